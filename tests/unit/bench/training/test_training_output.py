"""Tests of the output of `flagscale bench training`: summaries, findings, tables and files."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale.bench.training.arms import Arm
from flagscale.bench.training.output import OutputFiles, present_results
from flagscale.bench.training.plan import TrainingOptions
from flagscale.bench.training.results import (
    ArmResult,
    SessionResult,
    Steps,
    TailRatio,
    TrainingSubject,
)
from flagscale.bench.training.summary import compare_arms, is_valid, list_findings, summarize_arms
from flagscale.records import decode, encode

pytestmark = pytest.mark.torch

# Bytes from rank to rank, [from][to].
RING = ((0, 9000, 0), (0, 0, 9000), (9000, 0, 0))
REVERSE_RING = ((0, 0, 9000), (9000, 0, 0), (0, 9000, 0))
TREE = ((0, 9000, 9000), (9000, 0, 0), (9000, 0, 0))


def _arm_result(
    name: str,
    step_seconds: float,
    sent: Any = (),
    *,
    exact: bool = True,
    loss_per_step: float = 0.01,
) -> ArmResult:
    count = range(40)
    steps = Steps(
        step=tuple(5 + i for i in count),
        round=tuple(1 + i // 4 for i in count),
        seconds=tuple(step_seconds * (1 + 0.01 * (i % 7)) for i in count),
        exposed=tuple(step_seconds / 4 for _ in count),
        communication=tuple(step_seconds / 2 for _ in count),
        loss=tuple(5 - loss_per_step * i for i in count),
    )
    return ArmResult(
        arm=Arm(name, "fsccl", (("FSCCL_ALGO", name),), exact),
        version="fsccl 1",
        steps=steps,
        settling=Steps(),
        parameters=1000,
        buckets=(4000,),
        replicas_equal=True,
        sent=sent,
        counted_by="fsccl" if sent else "",
    )


def _session(setting: str, arms: Sequence[ArmResult]) -> SessionResult:
    model = TrainingSubject("gpt2:base", "GPT-2")
    return SessionResult(model, setting, 3, "cpu", ("h<0>",) * 3, tuple(arms))


def _two_sessions(slowdown: float = 1.5) -> list[SessionResult]:
    without_traffic = _session(
        "none", [_arm_result("ring", 0.2, RING), _arm_result("tree", 0.1, TREE)]
    )
    with_traffic = _session(
        "3", [_arm_result("ring", 0.2 * slowdown, RING), _arm_result("tree", 0.11, TREE)]
    )
    return [
        without_traffic,
        replace(with_traffic, before=TailRatio(3.1, 2.9, 3.3), after=TailRatio(2.8, 2.7, 3.0)),
    ]


def test_slowdown_is_relative_to_no_traffic_and_arms_to_the_first() -> None:
    summaries = {
        (summary.setting, summary.arm): summary for summary in summarize_arms(_two_sessions())
    }
    assert summaries["none", "ring"].slowdown is None
    slowdown = summaries["3", "ring"].slowdown
    assert slowdown is not None
    assert (slowdown.value, slowdown.low, slowdown.high) == pytest.approx((1.5, 1.5, 1.5))
    against = summaries["3", "tree"].against
    assert against is not None
    assert against.value == pytest.approx(0.11 / 0.3)
    assert summaries["none", "tree"].compute == pytest.approx(0.103 - 0.025)
    # All arms reach the same loss at the same step, so the slower arms need more time.
    times = {key: summary.to_loss for key, summary in summaries.items()}
    assert times["none", "tree"] < times["none", "ring"] < times["3", "ring"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arms", "expected"),
    [
        pytest.param(
            ("ring", RING, "tree", TREE), "ring and tree: proved different: 50%", id="two"
        ),
        pytest.param(("a", TREE, "b", TREE), "NOT shown to be different: 0%", id="one twice"),
        pytest.param(("a", RING, "b", REVERSE_RING), "both are a ring", id="other way round"),
        pytest.param(("ring", RING, "tree", ()), "bytes of one are not counted", id="uncounted"),
    ],
)
def test_arms_differ_by_their_byte_matrices(arms: Any, expected: str) -> None:
    session = _session("none", [_arm_result(arms[0], 1, arms[1]), _arm_result(arms[2], 1, arms[3])])
    assert any(expected in line for line in list_findings(session))


def test_datagrams_count_as_a_different_transport() -> None:
    exact, bounded = (
        _arm_result("transpose", 1, TREE),
        _arm_result("optireduce", 1, TREE, exact=False),
    )
    datagrams = ((0, 8900, 8950), (8900, 0, 0), (8900, 0, 0))
    session = _session("none", [exact, replace(bounded, datagrams=datagrams)])
    expected = list_findings(session)
    assert any("transpose and optireduce: proved different: 99%" in line for line in expected)
    assert any("0.0 MiB in all, 0.0 of them by datagrams, counted by fsccl" in t for t in expected)
    rings = [
        _arm_result("ring", 1, RING),
        replace(_arm_result("x", 1, REVERSE_RING), datagrams=REVERSE_RING),
    ]
    assert "proved different: 100%" in compare_arms(_session("none", rings))[0].sentence


PROBE_VERDICTS = {
    "as meant": (TailRatio(2.9, 2.6, 3.3), "2.90 [2.60, 3.30], as meant before"),
    "too high": (TailRatio(16.4, 9.0, 18.0), "16.40 [9.00, 18.00], NOT what was meant before"),
    "open": (
        TailRatio(3.4, 2.9, 3.9),
        "3.40 [2.90, 3.90], not told apart from what was meant before",
    ),
}


@pytest.mark.parametrize("case", PROBE_VERDICTS)
def test_tail_is_compared_with_its_target(case: str) -> None:
    before, expected = PROBE_VERDICTS[case]
    session = replace(_two_sessions()[1], before=before, target=3.0, tolerance=0.2)
    (line,) = [line for line in list_findings(session) if "p99/p50" in line]
    assert line.startswith(f"the probe's p99/p50: 3 ± 0.2 was meant; {expected} the ranks began, ")


def test_nccl_arms_differ_by_their_log() -> None:
    ring = replace(_arm_result("ring", 1), algorithms={"RING": 30})
    tree = replace(_arm_result("tree", 1), algorithms={"TREE": 28, "RING": 2})
    (difference,) = compare_arms(_session("none", [ring, tree]))
    assert difference.share == pytest.approx(28 / 30)


@pytest.mark.parametrize(
    ("other", "expected", "valid"),
    [
        (_arm_result("tree", 1), "losses of tree and ring agree", True),
        (_arm_result("tree", 1, loss_per_step=0.03), "losses of tree and ring do NOT agree", False),
        (
            _arm_result("tail", 1, loss_per_step=0.03, exact=False),
            "losses of tail and ring differ",
            True,
        ),
        (
            replace(_arm_result("tree", 1), replicas_equal=False),
            "tree: the ranks ended with DIFFERENT",
            False,
        ),
    ],
    ids=["same-losses", "other-losses", "inexact-arm", "replicas"],
)
def test_invalid_sessions_are_reported(other: ArmResult, expected: str, valid: bool) -> None:
    session = _session("none", [_arm_result("ring", 1), other])
    assert any(expected in line for line in list_findings(session))
    assert is_valid(session) is valid


def test_excluded_parts_of_bounded_all_reduces_are_reported() -> None:
    bounded = replace(
        _arm_result("optireduce", 1, exact=False), tail={"operations": 30.0, "excluded": 0.5}
    )
    expected = list_findings(_session("3", [_arm_result("ring", 1), bounded]))
    assert any("bounded sums: operations 30, excluded 0.5" in line for line in expected)


def test_session_result_round_trips_through_json() -> None:
    session = _two_sessions()[1]
    lost = replace(session.arms[0].steps, loss=(None, *session.arms[0].steps.loss[1:]))
    session = replace(session, arms=(replace(session.arms[0], steps=lost),))
    assert decode(SessionResult, encode(session)) == session


def test_all_outputs_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file_names = ("all.json", "steps.csv", "page.html", "plot.svg")
    json_path, csv_path, page_path, plot_path = (tmp_path / name for name in file_names)
    machine = {"command": "python <x> --steps 40", "date": "2026-11-23", "ranks": 3}
    present_results(
        _two_sessions(),
        TrainingOptions(),
        machine,
        OutputFiles(json_path, csv_path, page_path, (plot_path,)),
    )
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["GPT-2", "none", "0.206", "0.103"] in rows
    assert ["3", "0.309", "0.1133"] in rows
    assert "1.50 [1.50, 1.50]" in out
    assert "the probe's p99/p50: 3.10 [2.90, 3.30] before the ranks began" in out
    assert "40 steps an arm: a 99th percentile of fewer than 300" in out

    record = json.loads(json_path.read_text())
    assert [
        row["slowdown"] and round(row["slowdown"]["value"], 3) for row in record["summary"]
    ] == [*(None, None, 1.5, 1.1)]
    assert len(record["sessions"][0]["arms"][0]["steps"]["seconds"]) == 40
    csv_rows = list(csv.DictReader(csv_path.read_text().splitlines()))
    assert len(csv_rows) == 2 * 2 * 40
    assert csv_rows[0]["model"] == "gpt2:base"
    assert float(csv_rows[0]["compute"]) == pytest.approx(0.15)
    text = page_path.read_text()
    assert "python &lt;x&gt; --steps 40" in text
    assert text.count('class="plot"') == 1 + 2 * 2
    assert "MiB from rank to rank, counted by fsccl" in text
    assert "src=" not in text.replace("script-src", "")
    assert b"<svg" in plot_path.read_bytes()
