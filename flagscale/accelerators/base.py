"""Base class of the adapters, one per kind of device. Imports torch only in methods that ranks
call.

torch's own module of a kind of device (``torch.cuda``, ``torch.xpu``, ``torch.npu`` of a
plug-in) implements most of the ranks' part, with the same function names for all kinds. An
adapter therefore defines how its devices are named and detected, and overrides the differences.
:mod:`.registry` finds the adapters.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.accelerators.counters import DeviceCounters
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from flagscale.accelerators.health import DeviceReading, Rate

_COUNT_TIMEOUT_SECONDS = 20.0


class Accelerator:
    """Adapter of one kind of device."""

    # -- without torch

    name: str
    """The kind, as in ``device`` of a YAML."""
    title: str = ""
    """Display name in messages, such as ``CUDA``. If empty, ``name`` is used."""
    visible_variable: str | None = None
    """Environment variable that lists a process's devices, such as ``CUDA_VISIBLE_DEVICES``."""
    host_types: tuple[str, ...] = ()
    """Values of ``type=`` in a hostfile for hosts with such devices, in addition to
    :attr:`name`.
    """
    presence_condition: str = "false"
    """Bash condition that is true if a host may have such devices. It must be a single fast
    command, because it is part of scripts for hosts that were not probed.
    """
    count_script: str = ""
    """Bash commands that set ``count`` to the number of devices of a host and, where possible,
    ``product`` to the vendor's product name. ``nullglob`` is set. The commands must not
    exit.
    """
    default_variables: ClassVar[Mapping[str, str]] = {}
    """Environment variables of ranks on hosts with such devices, unless the user sets other
    values.
    """
    default_variables_reason: str = ""
    """Reason for these defaults, written as a comment into the script that sets them."""

    def count_devices(self) -> int:
        """Return the number of devices of this machine, hidden ones included, by running
        :attr:`count_script`.
        """
        script = f'shopt -s nullglob; count=0\n{self.count_script}\necho "$count"'
        try:
            process = subprocess.run(
                ["bash", "-c", script],
                capture_output=True,
                text=True,
                timeout=_COUNT_TIMEOUT_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return 0
        lines = process.stdout.split()
        return int(lines[-1]) if lines and lines[-1].isdigit() else 0

    def list_products(self) -> list[str]:
        """Return the product of each device of this machine, or the kind where it is unknown."""
        return [self.display_name] * self.count_devices()

    def driver_version(self) -> str:
        """Return the version of the driver of this machine's devices; empty if unknown."""
        return ""

    def read_counters(self) -> Sequence[DeviceCounters]:
        """Return the counters of this host's devices (use, memory, power); empty if they are not
        available. The agents of a run serve them with the metrics of the run
        (``experiment.runner.metrics_port``).
        """
        return ()

    @property
    def display_name(self) -> str:
        """Display name of the kind in messages."""
        return self.title or self.name

    @property
    def unit(self) -> str:
        """Display name of one device in messages."""
        return f"{self.display_name} device"

    # -- properties that torch needs

    @property
    def torch_type(self) -> str:
        """Type of the ``torch.device``, also used for ``torch.autocast``."""
        return self.name

    @property
    def is_host(self) -> bool:
        """True if its memory is host memory and its operations are synchronous."""
        return self.torch_type == "cpu"

    default_backend: str = "gloo"
    """Communication backend for ``distributed_backend: auto``."""
    plugin: str | None = None
    """Python module that registers the device with torch, such as ``torch_npu``; None if torch
    includes it.
    """
    compiles: bool = False
    """True if ranks are faster with ``torch.compile``."""
    symmetric_memory: bool = False
    """True if torch supports symmetric memory on it, by which ranks read each other's memory."""
    profiler_activity: str | None = None
    """Member of ``torch.profiler.ProfilerActivity`` that records its kernels."""
    fused_attention: bool = False
    """True if torch includes flash attention and cuDNN attention for it. They are selected by
    the flags of ``torch.backends.cuda``, and take variable sequence lengths as cumulative
    offsets.
    """
    dispatch_key: str = "PrivateUse1"
    """torch's dispatch key of its tensors. Devices of plug-ins use the default."""

    # -- operations that use torch

    @property
    def module(self) -> Any:
        """torch's module of the device, such as ``torch.cuda``. Raises :class:`ImportError` if the
        :attr:`plugin` is not installed.
        """
        import torch

        if self.plugin is not None:
            importlib.import_module(self.plugin)
        return torch.get_device_module(self.torch_type)

    def library_versions(self) -> dict[str, str]:
        """Return the versions of torch and of the libraries that it uses on such devices."""
        import torch

        return {"torch": torch.__version__}

    def explain_unavailable(self) -> str | None:
        """Return the reason why ranks on this machine cannot use such devices; None if they can."""
        try:
            if self.module.is_available():
                return None
        except (ImportError, RuntimeError) as error:
            return f"torch cannot use {self.display_name} here: {error}"
        variable = f"{self.visible_variable} and " if self.visible_variable else ""
        return f"no {self.display_name} device is visible (check {variable}the driver)"

    def count_visible(self) -> int:
        """Return the number of devices that this process may use."""
        return int(self.module.device_count())

    def select(self, local_rank: int) -> torch.device:
        """Return the device of a local rank and make it the current one.

        Raises:
            ConfigError: this process may use no such device, or fewer than there are ranks.
        """
        import torch

        if problem := self.explain_unavailable():
            hint = "or set device: cpu"
            raise ConfigError(f"device: {self.name} is asked for, but {problem}", hint=hint)
        if local_rank >= (count := self.count_visible()):
            variable = self.visible_variable
            setting = f" ({variable}={os.environ.get(variable, 'not set')})" if variable else ""
            raise ConfigError(
                f"local rank {local_rank} has no {self.unit}: this host shows {count}{setting}",
                hint=f"lower nproc_per_node or make more {self.unit}s visible",
            )
        self.module.set_device(local_rank)
        return torch.device(self.torch_type, local_rank)

    def next_device(self, device: torch.device) -> torch.device:
        """Return the next device of this host, cyclically."""
        import torch

        return torch.device(self.torch_type, ((device.index or 0) + 1) % self.count_visible())

    def product_name(self, device: torch.device) -> str:
        """Return the vendor's product name, such as ``NVIDIA H200``."""
        return str(self.module.get_device_name(device))

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work that was submitted to the device."""
        self.module.synchronize(device)

    def peak_memory(self, device: torch.device) -> int | None:
        """Return the peak of bytes allocated by tensors; None if it is not counted."""
        return int(self.module.max_memory_allocated(device))

    def allocated_memory(self, device: torch.device) -> int | None:
        """Return the bytes that tensors currently allocate; None if they are not counted."""
        return int(self.module.memory_allocated(device))

    def reset_peak_memory(self, device: torch.device) -> None:
        """Reset :meth:`peak_memory` to the current allocation."""
        self.module.reset_peak_memory_stats(device)

    def available_memory(self, device: torch.device) -> int | None:
        """Return the bytes that tensors of this process can allocate at most, including those
        already allocated; None if unknown.
        """
        free, _ = self.module.mem_get_info(device)
        return int(free) + int(self.module.memory_reserved(device))

    def record_memory_history(self) -> bool:
        """Start to record allocations with their stacks; return False if that is not supported."""
        return False

    def dump_memory_history(self, path: Path) -> None:
        """Write a snapshot of the memory and the recorded allocations; see
        :meth:`record_memory_history`.
        """
        raise NotImplementedError

    def empty_cache(self) -> None:
        """Return cached memory that no tensor uses to the device."""
        self.module.empty_cache()

    def used_memory(self, device: torch.device) -> int:
        """Return the bytes of the device that are in use by all processes."""
        free, total = self.module.mem_get_info(device)
        return int(total - free)

    def get_rng_state(self) -> torch.Tensor | None:
        """Return the state of the current device's random generator; None if it has none, or none
        yet.
        """
        module = self.module
        state: torch.Tensor | None = module.get_rng_state() if module.is_initialized() else None
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state returned by :meth:`get_rng_state`."""
        if self.module.is_initialized():
            self.module.set_rng_state(state)

    def create_event(self, *, timed: bool = False) -> Any:
        """Return a new stream event. ``timed`` events measure elapsed time."""
        return self.module.Event(enable_timing=timed)

    def copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Start copying a tensor to host memory.

        Returns a contiguous copy, and a function that waits for its completion, callable from
        any thread. The device continues meanwhile. ``tensor`` must not be written to before
        completion.
        """
        return tensor.contiguous().cpu(), lambda: None

    def allocate_host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory from which the device copies asynchronously."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype)

    def register_host_memory(self, tensor: torch.Tensor) -> bool:
        """Let the device copy asynchronously from and to a tensor in host memory, as long as it
        exists. Return False if that is impossible.
        """
        return False

    def side_stream(self) -> AbstractContextManager[None]:
        """Context manager that runs its block's work on a side stream, always the same one.

        The work is ordered after earlier and before later work of the current stream. Work to be
        captured in a graph must be warmed up on that stream.
        """
        return nullcontext()

    def profiler_range(self) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """Return functions that start and stop a range of the vendor's profiler; None if it has no
        such API.
        """
        return None

    def capture_graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats ``work`` at lower cost: a graph replay if the device
        supports graphs, otherwise ``work`` itself.
        """
        return work

    # -- health, see :mod:`flagscale.health`

    def read_health(self, device: torch.device) -> DeviceReading | None:
        """Return the device's state as its vendor's management library reports it; None without
        such a library. Called while the device is busy, because clocks and links idle otherwise.
        """
        return None

    def measure_rates(
        self, device: torch.device, seconds: float, while_busy: Callable[[], object]
    ) -> Sequence[Rate]:
        """Measure a device for a comparison with equal ones, see :func:`.rates.measure_rates`. All
        devices of a host are measured at the same time.

        Rates with a name that only this kind has are compared as well.
        """
        from flagscale.accelerators.rates import measure_rates

        return measure_rates(self, device, seconds, while_busy)

    def measure_host_copies(self, device: torch.device, seconds: float) -> Sequence[Rate]:
        """Measure copies between a device and its host, see :func:`.rates.measure_host_copies`.

        Devices of a host share its memory and buses, so only one of them is measured at a time.
        """
        from flagscale.accelerators.rates import measure_host_copies

        return measure_host_copies(self, device, seconds)

    def peak_tflops(self, product: str) -> float | None:
        """Return the peak dense 16-bit TFLOP/s of a product; None if unknown."""
        return None

    def bus_gb_per_second(self, product: str) -> float | None:
        """Return the unidirectional bandwidth of a product's links to other devices of the host
        (such as NVLink), in 1e9 bytes per second; None if unknown.
        """
        return None

    def supports_fp8(self, device: torch.device) -> bool:
        """Return True if the device supports FP8 matrix multiplications (GEMMs)."""
        return False

    def supports_block_scaled_fp8(self, device: torch.device) -> bool:
        """Return True if FP8 GEMMs support one scale per block of 128 elements.

        This is torch's ``scaled_mm`` with 1 x 128 blocks of the left operand, and 1 x 128 or 128
        x 128 blocks of the right one.
        """
        return False

    def memory_gib(self, product: str) -> float | None:
        """Return the memory of a product as its driver reports it, in GiB; None if unknown."""
        return None

    def memory_gb_per_second(self, product: str) -> float | None:
        """Return the memory bandwidth of a product in 1e9 bytes per second; None if unknown."""
        return None

    def product_supports_fp8(self, product: str) -> bool | None:
        """Return :meth:`supports_fp8` of a product that is not installed here; None if unknown."""
        return None
