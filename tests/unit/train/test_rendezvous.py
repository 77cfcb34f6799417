"""Check that all ranks use the same communication backend."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from flagscale.errors import JobError
from flagscale.train.distributed import RankIdentity, _check_same_backend


def test_rank_with_another_backend_than_rank_0_is_rejected() -> None:
    store = dist.HashStore()
    _check_same_backend(store, RankIdentity(0, 0, 3), "nccl on NVIDIA H200")
    _check_same_backend(store, RankIdentity(1, 0, 3), "nccl on NVIDIA A100")
    with pytest.raises(JobError) as error:
        _check_same_backend(store, RankIdentity(2, 0, 3), "gloo on cpu")
    assert str(error.value).splitlines() == [
        "rank 2 uses gloo on cpu, rank 0 uses nccl on NVIDIA H200",
        "  hint: set distributed_backend to one that supports both devices, such as fsccl",
    ]
