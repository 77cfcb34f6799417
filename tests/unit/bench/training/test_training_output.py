"""What trials say of sessions: tables, findings, files."""

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

RING = ((0, 9000, 0), (0, 0, 9000), (9000, 0, 0))
BACK = ((0, 0, 9000), (9000, 0, 0), (0, 9000, 0))
TREE = ((0, 9000, 9000), (9000, 0, 0), (9000, 0, 0))


def _arm(
    name: str, second: float, sent: Any = (), *, exact: bool = True, drop: float = 0.01
) -> ArmResult:
    count = range(40)
    steps = Steps(
        step=tuple(5 + i for i in count),
        round=tuple(1 + i // 4 for i in count),
        seconds=tuple(second * (1 + 0.01 * (i % 7)) for i in count),
        exposed=tuple(second / 4 for _ in count),
        communication=tuple(second / 2 for _ in count),
        loss=tuple(5 - drop * i for i in count),
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


def _both(slow: float = 1.5) -> list[SessionResult]:
    quiet = _session("none", [_arm("ring", 0.2, RING), _arm("tree", 0.1, TREE)])
    loud = _session("3", [_arm("ring", 0.2 * slow, RING), _arm("tree", 0.11, TREE)])
    return [quiet, replace(loud, before=TailRatio(3.1, 2.9, 3.3), after=TailRatio(2.8, 2.7, 3.0))]


def test_slowdown_is_relative_to_no_traffic_and_arms_to_the_first() -> None:
    found = {(line.setting, line.arm): line for line in summarize_arms(_both())}
    assert found["none", "ring"].slowdown is None
    slow = found["3", "ring"].slowdown
    assert slow is not None
    assert (slow.value, slow.low, slow.high) == pytest.approx((1.5, 1.5, 1.5))
    against = found["3", "tree"].against
    assert against is not None
    assert against.value == pytest.approx(0.11 / 0.3)
    assert found["none", "tree"].compute == pytest.approx(0.103 - 0.025)
    # All reach the same loss, so it takes the slower arm longer.
    times = {key: line.to_loss for key, line in found.items()}
    assert times["none", "tree"] < times["none", "ring"] < times["3", "ring"]  # type: ignore[operator]


@pytest.mark.parametrize(
    ("arms", "told"),
    [
        pytest.param(
            ("ring", RING, "tree", TREE), "ring and tree: proved different: 50%", id="two"
        ),
        pytest.param(("a", TREE, "b", TREE), "NOT shown to be different: 0%", id="one twice"),
        pytest.param(("a", RING, "b", BACK), "both are a ring", id="other way round"),
        pytest.param(("ring", RING, "tree", ()), "bytes of one are not counted", id="uncounted"),
    ],
)
def test_arms_differ_by_their_byte_matrices(arms: Any, told: str) -> None:
    session = _session("none", [_arm(arms[0], 1, arms[1]), _arm(arms[2], 1, arms[3])])
    assert any(told in line for line in list_findings(session))


def test_datagrams_count_as_a_different_transport() -> None:
    exact, bounded = _arm("transpose", 1, TREE), _arm("optireduce", 1, TREE, exact=False)
    talk = ((0, 8900, 8950), (8900, 0, 0), (8900, 0, 0))
    session = _session("none", [exact, replace(bounded, datagrams=talk)])
    told = list_findings(session)
    assert any("transpose and optireduce: proved different: 99%" in line for line in told)
    assert any("0.0 MiB in all, 0.0 of them by datagrams, counted by fsccl" in t for t in told)
    rings = [_arm("ring", 1, RING), replace(_arm("x", 1, BACK), datagrams=BACK)]
    assert "proved different: 100%" in compare_arms(_session("none", rings))[0].sentence


PROBED = {
    "as meant": (TailRatio(2.9, 2.6, 3.3), "2.90 [2.60, 3.30], as meant before"),
    "too high": (TailRatio(16.4, 9.0, 18.0), "16.40 [9.00, 18.00], NOT what was meant before"),
    "open": (
        TailRatio(3.4, 2.9, 3.9),
        "3.40 [2.90, 3.90], not told apart from what was meant before",
    ),
}


@pytest.mark.parametrize("found", PROBED)
def test_tail_is_compared_with_its_target(found: str) -> None:
    before, told = PROBED[found]
    session = replace(_both()[1], before=before, target=3.0, tolerance=0.2)
    (line,) = [line for line in list_findings(session) if "p99/p50" in line]
    assert line.startswith(f"the probe's p99/p50: 3 ± 0.2 was meant; {told} the ranks began, ")


def test_nccl_arms_differ_by_their_log() -> None:
    one = replace(_arm("ring", 1), algorithms={"RING": 30})
    other = replace(_arm("tree", 1), algorithms={"TREE": 28, "RING": 2})
    (pair,) = compare_arms(_session("none", [one, other]))
    assert pair.share == pytest.approx(28 / 30)


@pytest.mark.parametrize(
    ("other", "told", "good"),
    [
        (_arm("tree", 1), "losses of tree and ring agree", True),
        (_arm("tree", 1, drop=0.03), "losses of tree and ring do NOT agree", False),
        (_arm("tail", 1, drop=0.03, exact=False), "losses of tail and ring differ", True),
        (
            replace(_arm("tree", 1), replicas_equal=False),
            "tree: the ranks ended with DIFFERENT",
            False,
        ),
    ],
    ids=["alike", "unlike", "lossy", "replicas"],
)
def test_invalid_sessions_are_reported(other: ArmResult, told: str, good: bool) -> None:
    session = _session("none", [_arm("ring", 1), other])
    assert any(told in line for line in list_findings(session))
    assert is_valid(session) is good


def test_excluded_parts_of_bounded_all_reduces_are_reported() -> None:
    arm = replace(_arm("optireduce", 1, exact=False), tail={"operations": 30.0, "excluded": 0.5})
    told = list_findings(_session("3", [_arm("ring", 1), arm]))
    assert any("bounded sums: operations 30, excluded 0.5" in line for line in told)


def test_session_result_round_trips_through_json() -> None:
    session = _both()[1]
    lost = replace(session.arms[0].steps, loss=(None, *session.arms[0].steps.loss[1:]))
    session = replace(session, arms=(replace(session.arms[0], steps=lost),))
    assert decode(SessionResult, encode(session)) == session


def test_all_outputs_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    names = ("all.json", "steps.csv", "page.html", "plot.svg")
    one, table, page, plot = (tmp_path / name for name in names)
    about = {"command": "python <x> --steps 40", "date": "2026-11-23", "ranks": 3}
    present_results(_both(), TrainingOptions(), about, OutputFiles(one, table, page, (plot,)))
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines()]
    assert ["GPT-2", "none", "0.206", "0.103"] in rows
    assert ["3", "0.309", "0.1133"] in rows
    assert "1.50 [1.50, 1.50]" in out
    assert "the probe's p99/p50: 3.10 [2.90, 3.30] before the ranks began" in out
    assert "40 steps an arm: a 99th percentile of fewer than 300" in out

    kept = json.loads(one.read_text())
    assert [row["slowdown"] and round(row["slowdown"]["value"], 3) for row in kept["summary"]] == [
        *(None, None, 1.5, 1.1)
    ]
    assert len(kept["sessions"][0]["arms"][0]["steps"]["seconds"]) == 40
    lines_ = list(csv.DictReader(table.read_text().splitlines()))
    assert len(lines_) == 2 * 2 * 40
    assert lines_[0]["model"] == "gpt2:base"
    assert float(lines_[0]["compute"]) == pytest.approx(0.15)
    text = page.read_text()
    assert "python &lt;x&gt; --steps 40" in text
    assert text.count('class="plot"') == 1 + 2 * 2
    assert "MiB from rank to rank, counted by fsccl" in text
    assert "src=" not in text.replace("script-src", "")
    assert b"<svg" in plot.read_bytes()
