"""What an adapter of a kind of chip says and does. Imports torch only where a rank asks.

Most of what ranks ask, torch's own module of the chip answers (``torch.cuda``, ``torch.xpu``,
``torch.npu`` of a plug-in), whose functions have the same names for all. So an adapter says how its
chip is named and found, and overrides what is different.
"""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.errors import ConfigError

if TYPE_CHECKING:
    import torch

_SECONDS = 20.0


class Accelerator:
    """One kind of chip."""

    # -- without torch

    name: str
    """The kind: what ``device`` of a YAML calls it."""
    title: str = ""
    """What sentences call it, such as ``CUDA``; the name where it is empty."""
    visible_variable: str | None = None
    """The variable that lists what a process may use, such as ``CUDA_VISIBLE_DEVICES``."""
    host_types: tuple[str, ...] = ()
    """What ``type=`` of a hostfile calls hosts that have such chips, besides :attr:`name`."""
    present: str = "false"
    """A condition of bash, one command and quick: whether a host may have such chips. It stands in
    scripts of hosts that nobody has asked."""
    look: str = ""
    """Commands of bash that set ``count``, and ``product`` where they can tell, to the number of
    chips of a host and to their maker's name for them. Globs without a match vanish there; the
    commands must not exit."""
    defaults: ClassVar[Mapping[str, str]] = {}
    """Variables of ranks on hosts that have such chips, where nobody gives other values."""
    defaults_reason: str = ""
    """Why these, for the script that sets them."""

    def count(self) -> int:
        """How many of them this machine has, hidden ones too: what :attr:`look` finds here."""
        program = f'shopt -s nullglob; count=0\n{self.look}\necho "$count"'
        try:
            done = subprocess.run(
                ["bash", "-c", program],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return 0
        lines = done.stdout.split()
        return int(lines[-1]) if lines and lines[-1].isdigit() else 0

    @property
    def shown(self) -> str:
        """What sentences call it."""
        return self.title or self.name

    @property
    def unit(self) -> str:
        """What sentences call one of them."""
        return f"{self.shown} device"

    # -- with torch: what it is like

    @property
    def torch_type(self) -> str:
        """The type of ``torch.device``, which ``torch.autocast`` takes too."""
        return self.name

    @property
    def is_host(self) -> bool:
        """Whether its memory is the host's and its work is done when a call returns."""
        return self.torch_type == "cpu"

    default_backend: str = "gloo"
    """The communication backend of ``distributed_backend: auto``."""
    plugin: str | None = None
    """The Python module that makes torch know it, such as ``torch_npu``; None for torch alone."""
    compiles: bool = False
    """Whether ranks gain by ``torch.compile``."""
    symmetric_memory: bool = False
    """Whether torch's operators over symmetric memory know it: ranks read each other's memory."""
    profiler_activity: str | None = None
    """What of ``torch.profiler.ProfilerActivity`` records its kernels."""
    fused_attention: bool = False
    """Whether torch brings flash attention and cuDNN's for its tensors: the switches of
    ``torch.backends.cuda`` choose among them, and documents are told apart by their ends."""
    dispatch_key: str = "PrivateUse1"
    """torch's dispatch key of its tensors; a plug-in's chips have this one."""

    # -- with torch: what it does

    @property
    def module(self) -> Any:
        """torch's module of it, such as ``torch.cuda``. Raises :class:`ImportError` where the
        :attr:`plugin` is not installed."""
        import torch

        if self.plugin is not None:
            importlib.import_module(self.plugin)
        return torch.get_device_module(self.torch_type)

    def missing(self) -> str | None:
        """Why ranks of this machine can use none; None where they can."""
        try:
            if self.module.is_available():
                return None
        except (ImportError, RuntimeError) as error:
            return f"torch cannot use {self.shown} here: {error}"
        variable = f"{self.visible_variable} and " if self.visible_variable else ""
        return f"no {self.shown} device is visible (check {variable}the driver)"

    def visible(self) -> int:
        """How many of them this process may use."""
        return int(self.module.device_count())

    def select(self, local_rank: int) -> torch.device:
        """The device of the rank ``local_rank`` of its host, made current.

        Raises:
            ConfigError: this process may use none, or fewer than there are ranks.
        """
        import torch

        if missing := self.missing():
            hint = "or set device: cpu"
            raise ConfigError(f"device: {self.name} is asked for, but {missing}", hint=hint)
        if local_rank >= (count := self.visible()):
            variable = self.visible_variable
            told = f" ({variable}={os.environ.get(variable, 'not set')})" if variable else ""
            raise ConfigError(
                f"local rank {local_rank} has no {self.unit}: this host shows {count}{told}",
                hint=f"lower nproc_per_node or make more {self.unit}s visible",
            )
        self.module.set_device(local_rank)
        return torch.device(self.torch_type, local_rank)

    def neighbour(self, device: torch.device) -> torch.device:
        """The next device of this host, the only one again where there is one."""
        import torch

        return torch.device(self.torch_type, ((device.index or 0) + 1) % self.visible())

    def product(self, device: torch.device) -> str:
        """What the maker calls it, such as ``NVIDIA H200``."""
        return str(self.module.get_device_name(device))

    def synchronize(self, device: torch.device) -> None:
        """Wait for all work given to the device."""
        self.module.synchronize(device)

    def peak_memory(self, device: torch.device) -> int | None:
        """Most bytes that tensors have held at once; None where they are not counted."""
        return int(self.module.max_memory_allocated(device))

    def held_memory(self, device: torch.device) -> int | None:
        """Bytes that tensors hold now; None where they are not counted."""
        return int(self.module.memory_allocated(device))

    def forget_peak(self, device: torch.device) -> None:
        """Have :meth:`peak_memory` begin anew with what tensors hold now."""
        self.module.reset_peak_memory_stats(device)

    def room(self, device: torch.device) -> int | None:
        """Bytes that tensors of this process could hold at most, those that they hold included;
        None where nobody knows."""
        free, _ = self.module.mem_get_info(device)
        return int(free) + int(self.module.memory_reserved(device))

    def give_back(self) -> None:
        """Give memory that no tensor holds back to the device."""
        self.module.empty_cache()

    def used_memory(self, device: torch.device) -> int:
        """Bytes of the device that are in use, by anyone."""
        free, total = self.module.mem_get_info(device)
        return int(total - free)

    def random_state(self) -> torch.Tensor | None:
        """The state of the current device's generator; None where it has none, or none yet."""
        module = self.module
        state: torch.Tensor | None = module.get_rng_state() if module.is_initialized() else None
        return state

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set it to what :meth:`random_state` gave."""
        if self.module.is_initialized():
            self.module.set_rng_state(state)

    def event(self, *, timed: bool = False) -> Any:
        """A new event of its streams; ``timed``: one that tells the time between two."""
        return self.module.Event(enable_timing=timed)

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """A contiguous copy of ``tensor`` in the host's memory, and a function that waits until it
        is there, from any thread. The device goes on meanwhile; nobody may write to ``tensor``."""
        return tensor.contiguous().cpu(), lambda: None

    def landing(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the device copies from without the host's help."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype)

    def beside(self) -> AbstractContextManager[None]:
        """A context whose work goes to a stream of its own, always the same, behind what has been
        given to the current stream and before what will be. What is to be captured has to be
        prepared on it."""
        return nullcontext()

    def profiler_range(self) -> tuple[Callable[[], None], Callable[[], None]] | None:
        """What begins and what ends a range for the maker's own profiler; None where that is told
        nothing."""
        return None

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work`` as a function that does it again at less cost, where the chip has graphs."""
        return work

    def peak_tflops(self, product: str) -> float | None:
        """Peak dense 16-bit TFLOP/s of a device that the maker calls ``product``; None where it is
        not known."""
        return None

    def bus_gb(self, product: str) -> float | None:
        """What its links to others of the host carry in one direction, in 1e9 bytes a second; None
        where it is not known."""
        return None

    def multiplies_eight_bits(self, device: torch.device) -> bool:
        """Whether there are matrix products of 8-bit floats."""
        return False

    def multiplies_blocks(self, device: torch.device) -> bool:
        """Whether such products take a scale for every block of 128 numbers: torch's
        ``scaled_mm``, with 1 x 128 on the left, and 1 x 128 or 128 x 128 on the right."""
        return False

    def memory_gib(self, product: str) -> float | None:
        """Memory of a device that the maker calls ``product``, as its driver tells it, in GiB;
        None where it is not known."""
        return None

    def bandwidth_gb(self, product: str) -> float | None:
        """What the memory of a device that the maker calls ``product`` moves, in 1e9 bytes a
        second; None where it is not known."""
        return None

    def knows_eight_bits(self, product: str) -> bool | None:
        """Whether a device that the maker calls ``product`` has matrix products of 8-bit floats;
        None where that is not known. What :meth:`multiplies_eight_bits` tells of one at hand."""
        return None
