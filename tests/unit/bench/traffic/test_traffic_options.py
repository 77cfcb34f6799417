"""Tests of the command line of `flagscale bench traffic`: plans, and errors of invalid lines."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flagscale.bench.cli import main_bench
from flagscale.bench.traffic.environment import write_environment
from flagscale.bench.traffic.options import TrafficPlan, parse_command
from flagscale.bench.traffic.spec import (
    Environment,
    Flow,
    Pattern,
    Probe,
    TrafficHost,
    flows_between,
)
from flagscale.errors import ConfigError

TWO_HOSTS = "--hosts 127.0.0.1 127.0.0.2 "


def parse_line(line: str) -> TrafficPlan:
    return parse_command(line.split(), "flagscale bench traffic")


def error_message(line: str) -> str:
    with pytest.raises(ConfigError) as error_info:
        parse_line(line)
    return error_info.value.message


@pytest.mark.parametrize(
    ("line", "pattern"),
    [
        pytest.param("--rate 1gbit", Pattern(1e9, 6e7, 65536.0), id="6-percent"),
        pytest.param(
            "--rate 250mbit --load 10% --burst 1M --seed 4",
            Pattern(250e6, 25e6, float(1 << 20), seed=4),
            id="share",
        ),
        pytest.param(
            "--rate 10Gbit/s --load 15mbit --peak 1gbps --transport udp",
            Pattern(1e10, 15e6, 65536.0, "udp", peak=1e9),
            id="bits",
        ),
        pytest.param(
            "--rate 1g --bursts pareto --gaps constant",
            Pattern(1e9, 6e7, 65536.0, bursts="pareto", gaps="constant"),
            id="distributions",
        ),
    ],
)
def test_flags_make_a_pattern(line: str, pattern: Pattern) -> None:
    parsed_plan = parse_line(TWO_HOSTS + line)
    # The load, a fraction of the rate, is compared approximately because it is rounded.
    assert parsed_plan.environment.pattern.load == pytest.approx(pattern.load)
    assert parsed_plan.environment.pattern == Pattern(
        **{**vars(pattern), "load": parsed_plan.environment.pattern.load}
    )
    assert not parsed_plan.measure_rate


def test_hostfile_keeps_connection_settings(tmp_path: Path) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(
        "node[1-2] slots=1 addr=10.0.0.[1-2] user=me port=22 proxy=door\n"
        "left slots=1 addr=10.1.0.1 via=netns\n"
    )
    parsed_plan = parse_line(f"--hosts-file {hostfile} --rate 1gbit --flow node1:left").environment
    assert parsed_plan.hosts == (
        TrafficHost(
            "node1", addr="10.0.0.1", flow_addr=None, via="ssh", user="me", port=22, proxy="door"
        ),
        TrafficHost(
            "node2", addr="10.0.0.2", flow_addr=None, via="ssh", user="me", port=22, proxy="door"
        ),
        TrafficHost("left", addr="10.1.0.1", flow_addr=None, via="netns"),
    )
    assert parsed_plan.flows == (Flow(0, 2),)


def test_local_host_needs_no_ssh_and_rate_may_be_measured() -> None:
    parsed_plan = parse_line(TWO_HOSTS + "--between all --probe echo:64K --tail 3")
    assert [host.via for host in parsed_plan.environment.hosts] == ["local", "local"]
    assert parsed_plan.environment.probe == Probe("echo", 65536)
    assert (parsed_plan.environment.target, parsed_plan.environment.tolerance) == (3.0, 0.2)
    assert parsed_plan.measure_rate
    assert math.isinf(parse_line(TWO_HOSTS + "--probe none").probe_interval_seconds)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "which hosts? give --hosts, --hosts-file or --replay"),
        ("--hosts 127.0.0.1", "traffic needs two hosts, and 127.0.0.1 is one"),
        (TWO_HOSTS + "--hosts-file x", "--hosts and --hosts-file exclude each other"),
        (TWO_HOSTS + "--rate fast", "'fast'; expected such as 250mbit or 10gbit"),
        (TWO_HOSTS + "--rate 0", "'0'; expected such as"),
        (TWO_HOSTS + "--rate 1g --load 100%", "load: 1 Gbit/s a flow on a path of 1 Gbit/s"),
        (TWO_HOSTS + "--rate 1g --load x%", "--load 'x%'; expected such as 6% or 15mbit"),
        (TWO_HOSTS + "--load 15mbit", "--load in bit/s needs --rate"),
        (TWO_HOSTS + "--burst 1G --rate 1g", "burst: 1 GiB, expected 1 KiB to 64 MiB"),
        (TWO_HOSTS + "--burst big", "'big' is not a size"),
        (TWO_HOSTS + "--tail 1", "--tail 1; expected a ratio above 1"),
        (TWO_HOSTS + "--tail nan", "--tail nan; expected a ratio above 1"),
        (TWO_HOSTS + "--tail 3 --probe none", "--tail needs a probe"),
        (TWO_HOSTS + "--tolerance 0.1", "--tolerance needs --tail"),
        (TWO_HOSTS + "--within 10", "--within needs --tail"),
        (TWO_HOSTS + "--probe none --probe-every 3", "--probe none has nothing to look with"),
        (TWO_HOSTS + "--flow a:b --between all", "--flow and --between exclude each other"),
        (TWO_HOSTS + "--probe rings", "--probe 'rings'; expected ring:SIZE, echo:SIZE or none"),
        (TWO_HOSTS + "--seconds 1e9", "--seconds 1e+09; expected more than 0, at most 604800"),
        (TWO_HOSTS + "--seconds nan", "--seconds nan; expected more than 0"),
        (TWO_HOSTS + "--flow 127.0.0.1:127.0.0.3", "did you mean '127.0.0.2'"),
        (TWO_HOSTS + "--port 70000", "--port 70000; expected 1 to 65535"),
        (TWO_HOSTS + "--tial 3", "unknown flag --tial; did you mean --tail?"),
        (TWO_HOSTS + "--json /no/such/file", "--json /no/such/file: its directory does not exist"),
        ("--replay /no/such", "/no/such: cannot be read"),
        (TWO_HOSTS + "-s 64 --rate 1g", "127.0.0.1 would send 1.92 Gbit/s by 32 flows"),
        (TWO_HOSTS + "-s 1", "-s 1; expected 2 to 1024 processes"),
        ("-s 4 -m 127.0.0.1", "-m 127.0.0.1 is this machine: which is the other host?"),
    ],
)
def test_invalid_command_lines_are_refused(line: str, message: str) -> None:
    assert message in error_message(line)


def test_replay_defines_hosts_and_pattern(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    hosts = (TrafficHost("a", addr="10.0.0.1"), TrafficHost("b", addr="10.0.0.2"))
    environment = Environment(hosts, flows_between(2, "pairs"), Pattern(1e9, 6e7, 65536.0))
    write_environment(environment, path)
    assert parse_line(f"--replay {path} --seconds 5").environment == environment
    assert "--replay has its own hosts" in error_message(f"--replay {path} {TWO_HOSTS}")
    assert error_message(f"--replay {path} --load 5%").startswith(
        "--load: not supported with --replay"
    )
    assert error_message(f"--replay {path} --seed 0").startswith(
        "--seed: not supported with --replay"
    )
    assert error_message(f"--replay {path} -s 4").startswith("-s: not supported with --replay")
    assert error_message(f"--replay {path} --environment {path}").startswith(
        "--environment is the file"
    )


def test_run_background_flags_are_translated_with_notes() -> None:
    parsed_plan = parse_line(TWO_HOSTS + "-s 16 -r 1 -t 240000 -m 127.0.0.1 -p 12355 -d lo")
    assert parsed_plan.seconds == 240000
    assert (parsed_plan.port, parsed_plan.interface) == (12355, "lo")
    assert len(parsed_plan.environment.flows) == 16
    assert [note.partition(":")[0] for note in parsed_plan.notes] == [
        "-s 16",
        "-r 1",
        "-t 240000",
        "-p 12355",
        "-d lo",
    ]
    assert "a tail of 3, which --tail 3 finds" in parsed_plan.notes[0]


def test_second_host_of_run_background_names_the_first() -> None:
    parsed_plan = parse_line("-s 4 -r 1 -t 60 -m 127.0.0.3").environment
    assert [host.name for host in parsed_plan.hosts] == ["127.0.0.3", "127.0.0.1"]
    assert len(parsed_plan.flows) == 4


def test_bench_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main_bench([]) == 2
    assert "traffic ..." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "load_fraction"), [("", 0.06), ("--tail 1.5", 0.06), ("--tail 3", 0.1)]
)
def test_a_long_tail_has_a_heavier_load(words: str, load_fraction: float) -> None:
    parsed_plan = parse_line(f"{TWO_HOSTS} --rate 1gbit {words}").environment
    assert parsed_plan.pattern.load == pytest.approx(load_fraction * 1e9)
