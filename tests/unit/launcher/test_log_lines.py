"""Filters of lines: levels, messages of several lines, patterns; the program that hosts run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.hosts.local import LocalConnection
from flagscale.launcher.log_lines import ERROR, WARNING, LineFilter, level_of
from flagscale.launcher.runners.programs.filter_output import (
    FilteredLines,
    FilterRequest,
    NoPythonError,
    filter_output,
)

LEVELS = {
    "plain": ("step 10/200 | loss 8.4727", 0),
    "word-in-the-text": ("the error rate is 3 %, no WARNINGS", 0),
    "word-far-behind": ("x" * 200 + " ERROR ", 0),
    "logging-info": ("INFO:root:error: none", 0),
    "logging-default": ("WARNING:root:hot", WARNING),
    "logging-with-time": ("2026-11-26 23:34:18,008 ERROR root: caught", ERROR),
    "logging-brackets": ("[2026-11-26][trainer][CRITICAL] gone", ERROR),
    "logging-dashes": ("2026-11-26 - root - WARNING - hot", WARNING),
    "nccl-info": ("n1:1:2 [0] NCCL INFO Using network IB", 0),
    "nccl-warn": ("n1:1:2 [0] NCCL WARN Call to connect failed", WARNING),
    "nccl-with-time": ("2026-11-26 10:00:00 n1:1:2 [0] init.cc:9 NCCL WARN x", WARNING),
    "torch-warning": ("[rank0]:[W1126 23:19:48.752 ProcessGroupNCCL.cpp:1] x", WARNING),
    "torch-error": ("E1126 23:19:48.752295 139 torch/distributed/x.py:9] failed", ERROR),
    "torch-info": ("I1126 23:19:48.752295 139 torch/distributed/x.py:9] ERROR", 0),
    "python-warning": ("/a/b.py:12: UserWarning: old", WARNING),
    "launcher": ("flagscale: first failure: n1: rank 3", ERROR),
    "launcher-warning": ("warning: 2 hosts", WARNING),
    "launcher-note": ("note: nothing", 0),
    "exception-alone": ("torch.cuda.OutOfMemoryError: no memory", ERROR),
    "crash": ("terminate called after throwing an instance of 'std::exception'", ERROR),
    "core": ("bash: line 1: 12 Segmentation fault (core dumped) python", ERROR),
}


@pytest.mark.parametrize(("text", "level"), LEVELS.values(), ids=LEVELS)
def test_level_of_a_line(text: str, level: int) -> None:
    assert level_of(text) == level


OUTPUT = """\
h: flagscale: run r starts
h:0: step 1
h:0: Traceback (most recent call last):
h:1: step 1
h:0:   File "a.py", line 1, in <module>
h:1: WARNING:root:hot
h:0: ValueError: first
h:1:   with a second line
h:0:
h:0: During handling of the above exception, another exception occurred:
h:0:
h:0: Traceback (most recent call last):
h:0:   File "a.py", line 2, in <module>
h:0: KeyError: 'second'
h:0: step 2
h:1: [rank1]: Traceback (most recent call last):
h:1: [rank1]:   File "a.py", line 3
h:1: [rank1]: RuntimeError: CUDA error
h:1: [rank1]: Device-side assertions can be enabled.
h:1: step 2
""".replace("h:0:\n", "h:0: \n").splitlines()
FIRST, SECOND = (
    [line for line in OUTPUT[2:14] if line.startswith("h:0: ")],
    OUTPUT[15:19],
)
WARNED = [OUTPUT[5], OUTPUT[7]]


def select(line_filter: LineFilter, lines: list[str] = OUTPUT) -> list[str]:
    return [shown for line in lines for shown in line_filter.feed(line)] + line_filter.flush()


@pytest.mark.parametrize(
    ("pattern", "level", "expected"),
    [
        (None, "error", [*FIRST, *SECOND]),
        ("KeyError", "error", FIRST),
        (r"^h:1: .*line 3$", "error", SECOND),
        ("hot", "warning", WARNED),
        ("nothing", "warning", []),
        ("step [12]", None, [OUTPUT[1], OUTPUT[3], OUTPUT[14], OUTPUT[19]]),
        ("^h: ", None, OUTPUT[:1]),
    ],
)
def test_messages_are_units(pattern: str | None, level: str | None, expected: list[str]) -> None:
    assert select(LineFilter("h", pattern, level)) == expected


def test_warnings_include_errors_in_their_order() -> None:
    chosen = {*FIRST, *SECOND, *WARNED}
    expected = [line for line in OUTPUT if line in chosen]
    assert select(LineFilter("h", None, "warning")) == expected


@given(
    st.integers(0, len(OUTPUT)), st.sampled_from([None, "line"]), st.sampled_from([None, "error"])
)
def test_filter_continues_where_another_stopped(
    cut: int, pattern: str | None, level: str | None
) -> None:
    first, second = (LineFilter("h", pattern, level) for _ in range(2))
    lines = [shown for line in OUTPUT[:cut] for shown in first.feed(line)]
    second.restore(json.loads(json.dumps(first.to_json())))
    assert lines + select(second, OUTPUT[cut:]) == select(LineFilter("h", pattern, level))


@given(st.lists(st.text(st.characters(exclude_characters="\n")), max_size=8))
def test_any_lines_can_be_filtered(lines: list[str]) -> None:
    shown = select(LineFilter("h", None, "warning"), lines)
    assert [line for line in lines if line in shown] == shown or len(set(lines)) < len(lines)


@pytest.fixture
def request_of(tmp_path: Path) -> FilterRequest:
    output = tmp_path / "ü $(x) output"
    written = [OUTPUT[0].replace("h: ", "", 1), *OUTPUT[1:], "h:0: unfinished"]
    output.write_text("\n".join(written), encoding="utf-8")
    return FilterRequest(
        path=str(output),
        set_aside=str(tmp_path / "set_aside"),
        index=str(tmp_path / "index"),
        host="h",
    )


def run_filter(request: FilterRequest, **changes: object) -> FilteredLines:
    changed = FilterRequest(**{**vars(request), **changes})
    return filter_output(LocalConnection("h"), changed, sys.executable)


def test_host_filters_its_output(request_of: FilterRequest) -> None:
    reply = run_filter(request_of, level="error", pattern="KeyError", final=True)
    assert list(reply.lines) == FIRST
    assert not reply.has_more and reply.has_times
    assert run_filter(request_of, rank=1, count=1).lines == (OUTPUT[-1],)
    assert run_filter(request_of, since=1.0).has_times is False
    assert run_filter(request_of, path="/nowhere").lines == ()
    assert run_filter(request_of, path="/nowhere", set_aside=request_of.path, count=1).lines


@pytest.mark.parametrize("final", [False, True])
def test_host_continues_in_small_replies(request_of: FilterRequest, final: bool) -> None:
    lines: list[str] = []
    reply = run_filter(request_of, max_bytes=1, final=final)
    while reply.lines:
        lines += reply.lines
        reply = run_filter(
            request_of, max_bytes=1, final=final, offset=reply.offset, messages=reply.messages
        )
    assert lines == [*OUTPUT, *["h:0: unfinished"] * final]


def test_host_without_python(
    request_of: FilterRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("bash", "cat", "stat"):
        path = shutil.which(program)
        assert path is not None
        (tmp_path / program).symlink_to(path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoPythonError, match="no Python there can filter the output"):
        filter_output(LocalConnection("h"), request_of, "/nowhere/python")
