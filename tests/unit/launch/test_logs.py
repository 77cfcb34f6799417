from __future__ import annotations

import time
from pathlib import Path

import pytest

from flagscale.launch.logs import RunOutput, Tail, lines_of
from flagscale.launch.state import HostState, RunState


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    host = HostState(
        node_rank=0,
        name="node.a",
        nproc=12,
        first_rank=0,
        run_dir=tmp_path / "run",
        script=tmp_path / "s.sh",
        output=tmp_path / "output",
        pid_file=tmp_path / "pid",
    )
    return RunState("r", "n", tmp_path, time.time(), "boot", 12, True, 1.0, (host,))


OUTPUT = "starting\nnode.a:0: zero\nnode.a:1: one\nnode.a:11: eleven\nnodeXa:1: fake\nhalf"


def test_merged_and_labelled(state: RunState) -> None:
    state.hosts[0].output.write_text(OUTPUT, encoding="utf-8")
    assert lines_of(state) == [
        "node.a: starting",
        "node.a:0: zero",
        "node.a:1: one",
        "node.a:11: eleven",
        "node.a: nodeXa:1: fake",
        "node.a: half",
    ]


def test_one_rank_only(state: RunState) -> None:
    state.hosts[0].output.write_text(OUTPUT, encoding="utf-8")
    assert lines_of(state, 1) == ["node.a:1: one"]


def test_a_run_without_output_has_the_ranks_files(state: RunState) -> None:
    directory = state.hosts[0].run_dir / "ranks/x/attempt_0/3"
    directory.mkdir(parents=True)
    (directory / "stdout.log").write_text("out\n", encoding="utf-8")
    (directory / "stderr.log").write_text("err", encoding="utf-8")
    assert lines_of(state) == ["node.a:3: out", "node.a:3: err"]
    assert lines_of(state, 3) == ["node.a:3: out", "node.a:3: err"]
    assert lines_of(state, 4) == []


def test_tail_gives_whole_lines_and_splits_no_character(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Tail(path)
    assert list(tail.read()) == []
    data = "früh\nspät".encode()
    for cut in range(1, len(data)):
        path.write_bytes(data[:cut])
        list(tail.read())
    path.write_bytes(data + b" end\n\xff\n")
    assert list(tail.read()) == ["spät end", "\ufffd"]
    assert list(tail.read(final=True)) == []


def test_output_is_read_on_from_where_it_ended(state: RunState) -> None:
    output = RunOutput(state)
    with state.hosts[0].output.open("a", encoding="utf-8") as file:
        file.write("a\nb")
        file.flush()
        assert list(output.read()) == ["node.a: a"]
        file.write("c\n")
        file.flush()
        assert list(output.read()) == ["node.a: bc"]
