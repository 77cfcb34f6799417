"""A failed write costs one checkpoint, on all ranks at once, and does not end the run."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from integration.checkpoint.checkpoint_lab import (
    LAYOUTS,
    CheckpointLab,
    checkpoint_names,
    make_case,
)

pytestmark = [pytest.mark.integration, pytest.mark.torch]


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """Mount a file system of 16 MB; None if this process may not mount one."""
    path = tmp_path_factory.mktemp("small disk")
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=16m", "tmpfs", str(path)]
    if mount is None or subprocess.run([mount, *options], check=False).returncode:
        yield None
        return
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture(scope="module")
def failure_results(
    tmp_path_factory: pytest.TempPathFactory, small_disk: Path | None
) -> dict[str, Any]:
    lab = CheckpointLab(tmp_path_factory.mktemp("troubled"))
    layout, cases = LAYOUTS["dp2-do"], []
    for name, flags, ranks in (
        ("limit", "", [0, 1]), ("limit-async", "--async-save", [0, 1]), ("limit-one", "", [1]),
        ("limit-first", "", [0]),
    ):  # fmt: skip
        save = f"--save {lab.root / name / 'checkpoints'} {flags}"
        cases.append(make_case(name, "fail_in_the_middle", layout, save, trouble_ranks=ranks))
    save = f"--save {lab.root / 'end' / 'checkpoints'}"
    cases.append(make_case("end", "fail_at_the_end", layout, save, trouble_ranks=[1]))
    save += "2 --async-save"
    cases.append(make_case("end-async", "fail_at_the_end", layout, save, trouble_ranks=[1]))
    save = f"--save {lab.root / 'alone' / 'checkpoints'}"
    cases.append(make_case("alone", "fail_at_the_end", layout, save, trouble_ranks=[1], alone=True))
    if small_disk is not None:
        link = lab.root / "disk"  # the arguments are split at spaces
        link.symlink_to(small_disk)
        for name, flags in (("full", ""), ("full-async", "--async-save")):
            save = f"--save {link / name / 'checkpoints'} --keep-last 1 {flags}"
            cases.append(
                make_case(name, "fail_in_the_middle", layout, save, trouble_ranks=[0], fill=True)
            )
    lab.add_stage(2, *cases)
    return lab.run()


@pytest.mark.parametrize("name", ["limit", "limit-async", "limit-one", "limit-first"])
def test_a_write_that_fails_costs_one_checkpoint(
    name: str, failure_results: dict[str, Any]
) -> None:
    assert name in failure_results, failure_results["stderr"][-4000:]
    check_failed_save_was_survived(failure_results[name], "File too large")
    assert failure_results[name]["names"] == checkpoint_names(1, 3)


@pytest.mark.parametrize("name", ["full", "full-async"])
def test_a_full_disk_costs_one_checkpoint(
    name: str, failure_results: dict[str, Any], small_disk: Path | None
) -> None:
    if small_disk is None:
        pytest.skip("needs root, to mount a small file system")
    assert name in failure_results, failure_results["stderr"][-4000:]
    check_failed_save_was_survived(failure_results[name], "No space left on device")
    assert failure_results[name]["names"] == checkpoint_names(3)


def check_failed_save_was_survived(results: dict[str, Any], reason: str) -> None:
    for rank in results["ranks"]:
        assert "error" not in rank
        [warning] = rank["warnings"]
        assert "the checkpoint of iteration 2 was not saved: rank " in warning
        assert reason in warning
        # The earlier checkpoint is in place, and the failed one is deleted.
        assert rank["names_during_failure"] == checkpoint_names(1)
        assert rank["progress"]["iteration"] == 3


@pytest.mark.parametrize("name", ["end", "end-async"])
def test_the_last_save_must_succeed(name: str, failure_results: dict[str, Any]) -> None:
    for rank in failure_results[name]["ranks"]:
        assert rank["kind"] == "CheckpointError"
        assert "iteration 2 was not saved" in rank["error"]
        assert "the checkpoints saved before it are in place" in rank["error"]
    assert failure_results[name]["names"] == checkpoint_names(1)


def test_error_of_a_first_save_names_no_earlier_checkpoints(
    failure_results: dict[str, Any],
) -> None:
    for rank in failure_results["alone"]["ranks"]:
        assert "iteration 1 was not saved" in rank["error"]
        assert "saved before" not in rank["error"]
    assert failure_results["alone"]["names"] == []
