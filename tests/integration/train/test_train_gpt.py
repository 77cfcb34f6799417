"""Integration tests of the training program as the launcher starts it: processes, signals and
files.
"""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from flagscale.status import STATUS_DIR_VARIABLE, Event, list_status_files, read_events

pytestmark = [pytest.mark.integration, pytest.mark.torch]

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "flagscale" / "train" / "train_gpt.py"
ADAPTED = ROOT / "third_party" / "Megatron-LM"
TINY = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64
--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --vocab-size 100 --mock-data
--make-vocab-size-divisible-by 16 --normalization RMSNorm --swiglu --disable-bias-linear
--position-embedding-type rope --eval-iters 0 --num-workers 0 --log-interval 1 --device cpu
--lr-decay-style constant
"""


class Job:
    """Running training program with ``ranks`` ranks."""

    def __init__(
        self,
        directory: Path,
        arguments: str,
        *,
        ranks: int = 1,
        path: tuple[Path, ...] = (),
        output: IO[bytes] | int = subprocess.PIPE,
        **variables: str,
    ) -> None:
        self.status = directory / "status"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command = [sys.executable, *(launcher if ranks > 1 else []), str(PROGRAM)]
        excluded_variables = {
            "RANK",
            "LOCAL_RANK",
            "WORLD_SIZE",
            "MASTER_ADDR",
            "MASTER_PORT",
            "FLAGSCALE_DEVICE",
        }
        environment = {
            name: value for name, value in os.environ.items() if name not in excluded_variables
        }
        environment.update(
            PYTHONPATH=":".join(map(str, path or (ROOT, ADAPTED))),
            OMP_NUM_THREADS="1",
            **{STATUS_DIR_VARIABLE: str(self.status), **variables},
        )
        self.process = subprocess.Popen(
            [*command, *f"{TINY} {arguments}".split()],
            env=environment,
            cwd=directory,
            stdout=output,
            stderr=output,
            text=True,
        )

    def wait(self) -> int:
        self.output, self.errors = self.process.communicate(timeout=120)
        return self.process.returncode

    def events(self, kind: str, rank: int | None = None) -> list[Event]:
        events = [
            event for path in list_status_files(self.status) for event in read_events(path)[0]
        ]
        return [e for e in events if e.event == kind and rank in (None, e.rank)]

    def wait_for(self, kind: str, **fields: Any) -> Event:
        for _ in range(1200):
            for event in self.events(kind) if self.status.is_dir() else []:
                if all(event.get(name) == value for name, value in fields.items()):
                    return event
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        raise AssertionError(f"no {kind} event came")

    def losses(self) -> list[float]:
        return [event.get("loss") for event in self.events("progress")]


def test_status_events_and_files_of_a_run(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        "--train-iters 3 --eval-iters 1 --eval-interval 2 --save checkpoints --load nowhere "
        "--tensorboard-dir board --log-params-norm --log-throughput --log-num-zeros-in-grad "
        "--profile --profile-step-start 2 --profile-step-end 4 --profile-dir traces",
    )
    assert job.wait() == 0, job.errors
    started = job.events("started")[0]
    assert (started.get("world_size"), started.get("device")) == (1, "cpu")
    assert job.events("joined")[0].get("backend") == "gloo"
    assert job.events("ready")
    steps = job.events("progress")
    assert [event.get("step") for event in steps] == [1, 2, 3]
    assert [event.get("samples") for event in steps] == [4, 8, 12]
    assert all(event.get("tokens_per_second") > 0 for event in steps)
    assert [event.get("step") for event in job.events("evaluation")] == [2, 3]
    saved = job.events("checkpoint")[0]
    assert Path(tmp_path, saved.get("path")).is_dir()
    finished = job.events("finished")[0]
    assert (finished.get("step"), finished.get("reason")) == (3, "completed")
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))
    assert "step 3/3 | loss" in job.output
    assert "load: nowhere holds no checkpoint; training starts from step 0" in job.output
    assert "Warning" not in job.errors
    trace = tmp_path / "traces" / "profile_rank0_steps2-3.json.gz"
    assert f"trace of steps 2 to 3: {trace.relative_to(tmp_path)}" in job.output
    assert trace.stat().st_mode & 0o777 == 0o600
    with gzip.open(trace) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("Optimizer.step#Adam.step") <= 2  # only of the profiled steps
    assert "aten::mm" in names


def test_sigterm_to_one_rank_saves_and_stops_all(tmp_path: Path) -> None:
    job = Job(tmp_path, "--train-iters 100000 --save checkpoints", ranks=2)
    job.wait_for("progress", step=3)
    os.kill(job.wait_for("started", rank=1).get("pid"), signal.SIGTERM)
    assert job.wait() == 0, job.errors
    ends = job.events("finished")
    assert [event.get("reason") for event in ends] == ["signal", "signal"]
    assert ends[0].get("step") == ends[1].get("step")
    assert job.events("checkpoint")[0].get("step") == ends[0].get("step")


def test_completed_run_explains_how_to_continue(tmp_path: Path) -> None:
    arguments = "--save checkpoints --load checkpoints --lr-decay-style cosine --train-iters"
    first = Job(tmp_path, f"{arguments} 1")
    assert first.wait() == 0
    assert "holds no checkpoint" not in first.output  # not reported in a first run
    second = Job(tmp_path, f"{arguments} 1")
    assert second.wait() == 0, second.errors
    assert "1 steps are done already: nothing to train" in second.output
    assert "raise train_iters (or train_samples) and set override_opt_param_scheduler: true" in (
        second.output
    )
    continued = Job(tmp_path, f"{arguments} 2 --override-opt-param-scheduler")
    assert continued.wait() == 0, continued.errors
    assert continued.events("checkpoint")[-1].get("step") == 2


def test_batch_size_rampup_and_skipped_step(tmp_path: Path) -> None:
    job = Job(
        tmp_path,
        "--train-samples 20 --rampup-batch-size 1 1 6 --iterations-to-skip 3 --save checkpoints "
        "--save-interval 2 --save-retain-interval 4",
    )
    assert job.wait() == 0, job.errors
    assert "7 steps of 1 to 4 x 16 tokens, 1 to 4 micro-batches a step" in job.output
    steps = [(event.get("step"), event.get("samples")) for event in job.events("progress")]
    assert steps == [(1, 1), (2, 2), (4, 7), (5, 11), (6, 15), (7, 19)]
    assert "step 3: its data is skipped" in job.output
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert checkpoints == ["iter_0000004", "iter_0000007"]
    evaluation_run = Job(
        tmp_path, "--train-samples 20 --skip-train --eval-iters 1 --load checkpoints"
    )
    assert evaluation_run.wait() == 0, evaluation_run.errors
    assert [event.get("step") for event in evaluation_run.events("evaluation")] == [7]
    assert len(evaluation_run.events("progress")) == len(steps)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            "--load nowhere --finetune",
            "error: load: nowhere holds no checkpoint, and finetune asks for one",
            id="finetune",
        ),
        pytest.param(
            "--save file/checkpoints",
            "error: save: no checkpoint can be written in file/checkpoints: Not a directory",
            id="save-below-a-file",
        ),
        pytest.param(
            "--tensorboard-dir file/board",
            "error: tensorboard_dir: file/board cannot be written: Not a directory",
            id="board-below-a-file",
        ),
    ],
)
def test_errors_before_the_first_step(tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "file").touch()
    job = Job(tmp_path, f"--train-iters 1 {arguments}")
    assert job.wait() != 0
    assert job.errors.startswith(message)
    assert "Traceback" not in job.errors
    assert not job.events("progress")


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Dropout is enabled: the states of the random number generators are restored too.

    Layouts, and random numbers of several ranks, are covered by the tests of checkpoints.
    """
    common = (
        "--use-distributed-optimizer --bf16 --train-iters 6 "
        "--attention-dropout 0.1 --hidden-dropout 0.1"
    )
    uninterrupted = Job(tmp_path, common)
    assert uninterrupted.wait() == 0, uninterrupted.errors
    expected = uninterrupted.losses()

    arguments = f"{common} --save checkpoints --load checkpoints"
    (tmp_path / "first").mkdir()
    first = Job(tmp_path / "first", f"{arguments} --exit-interval 3")
    assert first.wait() == 0, first.errors
    assert first.events("finished")[0].get("reason") == "exit-interval"
    second = Job(tmp_path / "first", arguments)
    assert second.wait() == 0, second.errors
    assert second.losses() == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.compiler
def test_bounded_all_reduce_statistics_are_reported(tmp_path: Path) -> None:
    wide = "--hidden-size 128 --ffn-hidden-size 512 --train-iters 12 --tensorboard-dir board"
    fsccl = {"FSCCL_SHM": "0", "FSCCL_TAIL": "bounded", "FSCCL_TAIL_LIMIT": "100"}
    job = Job(tmp_path, f"{wide} --distributed-backend fsccl", ranks=2, **fsccl)
    assert job.wait() == 0, job.errors
    events = [e for e in job.events("progress", 0) if e.get("tail_excluded") is not None]
    assert events[-1].get("step") == 12
    assert all(0 <= e.get("tail_excluded") <= 1 and e.get("tail_repeated") == 0 for e in events)
    assert job.output.count("| tail excluded 0") + job.output.count("| tail excluded 1") == len(
        events
    )
    assert len(events) < 12  # the first operations are exact
    mib = sum(buckets := [e.get("tail_mib") for e in events]) / len(buckets)
    assert mib > 0.25, "a bucket is larger than FSCCL_TAIL_BYTES"
    assert all(e.get("tail_seconds") > 0 for e in events)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    plotted = [round(scalar.value, 4) for scalar in board.Scalars("train/tail-mib")]
    assert plotted == pytest.approx(buckets, abs=1e-3)
    assert len(board.Scalars("train/tail-seconds")) == len(events)


@pytest.mark.compiler
def test_step_with_too_much_loss_is_skipped(tmp_path: Path) -> None:
    """The configured rate is unreachable, so deadlines expire before the gradients arrive."""
    wide = "--hidden-size 256 --ffn-hidden-size 16384 --num-layers 1 --train-iters 8"
    tail_options = {
        "FSCCL_TAIL_RATE": "1000000",
        "FSCCL_TAIL_LIMIT": "0",
        "FSCCL_TAIL_ABOVE": "skip",
    }
    fsccl = {"FSCCL_SHM": "0", "FSCCL_TAIL": "bounded", **tail_options}
    job = Job(tmp_path, f"{wide} --distributed-backend fsccl --log-params-norm", ranks=2, **fsccl)
    assert job.wait() == 0, job.errors
    steps = job.events("progress", 0)
    # Four steps are exact, to measure the rate. The fifth is lost. Two more are exact after it.
    assert [e.get("skipped_steps", 0) for e in steps[:7]] == [0, 0, 0, 0, 1, 0, 0]
    assert "step 5 is skipped: too much of its gradients was lost" in job.output + job.errors
    assert steps[4].get("tail_skipped") == 1
    norms = [e.get("params_norm") for e in steps]
    assert norms[3] == norms[4] != norms[5], "the fifth changed the weights"


def test_non_finite_loss_ends_the_job(tmp_path: Path) -> None:
    job = Job(tmp_path, "--train-iters 20 --lr 1e37 --clip-grad 0 --save checkpoints", ranks=2)
    assert job.wait() == 1
    messages = [line for line in job.errors.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, job.errors
    assert "at step" in messages[0]
    failed = job.events("failed")
    assert {event.rank for event in failed} == {0, 1}
    assert all(event.get("kind") == "JobError" for event in failed)
    assert "Traceback" in failed[0].get("traceback")
    assert not job.events("checkpoint")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--train-iters 1 --distributed-backend nccl", "no CUDA device is visible"),
        (
            "--train-iters 1 --recompute-granularity selective --recompute-modules none",
            "expected a list, each item one of core_attn, mlp",
        ),
    ],
    ids=["nccl-without-gpu", "unknown-module"],
)
def test_user_error_is_one_message(tmp_path: Path, arguments: str, expected: str) -> None:
    job = Job(tmp_path, arguments)
    assert job.wait() == 2
    assert job.errors.startswith("error: ")
    assert expected in job.errors
    assert "Traceback" not in job.errors
    assert job.events("failed")[0].get("kind") == "ConfigError"


@pytest.mark.slow
def test_published_core_on_a_cpu_explains_unpatch(tmp_path: Path) -> None:
    job = Job(tmp_path, "--train-iters 1", path=(ROOT,))
    assert job.wait() == 2
    assert "tools/patch/unpatch.py --backend Megatron-LM" in job.errors
    assert "Traceback" not in job.errors
