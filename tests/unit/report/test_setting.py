"""Tests of the description of model and layout, derived from a program's arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.report_lab import store_run

from flagscale.report import setting

MODEL = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--bf16"),
    *("--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "2"),
)
TP, PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"


@pytest.mark.parametrize(
    ("arguments", "layout", "host_roles"),
    [
        pytest.param([], "dp8", ["replicas 0-3 of 8", "replicas 4-7 of 8"], id="data"),
        pytest.param([TP, "2"], "tp2 dp4", ["replicas 0-1 of 4", "replicas 2-3 of 4"], id="tensor"),
        pytest.param([PP, "4"], "dp2 pp4", ["stages 0-1 of 4", "stages 2-3 of 4"], id="pipeline"),
        pytest.param(
            [TP, "2", PP, "2", "--context-parallel-size", "2"],
            "tp2 cp2 pp2",
            ["stage 0 of 2", "stage 1 of 2"],
            id="context",
        ),
        pytest.param(
            [
                *("--enable-hetero", "--hetero-process-meshes"),
                *("tp=4,layers=3,device_type=A", "dp=4,layers=1,device_type=B"),
                *("--global-batch-size", "8"),
            ],
            "meshes A tp4 (3 layers) + B dp4 (1 layers)",
            ["stage 0 of 2, mesh 0 (A tp4)", "stage 1 of 2, mesh 1 (B dp4)"],
            id="meshes",
        ),
    ],
)
def test_layout_is_described(
    tmp_path: Path, arguments: list[str], layout: str, host_roles: list[str]
) -> None:
    stored_run = store_run(tmp_path, hosts=("a", "b"), nproc=4)
    stored_run.write_launcher_files({"x": {"y": [1], "z": None}}, "train.py", *MODEL, *arguments)
    settings = setting.read_settings(stored_run.state)
    assert (settings.layout, [*settings.host_roles.values()]) == (layout, host_roles)
    assert settings.model == "gpt, 4 layers, hidden size 64, 4 heads, sequences of 128, bf16"
    assert settings.options == {"x.y": "[1]", "x.z": "null"}


@pytest.mark.parametrize(
    "arguments",
    [[], ["--steps", "3"], ["x"], [*MODEL, "--num-layers", "many"], [*MODEL, TP, "0"]],
    ids=["none", "foreign", "no-flag", "wrong", "impossible"],
)
def test_unknown_arguments_are_ignored(tmp_path: Path, arguments: list[str]) -> None:
    stored_run = store_run(tmp_path)
    stored_run.write_launcher_files({}, "other.py", *arguments)
    settings = setting.read_settings(stored_run.state)
    assert (settings.program, settings.model, settings.layout, settings.host_roles) == (
        "other.py",
        "",
        "",
        {},
    )


def test_help_is_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored_run = store_run(tmp_path)
    stored_run.write_launcher_files({}, "train.py", *MODEL, "--help")
    assert setting.read_settings(stored_run.state).layout == "1 rank"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"run_id": 3, "hosts": 7}'])
def test_damaged_plan_yields_none(tmp_path: Path, damage: str) -> None:
    stored_run = store_run(tmp_path)
    stored_run.write_launcher_files({}, "train.py")
    path = stored_run.state.exp_dir / "logs" / "scripts" / "plan.json"
    path.write_text(damage)
    assert setting.read_settings(stored_run.state).missing_reason
    path.with_name("config.yaml").write_text("a: [")
    stored_run.write_launcher_files({}, "train.py")
    path.with_name("config.yaml").write_text("a: [")
    assert setting.read_settings(stored_run.state).text == ""
