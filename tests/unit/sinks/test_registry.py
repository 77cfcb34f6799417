"""Tests of the metrics sinks that arguments enable, and of their runs over resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flagscale.config.arguments.spec.registry import arguments
from flagscale.errors import ConfigError
from flagscale.files import read_json
from flagscale.sinks.base import TrainingRun
from flagscale.sinks.check import check_sinks
from flagscale.sinks.logins import remove_logins
from flagscale.sinks.registry import (
    ENABLING_KEYS,
    METRICS_SINKS,
    check_sink_names,
    create_sinks,
    list_enabled_sinks,
)
from flagscale.sinks.wandb_sink import choose_run_id

DEFAULTS = {argument.name: argument.default for argument in arguments().values()}
RESTARTED = {"FLAGSCALE_ATTEMPT": "1"}


def _values(**changes: Any) -> dict[str, Any]:
    return DEFAULTS | changes


def _run(
    save: Path | None, iteration: int = 0, environment: dict[str, str] | None = None, **changes: Any
) -> TrainingRun:
    values = _values(save=save and str(save), wandb_project="p", **changes)
    return TrainingRun(values, iteration, environment or {}, print)


def test_each_built_in_sink_has_its_key() -> None:
    assert ENABLING_KEYS.keys() == METRICS_SINKS.builtin.keys()
    for name, key in ENABLING_KEYS.items():
        sink = METRICS_SINKS.load(name)
        assert (sink.name, sink.key) == (name, key)
        assert list_enabled_sinks(_values(**{key: "x"})) == [name]
    assert list_enabled_sinks(_values()) == []


@pytest.mark.parametrize(
    ("names", "part"),
    [
        pytest.param(["wandb"], "'wandb' is built in; `wandb_project` enables it", id="built-in"),
        pytest.param(["mine"], "no metrics sink is called 'mine'; none is installed", id="unknown"),
    ],
)
def test_wrong_names_are_refused(names: list[str], part: str) -> None:
    assert list(check_sink_names(_values(metrics_sinks=names))) == [("metrics_sinks", part)]


def test_all_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as raised:
        create_sinks(_values(wandb_project="p", mlflow_experiment="e"), {})
    assert [str(problem) for problem in raised.value.problems] == [
        "wandb_project: is set, but the Python package wandb is not installed",
        "mlflow_experiment: is set, but the Python package mlflow is not installed",
    ]
    assert raised.value.hint == (
        "install wandb, or remove wandb_project; install mlflow, or remove mlflow_experiment"
    )


def test_a_host_is_checked_for_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "wandb" or None)
    assert check_sinks(["wandb"]) == {"found": "Weights & Biases"}
    assert check_sinks(["wandb", "mlflow"]) == {
        "problem": "mlflow_experiment: is set, but the Python package mlflow is not installed",
        "hint": "install mlflow, or remove mlflow_experiment",
    }


def test_a_missing_key_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    environment = {"SWANLAB_SAVE_DIR": str(tmp_path)}
    with pytest.raises(ConfigError, match="SWANLAB_API_KEY is not") as raised:
        create_sinks(_values(swanlab_project="p"), environment)
    assert "SWANLAB_MODE=offline" in str(raised.value.hint)
    assert create_sinks(_values(swanlab_project="p"), {**environment, "SWANLAB_MODE": "offline"})


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
    first_id = choose_run_id(_run(save))
    assert first_id is not None
    second = TrainingRun(
        _values(save=str(save), **{"wandb_project": "p", **changes}), iteration, environment, print
    )
    second_id = choose_run_id(second)
    assert (second_id == first_id) is is_continued
    assert (read_json(save / "wandb_run.json") or {})["id"] == second_id


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"save": None}, id="without-checkpoints"),
        pytest.param({"skip_train": True}, id="evaluation"),
    ],
)
def test_a_run_that_cannot_be_continued_is_not_stored(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    values = _values(**{"save": str(tmp_path), "wandb_project": "p", **changes})
    run = TrainingRun(values, 7, {}, print)
    run_id = choose_run_id(run)
    assert not list(tmp_path.iterdir())
    assert choose_run_id(run) == run_id, "after a failure of the sink"
    assert choose_run_id(TrainingRun(values, 9, {}, print)) != run_id


def test_the_user_chooses_the_run_at_weights_and_biases(tmp_path: Path) -> None:
    assert choose_run_id(_run(tmp_path, 7, {"WANDB_RUN_ID": "mine"})) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["{", '{"id": 7, "project": "p", "entity": null}', "[]"])
def test_a_damaged_file_begins_another_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "wandb_run.json").write_text(text)
    run_id = choose_run_id(_run(tmp_path, 7))
    assert run_id is not None
    assert choose_run_id(_run(tmp_path, 9)) == run_id


def test_a_directory_that_cannot_be_written_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert choose_run_id(_run(tmp_path / "file"))


@pytest.mark.parametrize(
    ("uri", "stored"),
    [
        pytest.param("https://me:s3cr3t@host:5000/x", "https://host:5000/x", id="password"),
        pytest.param("https://me:a@b@host/x", "https://host/x", id="at-sign"),
        pytest.param("sqlite:////data/a@b.db", "sqlite:////data/a@b.db", id="file"),
        pytest.param("databricks", "databricks", id="no-url"),
    ],
)
def test_logins_are_not_stored(uri: str, stored: str) -> None:
    assert remove_logins(uri) == stored
