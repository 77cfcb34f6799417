"""Reporting of training progress: console lines and status events."""

from __future__ import annotations

import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.status import StatusWriter, read_events
from flagscale.train.best_evaluation import EvaluationHistory
from flagscale.train.deferred_metrics import GRADIENTS_OVERFLOWED, HostMetrics, StepMetrics
from flagscale.train.evaluation.scores import TaskScores
from flagscale.train.report import Throughput, TrainingReporter, format_progress

pytestmark = pytest.mark.torch

METRICS = StepMetrics(
    HostMetrics(step=20, consumed_samples=80, learning_rate=3e-4, zero_gradients=7.0),
    loss=2.34567891,
    grad_norm=1.5,
    stop_reason=None,
    is_rank_loss_finite=True,
)
CPU_THROUGHPUT = Throughput(0.25, 4096.0, 0.012, mfu=None, memory_gib=None)
GPU_THROUGHPUT = Throughput(0.25, 40960.0, 496.1, mfu=0.501, memory_gib=65.2, ranks=8)


def create_arguments(**changes: Any) -> Namespace:
    return Namespace(**{**vars(parse_arguments([])), "train_iters": 100, **changes})


@pytest.mark.parametrize(
    ("throughput", "extra_metrics", "expected"),
    [
        (
            CPU_THROUGHPUT,
            {},
            "step  20/100 | loss 2.3457 | grad norm 1.500 | lr 3.00e-04 | 0.250 s/step | "
            "4,096 tok/s | 0:00:20 left",
        ),
        (
            GPU_THROUGHPUT,
            {"params_norm": 12.0},
            "step  20/100 | loss 2.3457 | grad norm 1.500 | lr 3.00e-04 | 0.250 s/step | "
            "40,960 tok/s (5,120/GPU) | 496.1 TFLOP/s/GPU | MFU 50.1 % | 65.2 GiB | "
            "params norm 12.000 | 0:00:20 left",
        ),
    ],
    ids=["cpu", "gpu"],
)
def test_progress_line_of_a_step(
    throughput: Throughput, extra_metrics: dict[str, float], expected: str
) -> None:
    assert format_progress(METRICS, throughput, 100, extra_metrics) == expected


def test_progress_line_of_a_skipped_step() -> None:
    host_metrics = HostMetrics(
        step=3, consumed_samples=12, learning_rate=0.0, skip_reason=GRADIENTS_OVERFLOWED
    )
    line = format_progress(
        StepMetrics(
            host_metrics, loss=9.0, grad_norm=0.0, stop_reason=None, is_rank_loss_finite=True
        ),
        CPU_THROUGHPUT,
        10,
        {"loss_scale": 65536, "skipped_steps": 3},
    )
    assert "| skipped |" in line
    assert "grad norm" not in line
    assert "loss scale 65,536 | skipped steps 3" in line


def test_reporting_rank_writes_status_events(tmp_path: Path) -> None:
    reporter = TrainingReporter(
        create_arguments(), StatusWriter(tmp_path, 0), is_reporting_rank=True
    )
    reporter.log_progress(METRICS, GPU_THROUGHPUT, {})
    reporter.log_evaluation("valid", 20, 3.0)
    reporter.log_evaluation("test", 20, 3.0)
    reporter.log_checkpoint(20, tmp_path / "iter_0000020", 1.234)
    reporter.warn("careful")
    reporter.close("finished")
    events = read_events(tmp_path / "rank_0.jsonl")[0]
    assert [e.event for e in events] == ["progress", "evaluation", "checkpoint", "warning"]
    assert events[0].fields == {
        "step": 20,
        "train_steps": 100,
        "samples": 80,
        "loss": 2.345679,
        "grad_norm": 1.5,
        "learning_rate": 3e-4,
        "step_seconds": 0.25,
        "tokens_per_second": 40960.0,
        "tokens_per_second_per_gpu": 5120.0,
        "tflops_per_gpu": 496.1,
        "mfu": 0.501,
        "memory_gib": 65.2,
    }


def test_evaluations_of_several_validation_sets_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = TrainingReporter(
        create_arguments(), StatusWriter(tmp_path, 0), is_reporting_rank=True
    )
    for name, loss in (("code", 0.0), ("chats", 1.0)):
        reporter.log_evaluation("valid", 20, loss, name)
    event_fields = [event.fields for event in read_events(tmp_path / "rank_0.jsonl")[0]]
    assert [(fields["data"], fields["loss"]) for fields in event_fields] == [
        ("code", 0.0),
        ("chats", 1.0),
    ]
    assert "step 20 | valid chats loss 1.0000 | perplexity 2.72" in capsys.readouterr().out


def test_scores_on_tasks_are_reported_without_those_that_are_no_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = TrainingReporter(
        create_arguments(), StatusWriter(tmp_path, 0), is_reporting_rank=True
    )
    reporter.log_scores(20, TaskScores({"arc/acc": 0.25, "arc/f1": math.nan}, {}, 1.5))
    history = EvaluationHistory(metric="arc/acc", higher_is_better=True)
    history.add_evaluation(20, 0.25)
    reporter.log_evaluation_history(20, history)
    (event,) = read_events(tmp_path / "rank_0.jsonl")[0]
    assert event.fields == {"step": 20, "seconds": 1.5, "scores": {"arc/acc": 0.25}}
    assert capsys.readouterr().out.splitlines() == [
        "step 20 | arc/acc 0.2500",
        "step 20 | arc/f1 nan",
        "step 20 | tasks evaluated in 1.5 s",
        "step 20 | best arc/acc so far",
    ]


def test_unavailable_metrics_are_omitted(tmp_path: Path) -> None:
    TrainingReporter(
        create_arguments(), StatusWriter(tmp_path, 0), is_reporting_rank=True
    ).log_progress(METRICS, CPU_THROUGHPUT, {})
    (event,) = read_events(tmp_path / "rank_0.jsonl")[0]
    assert "mfu" not in event.fields
    assert "memory_gib" not in event.fields


def test_other_ranks_report_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = create_arguments(tensorboard_dir=str(tmp_path / "board"))
    reporter = TrainingReporter(args, StatusWriter(tmp_path, 1), is_reporting_rank=False)
    reporter.log("hello")
    reporter.warn("careful")
    reporter.log_scalars(METRICS)
    reporter.log_progress(METRICS, CPU_THROUGHPUT, {})
    reporter.log_evaluation("valid", 1, 1.0)
    reporter.log_scores(1, TaskScores({"arc/acc": 0.5}, {}, 1.0))
    reporter.log_checkpoint(1, "path", 1.0)
    reporter.close("finished")
    assert capsys.readouterr().out == ""
    assert read_events(tmp_path / "rank_1.jsonl")[0] == []
    assert not (tmp_path / "board").exists()
