"""Groups of ranks on GPUs and on their hosts, for tests."""

from __future__ import annotations

from typing import Any

import torch

from support.fsccl_ranks import RankPool

GPUS = torch.cuda.device_count()
CUDA_VARIABLES = {"FSCCL_DEVICE": "cuda", "NCCL_NVLS_ENABLE": "0"}
HOST_VARIABLES = {"FSCCL_DEVICE": "cpu"}

# A rank's kind by letter: c on a GPU, h on its host. Then FSCCL_CLUSTERS and the GPUs it takes.
GROUPS: dict[str, tuple[str, str, int]] = {
    "gpu+host": ("ch", "1,1", 1),
    "gpu+gpu": ("cc", "1,1", 1),
    "gpu+2-hosts": ("chh", "1,2", 1),
    "host+gpu+gpu": ("hcc", "1,1,1", 1),
    "2-gpus+host": ("cch", "2,1", 2),
    "2+2-gpus": ("cccc", "2,2", 4),
    "3+1-gpus": ("cccc", "3,1", 4),
    "4+4-gpus": ("cccccccc", "4,4", 8),
}


class MixedGroup:
    """Group of ranks of both kinds: ``kinds`` has a letter per rank, c for CUDA and h for host."""

    def __init__(
        self, pool: RankPool, key: str, kinds: str, *, timeout: int = 60, **variables: str
    ) -> None:
        self.pool, self.kinds = pool, kinds
        self.members = range(len(kinds))
        for i, letter in enumerate(kinds):
            pool[i].start_case(
                "join",
                rank=i,
                size=len(kinds),
                port=pool.port,
                key=key,
                timeout=timeout,
                environment={
                    "FSCCL_SOCKET_IFNAME": "lo",
                    **(CUDA_VARIABLES if letter == "c" else HOST_VARIABLES),
                    **variables,
                },
            )
        pool.wait_for_results(self.members, 120)

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """Run the same case on all ranks, with tensors on the rank's device; return the results."""
        self.start_case(name, **arguments)
        return self.pool.wait_for_results(self.members, 240)

    def start_case(self, name: str, **arguments: Any) -> None:
        for i, kind in enumerate(self.kinds):
            if kind == "c":
                self.pool[i].start_case("run_on_cuda", name=name, **arguments)
            else:
                self.pool[i].start_case(name, **arguments)

    def leave(self) -> None:
        self.pool.leave(self.members)


def case(op: str, dtype: str, count: int, reduction: str = "sum", **more: Any) -> dict[str, Any]:
    """Return the arguments of a case with one collective; ``reduction`` is its reduce operation."""
    base = {"op": op, "dtype": dtype, "count": count, "red": reduction, "root": 1, "seed": count}
    return {**base, "strided": False, **more}
