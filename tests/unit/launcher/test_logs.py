from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.launcher import log_lines
from flagscale.launcher.layout import OUTPUT_TIMES_FILE
from flagscale.launcher.log_lines import Output
from flagscale.launcher.log_query import LogQuery, select_hosts
from flagscale.launcher.logs import host_outputs, read_lines
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import HostState, RunState


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
    return RunState(
        "r",
        name="n",
        exp_dir=tmp_path,
        started=time.time(),
        world_size=12,
        external=True,
        stop_grace=1.0,
        runner=RunnerHandle("local"),
        hosts=(host,),
    )


def query(state: RunState, rank: int | None = None, count: int | None = None) -> LogQuery:
    return LogQuery(select_hosts(state, rank=rank), rank, count=count)


OUTPUT = "starting\nnode.a:0: zero\nnode.a:1: one\nnode.a:11: eleven\nnodeXa:1: fake\nhalf"


def test_merged_and_labelled(state: RunState) -> None:
    state.hosts[0].output.write_text(OUTPUT, encoding="utf-8")
    assert list(read_lines(state)) == [
        "node.a: starting",
        "node.a:0: zero",
        "node.a:1: one",
        "node.a:11: eleven",
        "node.a: nodeXa:1: fake",
        "node.a: half",
    ]


def test_one_rank_only(state: RunState) -> None:
    state.hosts[0].output.write_text(OUTPUT, encoding="utf-8")
    assert list(read_lines(state, query(state, 1))) == ["node.a:1: one"]


def test_a_run_without_output_has_the_ranks_files(state: RunState) -> None:
    directory = state.hosts[0].run_dir / "ranks/x/attempt_0/3"
    directory.mkdir(parents=True)
    (directory / "stdout.log").write_text("out\n", encoding="utf-8")
    (directory / "stderr.log").write_text("err", encoding="utf-8")
    assert list(read_lines(state)) == ["node.a:3: out", "node.a:3: err"]
    assert list(read_lines(state, query(state, 3))) == ["node.a:3: out", "node.a:3: err"]
    assert list(read_lines(state, query(state, 4))) == []


def test_tail_returns_whole_lines_and_characters(tmp_path: Path) -> None:
    path = tmp_path / "log"
    tail = Output(path, str)
    assert list(tail.read()) == []
    data = "früh\nspät".encode()
    for cut in range(1, len(data)):
        path.write_bytes(data[:cut])
        list(tail.read())
    path.write_bytes(data + b" end\n\xff\n")
    assert list(tail.read()) == ["spät end", "\ufffd"]
    assert list(tail.read(final=True)) == []


def test_reading_continues_at_the_last_offset(state: RunState) -> None:
    (output,) = host_outputs(state)
    with state.hosts[0].output.open("a", encoding="utf-8") as file:
        file.write("a\nb")
        file.flush()
        assert list(output.read()) == ["node.a: a"]
        file.write("c\n")
        file.flush()
        assert list(output.read()) == ["node.a: bc"]


def test_the_last_lines_of_every_host(state: RunState, tmp_path: Path) -> None:
    second_host = replace(
        state.hosts[0], node_rank=1, name="b", first_rank=12, output=tmp_path / "b"
    )
    state_of_two_hosts = replace(state, world_size=24, hosts=(state.hosts[0], second_host))
    state.hosts[0].output.write_text("".join(f"node.a:0: {n}\n" for n in range(9)))
    second_host.output.write_text("".join(f"b:12: {n}\n" for n in range(9)) + "half")
    assert list(read_lines(state_of_two_hosts, query(state_of_two_hosts, count=2))) == [
        "node.a:0: 7",
        "node.a:0: 8",
        "b:12: 8",
        "b: half",
    ]
    assert list(read_lines(state_of_two_hosts, query(state_of_two_hosts, 12, 2))) == [
        "b:12: 7",
        "b:12: 8",
    ]
    assert list(read_lines(state_of_two_hosts, query(state_of_two_hosts, count=0))) == []


@pytest.mark.parametrize("count", [0, 1, 2, 4, 100])
def test_the_last_lines_of_a_rank_are_looked_for(state: RunState, count: int) -> None:
    lines = [f"node.a:{n % 12}: {n}" for n in range(60)]
    state.hosts[0].output.write_text("\n".join(lines), encoding="utf-8")
    expected = [line for line in lines if line.startswith("node.a:11: ")]
    assert list(read_lines(state, query(state, 11, count))) == expected[max(0, 5 - count) :]


def test_the_end_of_a_large_file_is_all_that_is_read(state: RunState) -> None:
    path = state.hosts[0].output
    with path.open("wb") as file:
        file.seek(1 << 40)  # a hole of a terabyte
        file.write(b"\none\ntwo\n")
    assert list(read_lines(state, query(state, count=2))) == ["node.a: one", "node.a: two"]


@given(st.lists(st.sampled_from(["", "a", "ü", "🦙" * 3]), max_size=12), st.integers(1, 9))
def test_backwards_is_forwards_turned_round(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], size: int
) -> None:
    path = tmp_path_factory.mktemp("x") / "log"
    path.write_text("\n".join(lines), encoding="utf-8")
    tail = Output(path, str)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_lines, "_READ_BYTES", size)
        assert list(tail._read_backwards()) == lines[:-1][::-1]
    assert list(tail.read(final=True)) == [line for line in lines[-1:] if line]


def test_lines_after_the_tail_follow(state: RunState) -> None:
    (output,) = host_outputs(state)
    path = state.hosts[0].output
    path.write_text("a\nb\nha", encoding="utf-8")
    assert output.last_lines(1) == ["node.a: b"]
    with path.open("a", encoding="utf-8") as file:
        file.write("lf\nc")
    assert list(output.read()) == ["node.a: half"]
    assert list(output.read(final=True)) == ["node.a: c"]


def test_lines_since_a_time(state: RunState, capsys: pytest.CaptureFixture[str]) -> None:
    host = state.hosts[0]
    host.run_dir.mkdir()
    host.output.write_text("old\nolder\nnew\nnewer\n", encoding="utf-8")
    all_hosts = select_hosts(state)

    def lines_since(since: float, count: int | None = None) -> list[str]:
        return list(read_lines(state, LogQuery(all_hosts, since=since, count=count)))

    assert len(lines_since(50.0)) == 4
    assert "no record of times" in capsys.readouterr().err
    (host.run_dir / OUTPUT_TIMES_FILE).write_text("100.0 6\n200.0 10\n300.0 20\n400")
    assert len(lines_since(50.0)) == 4
    # At 100 s, "old" and a part of "older" had been written.
    assert lines_since(150.0) == ["node.a: older", "node.a: new", "node.a: newer"]
    assert lines_since(200.0) == ["node.a: new", "node.a: newer"]
    assert lines_since(200.0, count=1) == ["node.a: newer"]
    assert lines_since(300.0) == []
    assert lines_since(time.time() + 60) == []
    assert capsys.readouterr().err == ""


def test_filters_apply_to_ranks_files_too(state: RunState) -> None:
    directory = state.hosts[0].run_dir / "ranks/x/attempt_0/3"
    directory.mkdir(parents=True)
    (directory / "stdout.log").write_text("fine\nWARNING: hot\n", encoding="utf-8")
    selected = LogQuery((0,), level="warning")
    assert list(read_lines(state, selected)) == ["node.a:3: WARNING: hot"]
