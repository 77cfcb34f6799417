"""Tests of the output paths that are printed after a start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.arguments import train_arguments

from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.show import output_paths
from flagscale.launcher.state import make_state
from flagscale.train.checkpoint.store import CheckpointStore


@pytest.mark.parametrize(
    ("iterations", "cut", "named", "tracker"),
    [
        pytest.param((), (), "checkpoints", None, id="none"),
        pytest.param((1, 2), (), "iter_0000002", None, id="newest"),
        pytest.param((1, 2), (2,), "iter_0000001", None, id="cut"),
        pytest.param((1, 2), (1, 2), "checkpoints", None, id="all-cut"),
        pytest.param((1, 2), (), "iter_0000001", "1", id="gone-back"),
        pytest.param((1,), (), "iter_0000001", "7", id="tracker-of-nothing"),
    ],
)
def test_the_checkpoint_that_would_be_loaded(
    tmp_path: Path,
    make_plan: Callable[..., LaunchPlan],
    iterations: tuple[int, ...],
    cut: tuple[int, ...],
    named: str,
    tracker: str | None,
) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    store = CheckpointStore(root)
    for iteration in iterations:
        (store.begin(iteration) / "a.distcp").write_bytes(b"x" * 100)
        store.publish(iteration, {})
    for iteration in cut:
        (store.path(iteration) / "a.distcp").write_bytes(b"x")
    if tracker is not None:
        (root / "latest_checkpointed_iteration.txt").write_text(tracker)
    plan = make_plan(exp_dir=tmp_path, train=train_arguments(system={"save": str(root)}))
    state = dict(output_paths.find_output_paths(plan, make_state(plan)))
    assert [path.name for label, path in state.items() if "checkpoint" in label] == [named]


def test_object_storage_is_named_without_a_request(
    tmp_path: Path, make_plan: Callable[..., LaunchPlan]
) -> None:
    address = "s3://bucket/checkpoints"
    plan = make_plan(exp_dir=tmp_path, train=train_arguments(system={"save": address}))
    lines = "\n".join(output_paths.format_output_paths(plan, make_state(plan)))
    assert f"checkpoints: {address}" in lines


def test_checkpoint_of_an_external_program(
    tmp_path: Path, make_plan: Callable[..., LaunchPlan]
) -> None:
    newest = tmp_path / "iter_0000003" / "mp_rank_00"
    newest.mkdir(parents=True)
    plan = make_plan(exp_dir=tmp_path, train=train_arguments(system={"save": str(tmp_path)}))
    assert (
        dict(output_paths.find_output_paths(plan, make_state(plan)))["checkpoint"] == newest.parent
    )
