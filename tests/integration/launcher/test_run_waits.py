"""Tests of the states that ``action=run`` waits for, and of failures in the meantime."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from support.launch_lab import PROJECT, Lab
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.launcher.runners.hosts import HostRunner
from flagscale.launcher.start import wait_until_started

pytestmark = pytest.mark.integration

# A program of two ranks that reports each stage. In attempt n, the rank in the variable RAISE_<n>
# raises once the other one has joined. After joining, ranks wait for the file ``go``.
STAGES = f"""
import os, sys, time, traceback
from pathlib import Path
sys.path.insert(0, {str(PROJECT)!r})
from flagscale.status import StatusWriter

rank, attempt = int(os.environ["RANK"]), os.environ["FLAGSCALE_ATTEMPT"]
status = StatusWriter.from_environment(rank)
status.write("started", rank=rank, pid=os.getpid())
if os.environ.get("RAISE_" + attempt) == str(rank):
    peer_events = Path(os.environ["FLAGSCALE_STATUS_DIR"]) / f"rank_{{1 - rank}}.jsonl"
    while not peer_events.exists() or "joined" not in peer_events.read_text():
        time.sleep(0.01)
    try:
        raise ValueError("bad data in shard 7")
    except ValueError as error:
        status.write("failed", kind="ValueError", message=str(error),
                     traceback=traceback.format_exc())
        raise
status.write("joined", backend="none")
while not Path(__file__).with_name("go").exists():
    time.sleep(0.01)
if rank == 0:
    status.write("progress", step=1, train_steps=9, loss=1.0)
time.sleep(600)
"""


def test_failure_before_another_attempt_does_not_end_the_wait(lab: Lab) -> None:
    lab.configure(STAGES, light=True, runner={"max_restarts": 1}, envs={"RAISE_0": "1"})
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    failed = "localhost: rank 1 failed: ValueError: bad data in shard 7"
    assert f"attempt 1 of 2 failed: {failed}" in result.stderr
    assert "the job starts again" in result.stderr
    assert "2 rank(s) joined" in result.stdout
    assert len(lab.run_processes()) > 2


def test_run_that_is_stopped_in_the_meantime_is_no_failure(lab: Lab) -> None:
    # It reports something, so that it does not count as started without having joined.
    program = (
        "import os, time\nfrom flagscale.status import StatusWriter\n"
        "StatusWriter.from_environment(int(os.environ['RANK'])).write('started')\n"
        "print('up', flush=True)\ntime.sleep(600)\n"
    )
    lab.configure(program, light=True)
    launcher = lab.start("run")
    wait_for(lambda: lab.layout.state.exists() and "up" in lab.output())
    assert lab.run_action("stop").returncode == 0
    output = launcher.communicate(timeout=PATIENCE_SECONDS)[0]
    assert launcher.returncode == 143, output
    assert output.endswith(
        f"error: run {lab.state().run_id} was stopped before its ranks had started\n"
    )


def test_failure_of_the_last_attempt_is_reported(lab: Lab) -> None:
    lab.configure(
        STAGES, light=True, runner={"max_restarts": 1}, envs={"RAISE_0": "1", "RAISE_1": "0"}
    )
    result = lab.run_action("run")
    assert result.returncode == 1
    assert "attempt 1 of 2 failed: localhost: rank 1" in result.stderr
    failed = "localhost: rank 0 failed: ValueError: bad data in shard 7"
    assert f"run {lab.state().run_id} failed in attempt 2: {failed}" in result.stderr
    lab.wait_until_ended()


def test_wait_for_none_returns_at_once(lab: Lab) -> None:
    lab.configure(
        STAGES, light=True, runner={"wait_for": "none"}, cmds={"before_start": "sleep 600"}
    )
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    assert "its scripts were started" in result.stdout
    assert not list(lab.state().hosts[0].run_dir.glob("status/rank_*"))
    assert lab.run_action("stop").returncode == 0
    assert lab.run_processes() == []


def test_wait_for_step_returns_after_the_first_step(lab: Lab) -> None:
    lab.configure(STAGES, light=True, runner={"wait_for": "step"})
    launcher = lab.start("run")
    assert launcher.stdout is not None
    output = wait_for(lambda: "joined" in (line := launcher.stdout.readline()) and line)
    assert "2 rank(s) joined in" in output
    assert "waiting for the first step" in output
    assert launcher.poll() is None
    (lab.root / "go").touch()
    assert (
        "2 rank(s) joined and are past the first step"
        in launcher.communicate(timeout=PATIENCE_SECONDS)[0]
    )
    assert launcher.returncode == 0


def test_ranks_that_joined_in_time_are_not_stopped(lab: Lab) -> None:
    lab.configure(STAGES, light=True)
    assert lab.run_action("run").returncode == 0
    message = wait_until_started(lab.state(), HostRunner(), 0.1, "step")
    assert "0.1 s later are still busy with the first step. The run continues" in message
    assert len(lab.run_processes()) > 2


TINY = {
    "system": {
        "distributed_backend": "gloo",
        "precision": {"bf16": False},
        "checkpoint": {"exit_on_missing_checkpoint": True},
    },
    "model": {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "seq_length": 8,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "train_iters": 1,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "eval_iters": 0,
        "optimizer": {"lr": 1.0e-3},
    },
    "data": {"mock_data": True, "vocab_size": 100, "num_workers": 0},
}


@pytest.mark.torch
def test_failure_after_joining_is_reported(lab: Lab, tmp_path: Path) -> None:
    """The training program's ranks have joined when they find no checkpoint.

    A preflight would have reported it before.
    """
    lab.configure("", task={"entrypoint": None}, runner={"nproc_per_node": 1, "preflight": False})
    conf = lab.root / "conf" / "lab.yaml"
    config = yaml.safe_load(conf.read_text(encoding="utf-8"))
    missing_path = tmp_path / "none"
    missing_path.mkdir()
    config["train"] = TINY | {"system": {**TINY["system"], "logging": {"tensorboard_dir": None}}}
    config["train"]["system"]["checkpoint"] |= {"load": str(missing_path), "save": None}
    conf.write_text(yaml.safe_dump(config), encoding="utf-8")
    result = lab.run_action("run")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "1 rank(s) joined" in result.stderr
    assert "waiting for the model, the data and the checkpoint" in result.stderr
    assert "rank 0 failed: CheckpointError" in result.stderr
    assert f"{missing_path} contains no checkpoint" in result.stderr
    lab.wait_until_ended()
