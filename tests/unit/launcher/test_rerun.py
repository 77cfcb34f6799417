"""Tests of ``flagscale rerun``: the recorded configuration, its secrets, and the new directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from support.report_lab import StoredRun, progress_events, store_run

from flagscale.cli import main
from flagscale.config.load import load
from flagscale.launcher.actions import make_config_texts
from flagscale.launcher.layout import Layout
from flagscale.launcher.runs import RunEntry
from flagscale.launcher.sweep_runs import SweepRun, record_sweep

RUN_ID = "20260921-000000-aaaaaa"
YAML = """\
experiment:
  exp_name: tiny
  exp_dir: exp
  task: {type: command, command: "echo ${lr} ${experiment.exp_dir}/x ${oc.env:FLAVOUR}"}
  runner: {nproc_per_node: 1}
  envs: {API_TOKEN: s3cret, HOME_OF_HOST: "${host:HOME}"}
  cmds: {before_start: 'echo \\${HOME}'}
action: test
lr: 0.1
"""
Rerun = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))
    monkeypatch.setenv("FLAVOUR", "then")
    monkeypatch.delenv("API_TOKEN", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rerun(capsys: pytest.CaptureFixture[str]) -> Rerun:
    """Plan a rerun, and return exit code, stdout and stderr."""

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["rerun", "--dryrun", *map(str, words)])
        return (end.value.code if isinstance(end.value.code, int) else 0, *capsys.readouterr())

    return call


def _record(exp_dir: Path, text: str = YAML, run_id: str = RUN_ID) -> StoredRun:
    """Store a run with the files that a start of this YAML writes."""
    exp_dir.parent.mkdir(parents=True, exist_ok=True)
    (exp_dir.parent / "train.yaml").write_text(text)
    experiment = load(exp_dir.parent, "train", [f"experiment.exp_dir={exp_dir}"], "plan").experiment
    stored_run = store_run(exp_dir.parent, run_id=run_id, exp_dir=exp_dir)
    files = Layout(exp_dir).run_files(run_id)
    files.directory.mkdir(parents=True)
    texts = make_config_texts(experiment)
    files.composed.write_text(texts.composed)
    files.launch.write_text(texts.launch)
    RunEntry(stored_run.state).save()
    return stored_run


def test_recorded_configuration_is_started_in_a_new_directory(
    tmp_path: Path, rerun: Rerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the present YAML nor the present environment counts, except for secrets; references
    between keys follow the overrides.
    """
    _record(tmp_path / "exp")
    (tmp_path / "train.yaml").write_text("nonsense")
    monkeypatch.setenv("FLAVOUR", "now")
    monkeypatch.setenv("API_TOKEN", "s3cret")
    monkeypatch.chdir("/")
    code, out, err = rerun(RUN_ID, "lr=0.2")
    assert code == 0, err
    assert out.splitlines()[:5] == [
        f"rerun of {RUN_ID} of tiny, with its recorded configuration",
        f"  in:        {tmp_path}, to which relative paths refer",
        "  overrides: lr=0.2",
        f"  directory: {tmp_path}/exp_rerun_1 (new: nothing is continued)",
        "  secrets:   API_TOKEN from the environment; they were not recorded",
    ]
    assert f"0.2 {tmp_path}/exp_rerun_1/x then" in out
    assert "echo ${HOME}" in out
    assert "API_TOKEN=<secret, not written>" in out
    assert "s3cret" not in out


@pytest.mark.parametrize(
    "secret", ['{"key": "s3cret"}', "[s3cret", "'s3cret'", "${s3cret}", "null"]
)
def test_any_secret_is_taken_as_it_is(
    secret: str, tmp_path: Path, rerun: Rerun, monkeypatch: pytest.MonkeyPatch
) -> None:
    _record(tmp_path / "exp")
    monkeypatch.setenv("API_TOKEN", secret)
    code, out, err = rerun(RUN_ID)
    assert code == 0, err
    assert "s3cret" not in out + err


@pytest.mark.parametrize(
    ("existing", "of", "expected"),
    [
        pytest.param(["exp_rerun_1"], "exp", "exp_rerun_2", id="next-number"),
        pytest.param([], "exp_rerun_1", "exp_rerun_2", id="of-a-rerun"),
        pytest.param([], "lr=0.1_seed=1", "lr=0.1_seed=1_rerun_1", id="of-a-sweep"),
        pytest.param([], "a b, ü", "a b, ü_rerun_1", id="unusual-name"),
    ],
)
def test_new_directory(
    tmp_path: Path, rerun: Rerun, existing: list[str], of: str, expected: str
) -> None:
    for name in existing:
        (tmp_path / name).mkdir()
    _record(tmp_path / of)
    code, out, err = rerun(f"./{of}", "experiment.envs.API_TOKEN=x")
    assert code == 0, err
    assert f"  directory: {tmp_path / expected} (new" in out


def test_directory_may_be_that_of_the_run(tmp_path: Path, rerun: Rerun) -> None:
    _record(tmp_path / "exp")
    words = ("experiment.exp_dir=exp", "experiment.envs.API_TOKEN=x")
    code, out, err = rerun("exp", *words)
    assert code == 0, err
    assert f"  directory: {tmp_path}/exp, where it continues the earlier run" in out
    assert "experiment.envs.API_TOKEN=<hidden>" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["exp"], "experiment.envs.API_TOKEN: is a secret, which was not recorded: set API_TOKEN"),
        (["exp", "lr=[", "experiment.envs.API_TOKEN=x"], "lr: Hydra cannot read this value"),
        (["exp", "--best"], "--best: exp is not the directory of a sweep"),
        (["exp", "--foo"], "unknown option --foo"),
        (["exp", "experiment=other"], "experiment=other: the recorded configuration is composed"),
        (["nope"], "'nope' is not a run id"),
    ],
)
def test_what_cannot_be_started_again(
    tmp_path: Path, rerun: Rerun, words: list[str], message: str
) -> None:
    _record(tmp_path / "exp")
    code, _, err = rerun(*words)
    assert code in (1, 2)
    assert message in err
    assert "Traceback" not in err


def test_a_run_of_an_older_version_is_refused(tmp_path: Path, rerun: Rerun) -> None:
    stored_run = _record(tmp_path / "exp")
    Layout(tmp_path / "exp").run_files(RUN_ID).composed.unlink()
    assert "has no recorded configuration" in rerun("exp")[2]
    stored_run.write_launcher_files({"experiment": {}})
    assert "by a version that did not record what a rerun needs" in rerun("exp")[2]


@pytest.mark.parametrize(
    ("save", "message"),
    [
        pytest.param(
            "{tmp_path}/exp/mine",
            "checkpoint.save: {tmp_path}/exp/mine is in the directory of the run",
            id="directory",
        ),
        pytest.param(
            "s3://bucket/mine",
            "checkpoint.save: s3://bucket/mine has the checkpoints of the run",
            id="address",
        ),
    ],
)
def test_a_rerun_does_not_write_to_the_directory_of_the_run(
    tmp_path: Path, rerun: Rerun, save: str, message: str
) -> None:
    train = {
        "system": {"checkpoint": {"save": save.format(tmp_path=tmp_path)}},
        "model": {},
        "data": {},
    }
    (tmp_path / "train.py").touch()
    task = {"type": "train", "entrypoint": str(tmp_path / "train.py")}
    experiment = {"exp_name": "x", "exp_dir": "exp", "task": task}
    experiment["runner"] = {"nproc_per_node": 1}
    _record(tmp_path / "exp", yaml.safe_dump({"experiment": experiment, "train": train}))
    code, _, err = rerun("exp")
    assert code == 2
    assert message.format(tmp_path=tmp_path) in err
    assert f"hint: override it, or continue the run there with experiment.exp_dir={tmp_path}" in err
    assert rerun("exp", "train.system.checkpoint.save=elsewhere")[0] == 0
    assert rerun("exp", f"experiment.exp_dir={tmp_path}/exp")[0] == 0


def test_best_run_of_a_sweep(tmp_path: Path, rerun: Rerun) -> None:
    directory = tmp_path / "sweep"
    exp_dirs = [directory / f"lr={lr}" for lr in (0.1, 0.2)]
    sweep_runs = [SweepRun(values={"lr": d.name[3:]}, exp_dir=d) for d in exp_dirs]
    record_sweep(tmp_path / "train.yaml", sweep_runs)
    code, _, err = rerun(directory)
    assert (code, "is a sweep of 2 runs\n  hint: --best takes its best run" in err) == (2, True)
    assert "none is the best" in rerun(directory, "--best")[2]
    for number, exp_dir in enumerate(exp_dirs):
        stored_run = _record(exp_dir, run_id=f"20260921-00000{number}-aaaaaa")
        stored_run.append_events(*progress_events(3, loss=5.0 - number))
        stored_run.write_exit_records()
    code, out, err = rerun(directory, "--best", "experiment.envs.API_TOKEN=x")
    assert code == 0, err
    assert out.startswith("the best of the completed runs by training loss (4.0000): lr=0.2\n")
    assert f"directory: {exp_dirs[1]}_rerun_1 (new" in out
