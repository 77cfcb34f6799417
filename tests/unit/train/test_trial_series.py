"""Further trials in the same processes: what they check before one begins."""

from __future__ import annotations

import signal
from argparse import Namespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flagscale.config.arguments.layout_choices import ARGUMENTS_OF_GROUPS, CHOSEN_ARGUMENTS
from flagscale.errors import ConfigError
from flagscale.train import trial_series
from flagscale.train.trial_series import GROUP_ARGUMENTS, count_tensor_bytes, require_same_groups

pytestmark = pytest.mark.torch


def test_tensors_are_counted_by_their_storage() -> None:
    start = count_tensor_bytes()
    tensor = torch.zeros(1 << 20)
    views = [tensor[:10], tensor.view(1 << 10, 1 << 10)]
    meta = torch.zeros(1 << 20, device="meta")
    assert count_tensor_bytes() - start == 4 << 20
    del tensor, views, meta
    assert count_tensor_bytes() == start


def test_tensors_without_memory_count_nothing() -> None:
    start = count_tensor_bytes()
    sparse = torch.eye(3).to_sparse()
    with FakeTensorMode():
        fake = torch.zeros(1 << 20)
    assert count_tensor_bytes() == start
    assert sparse.shape == (3, 3) and fake.numel() == 1 << 20


def test_handler_of_sigterm_returns_after_a_failure() -> None:
    earlier = signal.getsignal(signal.SIGTERM)

    def handler(*_: object) -> None:
        """Stand for training's handler."""

    signal.signal(signal.SIGTERM, handler)
    try:
        with pytest.raises(RuntimeError), trial_series._end_on_sigterm():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            raise RuntimeError
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, earlier)


def test_search_never_asks_for_other_groups() -> None:
    assert set(GROUP_ARGUMENTS) & set(CHOSEN_ARGUMENTS) <= set(ARGUMENTS_OF_GROUPS)


def test_other_groups_are_refused_by_name() -> None:
    args = Namespace(**dict.fromkeys(GROUP_ARGUMENTS, 1))
    require_same_groups(args, args)
    changed = Namespace(**{**vars(args), "context_parallel_size": 2})
    with pytest.raises(ConfigError, match="context_parallel_size"):
        require_same_groups(changed, args)
