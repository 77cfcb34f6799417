"""Options of ``logs``: hosts, ranks, patterns, levels, times."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from flagscale.config.schema import Options
from flagscale.errors import ConfigError
from flagscale.launcher.log_query import parse_query, select_hosts
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.state import HostState, RunState

NOW = datetime(2026, 11, 26, 14, 30).timestamp()


@pytest.fixture
def state(tmp_path: Path) -> RunState:
    hosts = tuple(
        HostState(
            node_rank=number,
            name=f"node{number}",
            nproc=2,
            first_rank=2 * number,
            run_dir=tmp_path,
            script=tmp_path / "s.sh",
            output=tmp_path / f"output{number}",
            pid_file=tmp_path / "pid",
        )
        for number in range(3)
    )
    return RunState(
        "r",
        name="n",
        exp_dir=tmp_path,
        started=0.0,
        world_size=6,
        external=True,
        stop_grace=1.0,
        runner=RunnerHandle("local"),
        hosts=hosts,
    )


@pytest.mark.parametrize(
    ("names", "rank", "indices"),
    [
        (None, None, (0, 1, 2)),
        ("node1", None, (1,)),
        ("node[0-1]", None, (0, 1)),
        ("node2,node0", None, (0, 2)),
        (None, 3, (1,)),
        ("node[0-1]", 3, (1,)),
    ],
)
def test_hosts_are_selected(
    state: RunState, names: str | None, rank: int | None, indices: tuple[int, ...]
) -> None:
    assert select_hosts(state, names, rank) == indices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(host="nod1"), "host=nod1: run r has node[0-2]; did you mean 'node1'"),
        (Options(host="node[1"), "host=node[1: "),
        (Options(rank=6), "rank=6: run r has ranks 0 to 5"),
        (Options(host="node0", rank=3), "rank=3 is on host node1"),
        (Options(grep="(a"), "grep=(a: not a regular expression: missing )"),
        (Options(level="info"), "level=info: expected one of warning, error"),
        (Options(since="noon"), "since=noon: expected an age (10m, 2h, 1d), a time (14:02)"),
        (Options(since="9999-01-01"), "is in the future"),
    ],
    ids=lambda value: None if isinstance(value, str) else "",
)
def test_wrong_options_are_answered(state: RunState, options: Options, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_query(state, options)
    assert message in error.value.message
