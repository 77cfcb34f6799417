from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import of_rank, resolve
from flagscale.estimate import cost_cache
from flagscale.estimate.cost_cache import Kept, path_of
from flagscale.estimate.costs import DENSE, Cost, Costs

BASE = """
--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --train-iters 1 --lr 1e-3
--mock-data --enable-hetero --hetero-process-meshes 1 1 1 2 1 2 1 1 1 1
--hetero-pipeline-layer-split auto --global-batch-size 8 --sequence-parallel
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def arguments(more: str = "") -> Namespace:
    return resolve(parse_arguments((BASE + more).split()), 4)


def where(args: Namespace, index: int = 1) -> Path:
    return path_of(vars(args), args.meshes, index)


def test_kept_and_found_again(tmp_path: Path) -> None:
    path = where(arguments())
    assert cost_cache.read(path) is None
    made = Kept(Costs({DENSE: Cost(1.0)}), {"torch": "2"}, "2026-11-23")
    cost_cache.write(path, made)
    assert cost_cache.read(path) == made
    assert path.parent == tmp_path / "flagscale" / "times"
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"origin": {}, "costs": {}, "date": 1}', "\0"])
def test_what_cannot_be_read_is_not_kept(text: str) -> None:
    path = where(arguments())
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert cost_cache.read(path) is None


def test_every_rank_and_the_launcher_name_a_mesh_alike() -> None:
    args = arguments()
    assert len({where(args), *(where(of_rank(args, rank)) for rank in range(4))}) == 1
    assert where(args, 0) != where(args, 1)


def test_meshes_of_equal_sizes_are_one_only_if_their_devices_are() -> None:
    alike = "--hetero-process-meshes 2 1 1 1 1 2 1 1 1 1"
    args = arguments(alike)
    assert where(args, 0) != where(args, 1)
    for kinds, same in (("A A", True), ("A B", False)):
        args = arguments(f"{alike} --hetero-device-types {kinds}")
        assert (where(args, 0) == where(args, 1)) is same


@pytest.mark.parametrize(
    "same", ["--lr 1e-4", "--num-layers 8", "--global-batch-size 16", "--clip-grad 0.1"]
)
def test_what_does_not_matter(same: str) -> None:
    assert where(arguments(same)) == where(arguments())


@pytest.mark.parametrize(
    "other",
    ["--hidden-size 128", "--bf16", "--micro-batch-size 2", "--seq-length 64", "--swiglu",
     "--use-distributed-optimizer", "--hetero-device-types A B", "--transformer-impl compiled",
     "--recompute-granularity selective"],
)  # fmt: skip
def test_what_matters(other: str) -> None:
    assert where(arguments(other)) != where(arguments())
