"""Checkpoints of ranks in object storage. The storage is a directory, by an address file://…"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integration.checkpoint.checkpoint_lab import LAYOUTS, CheckpointLab, make_case

pytestmark = [pytest.mark.integration, pytest.mark.torch]

pytest.importorskip("fsspec")


def list_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture(scope="module")
def lab_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def results(lab_root: Path) -> dict[str, Any]:
    lab = CheckpointLab(lab_root)

    def flags(name: str, more: str = "") -> str:
        staging = f"--save-staging-dir {lab_root / name / 'staging'}"
        return f"--save file://{lab_root / name / 'checkpoints'} {staging} {more}"

    dp2, tp2 = LAYOUTS["dp2-do"], LAYOUTS["tp2-sp-do"]
    load = f"--load file://{lab_root / 'go-on' / 'checkpoints'}"
    lab.add_stage(
        2,
        make_case("go-on", "save_and_go_on", dp2, flags("go-on", "--async-save"), steps=3),
        make_case("go-on-tp2", "train_and_save", tp2, load, steps=3),
        make_case(
            "each",
            "save_each_step",
            dp2,
            flags("each", "--keep-last 2 --save-retain-interval 3 --async-save"),
            steps=6,
        ),
        make_case("lost", "lose_the_storage", dp2, flags("lost", "--async-save")),
        make_case("killed", "kill_the_uploader", dp2, flags("killed", "--async-save")),
    )
    # Loads of a checkpoint whose stored tensors are damaged: with a staged copy, and without.
    damaged = flags("go-on")
    lab.add_stage(
        2,
        make_case(
            "damage",
            "damage_stored_tensors",
            dp2,
            damaged,
            checkpoint="iter_0000003",
            copy=str(lab_root / "copy"),
        ),
        make_case("staged", "load_only", dp2, f"{damaged} {load}"),
        *(
            make_case(
                name,
                "load_only",
                dp2,
                f"{damaged} {load} --save-staging-dir {lab_root / directory}",
            )
            for name, directory in (("not staged", "nothing"), ("of another save", "copy"))
        ),
    )
    return lab.run()


def test_another_layout_continues_with_the_same_losses(results: dict[str, Any]) -> None:
    assert "go-on-tp2" in results, results["stderr"][-4000:]
    resumed, reference = results["go-on-tp2"], results["go-on"]
    assert "error" not in resumed, resumed
    assert resumed["loss"] == pytest.approx(reference["loss"][-3:], abs=2e-4)
    assert "iteration 3 from file://" in resumed["report"]


def test_only_whole_checkpoints_that_are_to_be_kept_remain(
    results: dict[str, Any], lab_root: Path
) -> None:
    assert results["each"]["polled"] == [1, 2, 3, 4, 5, 6]
    root = lab_root / "each" / "checkpoints"
    tracker = "latest_checkpointed_iteration.txt"
    assert list_names(root) == ["iter_0000003", "iter_0000005", "iter_0000006", tracker]
    assert (root / tracker).read_text() == "6\n"
    names = list_names(root / "iter_0000006")
    assert {"manifest.json", ".metadata", "common.pt", "metadata.json"} < set(names)
    assert ".partial" not in names
    # The staged copy of the newest one is a checkpoint on disk.
    assert list_names(lab_root / "each" / "staging") == ["iter_0000006"]
    assert list_names(lab_root / "each" / "staging" / "iter_0000006") == names


def test_a_failed_upload_costs_one_checkpoint(results: dict[str, Any], lab_root: Path) -> None:
    for rank in results["lost"]["ranks"]:
        [warning] = rank["warnings"]
        assert "the checkpoint of iteration 2 was not saved: rank " in warning
        assert rank["progress"]["iteration"] == 3
    names = list_names(lab_root / "lost" / "checkpoints")
    assert names == ["iter_0000001", "iter_0000003", "latest_checkpointed_iteration.txt"]


def test_a_killed_upload_process_costs_one_checkpoint(
    results: dict[str, Any], lab_root: Path
) -> None:
    for rank in results["killed"]["ranks"]:
        assert "error" not in rank, rank
        [warning] = rank["warnings"]
        assert "rank 1: the process that uploads to file://" in warning
        assert "its files stay in " in warning
    names = list_names(lab_root / "killed" / "checkpoints")
    saved = ["iter_0000001", "iter_0000003", "iter_0000004"]
    assert names == [*saved, "latest_checkpointed_iteration.txt"]


def test_a_staged_copy_of_the_same_save_is_read(results: dict[str, Any]) -> None:
    assert "error" not in results["staged"], results["staged"]
    assert "iteration 3" in results["staged"]["report"]


@pytest.mark.parametrize("name", ["not staged", "of another save"])
def test_damaged_tensors_are_refused(name: str, results: dict[str, Any]) -> None:
    for rank in results[name]["ranks"]:
        assert rank["kind"] == "CheckpointError"
        assert "is not as it was written" in rank["error"]
        assert "\n" not in rank["error"].partition("\n  hint")[0]
