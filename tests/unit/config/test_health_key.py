"""Tests of ``experiment.runner.health`` and of FlagScale's name of it."""

from __future__ import annotations

import pytest

from flagscale.config.checks import experiment_notes
from flagscale.errors import ConfigError

from .conftest import Workspace


@pytest.mark.parametrize(
    ("setting", "health"),
    [
        ("nnodes: 1", "off"),
        ("health: off", "off"),  # a boolean in YAML
        ("health: 'off'", "off"),
        ("health: quick", "quick"),
        ("health: full", "full"),
        ("enable_gpu_health_check: true", "quick"),
        ("enable_gpu_health_check: false", "off"),
        ("{enable_gpu_health_check: true, health: full}", "full"),
        ("{enable_gpu_health_check: false, health: quick}", "quick"),
    ],
)
def test_value(workspace: Workspace, setting: str, health: str) -> None:
    setting = setting.strip("{}").replace(", ", "\n    ")
    workspace.replace("conf/train.yaml", "nnodes: 1", setting)
    experiment = workspace.load(purpose="plan")
    assert experiment.runner.health == health
    assert not any("health" in note for note in experiment_notes(experiment, 1))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("health: fast", "expected one of off, quick, full"),
        ("health: off\n    enable_gpu_health_check: true", "off contradicts"),
        ("health: full\n    preflight: false", "`preflight: false` omits"),
        ("enable_gpu_health_check: true\n    preflight: false", "`preflight: false` omits"),
    ],
)
def test_contradiction_is_refused(workspace: Workspace, setting: str, message: str) -> None:
    workspace.replace("conf/train.yaml", "nnodes: 1", setting)
    with pytest.raises(ConfigError) as error:
        workspace.load(purpose="plan")
    (problem,) = error.value.problems
    assert problem.key == "experiment.runner.health"
    assert message in problem.message


def test_runner_without_the_check_is_noted(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "nnodes: 1", "type: slurm\n    health: quick")
    notes = experiment_notes(workspace.load(purpose="plan"), 1)
    assert any("health: quick has no effect with type: slurm" in note for note in notes)
