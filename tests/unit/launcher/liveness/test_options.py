"""Tests of agent options: JSON round trip, and error messages for invalid options."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from flagscale.launcher.liveness.options import AgentOptions, compress_positions, parse_command_line

ALONE = AgentOptions(
    max_restarts=2,
    on_failure="leave",
    lost_host_timeout=60.0,
    start_timeout=600.0,
    hang_detection_timeout=0.0,
    run_name="--odd 'name' \"of\"\nü 🦙 $HOME",
    run_dir=Path("/data/runs/a b"),
    name="h00",
    node_rank=0,
    first_rank=0,
    nproc=8,
    stop_grace=0.5,
)
FIRST = replace(
    ALONE,
    notify_on=("failed", "finished"),
    master_addr="fe80::1",
    liveness_port=29501,
    hosts=("h[00-02]", "login"),
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(ALONE, id="alone"),
        pytest.param(FIRST, id="host-0"),
        pytest.param(replace(FIRST, node_rank=1, hosts=(), master_name="h00"), id="host-1"),
        pytest.param(replace(FIRST, addresses=("10.0.0.[1-3]",)), id="host-0-may-be-lost"),
        pytest.param(replace(FIRST, places=("0 stage 0", "2 stage 1")), id="host-0-of-meshes"),
    ],
)
def test_options_are_read_as_they_were_written(options: AgentOptions) -> None:
    assert AgentOptions.from_json(options.to_json()) == options


def test_options_of_the_job_take_precedence_over_the_script() -> None:
    job_options = (
        '{"name": "gpu7", "hosts": ["gpu[7-8],x1"], "liveness_port": 5, "earlier_starts": 1}'
    )
    options = AgentOptions.from_json(ALONE.to_json(), job_options)
    assert options.names == ["gpu7", "gpu8", "x1"]
    expected = {"name": "gpu7", "hosts": ("gpu[7-8],x1",), "liveness_port": 5, "earlier_starts": 1}
    assert options == replace(ALONE, **expected)
    with pytest.raises(ValueError, match="this is no JSON"):
        AgentOptions.from_json(ALONE.to_json(), '{"name": ')


def test_names_are_those_of_all_hosts_in_their_order() -> None:
    assert FIRST.names == ["h00", "h01", "h02", "login"]
    assert ALONE.names == ["h00"]


@pytest.mark.parametrize(
    "places",
    [[], ["a", "a", "a", "b"], ["a", "b b", "b b", "a"], ["c"] * 4],
    ids=["alike", "two", "three", "one"],
)
def test_places_of_consecutive_hosts_are_compressed(places: list[str]) -> None:
    options = replace(FIRST, places=tuple(compress_positions(places)))
    assert options.positions_by_host == places
    assert len(options.places) == sum(1 for _ in groupby(places))


def broken(**changes: Any) -> str:
    return json.dumps({**json.loads(FIRST.to_json()), **changes})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("", "this is no JSON: Expecting value", id="empty"),
        pytest.param(FIRST.to_json()[:-20], "this is no JSON: .* line ", id="cut"),
        pytest.param("[1]", r"expected a JSON object, found \[1\]", id="a-list"),
        pytest.param('{"nproc": 8}', "max_restarts, on_failure, .*run_dir.*: missing", id="few"),
        pytest.param(
            broken(lost_host_timeot=1),
            "no option 'lost_host_timeot'; did you mean 'lost_host_timeout'",
            id="unknown",
        ),
        pytest.param(broken(nproc="8"), 'nproc is "8": expected a whole number', id="text"),
        pytest.param(broken(nproc=True), "nproc is true: expected a whole number", id="bool"),
        pytest.param(broken(nproc=1.5), "nproc is 1.5: expected a whole number", id="part"),
        pytest.param(broken(stop_grace="1"), 'stop_grace is "1": expected a number', id="number"),
        pytest.param(broken(run_dir=7), "run_dir is 7: expected a text", id="path"),
        pytest.param(broken(on_failure="go"), 'is "go": expected stop or leave', id="choice"),
        pytest.param(broken(hosts="h0"), 'hosts is "h0": expected a list', id="no-list"),
        pytest.param(broken(hosts=[1]), r"hosts is \[1\]: expected a text", id="item"),
        pytest.param(broken(hosts=["h[0-"]), "hosts: 'h.0-': a bracket without", id="range"),
        pytest.param(broken(places=["stage 0"]), "places: each begins with the number", id="place"),
        pytest.param(broken(notify_on=["no"]), "expected failed or stalled or", id="event"),
        pytest.param(broken(liveness_port=None), "liveness_port is null: expected", id="null"),
    ],
)
def test_error_messages_of_invalid_options(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=message):
        AgentOptions.from_json(text)
    with pytest.raises(SystemExit) as exit_error:
        parse_command_line(["--options", text, "--", "prog"], "r")
    assert exit_error.value.code == 2
    assert "error: --options: " in capsys.readouterr().err


def test_the_command_line_ends_where_the_command_begins() -> None:
    arguments = ["--options", FIRST.to_json()]
    command = ["prog", "--options", "--", "--sweep"]
    line = parse_command_line([*arguments, "--", *command], "r")
    assert (line.options, line.command, line.sweep) == (FIRST, tuple(command), False)
    assert parse_command_line([*arguments, "--sweep"], "r").sweep


@pytest.mark.parametrize(
    ("argv", "run_id", "message"),
    [
        pytest.param(["--", "x"], "r", "required: --options", id="no-options"),
        pytest.param(["--options", ALONE.to_json()], "r", "no command given", id="no-command"),
        pytest.param(["--options", ALONE.to_json(), "--", "x"], "", "is not set", id="no-run"),
    ],
)
def test_a_command_line_that_cannot_be(
    argv: list[str], run_id: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_command_line(argv, run_id)
    assert message in capsys.readouterr().err
