"""Groups of ranks on GPUs and on their hosts."""

from __future__ import annotations

from typing import Any

import torch

from support.fsccl_ranks import Ranks

GPUS = torch.cuda.device_count()
CUDA = {"FSCCL_DEVICE": "cuda", "NCCL_NVLS_ENABLE": "0"}
HOST = {"FSCCL_DEVICE": "cpu"}

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


class Job:
    """A group of ranks of both kinds."""

    def __init__(
        self, pool: Ranks, key: str, kinds: str, *, timeout: int = 60, **variables: str
    ) -> None:
        self.pool, self.kinds = pool, kinds
        self.members = range(len(kinds))
        for i, kind in enumerate(kinds):
            pool[i].ask(
                "join",
                rank=i,
                size=len(kinds),
                port=pool.port,
                key=key,
                timeout=timeout,
                environment={
                    "FSCCL_SOCKET_IFNAME": "lo",
                    **(CUDA if kind == "c" else HOST),
                    **variables,
                },
            )
        pool.answers(self.members, 120)

    def call(self, name: str, **arguments: Any) -> list[Any]:
        """The same case on all ranks, with tensors where the rank is."""
        self.ask(name, **arguments)
        return self.pool.answers(self.members, 240)

    def ask(self, name: str, **arguments: Any) -> None:
        for i, kind in enumerate(self.kinds):
            if kind == "c":
                self.pool[i].ask("on_cuda", name=name, **arguments)
            else:
                self.pool[i].ask(name, **arguments)

    def leave(self) -> None:
        self.pool.leave(self.members)


def case(op: str, dtype: str, count: int, red: str = "sum", **more: Any) -> dict[str, Any]:
    base = {"op": op, "dtype": dtype, "count": count, "red": red, "root": 1, "seed": count}
    return {**base, "strided": False, **more}
