"""Traffic between real hosts: who gets it, how much, and that nothing is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from bed.host import Host
from bed.lab import Bed

from flagscale.bench.traffic import handshake
from flagscale.bench.traffic.environment import read_environment
from flagscale.bench.traffic.session import Traffic, play
from flagscale.bench.traffic.spec import (
    Environment,
    Flow,
    Pattern,
    Probe,
    TrafficHost,
    flows_between,
)
from flagscale.errors import UnreachableError

ROOT = Path(__file__).resolve().parents[4]
RATE = 100e6

pytestmark = [pytest.mark.integration]


def environment(bed: Bed, flows: tuple[Flow, ...], transport: str = "tcp") -> Environment:
    sites = tuple(TrafficHost(host.name, host.address) for host in bed.hosts)
    kind = "udp" if transport == "udp" else "tcp"
    return Environment(sites, flows, Pattern(RATE, 0.1 * RATE, 16384.0, kind), Probe("ring", 4096))


def came(host: Host) -> int:
    """Bytes that came to a host by its cable: what its other end, on the switch, has sent."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    counts = {name.strip(): rest.split() for name, _, rest in (x.partition(":") for x in lines)}
    return int(counts[host.veth][8])


def processes(bed: Bed) -> list[tuple[str, ...]]:
    return [one.argv for host in bed.hosts for one in host.find("flagscale.bench.traffic")]


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.05)


def flowing(traffic: Traffic, least: int) -> None:
    until(lambda: all(rate.received >= least for rate in traffic.rates()), "bytes of every flow")


@pytest.mark.bed(hosts=3)
@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_flows_reach_their_targets_at_the_requested_load(bed: Bed, transport: str) -> None:
    played = environment(bed, (Flow(0, 1),), transport)
    with play(played, seconds=60, ssh_config=bed.ssh_config, paused=True) as traffic:
        seen = traffic.probe(40)
        assert (seen.samples, seen.ratio >= 1) == (40, True)
        before = [came(host) for host in bed.hosts]
        begin = time.monotonic()
        traffic.resume()
        flowing(traffic, 1 << 20)
        traffic.pause()
        span = time.monotonic() - begin
        got = [came(host) - old for host, old in zip(bed.hosts, before, strict=True)]
        # Nothing but what SSH says and the acknowledgements of the flow.
        assert got[2] < 60_000
        assert got[0] < 200_000
        assert got[1] >= 1 << 20
        # The load, one largest burst, headers, and what is told by SSH.
        assert got[1] < 1.15 * (0.1 * RATE / 8 * (span + 1.0) + 20 * 16384) + 60_000
        # The two ends tell at their own times; a busy machine has no room for some datagrams.
        least = 0.9 if transport == "tcp" else 0.5
        until(lambda: least * _sent(traffic) <= _received(traffic) <= _sent(traffic), "the same")
    assert processes(bed) == []


def _sent(traffic: Traffic) -> int:
    return traffic.rates()[0].sent


def _received(traffic: Traffic) -> int:
    return traffic.rates()[0].received


@pytest.mark.bed(hosts=3)
def test_unauthenticated_address_receives_only_the_hello(bed: Bed) -> None:
    listening = """\
import socket, sys
server = socket.create_server(("", 7001))
print("ready", flush=True)
found = server.accept()[0]
found.settimeout(20)
found.sendall(bytes(16))  # some answer, by another key
got = 0
while more := found.recv(65536):
    got += len(more)
print(got, flush=True)
"""
    enter = ["nsenter", "-t", str(bed[2].pid), "-a", "--", sys.executable, "-c", listening]
    stranger = subprocess.Popen(enter, stdout=subprocess.PIPE, text=True)
    try:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == "ready\n"
        played = environment(bed, (Flow(0, 1),))
        astray = replace(played.hosts[1], flow_addr=bed[2].address)
        played = replace(played, hosts=(played.hosts[0], astray, played.hosts[2]))
        with pytest.raises(UnreachableError) as caught:
            play(played, seconds=60, ssh_config=bed.ssh_config, port=7001)
        where = f"h00: {bed[2].address} port 7001 does not answer the hello"
        assert f"{where}; nothing else was sent there" in caught.value.message
        assert stranger.stdout.readline() == f"{handshake.HELLO_SIZE}\n"
    finally:
        stranger.kill()
        stranger.wait()
    assert processes(bed) == []


@contextmanager
def command(bed: Bed, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
    """`flagscale bench traffic` as a process of its own."""
    line = [sys.executable, "-m", "flagscale.cli", "bench", "traffic", *map(str, words)]
    process = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=bed.environment(PYTHONPATH=str(ROOT)),
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.bed(hosts=2)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_command(bed: Bed, number: signal.Signals) -> None:
    line = ["--hosts", *bed.names, "--rate", "100mbit", "--seconds", "600", "--probe", "none"]
    with command(bed, *line) as process:
        quiet = came(bed[1])
        until(lambda: came(bed[1]) - quiet > 1 << 20, "traffic")
        os.kill(process.pid, number)
        process.wait(30)
        until(lambda: processes(bed) == [], "nothing left", 10)
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert [list(host.path("/tmp").glob("*flagscale*")) for host in bed.hosts] == [[], []]


@pytest.mark.bed(hosts=2)
def test_lost_host_ends_the_command_with_an_error(bed: Bed) -> None:
    with command(bed, "--hosts", *bed.names, "--rate", "1gbit", "--probe", "none") as process:
        quiet = came(bed[1])
        until(lambda: came(bed[1]) - quiet > 1 << 20, "traffic")
        # Beside each is the shell that SSH has started it with.
        lost = [
            one for one in bed[1].find("flagscale.bench.traffic") if one.argv[0] == sys.executable
        ]
        os.kill(lost[0].pid, signal.SIGKILL)
        _, said = process.communicate(timeout=30)
        assert process.returncode == UnreachableError.exit_code
        assert said.startswith("error: h0")
        until(lambda: processes(bed) == [], "nothing left", 10)


@pytest.mark.bed(hosts=2)
def test_short_calibration_and_replay(bed: Bed, tmp_path: Path) -> None:
    """How far it comes in so short a time is not asked; that it tells is."""
    for host in bed.hosts:
        host.bottleneck("100mbit", "256kb")
    kept, result = tmp_path / "tail.json", tmp_path / "result.json"
    line = ["--hosts", *bed.names, "--rate", "100mbit", "--tail", "3", "--within", "4"]
    line += ["--seconds", "0.5", "--probe", "ring:64K", "--probe-samples", "50"]
    with command(bed, *line, "--environment", kept, "--json", result) as process:
        out, said = process.communicate(timeout=60)
    found = json.loads(result.read_text(encoding="utf-8"))
    reached = found["calibration"]["reached"]
    assert process.returncode == (0 if reached else 1), said
    assert reached or said.startswith("error: --tail 3: ")
    assert (found["complete"], found["calibration"]["target"]) == (True, 3.0)
    assert "without traffic" in out
    played = read_environment(kept)
    assert [site.name for site in played.hosts] == bed.names
    assert [host for host, _ in played.congestion] == bed.names
    assert played.flows == flows_between(2, "pairs")
    assert played.found is not None
    assert played.found.low <= played.found.ratio <= played.found.high
    with command(bed, "--replay", kept, "--seconds", "0.5", "--probe", "none") as process:
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")
