"""What ``run.py`` shows of a configuration: all but its secrets."""

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


def _shown(lab: Lab, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        lab.command(*argv), cwd=lab.root, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("part", ["job", "hydra", "all"])
@pytest.mark.parametrize("more", [[], ["--resolve"]], ids=["", "resolved"])
def test_what_is_shown_of_a_configuration_holds_no_secret(
    lab: Lab, part: str, more: list[str]
) -> None:
    lab.configure(PROGRAM, envs={**SECRETS, "PLAIN": "seen", "NAME": "${experiment.exp_name}"})
    done = _shown(lab, "--cfg", part, *more, *OVERRIDDEN)
    assert done.returncode == 0, done.stderr
    assert "s3cr3t" not in done.stdout and "four" not in done.stdout
    assert "<hidden>" in done.stdout
    assert done.stderr == "note: what looks like a secret is shown as <hidden>\n"
    shown = yaml.safe_load(done.stdout)
    assert ("hydra" in shown, "experiment" in shown) == (part != "job", part != "hydra")
    if part != "hydra":
        envs = shown["experiment"]["envs"]
        assert (envs["PLAIN"], envs["SSHPASS"]) == ("seen", "<hidden>")
        assert envs["NAME"] == ("lab" if more else "${experiment.exp_name}")
        assert envs["AZURE_CONN"] == "AccountName=me;AccountKey=<hidden>;EndpointSuffix=x"
    else:
        assert shown["hydra"]["overrides"]["task"] == [
            "++experiment.envs.SSHPASS=<hidden>",
            '+experiment.envs.node_specific={"h0": {"PGPASSWORD": "<hidden>"}}',
        ]


def test_a_part_that_holds_no_secret_is_shown_without_a_note(lab: Lab) -> None:
    lab.configure(PROGRAM, envs=SECRETS)
    done = _shown(lab, "--cfg", "job", "--package", "experiment.runner")
    assert done.stdout == "# @package experiment.runner\nnproc_per_node: 2\nstop_grace: 3\n"
    assert done.stderr == ""
    wrong = _shown(lab, "--cfg", "job", "--package", "experiment.runer")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no 'runer' there; did you mean 'runner'?" in wrong.stderr


def test_help_shows_groups_and_no_value(lab: Lab) -> None:
    lab.configure(PROGRAM, envs=SECRETS)
    (lab.root / "conf" / "train").mkdir()
    for name in ("tiny", "8b"):
        (lab.root / "conf" / "train" / f"{name}.yaml").write_text("model: {}\n", encoding="utf-8")
    done = _shown(lab, "--help", *OVERRIDDEN)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("Config groups beside lab.yaml\n  train: 8b, tiny\n")
    assert "s3cr3t" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        pytest.param(["--info"], "--info: only Hydra's own command line can tell", id="info"),
        pytest.param(["--info=defaults"], "--info: only Hydra's own", id="info-of-something"),
        pytest.param(["--hydra-help"], "--hydra-help: only Hydra's own", id="hydra-help"),
        pytest.param(["-sc", "install=bash"], "-sc: is part of Hydra's own", id="completion"),
        pytest.param(["--config-dir", "x"], "--config-dir: every file is below", id="config-dir"),
        pytest.param(["--cfg", "jobs"], "invalid choice: 'jobs'", id="cfg"),
        pytest.param(["--confg", "job"], "--confg", id="unknown"),
    ],
)
def test_what_hydra_has_and_this_has_not(lab: Lab, argv: list[str], message: str) -> None:
    lab.configure(PROGRAM, envs=SECRETS)
    done = _shown(lab, *argv)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert "s3cr3t" not in done.stderr


def test_overrides_and_flags_in_any_order(lab: Lab) -> None:
    lab.configure(PROGRAM)
    done = _shown(lab, "experiment.exp_name=x", "--cfg", "job", "~action", "--resolve", "rank=1")
    assert done.returncode == 0, done.stderr
    shown = yaml.safe_load(done.stdout)
    assert (shown["experiment"]["exp_name"], shown["rank"], "action" in shown) == ("x", 1, False)
