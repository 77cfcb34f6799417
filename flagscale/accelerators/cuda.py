"""Adapter of NVIDIA GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.accelerators.base import Accelerator
from flagscale.accelerators.counters import DeviceCounters
from flagscale.accelerators.nvml_counters import read_gpu_counters

if TYPE_CHECKING:
    import torch

    from flagscale.accelerators.health import DeviceReading, Rate

_MEMORY_HISTORY_ENTRIES = 200_000
"""Number of the last allocations that are recorded; one takes about 1 KiB of host memory."""
_DRIVER_DIRECTORY = Path("/proc/driver/nvidia/gpus")
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_DRIVER_VERSION_FILE = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION = re.compile(r"(?<=\s)\d+\.\d+(\.\d+)?(?=\s)")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)
_QUERY_TIMEOUT_SECONDS = 20
_COUNT_SCRIPT = """\
devices=(/proc/driver/nvidia/gpus/*)
count=${#devices[@]}
if ((count == 0)) && command -v nvidia-smi >/dev/null; then
    count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
elif ((count)) && [[ -r ${devices[0]}/information ]]; then
    while IFS=: read -r key value; do
        [[ $key != Model ]] || read -r product <<<"$value"
    done <"${devices[0]}/information"
fi
"""

PEAK_TFLOPS: Mapping[str, float] = {
    "GB300": 2500.0,
    "B300": 2250.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "A40": 149.7,
    "A30": 165.0,
    "A10": 125.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "V100": 125.0,
}
"""Peak dense 16-bit TFLOP/s with fp32 accumulation, by substring of the product's name; the first
match counts.

Source: NVIDIA's data sheets.
"""

BUS_GB_PER_SECOND: Mapping[str, float] = {
    "V100": 150.0,
    "A100": 300.0,
    "A800": 200.0,
    "H100": 450.0,
    "H200": 450.0,
    "H800": 200.0,
    "H20": 450.0,
    "B200": 900.0,
    "GB200": 900.0,
}
"""Unidirectional NVLink bandwidth in 1e9 bytes per second, by a word of the product's name."""

MEMORY_GIB: Mapping[str, float] = {
    "GB300": 275.0,
    "B300": 275.0,
    "GB200": 184.0,
    "B200": 178.0,
    "GH200": 95.0,
    "H200": 139.8,
    "H100 NVL": 93.1,
    "H100": 79.1,
    "H800": 79.1,
    "H20": 95.1,
    "A100-SXM4-40GB": 39.4,
    "A100-PCIE-40GB": 39.4,
    "A100": 79.1,
    "A800": 79.1,
    "A40": 44.4,
    "A30": 23.5,
    "A10": 22.0,
    "L40S": 44.4,
    "L40": 44.4,
    "L4": 22.0,
    "RTX 4090": 23.5,
    "RTX 3090": 23.5,
    "V100": 31.7,
}
"""Memory in GiB by substring of the product's name, of the larger model where there are two; the
first match counts.
"""

MEMORY_GB_PER_SECOND: Mapping[str, float] = {
    "GB300": 8000.0,
    "B300": 8000.0,
    "GB200": 8000.0,
    "B200": 8000.0,
    "GH200": 4000.0,
    "H200": 4800.0,
    "H100 PCIe": 2000.0,
    "H100 NVL": 3900.0,
    "H100": 3350.0,
    "H800": 3350.0,
    "H20": 4000.0,
    "A100-SXM4-40GB": 1555.0,
    "A100-PCIE-40GB": 1555.0,
    "A100": 2039.0,
    "A800": 2039.0,
    "A40": 696.0,
    "A30": 933.0,
    "A10": 600.0,
    "L40S": 864.0,
    "L40": 864.0,
    "L4": 300.0,
    "RTX 4090": 1008.0,
    "RTX 3090": 936.0,
    "V100": 900.0,
}
"""Memory bandwidth in 1e9 bytes per second by substring of the product's name; the first match
counts.

Source: NVIDIA's data sheets.
"""

WITHOUT_FP8 = ("A100", "A800", "A40", "A30", "A10", "RTX 3090", "V100")
"""Products among those above that do not support FP8 GEMMs: all before Ada."""


@cache
def _get_side_stream(purpose: str) -> Any:
    """Return this process's stream for a purpose."""
    import torch

    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _query_nvidia_smi(field: str) -> list[str]:
    """Return a property of each GPU; empty without ``nvidia-smi``."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_QUERY_TIMEOUT_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return listing.stdout.splitlines()


def _find_by_substring(table: Mapping[str, float], product: str) -> float | None:
    return next((value for name_part, value in table.items() if name_part in product), None)


@contextmanager
def _run_near(properties: Any) -> Iterator[None]:
    """Run the block on CPUs of the GPU's socket, as far as the kernel reports them and this process
    may use them. Memory that is allocated there is near, too.
    """
    address = "{:04x}:{:02x}:{:02x}.0".format(
        *(getattr(properties, f"pci_{part}_id", 0) for part in ("domain", "bus", "device"))
    )
    usable = os.sched_getaffinity(0)
    try:
        text = (_PCI_DEVICES / address / "local_cpulist").read_text(encoding="ascii").strip()
    except OSError:
        text = ""
    os.sched_setaffinity(0, _parse_cpu_list(text) & usable or usable)
    try:
        yield
    finally:
        os.sched_setaffinity(0, usable)


def _parse_cpu_list(text: str) -> set[int]:
    """Return the numbers of a list such as ``0-3,8``."""
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


class Cuda(Accelerator):
    """Adapter of NVIDIA GPUs."""

    name = "cuda"
    title = "CUDA"
    unit = "GPU"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    presence_condition = "[[ -e /proc/driver/nvidia/gpus ]] || command -v nvidia-smi >/dev/null"
    count_script = _COUNT_SCRIPT
    default_variables: ClassVar[Mapping[str, str]] = {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    default_variables_reason = (
        "No NVLink multicast: it is not safe on hosts that are shared with others."
    )
    default_backend = "nccl"
    compiles = True
    symmetric_memory = True
    profiler_activity = "CUDA"
    fused_attention = True
    dispatch_key = "CUDA"

    def read_counters(self) -> Sequence[DeviceCounters]:
        return tuple(read_gpu_counters())

    def count_devices(self) -> int:
        """Count the driver's entries in /proc, else the lines of ``nvidia-smi -L``, as
        :attr:`count_script` does.

        Reading /proc starts no process, which matters because every dry run counts.
        """
        try:
            return sum(1 for _ in _DRIVER_DIRECTORY.iterdir())
        except OSError:
            pass
        tool = shutil.which("nvidia-smi")
        if tool is None:
            return 0
        try:
            listing = subprocess.run(
                [tool, "-L"],
                capture_output=True,
                text=True,
                timeout=_QUERY_TIMEOUT_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return 0
        return sum(1 for line in listing.stdout.splitlines() if line.startswith("GPU "))

    def list_products(self) -> list[str]:
        """Return the model of each GPU, from the driver's entries in /proc or ``nvidia-smi``."""
        texts = []
        with suppress(OSError):
            entries = sorted(_DRIVER_DIRECTORY.iterdir())
            texts = [(entry / "information").read_text(encoding="utf-8") for entry in entries]
        models = [match[1] for text in texts if (match := _MODEL.search(text))]
        return models or _query_nvidia_smi("name")

    def driver_version(self) -> str:
        """Return the version of NVIDIA's kernel module."""
        with suppress(OSError):
            text = _DRIVER_VERSION_FILE.read_text(encoding="utf-8")
            if match := _DRIVER_VERSION.search(text):
                return match[0]
        return next(iter(_query_nvidia_smi("driver_version")), "")

    def library_versions(self) -> dict[str, str]:
        """Return the versions of torch, CUDA and NCCL."""
        import torch

        versions = {**super().library_versions(), "cuda": str(torch.version.cuda)}
        if torch.distributed.is_nccl_available():
            numbers = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            versions["nccl"] = ".".join(map(str, numbers))
        return versions

    def copy_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """Copy on a side stream into pinned memory."""
        tensor = tensor.contiguous()
        host_buffer, stream = (
            self.allocate_host_buffer(tensor.shape, tensor.dtype),
            _get_side_stream("copy_to_host"),
        )
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            host_buffer.copy_(tensor, non_blocking=True)
            # If `contiguous` made a copy, its memory must not be reused before the transfer is
            # done.
            tensor.record_stream(stream)
            copy_event = stream.record_event()
        return host_buffer, copy_event.synchronize

    def allocate_host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pinned memory."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def register_host_memory(self, tensor: torch.Tensor) -> bool:
        """Pin the memory where it is, because pinned memory that torch allocates is rounded up to a
        power of two.
        """
        import torch

        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        if int(runtime.cudaHostRegister(address, size, 0)) != 0:
            with suppress(RuntimeError):  # the next kernel reports the error, and no later one
                torch.zeros(1, device=self.torch_type)
            return False
        weakref.finalize(tensor, runtime.cudaHostUnregister, address).atexit = False
        return True

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        stream, current = _get_side_stream("side"), self.module.current_stream()
        stream.wait_stream(current)
        with self.module.stream(stream):
            yield
        current.wait_stream(stream)

    def record_memory_history(self) -> bool:
        """Record the last allocations for ``https://pytorch.org/memory_viz``."""
        import torch

        torch.cuda.memory._record_memory_history(max_entries=_MEMORY_HISTORY_ENTRIES)
        return True

    def dump_memory_history(self, path: Path) -> None:
        """Write a snapshot as a pickle."""
        import torch

        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]

    def profiler_range(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return the range functions of ``nsys profile --capture-range=cudaProfilerApi``."""
        import torch

        return torch.cuda.profiler.start, torch.cuda.profiler.stop

    def capture_graph(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture ``work`` in a CUDA graph and return the function that replays it on the current
        stream.
        """
        import torch

        graph = torch.cuda.CUDAGraph()
        current: Any = torch.cuda.current_stream()
        # The default stream cannot capture. For it, torch uses a stream of its own.
        stream = None if current == torch.cuda.default_stream() else current
        # Other threads (a backend's watchdog) may call the driver during the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def read_health(self, device: torch.device) -> DeviceReading:
        """Return what NVML reports (:mod:`.nvml`)."""
        import torch

        from flagscale.accelerators.nvml import read_gpu

        return read_gpu(str(torch.cuda.get_device_properties(device).uuid))

    def measure_host_copies(self, device: torch.device, seconds: float) -> Sequence[Rate]:
        """Measure from a CPU next to the GPU: the way through another socket is slower."""
        import torch

        with _run_near(torch.cuda.get_device_properties(device)):
            return super().measure_host_copies(device, seconds)

    def peak_tflops(self, product: str) -> float | None:
        return _find_by_substring(PEAK_TFLOPS, product)

    def memory_gib(self, product: str) -> float | None:
        return _find_by_substring(MEMORY_GIB, product)

    def memory_gb_per_second(self, product: str) -> float | None:
        return _find_by_substring(MEMORY_GB_PER_SECOND, product)

    def product_supports_fp8(self, product: str) -> bool | None:
        name_part = next((part for part in PEAK_TFLOPS if part in product), None)
        return None if name_part is None else name_part not in WITHOUT_FP8

    def bus_gb_per_second(self, product: str) -> float | None:
        return next(
            (BUS_GB_PER_SECOND[word] for word in product.split() if word in BUS_GB_PER_SECOND), None
        )

    def supports_fp8(self, device: torch.device) -> bool:
        """Return True from Ada (compute capability 8.9) on."""
        import torch

        return torch.cuda.get_device_capability(device) >= (8, 9)

    def supports_block_scaled_fp8(self, device: torch.device) -> bool:
        """Return True on Hopper, where cuBLAS supports it from CUDA 12.9 on."""
        import torch

        toolkit = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
        return toolkit >= (12, 9) and torch.cuda.get_device_capability(device)[0] == 9
