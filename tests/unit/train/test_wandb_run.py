"""Tests of the choice of the run at Weights & Biases that a training continues."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from flagscale.files import read_json
from flagscale.train.wandb_run import RUN_FILE, choose_run_id

RESTARTED = {"FLAGSCALE_ATTEMPT": "1"}


def _arguments(directory: Path, **changes: Any) -> Namespace:
    common = {"wandb_project": "p", "wandb_entity": None, "skip_train": False}
    return Namespace(**{**common, "save": str(directory), **changes})


@pytest.mark.parametrize(
    ("iteration", "environment", "changes", "is_continued"),
    [
        pytest.param(7, {}, {}, True, id="resumed"),
        pytest.param(0, {}, {}, False, id="begun-anew"),
        pytest.param(0, RESTARTED, {}, True, id="restarted-before-a-checkpoint"),
        pytest.param(7, {}, {"wandb_project": "q"}, False, id="another-project"),
        pytest.param(7, {}, {"wandb_entity": "team"}, False, id="another-team"),
    ],
)
def test_a_training_continues_its_run(
    tmp_path: Path,
    iteration: int,
    environment: dict[str, str],
    changes: dict[str, Any],
    is_continued: bool,
) -> None:
    save = tmp_path / "new" / "checkpoints"
    first_id = choose_run_id(_arguments(save), 0, {})
    assert first_id is not None
    second_id = choose_run_id(_arguments(save, **changes), iteration, environment)
    assert (second_id == first_id) is is_continued
    # The next start continues the latest one.
    assert choose_run_id(_arguments(save, **changes), 8, {}) == second_id
    assert (read_json(save / RUN_FILE) or {})["id"] == second_id


@pytest.mark.parametrize(
    ("environment", "changes"),
    [
        pytest.param({"WANDB_RUN_ID": "mine"}, {}, id="the-user's-own"),
        pytest.param({}, {"save": None}, id="without-checkpoints"),
        pytest.param({}, {"skip_train": True}, id="evaluation"),
    ],
)
def test_the_choice_is_left_to_weights_and_biases(
    tmp_path: Path, environment: dict[str, str], changes: dict[str, Any]
) -> None:
    assert choose_run_id(_arguments(tmp_path, **changes), 7, environment) is None
    assert not (tmp_path / RUN_FILE).exists()


@pytest.mark.parametrize("text", ["{", '{"id": 7, "project": "p", "entity": null}', "[]"])
def test_a_damaged_file_begins_another_run(tmp_path: Path, text: str) -> None:
    (tmp_path / RUN_FILE).write_text(text)
    run_id = choose_run_id(_arguments(tmp_path), 7, {})
    assert run_id is not None
    assert choose_run_id(_arguments(tmp_path), 9, {}) == run_id


def test_a_directory_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert choose_run_id(_arguments(tmp_path / "file"), 0, {})
