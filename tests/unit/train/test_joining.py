from __future__ import annotations

import pytest
import torch.distributed as dist

from flagscale.errors import JobError
from flagscale.train.distributed import Rank, _agree


def test_ranks_that_would_wait_for_each_other_for_ever() -> None:
    store = dist.HashStore()
    _agree(store, Rank(0, 0, 3), "nccl on NVIDIA H200")
    _agree(store, Rank(1, 0, 3), "nccl on NVIDIA A100")
    with pytest.raises(JobError) as error:
        _agree(store, Rank(2, 0, 3), "gloo on cpu")
    assert str(error.value).splitlines() == [
        "rank 2 would communicate by gloo on cpu, rank 0 by nccl on NVIDIA H200",
        "  hint: set distributed_backend to one that joins both devices, such as fsccl",
    ]
