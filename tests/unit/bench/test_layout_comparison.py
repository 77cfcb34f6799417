"""Tests of the comparison of ``auto_tune`` with a measurement of all layouts."""

from __future__ import annotations

from typing import Any

import pytest
from auto_tune import rank_correlation
from pruned_grid import GridModel, list_grid, run_grid

from flagscale.tune.space import describe_setting

RANKS: dict[str, tuple[list[float], list[float], float | None]] = {
    "same order": ([1, 2, 3], [10, 20, 90], 1.0),
    "reversed": ([1, 2, 3], [3, 2, 1], -1.0),
    "two exchanged": ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
    "equal values share a rank": ([1, 1, 2], [1, 2, 3], 0.866),
    "too few": ([1, 2], [1, 2], None),
    "all equal": ([1, 1, 1], [1, 2, 3], None),
}


@pytest.mark.parametrize(("first", "second", "expected"), RANKS.values(), ids=RANKS)
def test_rank_correlation(first: list[float], second: list[float], expected: float | None) -> None:
    assert rank_correlation(first, second) == expected


def list_names(space: dict[str, Any], **sizes: int) -> list[str]:
    numbers = {"ranks": 2, "layers": 4, "batch": 4, **sizes}
    return [describe_setting(setting) for setting in list_grid(GridModel(**numbers), space)]


PLAIN: dict[str, Any] = {
    "use_distributed_optimizer": (True,),
    "micro_batch_size": (2,),
    "sequence_parallel": (True, False),
    "num_layers_per_virtual_pipeline_stage": (None,),
}


def test_grid_has_what_is_divisible() -> None:
    names = list_names(PLAIN)
    assert sorted(names) == sorted(
        [
            "tp1 pp1 mbs2 shard",
            "tp1 pp1 cp2 mbs2 shard",
            "tp1 pp2 mbs2 shard",
            "tp2 pp1 mbs2 shard",
            "tp2 pp1 mbs2 shard nosp",
        ]
    )
    assert "tp1 pp2 mbs2 shard" not in list_names(PLAIN, layers=3)
    assert "tp1 pp1 mbs2 shard" not in list_names(PLAIN, batch=2)


def test_grid_skips_what_needs_more_than_a_layout_out_of_memory() -> None:
    space = {
        **PLAIN,
        "micro_batch_size": (1, 2, 4),
        "tensor_model_parallel_size": (1,),
        "pipeline_model_parallel_size": (1,),
        "context_parallel_size": (1,),
    }
    grid = list_grid(GridModel(1, 4, 4), space)
    seconds = {"tp1 pp1 mbs1 shard": 2.0, "tp1 pp1 mbs2 shard": 1.5, "tp1 pp1 mbs4 shard": 1.0}
    assert run_grid(grid, seconds) == (3, "tp1 pp1 mbs4 shard")
    works = {"tp1 pp1 mbs1 shard": 2.0}
    assert run_grid(grid, works, ["tp1 pp1 mbs2 shard"]) == (2, "tp1 pp1 mbs1 shard")
