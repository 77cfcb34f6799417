from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from flagscale.config.arguments.derive import derive_arguments, rank_arguments
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.estimate import cost_cache
from flagscale.estimate.cost_cache import CachedCosts, mesh_cost_path
from flagscale.estimate.costs import DENSE, PartCost, RankCosts

BASE = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 1 --lr 1e-3
--mock-data --enable-hetero --hetero-process-meshes 1 1 1 2 1 2 1 1 1 1
--hetero-pipeline-layer-split auto --global-batch-size 8 --sequence-parallel
"""


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def arguments(more: str = "") -> Namespace:
    return derive_arguments(parse_arguments((BASE + more).split()), 4)


def cache_path(args: Namespace, index: int = 1) -> Path:
    return mesh_cost_path(vars(args), args.meshes, index)


def test_costs_round_trip(tmp_path: Path) -> None:
    path = cache_path(arguments())
    assert cost_cache.read_costs(path) is None
    cached_costs = CachedCosts(RankCosts({DENSE: PartCost(1.0)}), {"torch": "2"}, "2026-11-23")
    cost_cache.write_costs(path, cached_costs)
    assert cost_cache.read_costs(path) == cached_costs
    assert path.parent == tmp_path / "flagscale" / "times"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"origin": {}, "costs": {}, "date": 1}', "\0"])
def test_invalid_files_are_ignored(text: str) -> None:
    path = cache_path(arguments())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert cost_cache.read_costs(path) is None


def test_ranks_and_launcher_use_the_same_path() -> None:
    args = arguments()
    assert (
        len({cache_path(args), *(cache_path(rank_arguments(args, rank)) for rank in range(4))}) == 1
    )
    assert cache_path(args, 0) != cache_path(args, 1)


def test_meshes_of_equal_sizes_are_one_only_if_their_devices_are() -> None:
    equal_meshes = "--hetero-process-meshes 2 1 1 1 1 2 1 1 1 1"
    args = arguments(equal_meshes)
    assert cache_path(args, 0) != cache_path(args, 1)
    for kinds, same in (("A A", True), ("A B", False)):
        args = arguments(f"{equal_meshes} --hetero-device-types {kinds}")
        assert (cache_path(args, 0) == cache_path(args, 1)) is same


@pytest.mark.parametrize(
    "same", ["--lr 1e-4", "--num-layers 8", "--global-batch-size 16", "--clip-grad 0.1"]
)
def test_irrelevant_arguments_keep_the_cached_costs(same: str) -> None:
    assert cache_path(arguments(same)) == cache_path(arguments())


@pytest.mark.parametrize(
    "changed_option",
    ["--hidden-size 128", "--bf16", "--micro-batch-size 2", "--seq-length 64", "--swiglu",
     "--use-distributed-optimizer", "--hetero-device-types A B", "--transformer-impl compiled",
     "--recompute-granularity selective", "--recompute-modules mlp",
     "--cpu-offloading-num-layers 1", "--optimizer muon", "--muon-num-ns-steps 3"],
)  # fmt: skip
def test_relevant_arguments_change_the_cached_costs(changed_option: str) -> None:
    assert cache_path(arguments(changed_option)) != cache_path(arguments())
