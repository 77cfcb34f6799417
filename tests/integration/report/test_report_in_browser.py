"""Tests of the pages of real runs and of a benchmark in a real browser."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browser import Browser, open_browser
from support.launch_lab import PROJECT, Lab
from support.report_lab import START_TIME, progress_events, store_run
from support.waiting import PATIENCE_SECONDS

from flagscale.bench.collectives.curves import Curve, Point
from flagscale.bench.collectives.records import ResultRow
from flagscale.bench.collectives.report import render
from flagscale.launcher.runs import find_history
from flagscale.report.pages import write_page, write_reports
from flagscale.report.story import collect_story

pytestmark = pytest.mark.integration

# A program that reports training progress and fails in the middle of its first attempt.
BREAKS = """\
import os
import time
from flagscale.status import StatusWriter
attempt, rank = int(os.environ["FLAGSCALE_ATTEMPT"]), int(os.environ["RANK"])
status = StatusWriter.from_environment(rank)
status.write("started", rank=rank, device="cpu", host="h", pid=os.getpid())
status.write("joined", backend="gloo", seconds=0.1)
status.write("ready", seconds=0.1)
for step in range(1 + 20 * attempt, 61):
    if rank == 0:
        loss = float("nan") if step == 50 else 9 - step / 10 + (8 if step == 45 else 0)
        status.write("progress", step=step, train_steps=60, loss=loss, grad_norm=1.5, mfu=0.4,
                     tokens_per_second=1000.0 + step, memory_gib=7.0)
        if step % 20 == 0:
            status.write("checkpoint", step=step, path=f"/c/{step}", seconds=0.5)
            status.write("evaluation", step=step, loss=9.5 - step / 10)
    if step == LAST[attempt] and rank == 1:
        reported = os.path.join(os.environ["FLAGSCALE_STATUS_DIR"], "rank_0.jsonl")
        while not os.path.exists(reported) or '"step": 60' not in open(reported).read():
            time.sleep(0.05)
        try:
            raise ValueError("</script><b>broken</b>")
        except ValueError as error:
            import traceback
            trace = "".join(traceback.format_exception(error))
            status.write("failed", kind="ValueError", message=str(error), traceback=trace)
            raise
if rank == 0:
    time.sleep(300 if 60 in LAST else 0)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("browser")) as new_browser:
        yield new_browser


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    new_lab = Lab(tmp_path, tmp_path / "exp")
    yield new_lab
    new_lab.kill_processes()


def _fits(browser: Browser) -> bool:
    """Return whether the page fits the window's width; elements that scroll do not count."""
    return bool(browser.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def _colours(browser: Browser) -> tuple[str, str]:
    """Return the colours of the page's background and of the first line."""
    path = "getComputedStyle(document.querySelector('path.line')).stroke"
    return browser.evaluate("getComputedStyle(document.body).backgroundColor"), browser.evaluate(
        path
    )


def _drawn(browser: Browser) -> list[float]:
    """Return the share of each plot's width that its first line covers."""
    return list(
        browser.evaluate(
            "[...document.querySelectorAll('.field svg')].filter((s) => s.clientWidth).map((s) => "
            "s.querySelector('path.line').getBoundingClientRect().width / s.clientWidth)"
        )
    )


def test_restarted_and_failed_run(lab: Lab, browser: Browser) -> None:
    program = BREAKS.replace("LAST", "(30, 60)")
    lab.configure(program, light=True, runner={"max_restarts": 1, "nproc_per_node": 2})
    result = lab.run_action("test")
    assert result.returncode == 1, result.stderr
    page = lab.root / "page.html"
    command = [sys.executable, "-m", "flagscale.cli", "report", lab.exp_dir, "-o", page]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    subprocess.run(command, cwd=lab.root, env=environment, check=True, timeout=PATIENCE_SECONDS)

    for width, dark in ((1200, False), (390, True)):
        browser.open(page, width=width, dark=dark)
        assert _fits(browser)
        # Steps 1 to 20 of 60; steps that the second attempt repeated are another line.
        assert _drawn(browser) == pytest.approx([19 / 59] * 5, abs=0.01)
        text = browser.evaluate("document.body.innerText")
        for expected_text in (
            "failed",
            "attempts\n2 of 2",
            "ValueError: </script><b>broken</b>",
            "raise Val",
        ):
            assert expected_text in text, expected_text
    signs = browser.evaluate(
        "[...document.querySelector('figure.plot').querySelectorAll('.mark')].map((m) => m.title)"
    )
    assert [sign.partition(":")[0] for sign in signs].count("step 21") == 1, "started again"
    assert any("loss spike: 12.5" in sign for sign in signs)
    assert any("loss is NaN" in sign for sign in signs)
    assert any("first failure" in sign for sign in signs)
    assert browser.console_errors == []
    assert {*browser.requested_urls} == {page.as_uri()}, "it loads nothing"


def test_values_are_shown_by_pointer_and_keyboard(tmp_path: Path, browser: Browser) -> None:
    stored_run = store_run(tmp_path)
    stored_run.append_events(*progress_events(101, loss=float, grad_norm=0.5))
    stored_run.write_exit_records()
    browser.open(write_page([stored_run.state], tmp_path / "p.html"), width=390)
    tip = "document.querySelector('.tip').innerText"
    browser.move_pointer(".field", 0.501)
    assert browser.evaluate(tip) == "step 51\ntraining 51"
    inside = browser.evaluate(
        "(() => { const t = document.querySelector('.tip').getBoundingClientRect(), "
        "f = document.querySelector('.field').getBoundingClientRect();"
        "return t.left >= f.left - 1 && t.right <= f.right + 1 })()"
    )
    assert inside
    crosses = "[...document.querySelectorAll('.cross')].map((c) => c.hidden)"
    assert browser.evaluate(crosses) == [False, False], "the other plot shows the place, too"
    browser.evaluate("document.querySelectorAll('.area')[1].focus()")
    tooltip_text = "document.querySelectorAll('.tip')[1].innerText"
    for key, step in (
        ("Home", 1),
        ("ArrowRight", 2),
        ("PageDown", 7),
        ("End", 101),
        ("ArrowLeft", 100),
    ):
        browser.press_key(key)
        assert browser.evaluate(tooltip_text) == f"step {step}\ntraining 0.5"
    browser.press_key("Escape")
    assert browser.evaluate(crosses) == [True, True]
    assert browser.console_errors == []


def test_light_and_dark_theme(tmp_path: Path, browser: Browser) -> None:
    """The theme follows the system until the switch selects one."""
    stored_run = store_run(tmp_path)
    stored_run.append_events(*progress_events(9))
    stored_run.write_exit_records()
    page = write_page([stored_run.state], tmp_path / "p.html")
    browser.open(page)
    light = _colours(browser)
    assert light[0] == "rgb(255, 255, 255)"
    browser.open(page, dark=True)
    dark = _colours(browser)
    assert all(
        light_colour != dark_colour for light_colour, dark_colour in zip(light, dark, strict=True)
    )
    press = "document.getElementById('theme').click()"
    for colours in (light, dark, dark):  # light, dark, as the system has it
        browser.evaluate(press)
        assert _colours(browser) == colours
    assert browser.console_errors == []


def test_two_runs_side_by_side_or_stacked(tmp_path: Path, browser: Browser) -> None:
    stored_runs = [store_run(tmp_path, run_id=run_id) for run_id in ("one", "two")]
    stored_runs[0].append_events(
        *progress_events(5000, tokens_per_second=5.0, mfu=0.4, memory_gib=7.0)
    )
    stored_runs[1].append_events(*progress_events(1000))
    for stored_run in stored_runs:
        stored_run.write_exit_records()
    page = write_page([stored_run.state for stored_run in stored_runs], tmp_path / "p.html")
    browser.open(page, width=390)
    assert _fits(browser)
    assert _drawn(browser) == pytest.approx([1.0] * 5, abs=0.02)
    tops = "[...document.querySelectorAll('article')].map((a) => a.getBoundingClientRect().top)"
    first_top, second_top = browser.evaluate(tops)
    assert first_top < second_top, "on a phone"
    browser.open(page)
    first_top, second_top = browser.evaluate(tops)
    assert first_top == second_top
    assert browser.console_errors == []


def test_benchmark_uses_the_same_page_frame(tmp_path: Path, browser: Browser) -> None:
    shared: dict[str, Any] = {"nccl_type": "float", "reduction": "sum", "root": -1, "count": 1}
    shared |= {"in_place": True, "ranks": 2, "input_bytes": 1, "output_bytes": 1, "bus_factor": 1.0}
    rows = [
        ResultRow(
            operation="all_reduce", type="fp32", backend="gloo", size=size, time=9.0, **shared
        )
        for size in (1024, 4096, 1 << 20)
    ]
    points = tuple(Point(row.size, row.time, row.busbw) for row in rows)
    curve = Curve("all_reduce <gloo>", points, operation="all_reduce")
    page = tmp_path / "bench.html"
    about = {"config": {"command": ["allr", "--x", "</script>"]}, "environment": {"date": "2026"}}
    page.write_text(render(rows, [curve], ["a header " * 40], about), encoding="utf-8")
    browser.open(page, width=390)
    assert _fits(browser)
    assert _drawn(browser) == pytest.approx([0.96, 0.96], abs=0.03)
    browser.move_pointer(".field", 0.02)
    assert browser.evaluate("document.querySelector('.tip').innerText") == (
        "bytes 1,024\nall_reduce <gloo> 9"
    )
    assert browser.console_errors == []


def test_runs_of_a_directory_are_drawn_as_one_curve(tmp_path: Path, browser: Browser) -> None:
    exp_dir = tmp_path / "exp"
    for number, (first, last) in enumerate(((1, 50), (41, 100))):
        run_id = f"2026092{number}-000000-aaaaaa"
        stored_run = store_run(
            tmp_path, run_id=run_id, exp_dir=exp_dir, started=START_TIME + 1000 * number
        )
        stored_run.append_events(*progress_events(last - first + 1, first=first))
        stored_run.write_own_files({"train": {"lr": number}})
        if number == 0:
            stored_run.write_exit_records(143, signal=15)
            stored_run.set_aside()
    stored_run.write_exit_records()
    page = write_reports([collect_story(find_history(exp_dir))], tmp_path / "page.html")
    for width in (1200, 390):
        browser.open(page, width=width)
        assert _fits(browser)
        # Steps 41 to 50 of the first run are pale.
        bounds = "[...document.querySelectorAll('figure.plot')[0].querySelectorAll('path.line')]"
        widths = browser.evaluate(f"{bounds}.map((path) => path.getBBox().width / 2000)")
        assert widths == pytest.approx([39 / 99, 9 / 99, 59 / 99], abs=0.01)
        faint = browser.evaluate(f"{bounds}.map((path) => getComputedStyle(path).opacity < 1)")
        assert faint == [False, True, False]
        text = browser.evaluate("document.body.innerText")
        assert "41 to 100\ttrain.lr 0 → 1" in text
    marks = (
        "[...document.querySelector('figure.plot').querySelectorAll('.mark')].map((m) => m.title)"
    )
    assert [title.partition(":")[0] for title in browser.evaluate(marks)] == ["step 50", "step 41"]
    assert browser.console_errors == []
