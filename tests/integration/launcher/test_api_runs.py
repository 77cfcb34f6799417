"""Tests of real runs through the Python API."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.launch_lab import PROJECT, Lab
from support.waiting import PATIENCE_SECONDS, wait_for

import flagscale
from flagscale.errors import ConfigError, FlagscaleError, JobError, RunStateError
from flagscale.launcher.runners.hosts import HostRunner

pytestmark = pytest.mark.integration

PROGRAM = """\
import os, sys, time
from flagscale.status import StatusWriter
seed = sys.argv[sys.argv.index("--seed") + 1] if "--seed" in sys.argv else "0"
status = StatusWriter.from_environment(int(os.environ["RANK"]))
if seed == "2":
    sys.exit(7)
for event in ("started", "joined", "ready"):
    status.write(event)
print("localhost:0: seed", seed, flush=True)  # as torchrun would label it
status.write("progress", step=3, train_steps=3, loss=float(seed) / 4, tokens_per_second=10)
if seed == "9":
    time.sleep(600)
"""


def write_config(lab: Lab, **runner: object) -> Path:
    lab.configure(PROGRAM, light=True, runner={"nproc_per_node": 1, **runner})
    return lab.root / "conf" / "lab.yaml"


def test_an_interrupted_start_leaves_no_run(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C arrives when the script has started, and the launcher does not wait for it yet."""
    config, submit = write_config(lab), HostRunner.submit

    def submit_and_interrupt(*args: Any, **options: Any) -> None:
        submit(*args, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(HostRunner, "submit", submit_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        flagscale.launch(config, ["+train.model.seed=9"])
    assert f"stopping run {lab.state().run_id}" in capfd.readouterr().err
    assert lab.run_processes() == []
    assert flagscale.find(lab.exp_dir).status().phase.value == "stopped"


def test_a_run_is_started_watched_and_stopped(lab: Lab) -> None:
    config = write_config(lab, foreground=True)
    run = flagscale.launch(config, ["+train.model.seed=9"])
    # The launch waits until the rank has joined, and the step follows.
    status = wait_for(lambda: (now := run.status()).step is not None and now)
    assert (status.phase.value, status.step, status.loss) == ("running", 3, 2.25)
    assert (run.name, run.directory) == ("lab", lab.exp_dir)
    assert run.wait(timeout=0.2, every=0.1).phase.value == "running"
    assert run.logs(rank=0) == ["localhost:0: seed 9"]
    for wrong in (
        lambda: run.logs(rank=1),
        lambda: run.logs(lines=-1),
        lambda: run.wait(every=0),
        lambda: run.wait(timeout=-1),
    ):
        with pytest.raises(ConfigError, match=r"rank=1: run .* has ranks 0 to 0|expected"):
            wrong()
    with pytest.raises(RunStateError, match="Is a directory"):
        run.report(lab.root)
    # The same run, looked up again from another thread, as a notebook's widgets would.
    lines: list[str] = []
    same_run = flagscale.find(run.id[:-2])
    thread = threading.Thread(target=lambda: lines.extend(same_run.follow()))
    thread.start()
    assert same_run.id == run.id == flagscale.find(lab.exp_dir).id
    with pytest.raises(FlagscaleError, match=f"run {run.id} of lab is alive"):
        flagscale.launch(config)
    page = run.report(lab.root / "page.html", same_run).read_text(encoding="utf-8")
    assert run.id in page
    run.stop()
    thread.join(timeout=PATIENCE_SECONDS)
    assert "localhost:0: seed 9" in lines
    assert lab.run_processes() == []
    assert (run.wait().phase.value, same_run.status().phase.value) == ("stopped", "stopped")
    run.stop()


def test_failed_start_raises_an_error(lab: Lab) -> None:
    config = write_config(lab)
    with pytest.raises(JobError, match="ended with exit code 7"):
        flagscale.launch(config, ["+train.model.seed=2"])
    status = flagscale.find(lab.exp_dir).wait()
    assert (status.phase.value, status.exit_code) == ("failed", 7)
    lab.exp_dir.chmod(0o700)
    (lab.root / "taken").write_text("", encoding="utf-8")
    with pytest.raises(RunStateError, match="taken"):
        flagscale.find(lab.exp_dir).report(lab.root / "taken" / "page.html")
    with pytest.raises((ConfigError, RunStateError), match="taken"):
        flagscale.launch(config, [f"experiment.exp_dir={lab.root}/taken/exp"])


def test_a_mapping_in_a_thread(lab: Lab) -> None:
    config = yaml.safe_load(write_config(lab).read_text(encoding="utf-8"))
    runs: list[flagscale.Run] = []
    thread = threading.Thread(target=lambda: runs.append(flagscale.launch(config)))
    thread.start()
    thread.join(timeout=PATIENCE_SECONDS)
    (run,) = runs
    assert run.wait().phase.value == "completed"
    assert flagscale.find(run.id).logs(lines=1) == run.logs(lines=1)
    wait_for(lambda: not lab.run_processes())


def test_the_example(lab: Lab) -> None:
    config = write_config(lab)
    result = subprocess.run(
        [sys.executable, str(PROJECT / "examples/python/seeds.py"), config],
        cwd=lab.root,
        env={**lab.environment(), "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 1, result.stderr
    output = result.stdout.splitlines()
    assert output[:2] == ["1 rank(s) each", "seed 1: completed at step 3, loss 0.25"]
    assert any(line.startswith("seed 2:") and "exit code 7" in line for line in output)
    assert "seed 3: completed at step 3, loss 0.75" in output
    assert [path.name for path in sorted((lab.root / "outputs_seeds").iterdir())] == ["1", "2", "3"]
