"""NVIDIA's GPUs, by CUDA."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flagscale.accelerators.base import Accelerator

if TYPE_CHECKING:
    import torch

_PROC = Path("/proc/driver/nvidia/gpus")
_LOOK = """\
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
"""Peak dense 16-bit TFLOP/s with fp32 accumulation, from the maker's data sheets, by a part of the
product's name. The first that matches counts."""

BUS_GB: Mapping[str, float] = {
    **{"V100": 150.0, "A100": 300.0, "A800": 200.0, "H100": 450.0, "H200": 450.0},
    **{"H800": 200.0, "H20": 450.0, "B200": 900.0, "GB200": 900.0},
}
"""NVLink in one direction, in 1e9 bytes a second, by a word of the product's name."""

MEMORY_GIB: Mapping[str, float] = {
    **{"GB300": 275.0, "B300": 275.0, "GB200": 184.0, "B200": 178.0},
    **{"GH200": 95.0, "H200": 139.8, "H100 NVL": 93.1, "H100": 79.1, "H800": 79.1, "H20": 95.1},
    **{"A100-SXM4-40GB": 39.4, "A100-PCIE-40GB": 39.4, "A100": 79.1, "A800": 79.1},
    **{"A40": 44.4, "A30": 23.5, "A10": 22.0, "L40S": 44.4, "L40": 44.4, "L4": 22.0},
    **{"RTX 4090": 23.5, "RTX 3090": 23.5, "V100": 31.7},
}
"""Memory by a part of the product's name, of the larger model where there are two. The first that
matches counts."""

BANDWIDTH_GB: Mapping[str, float] = {
    **{"GB300": 8000.0, "B300": 8000.0, "GB200": 8000.0, "B200": 8000.0},
    **{"GH200": 4000.0, "H200": 4800.0, "H100 PCIe": 2000.0, "H100 NVL": 3900.0},
    **{"H100": 3350.0, "H800": 3350.0, "H20": 4000.0},
    **{"A100-SXM4-40GB": 1555.0, "A100-PCIE-40GB": 1555.0, "A100": 2039.0, "A800": 2039.0},
    **{"A40": 696.0, "A30": 933.0, "A10": 600.0, "L40S": 864.0, "L40": 864.0, "L4": 300.0},
    **{"RTX 4090": 1008.0, "RTX 3090": 936.0, "V100": 900.0},
}
"""What the memory moves, in 1e9 bytes a second, from the maker's data sheets, by a part of the
product's name. The first that matches counts."""

WITHOUT_EIGHT_BITS = ("A100", "A800", "A40", "A30", "A10", "RTX 3090", "V100")
"""Of the products above those without matrix products of 8-bit floats: all before Ada."""


@cache
def _side_stream(use: str) -> Any:
    """The process's stream for a use."""
    import torch

    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _named(table: Mapping[str, float], product: str) -> float | None:
    return next((value for part, value in table.items() if part in product), None)


class Cuda(Accelerator):
    name = "cuda"
    title = "CUDA"
    unit = "GPU"
    visible_variable = "CUDA_VISIBLE_DEVICES"
    present = "[[ -e /proc/driver/nvidia/gpus ]] || command -v nvidia-smi >/dev/null"
    look = _LOOK
    defaults: ClassVar[Mapping[str, str]] = {
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    }
    defaults_reason = "No NVLink multicast: it is not safe on hosts that are shared with others."
    default_backend = "nccl"
    compiles = True
    symmetric_memory = True
    profiler_activity = "CUDA"
    fused_attention = True
    dispatch_key = "CUDA"

    def count(self) -> int:
        """The driver's list, else ``nvidia-smi -L``: as :attr:`look`, without a process where the
        list is there, for a dry run asks this."""
        try:
            return sum(1 for _ in _PROC.iterdir())
        except OSError:
            pass
        tool = shutil.which("nvidia-smi")
        if tool is None:
            return 0
        try:
            listing = subprocess.run(
                [tool, "-L"], capture_output=True, text=True, timeout=20, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return 0
        return sum(1 for line in listing.stdout.splitlines() if line.startswith("GPU "))

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
        """By a stream of its own."""
        tensor = tensor.contiguous()
        host, stream = self.landing(tensor.shape, tensor.dtype), _side_stream("fetch")
        stream.wait_stream(self.module.current_stream())
        with self.module.stream(stream):
            host.copy_(tensor, non_blocking=True)
            # Where the copy of a part was made here, its memory is not to be used again before.
            tensor.record_stream(stream)
            done = stream.record_event()
        return host, done.synchronize

    def landing(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Pinned memory."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    @contextmanager
    def beside(self) -> Iterator[None]:
        stream, current = _side_stream("beside"), self.module.current_stream()
        stream.wait_stream(current)
        with self.module.stream(stream):
            yield
        current.wait_stream(stream)

    def profiler_range(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """That of ``nsys profile --capture-range=cudaProfilerApi``."""
        import torch

        return torch.cuda.profiler.start, torch.cuda.profiler.stop

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A CUDA graph of ``work``, as a function that launches it on the current stream."""
        import torch

        graph = torch.cuda.CUDAGraph()
        current: Any = torch.cuda.current_stream()
        # Nothing is captured on the default stream, for which torch takes one of its own.
        stream = None if current == torch.cuda.default_stream() else current
        # Other threads (a backend's watchdog) may go on calling the driver meanwhile.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            work()
        return graph.replay

    def peak_tflops(self, product: str) -> float | None:
        return _named(PEAK_TFLOPS, product)

    def memory_gib(self, product: str) -> float | None:
        return _named(MEMORY_GIB, product)

    def bandwidth_gb(self, product: str) -> float | None:
        return _named(BANDWIDTH_GB, product)

    def knows_eight_bits(self, product: str) -> bool | None:
        part = next((part for part in PEAK_TFLOPS if part in product), None)
        return None if part is None else part not in WITHOUT_EIGHT_BITS

    def bus_gb(self, product: str) -> float | None:
        return next((BUS_GB[word] for word in product.split() if word in BUS_GB), None)

    def multiplies_eight_bits(self, device: torch.device) -> bool:
        """Ada, Hopper and later."""
        import torch

        return torch.cuda.get_device_capability(device) >= (8, 9)

    def multiplies_blocks(self, device: torch.device) -> bool:
        """Hopper alone, by cuBLAS from CUDA 12.9 on."""
        import torch

        toolkit = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
        return toolkit >= (12, 9) and torch.cuda.get_device_capability(device)[0] == 9
