"""Tests that ``run.py`` shows configurations without their secrets."""

from __future__ import annotations

import subprocess

import pytest
import yaml
from support.launch_lab import Lab

pytestmark = pytest.mark.integration

PROGRAM = "print('hello')\n"
SECRETS = {
    "HF_TOKEN": "s3cr3t-1",
    "SESSION_COOKIE": "s3cr3t-2",
    "AZURE_CONN": "AccountName=me;AccountKey=s3cr3t-3;EndpointSuffix=x",
}
OVERRIDDEN = [
    "experiment.envs.SSHPASS=s3cr3t four",
    "+experiment.envs.node_specific={h0: {PGPASSWORD: s3cr3t-5}}",
]


def _run_launcher(lab: Lab, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        lab.command(*argv), cwd=lab.root, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("part", ["job", "hydra", "all"])
@pytest.mark.parametrize("more", [[], ["--resolve"]], ids=["", "resolved"])
def test_shown_configuration_contains_no_secret(lab: Lab, part: str, more: list[str]) -> None:
    lab.configure(PROGRAM, envs={**SECRETS, "PLAIN": "seen", "NAME": "${experiment.exp_name}"})
    result = _run_launcher(lab, "--cfg", part, *more, *OVERRIDDEN)
    assert result.returncode == 0, result.stderr
    assert "s3cr3t" not in result.stdout and "four" not in result.stdout
    assert "<hidden>" in result.stdout
    assert result.stderr == "note: values that look like secrets are shown as <hidden>\n"
    output = yaml.safe_load(result.stdout)
    assert ("hydra" in output, "experiment" in output) == (part != "job", part != "hydra")
    if part != "hydra":
        envs = output["experiment"]["envs"]
        assert (envs["PLAIN"], envs["SSHPASS"]) == ("seen", "<hidden>")
        assert envs["NAME"] == ("lab" if more else "${experiment.exp_name}")
        assert envs["AZURE_CONN"] == "AccountName=me;AccountKey=<hidden>;EndpointSuffix=x"
    else:
        assert output["hydra"]["overrides"]["task"] == [
            "++experiment.envs.SSHPASS=<hidden>",
            '+experiment.envs.node_specific={"h0": {"PGPASSWORD": "<hidden>"}}',
        ]


def test_a_part_that_holds_no_secret_is_shown_without_a_note(lab: Lab) -> None:
    lab.configure(PROGRAM, envs=SECRETS)
    result = _run_launcher(lab, "--cfg", "job", "--package", "experiment.runner")
    assert result.stdout == "# @package experiment.runner\nnproc_per_node: 2\nstop_grace: 3\n"
    assert result.stderr == ""
    wrong = _run_launcher(lab, "--cfg", "job", "--package", "experiment.runer")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no 'runer' there; did you mean 'runner'?" in wrong.stderr


def test_help_shows_groups_and_no_value(lab: Lab) -> None:
    lab.configure(PROGRAM, envs=SECRETS)
    (lab.root / "conf" / "train").mkdir()
    for name in ("tiny", "8b"):
        (lab.root / "conf" / "train" / f"{name}.yaml").write_text("model: {}\n", encoding="utf-8")
    result = _run_launcher(lab, "--help", *OVERRIDDEN)
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("Config groups next to lab.yaml\n  train: 8b, tiny\n")
    assert "s3cr3t" not in result.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["--info"], "--info: only Hydra's own command line supports it", id="info"),
        pytest.param(["--info=defaults"], "--info: only Hydra's own", id="info-of-something"),
        pytest.param(["--hydra-help"], "--hydra-help: only Hydra's own", id="hydra-help"),
        pytest.param(["-sc", "install=bash"], "-sc: only Hydra's own", id="completion"),
        pytest.param(["--config-dir", "x"], "--config-dir: all files are below", id="config-dir"),
        pytest.param(["--cfg", "jobs"], "invalid choice: 'jobs'", id="cfg"),
        pytest.param(["--confg", "job"], "--confg", id="unknown"),
    ],
)
def test_unsupported_hydra_flags(lab: Lab, argv: list[str], message: str) -> None:
    lab.configure(PROGRAM, envs=SECRETS)
    result = _run_launcher(lab, *argv)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert "s3cr3t" not in result.stderr


def test_overrides_and_flags_in_any_order(lab: Lab) -> None:
    lab.configure(PROGRAM)
    result = _run_launcher(
        lab, "experiment.exp_name=x", "--cfg", "job", "~action", "--resolve", "rank=1"
    )
    assert result.returncode == 0, result.stderr
    output = yaml.safe_load(result.stdout)
    assert (output["experiment"]["exp_name"], output["rank"], "action" in output) == ("x", 1, False)
