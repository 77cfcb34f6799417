"""Tests of traffic between hosts: its targets, its load, and that no process remains.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from bed.host import Host
from bed.lab import Bed
from support.waiting import PATIENCE_SECONDS, wait_for

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


def make_environment(bed: Bed, flows: tuple[Flow, ...], transport: str = "tcp") -> Environment:
    hosts = tuple(TrafficHost(host.name, host.address) for host in bed.hosts)
    kind = "udp" if transport == "udp" else "tcp"
    return Environment(hosts, flows, Pattern(RATE, 0.1 * RATE, 16384.0, kind), Probe("ring", 4096))


def count_received_bytes(host: Host) -> int:
    """Return the bytes that a host has received, as counted at the switch."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    counts = {name.strip(): rest.split() for name, _, rest in (x.partition(":") for x in lines)}
    return int(counts[host.veth][8])


def find_workers(bed: Bed) -> list[tuple[str, ...]]:
    return [worker.argv for host in bed.hosts for worker in host.find("flagscale.bench.traffic")]


def wait_for_flows(traffic: Traffic, min_bytes: int) -> None:
    wait_for(
        lambda: all(rate.received >= min_bytes for rate in traffic.rates()), "bytes from every flow"
    )


@pytest.mark.bed(hosts=3)
@pytest.mark.parametrize("transport", ["tcp", "udp"])
def test_flows_reach_their_targets_at_the_requested_load(bed: Bed, transport: str) -> None:
    environment = make_environment(bed, (Flow(0, 1),), transport)
    with play(environment, seconds=60, ssh_config=bed.ssh_config, paused=True) as traffic:
        delay = traffic.probe(40)
        assert (delay.samples, delay.ratio >= 1) == (40, True)
        before = [count_received_bytes(host) for host in bed.hosts]
        start = time.monotonic()
        traffic.resume()
        wait_for_flows(traffic, 1 << 20)
        traffic.pause()
        seconds = time.monotonic() - start
        received = [
            count_received_bytes(host) - earlier
            for host, earlier in zip(bed.hosts, before, strict=True)
        ]
        # Other hosts receive only SSH messages and the flow's acknowledgements.
        assert received[2] < 60_000
        assert received[0] < 200_000
        assert received[1] >= 1 << 20
        # The load, one largest burst, headers, and SSH messages.
        assert received[1] < 1.15 * (0.1 * RATE / 8 * (seconds + 1.0) + 20 * 16384) + 60_000
        # The ends report at different times, and a busy machine may drop datagrams.
        min_received_share = 0.9 if transport == "tcp" else 0.5
        wait_for(
            lambda: min_received_share * _sent(traffic) <= _received(traffic) <= _sent(traffic),
            "equal byte counts",
        )
    assert find_workers(bed) == []


def _sent(traffic: Traffic) -> int:
    return traffic.rates()[0].sent


def _received(traffic: Traffic) -> int:
    return traffic.rates()[0].received


@pytest.mark.bed(hosts=3)
def test_unauthenticated_address_receives_only_the_hello(bed: Bed) -> None:
    server_program = """\
import socket, sys
server = socket.create_server(("", 7001))
print("ready", flush=True)
connection = server.accept()[0]
connection.settimeout(20)
connection.sendall(bytes(16))  # not authenticated by the key of the traffic
received = 0
while block := connection.recv(65536):
    received += len(block)
print(received, flush=True)
"""
    server_command = [
        "nsenter",
        "-t",
        str(bed[2].pid),
        "-a",
        "--",
        sys.executable,
        "-c",
        server_program,
    ]
    server = subprocess.Popen(server_command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        environment = make_environment(bed, (Flow(0, 1),))
        wrong_target = replace(environment.hosts[1], flow_addr=bed[2].address)
        environment = replace(
            environment, hosts=(environment.hosts[0], wrong_target, environment.hosts[2])
        )
        with pytest.raises(UnreachableError) as caught:
            play(environment, seconds=60, ssh_config=bed.ssh_config, port=7001)
        problem = f"h00: {bed[2].address} port 7001 does not answer the hello"
        assert f"{problem}; nothing else was sent there" in caught.value.message
        assert server.stdout.readline() == f"{handshake.HELLO_SIZE}\n"
    finally:
        server.kill()
        server.wait()
    assert find_workers(bed) == []


@contextmanager
def bench_traffic(bed: Bed, *arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """Start ``flagscale bench traffic`` and kill it at the end."""
    line = [sys.executable, "-m", "flagscale.cli", "bench", "traffic", *map(str, arguments)]
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
    arguments = ["--hosts", *bed.names, "--rate", "100mbit", "--seconds", "600", "--probe", "none"]
    with bench_traffic(bed, *arguments) as process:
        before = count_received_bytes(bed[1])
        wait_for(lambda: count_received_bytes(bed[1]) - before > 1 << 20, "traffic")
        os.kill(process.pid, number)
        process.wait(PATIENCE_SECONDS)
        wait_for(lambda: find_workers(bed) == [], "no process remains", seconds=14)
        assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    assert [list(host.local_path("/tmp").glob("*flagscale*")) for host in bed.hosts] == [[], []]


@pytest.mark.bed(hosts=2)
def test_lost_host_ends_the_command_with_an_error(bed: Bed) -> None:
    with bench_traffic(bed, "--hosts", *bed.names, "--rate", "1gbit", "--probe", "none") as process:
        before = count_received_bytes(bed[1])
        wait_for(lambda: count_received_bytes(bed[1]) - before > 1 << 20, "traffic")
        # SSH starts each worker with a shell, which is not a worker itself.
        workers = [
            process_info
            for process_info in bed[1].find("flagscale.bench.traffic")
            if process_info.argv[0] == sys.executable
        ]
        os.kill(workers[0].pid, signal.SIGKILL)
        _, error_output = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == UnreachableError.exit_code
        assert error_output.startswith("error: h0")
        wait_for(lambda: find_workers(bed) == [], "no process remains", seconds=14)


@pytest.mark.bed(hosts=2)
def test_short_calibration_and_replay(bed: Bed, tmp_path: Path) -> None:
    """Test that a calibration is reported, whether or not it succeeds in so short a time."""
    for host in bed.hosts:
        host.limit_switch_rate("100mbit", "256kb")
    environment_file, record_file = tmp_path / "tail.json", tmp_path / "result.json"
    arguments = ["--hosts", *bed.names, "--rate", "100mbit", "--tail", "3", "--within", "4"]
    arguments += ["--seconds", "0.5", "--probe", "ring:64K", "--probe-samples", "50"]
    with bench_traffic(
        bed, *arguments, "--environment", environment_file, "--json", record_file
    ) as process:
        out, error_output = process.communicate(timeout=PATIENCE_SECONDS)
    record = json.loads(record_file.read_text(encoding="utf-8"))
    reached = record["calibration"]["reached"]
    assert process.returncode == (0 if reached else 1), error_output
    assert reached or error_output.startswith("error: --tail 3: ")
    assert (record["complete"], record["calibration"]["target"]) == (True, 3.0)
    assert "without traffic" in out
    environment = read_environment(environment_file)
    assert [traffic_host.name for traffic_host in environment.hosts] == bed.names
    assert [host for host, _ in environment.congestion] == bed.names
    assert environment.flows == flows_between(2, "pairs")
    assert environment.found is not None
    assert environment.found.low <= environment.found.ratio <= environment.found.high
    with bench_traffic(
        bed, "--replay", environment_file, "--seconds", "0.5", "--probe", "none"
    ) as process:
        _, error_output = process.communicate(timeout=PATIENCE_SECONDS)
        assert (process.returncode, error_output) == (0, "")
