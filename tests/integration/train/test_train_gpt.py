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
from support.held_exports import hold_exports
from support.waiting import PATIENCE_SECONDS, wait_for
from support.warm_programs import WarmProgram, start_warm_program

from flagscale.launcher.liveness.diagnosis import HostFiles, TorchrunExit, diagnose_host
from flagscale.status import STATUS_DIR_VARIABLE, Event, list_status_files, read_events

pytestmark = [pytest.mark.integration, pytest.mark.torch]

ROOT = Path(__file__).parents[3]
PROGRAM = ROOT / "flagscale" / "train" / "train_gpt.py"
PATCHED_MEGATRON = ROOT / "third_party" / "Megatron-LM"
TINY = """
--num-layers 2 --hidden-size 32 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 64
--seq-length 16 --micro-batch-size 1 --global-batch-size 4 --vocab-size 100
--make-vocab-size-divisible-by 16 --normalization RMSNorm --swiglu --disable-bias-linear
--position-embedding-type rope --eval-iters 0 --num-workers 0 --log-interval 1 --device cpu
"""
SCHEDULE = "--lr 1e-3 --lr-decay-style constant"


class TrainingProcess:
    """Running training program.

    Attributes:
        status: directory of the status files.
        process: the program, or torchrun for several ranks.
    """

    def __init__(
        self,
        directory: Path,
        arguments: str,
        *,
        ranks: int = 1,
        schedule: str = SCHEDULE,
        data: str = "--mock-data",
        python_path: tuple[Path, ...] = (),
        output: IO[bytes] | None = None,
        cold: bool = False,
        **variables: str,
    ) -> None:
        """Start the program.

        Args:
            directory: working directory, to which status files are written.
            arguments: arguments in addition to those of a tiny model.
            ranks: number of ranks.
            schedule: arguments of the learning rate.
            data: arguments of the data.
            python_path: PYTHONPATH; by default the project and the patched megatron.core.
            output: destination of standard output and error.
            cold: whether to start a new interpreter, or torchrun, as the launcher does. By default
                ranks are forked after the imports (:mod:`support.warm_programs`).
            variables: additional environment variables.
        """
        self.status = directory / "status"
        words = f"{TINY} {data} {schedule} {arguments}".split()
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
            PYTHONPATH=":".join(map(str, python_path or (ROOT, PATCHED_MEGATRON))),
            OMP_NUM_THREADS="1",
            **{STATUS_DIR_VARIABLE: str(self.status), **variables},
        )
        self.process: subprocess.Popen[str] | WarmProgram
        if python_path or output is not None or cold:
            torchrun = ["-m", "torch.distributed.run", "--standalone"]
            torchrun += ["--nproc_per_node", str(ranks)]
            self.process = subprocess.Popen(
                [sys.executable, *(torchrun if ranks > 1 else []), str(PROGRAM), *words],
                env=environment,
                cwd=directory,
                stdout=output or subprocess.PIPE,
                stderr=output or subprocess.PIPE,
                text=True,
            )
        else:
            self.process = start_warm_program(
                PROGRAM, words, ranks=ranks, environment=environment, cwd=directory
            )

    def wait(self) -> int:
        """Wait for the end, read the output, and return the exit code."""
        self.output, self.errors = self.process.communicate(timeout=PATIENCE_SECONDS)
        return self.process.returncode

    def events(self, event_type: str, rank: int | None = None) -> list[Event]:
        events = [
            event for path in list_status_files(self.status) for event in read_events(path)[0]
        ]
        return [
            event for event in events if event.event == event_type and rank in (None, event.rank)
        ]

    def wait_for_event(self, event_type: str, **fields: Any) -> Event:
        """Wait for an event of a type with these fields, and return the first one."""

        def find_event() -> Event | None:
            has_ended = self.process.poll() is not None  # before its last events are read
            for event in self.events(event_type) if self.status.is_dir() else []:
                if all(event.get(name) == value for name, value in fields.items()):
                    return event
            assert not has_ended, self.process.communicate()
            return None

        found: Event = wait_for(find_event, f"a {event_type} event")
        return found

    def losses(self) -> list[float]:
        """Return the losses of all steps and ranks that report them."""
        return [event.get("loss") for event in self.events("progress")]


def test_status_events_and_files_of_a_run(tmp_path: Path) -> None:
    training = TrainingProcess(
        tmp_path,
        "--train-iters 3 --eval-iters 1 --eval-interval 2 --save checkpoints --load nowhere "
        "--tensorboard-dir board --log-params-norm --log-throughput --log-num-zeros-in-grad "
        "--profile --profile-step-start 2 --profile-step-end 4 --profile-dir traces",
        cold=True,
    )
    assert training.wait() == 0, training.errors
    started = training.events("started")[0]
    assert (started.get("world_size"), started.get("device")) == (1, "cpu")
    assert training.events("joined")[0].get("backend") == "gloo"
    assert training.events("ready")
    steps = training.events("progress")
    assert [event.get("step") for event in steps] == [1, 2, 3]
    assert [event.get("samples") for event in steps] == [4, 8, 12]
    assert all(event.get("tokens_per_second") > 0 for event in steps)
    assert [event.get("step") for event in training.events("evaluation")] == [2, 3]
    checkpoint = training.events("checkpoint")[0]
    assert Path(tmp_path, checkpoint.get("path")).is_dir()
    finished = training.events("finished")[0]
    assert (finished.get("step"), finished.get("reason")) == (3, "completed")
    assert list((tmp_path / "board").glob("events.out.tfevents.*"))
    assert "step 3/3 | loss" in training.output
    assert "load: nowhere contains no checkpoint; training starts from step 0" in training.output
    assert "Warning" not in training.errors
    trace = tmp_path / "traces" / "profile_rank0_steps2-3.json.gz"
    assert f"trace of steps 2 to 3: {trace.relative_to(tmp_path)}" in training.output
    assert trace.stat().st_mode & 0o777 == 0o600
    with gzip.open(trace) as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert names.count("Optimizer.step#Adam.step") <= 2  # only of the profiled steps
    assert "aten::mm" in names


@pytest.mark.parametrize(
    ("arguments", "steps", "reason"),
    [
        pytest.param("--train-iters 5", [1, 5], "completed", id="completed"),
        pytest.param("--train-iters 9 --exit-interval 4", [1, 4], "exit-interval", id="exit"),
        pytest.param("--train-iters 4 --log-interval 2", [1, 2, 4], "completed", id="once"),
    ],
)
def test_last_step_is_logged_once(
    tmp_path: Path, arguments: str, steps: list[int], reason: str
) -> None:
    training = TrainingProcess(tmp_path, f"--log-interval 100 {arguments}")
    assert training.wait() == 0, training.errors
    assert [event.get("step") for event in training.events("progress")] == steps
    lines = [line for line in training.output.splitlines() if line.startswith("step")]
    assert [int(line.split("/")[0].split()[1]) for line in lines if "| loss" in line] == steps
    finished = training.events("finished")[0]
    assert (finished.get("step"), finished.get("reason")) == (steps[-1], reason)


def test_sigterm_to_one_rank_saves_and_stops_all(tmp_path: Path) -> None:
    training = TrainingProcess(
        tmp_path, "--train-iters 100000 --save checkpoints", ranks=2, cold=True
    )
    training.wait_for_event("progress", step=3)
    os.kill(training.wait_for_event("started", rank=1).get("pid"), signal.SIGTERM)
    assert training.wait() == 0, training.errors
    finished_events = training.events("finished")
    assert [event.get("reason") for event in finished_events] == ["signal", "signal"]
    assert finished_events[0].get("step") == finished_events[1].get("step")
    assert training.events("checkpoint")[0].get("step") == finished_events[0].get("step")


def test_completed_run_explains_how_to_continue(tmp_path: Path) -> None:
    arguments = "--save checkpoints --load checkpoints --lr-decay-style cosine --train-iters"
    first_run = TrainingProcess(tmp_path, f"{arguments} 1")
    assert first_run.wait() == 0
    assert "contains no checkpoint" not in first_run.output  # not reported in a first run
    repeated_run = TrainingProcess(tmp_path, f"{arguments} 1")
    assert repeated_run.wait() == 0, repeated_run.errors
    assert "1 steps are done already: nothing to train" in repeated_run.output
    assert (
        "raise train.model.train_iters (or train_samples) and set train.model.override_opt_param"
        in (repeated_run.output)
    )
    continued_run = TrainingProcess(tmp_path, f"{arguments} 2 --override-opt-param-scheduler")
    assert continued_run.wait() == 0, continued_run.errors
    assert continued_run.events("checkpoint")[-1].get("step") == 2


def test_batch_size_rampup_and_skipped_step(tmp_path: Path) -> None:
    training = TrainingProcess(
        tmp_path,
        "--train-samples 20 --rampup-batch-size 1 1 6 --iterations-to-skip 3 --save checkpoints "
        "--save-interval 2 --save-retain-interval 4",
    )
    assert training.wait() == 0, training.errors
    assert "7 steps of 1 to 4 x 16 tokens, 1 to 4 micro-batches a step" in training.output
    steps = [(event.get("step"), event.get("samples")) for event in training.events("progress")]
    assert steps == [(1, 1), (2, 2), (4, 7), (5, 11), (6, 15), (7, 19)]
    assert "step 3: its data is skipped" in training.output
    checkpoints = sorted(path.name for path in (tmp_path / "checkpoints").glob("iter_*"))
    assert checkpoints == ["iter_0000004", "iter_0000007"]
    evaluation_run = TrainingProcess(
        tmp_path, "--train-samples 20 --skip-train --eval-iters 1 --load checkpoints"
    )
    assert evaluation_run.wait() == 0, evaluation_run.errors
    assert [event.get("step") for event in evaluation_run.events("evaluation")] == [7]
    assert len(evaluation_run.events("progress")) == len(steps)


def test_early_stopping_survives_resume_and_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    """The loss improves by less than the required amount after the first evaluation."""
    arguments = (
        "--train-iters 30 --eval-iters 1 --eval-interval 2 --early-stopping-patience 3 "
        "--early-stopping-min-delta 100 --save-best --save checkpoints --load checkpoints "
        "--keep-last 1"
    )
    interrupted = TrainingProcess(tmp_path, f"{arguments} --exit-interval 5")
    assert interrupted.wait() == 0, interrupted.errors
    resumed = TrainingProcess(tmp_path, arguments, ranks=2)
    assert resumed.wait() == 0, resumed.errors
    detail = "validation loss has not improved by more than 100 since step 2"
    ends = [(e.get("step"), e.get("reason"), e.get("detail")) for e in resumed.events("finished")]
    assert ends == [(5, "exit-interval", None), (8, "completed", detail), (8, "completed", detail)]
    assert f"step 8 | training ends: {detail} (early_stopping_patience: 3)" in resumed.output
    assert "2 of 3 evaluations without improvement" in resumed.output
    losses = {e.get("step"): e.get("loss") for e in resumed.events("evaluation", 0)}
    assert sorted(losses) == [2, 4, 6, 8]
    best = min(losses, key=losses.__getitem__)
    marked = [e for e in resumed.events("checkpoint", 0) if e.get("best")][-1]
    assert (marked.get("step"), marked.get("valid_loss")) == (best, losses[best])
    checkpoints = tmp_path / "checkpoints"
    assert (checkpoints / "best").resolve() == checkpoints / f"iter_{best:07d}"
    names = sorted(path.name for path in checkpoints.glob("iter_*"))
    assert names == sorted({f"iter_{best:07d}", "iter_0000008"})
    repeated = TrainingProcess(tmp_path, arguments.replace("--load checkpoints", f"--load {best}"))
    (tmp_path / str(best)).symlink_to(checkpoints / "best")
    assert repeated.wait() == 0, repeated.errors
    assert f"loaded iteration {best} from {checkpoints / f'iter_{best:07d}'}" in repeated.output
    assert repeated.events("finished", 0)[-1].get("detail") == detail


def test_each_checkpoint_is_exported_and_deleted_with_its_export(tmp_path: Path) -> None:
    """The export of the first checkpoint waits until training has ended, so that the export of the
    second one is left out, and the first is still being read when it is superseded.
    """
    site = tmp_path / "site"
    hold_exports(site, "checkpoints/iter_0000004")
    training = TrainingProcess(
        tmp_path,
        "--train-iters 4 --save-interval 1 --keep-last 1 --save checkpoints "
        "--export-huggingface hf --export-each-checkpoint --eval-iters 1 --save-best "
        "--untie-embeddings-and-output-weights "
        "--eval-interval 1 --early-stopping-patience 9",
        python_path=(site, ROOT, PATCHED_MEGATRON),
    )
    assert training.wait() == 0, training.errors
    assert "exported to hf/iter_0000001" in training.output
    assert "is not exported now, because the export of iteration 1 is still under way" in (
        training.output
    )
    names = {path.name for path in (tmp_path / "checkpoints").glob("iter_*")}
    assert names <= {"iter_0000004", (tmp_path / "checkpoints" / "best").readlink().name}
    exports = {path.name for path in (tmp_path / "hf").iterdir() if not path.is_symlink()}
    assert "iter_0000004" in exports <= names
    assert (tmp_path / "hf" / "iter_0000004" / "model.safetensors").is_file()
    assert training.output.count("exported to hf/iter_0000004") == 1


def test_evaluation_needs_neither_learning_rate_nor_length(tmp_path: Path) -> None:
    training = TrainingProcess(
        tmp_path, "--train-iters 2 --save checkpoints --eval-iters 2 --eval-interval 2"
    )
    assert training.wait() == 0, training.errors
    evaluations = {
        "schedule": ("--load checkpoints", f"{SCHEDULE} --train-iters 2"),
        "loaded": ("--load checkpoints", ""),
        "contradictory": ("--load checkpoints", "--min-lr 1e-4 --lr-decay-style WSD"),
        "pretrained": ("--pretrained-checkpoint checkpoints", ""),
    }
    losses, steps = {}, {}
    for name, (source, schedule) in evaluations.items():
        directory = tmp_path / name
        directory.mkdir()
        (directory / "checkpoints").symlink_to(tmp_path / "checkpoints")
        run = TrainingProcess(directory, f"--skip-train --eval-iters 2 {source}", schedule=schedule)
        assert run.wait() == 0, f"{name}: {run.errors}"
        assert "no training (skip_train), 2 evaluation steps of 4 x 16 tokens" in run.output
        assert "nothing to train" not in run.output
        (evaluation,) = run.events("evaluation")
        losses[name], steps[name] = evaluation.get("loss"), evaluation.get("step")
    assert steps == {"schedule": 2, "loaded": 2, "contradictory": 2, "pretrained": 0}
    assert losses["loaded"] == losses["contradictory"] == losses["schedule"]
    # Without the data position of a loaded checkpoint, validation starts at the first sample.
    (trained,) = training.events("evaluation")
    assert losses["pretrained"] == trained.get("loss")


OUT_OF_MEMORY = """
import torch

def batches(args, tokenizer, split, samples):
    tokens = torch.zeros(4, 16, dtype=torch.long)
    yield {"tokens": tokens, "labels": tokens}
    raise torch.OutOfMemoryError("out of memory. Tried to allocate 20.00 GiB. Including more")
"""


def test_rank_out_of_memory_reports_what_would_save_memory(tmp_path: Path) -> None:
    (tmp_path / "own_data.py").write_text(OUT_OF_MEMORY)
    training = TrainingProcess(
        tmp_path,
        "--train-iters 3 --micro-batch-size 4 --record-memory-history --memory-snapshot-step 1",
        data="--tokenizer-type NullTokenizer --dataloader-type external --external-data "
        "own_data.py:batches",
    )
    assert training.wait() == 1
    (failed,) = training.events("failed")
    assert failed.get("kind") == "OutOfMemoryError"
    message = failed.get("message")
    expected = "CPU out of memory on rank 0 in step 2: tried to allocate 20.00 GiB; "
    assert message.startswith(expected)
    assert "micro_batch_size: 1 saves about" in message
    assert "\n" not in message
    assert "own_data.py" in failed.get("traceback")
    assert f"OutOfMemoryError: {message}" in training.errors
    # The launcher reports it as the first failure.
    path = tmp_path / "run"
    host = HostFiles(name="node", first_rank=0, nproc=1, run_dir=path, output=path)
    report = diagnose_host(host, {0: [failed]}, TorchrunExit(1, time.time()))
    assert report is not None
    assert report.failure.headline() == f"node: rank 0 failed: OutOfMemoryError: {message}"
    assert "own_data.py" in report.failure.traceback
    assert "record_memory_history has no effect: allocations of a CPU" in training.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            "--load nowhere --skip-train",
            "error: load: nowhere contains no checkpoint, but skip_train requires a checkpoint",
            id="evaluate-nothing",
        ),
        pytest.param(
            "--load nowhere --finetune",
            "error: load: nowhere contains no checkpoint, but finetune requires a checkpoint",
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
    training = TrainingProcess(tmp_path, f"--train-iters 1 {arguments}")
    assert training.wait() != 0
    assert training.errors.startswith(message)
    assert "Traceback" not in training.errors
    assert not training.events("progress")


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Dropout is enabled, so the states of the random number generators must be restored too.

    The tests of checkpoints cover parallel layouts and random numbers of several ranks.
    """
    common = (
        "--use-distributed-optimizer --bf16 --train-iters 6 "
        "--attention-dropout 0.1 --hidden-dropout 0.1"
    )
    uninterrupted = TrainingProcess(tmp_path, common)
    assert uninterrupted.wait() == 0, uninterrupted.errors
    expected = uninterrupted.losses()

    arguments = f"{common} --save checkpoints --load checkpoints"
    (tmp_path / "interrupted").mkdir()
    interrupted = TrainingProcess(tmp_path / "interrupted", f"{arguments} --exit-interval 3")
    assert interrupted.wait() == 0, interrupted.errors
    assert interrupted.events("finished")[0].get("reason") == "exit-interval"
    resumed = TrainingProcess(tmp_path / "interrupted", arguments)
    assert resumed.wait() == 0, resumed.errors
    assert resumed.losses() == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
@pytest.mark.compiler
def test_bounded_all_reduce_statistics_are_reported(tmp_path: Path) -> None:
    arguments_of_wide_model = (
        "--hidden-size 128 --ffn-hidden-size 512 --train-iters 12 --tensorboard-dir board"
    )
    fsccl = {"FSCCL_SHM": "0", "FSCCL_TAIL": "bounded", "FSCCL_TAIL_LIMIT": "100"}
    training = TrainingProcess(
        tmp_path, f"{arguments_of_wide_model} --distributed-backend fsccl", ranks=2, **fsccl
    )
    assert training.wait() == 0, training.errors
    events = [e for e in training.events("progress", 0) if e.get("tail_excluded") is not None]
    assert events[-1].get("step") == 12
    assert all(0 <= e.get("tail_excluded") <= 1 and e.get("tail_repeated") == 0 for e in events)
    assert training.output.count("| tail excluded 0") + training.output.count(
        "| tail excluded 1"
    ) == len(events)
    assert len(events) < 12  # the first operations are not bounded, to measure the rate
    sent_mib = [event.get("tail_mib") for event in events]
    assert sum(sent_mib) / len(sent_mib) > 0.25, "a bucket is larger than FSCCL_TAIL_BYTES"
    assert all(e.get("tail_seconds") > 0 for e in events)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "board")).Reload()
    plotted_mib = [round(scalar.value, 4) for scalar in board.Scalars("train/tail-mib")]
    assert plotted_mib == pytest.approx(sent_mib, abs=1e-3)
    assert len(board.Scalars("train/tail-seconds")) == len(events)


@pytest.mark.compiler
def test_step_that_loses_too_much_of_its_gradients_is_skipped(tmp_path: Path) -> None:
    """The configured rate is unreachable, so deadlines expire before the gradients arrive."""
    arguments_of_wide_model = (
        "--hidden-size 256 --ffn-hidden-size 16384 --num-layers 1 --train-iters 7"
    )
    tail_options = {
        "FSCCL_TAIL_RATE": "1000000",
        "FSCCL_TAIL_LIMIT": "0",
        "FSCCL_TAIL_ABOVE": "skip",
    }
    fsccl = {"FSCCL_SHM": "0", "FSCCL_TAIL": "bounded", **tail_options}
    training = TrainingProcess(
        tmp_path,
        f"{arguments_of_wide_model} --distributed-backend fsccl --log-params-norm",
        ranks=2,
        **fsccl,
    )
    assert training.wait() == 0, training.errors
    steps = training.events("progress", 0)
    # All_reduce is not bounded in the first four steps, to measure the rate, and in two steps after
    # a skipped one. The fifth step is bounded and loses its gradients.
    assert [e.get("skipped_steps", 0) for e in steps[:7]] == [0, 0, 0, 0, 1, 0, 0]
    assert (
        "step 5 is skipped: too much of its gradients was lost" in training.output + training.errors
    )
    assert steps[4].get("tail_skipped") == 1
    norms = [e.get("params_norm") for e in steps]
    assert norms[3] == norms[4] != norms[5], (
        "the fifth step must not change the weights, the sixth must"
    )


def test_non_finite_loss_ends_the_job(tmp_path: Path) -> None:
    training = TrainingProcess(
        tmp_path, "--train-iters 20 --lr 1e37 --clip-grad 0 --save checkpoints", ranks=2
    )
    assert training.wait() == 1
    messages = [line for line in training.errors.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, training.errors
    assert "at step" in messages[0]
    failed = training.events("failed")
    assert {event.rank for event in failed} == {0, 1}
    assert all(event.get("kind") == "JobError" for event in failed)
    assert "Traceback" in failed[0].get("traceback")
    assert not training.events("checkpoint")


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
def test_error_of_the_user_is_printed_without_traceback(
    tmp_path: Path, arguments: str, expected: str
) -> None:
    training = TrainingProcess(tmp_path, arguments)
    assert training.wait() == 2
    assert training.errors.startswith("error: ")
    assert expected in training.errors
    assert "Traceback" not in training.errors
    assert training.events("failed")[0].get("kind") == "ConfigError"


@pytest.mark.slow
def test_published_megatron_on_a_cpu_is_an_error_with_a_hint(tmp_path: Path) -> None:
    training = TrainingProcess(tmp_path, "--train-iters 1", python_path=(ROOT,))
    assert training.wait() == 2
    assert "tools/patch/unpatch.py --backend Megatron-LM" in training.errors
    assert "Traceback" not in training.errors
