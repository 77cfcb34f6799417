"""Tests of traffic on this machine: workers that end by themselves, and namespaces as hosts."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from bed.namespaces import fresh_network
from bed.plugin import require_bed
from bed.users import User
from support.needs import open_terminal
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.bench.traffic.messages import WorkerSettings
from flagscale.bench.traffic.session import play
from flagscale.bench.traffic.spec import Environment, Flow, Pattern, Probe, TrafficHost
from flagscale.errors import ConfigError, UnreachableError
from flagscale.hosts.connection import Endpoint
from flagscale.hosts.errors import HostError
from flagscale.hosts.netns import NetnsConnectionFactory
from flagscale.hosts.workers.task import WorkerTask

pytestmark = [pytest.mark.integration]

PATTERN = Pattern(1e8, 1e7, 16384.0)
LOOPBACK = tuple(TrafficHost(name, name, via="local") for name in ("127.0.0.1", "127.0.0.2"))
TIMEOUT_SECONDS = PATIENCE_SECONDS
ROOT = Path(__file__).resolve().parents[4]


@contextmanager
def start_worker(settings: WorkerSettings) -> Iterator[subprocess.Popen[bytes]]:
    """Start a worker of the traffic and wait until it has reported its endpoint."""
    task = WorkerTask.create("flagscale.bench.traffic.worker:run", settings)
    worker_process = subprocess.Popen(
        task.command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert worker_process.stdin is not None
        assert worker_process.stdout is not None
        worker_process.stdin.write(task.to_stdin())
        worker_process.stdin.close()
        assert json.loads(worker_process.stdout.readline())["endpoint"]["pid"] == worker_process.pid
        yield worker_process
    finally:
        worker_process.kill()
        worker_process.wait()
        if worker_process.stdout is not None:
            worker_process.stdout.close()


@pytest.mark.parametrize(
    ("seconds", "lease"),
    [
        # Time to report the endpoint, on a busy machine.
        pytest.param(3.0, TIMEOUT_SECONDS, id="deadline"),
        pytest.param(TIMEOUT_SECONDS, 3.0, id="lease"),
    ],
)
def test_worker_ends_by_deadline_or_lease(seconds: float, lease: float) -> None:
    with start_worker(WorkerSettings("flows", 0, "00" * 32, seconds, lease)) as worker_process:
        assert worker_process.wait(TIMEOUT_SECONDS / 2) == 0


def test_worker_ends_when_its_stdout_is_closed() -> None:
    with start_worker(
        WorkerSettings("probe", 0, "00" * 32, TIMEOUT_SECONDS, TIMEOUT_SECONDS)
    ) as worker_process:
        assert worker_process.stdout is not None
        worker_process.stdout.close()
        assert worker_process.wait(TIMEOUT_SECONDS / 2) == 0


def test_pattern_changes_and_pauses_take_effect() -> None:
    environment = Environment(LOOPBACK, (Flow(0, 1),), PATTERN, Probe("echo", 1024))
    with play(environment, seconds=TIMEOUT_SECONDS, paused=True) as traffic:
        assert traffic.probe(30).samples == 30
        assert traffic.rates()[0].sent == 0
        # The first pattern sends a burst about every two hours, the second one all the time.
        traffic.change(Pattern(1e8, 1e3, 1 << 20))
        traffic.resume()
        traffic.change(PATTERN)
        wait_for(lambda: traffic.rates()[0].received > 1 << 19)
        with pytest.raises(ConfigError, match="less than the path's rate"):
            traffic.change(Pattern(1e8, 1e9, 16384.0))


def test_session_reports_its_deadline() -> None:
    environment = Environment(LOOPBACK, (Flow(0, 1),), PATTERN, Probe("echo", 1024))
    # On a slow machine the time is over before the traffic has started.
    with pytest.raises(UnreachableError) as caught, play(environment, seconds=1.5) as traffic:
        while True:
            traffic.check()
            time.sleep(0.05)
    assert "no more traffic: its 1.5 s are over" in caught.value.message


def test_occupied_port_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        environment = Environment(LOOPBACK, (Flow(0, 1),), PATTERN)
        with pytest.raises(UnreachableError, match=f"port {port} is not available"):
            play(environment, seconds=TIMEOUT_SECONDS, port=port)


@contextmanager
def two_namespaces() -> Iterator[None]:
    """Create two network namespaces, called left and right, joined by a veth pair."""
    require_bed()
    lines = ["link add eth0 netns left type veth peer name eth0 netns right"]
    with fresh_network():
        # `ip netns` keeps its files in /run; the tmpfs disappears with the test.
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/run"], check=True)
        for name in ("left", "right"):
            subprocess.run(["ip", "netns", "add", name], check=True)
        subprocess.run(["ip", "-batch", "-"], input="\n".join(lines), text=True, check=True)
        for number, name in enumerate(("left", "right"), start=1):
            commands = f"link set lo up\naddr add 10.76.0.{number}/24 dev eth0\nlink set eth0 up\n"
            batch = ["ip", "-n", name, "-batch", "-"]
            subprocess.run(batch, input=commands, text=True, check=True)
        yield


def test_traffic_runs_between_namespaces() -> None:
    with two_namespaces():
        hosts = (
            TrafficHost("left", "10.76.0.1", via="netns"),
            TrafficHost("right", "10.76.0.2", via="netns"),
        )
        environment = Environment(hosts, (Flow(0, 1), Flow(1, 0)), PATTERN)
        with play(environment, seconds=TIMEOUT_SECONDS) as traffic:
            wait_for(lambda: all(rate.received > 1 << 18 for rate in traffic.rates()))
        error = User().call(enter_namespace)
        hint = "entering one takes root's rights"
        assert error["message"].startswith("left: its network cannot be entered: ")
        assert error["hint"] == hint


def enter_namespace() -> dict[str, Any]:
    try:
        NetnsConnectionFactory({}).open(Endpoint("left", "netns"))
    except HostError as error:
        return {"message": error.message, "hint": error.hint}
    return {"message": "entered", "hint": None}


def test_missing_namespace_is_reported() -> None:
    with pytest.raises(HostError) as caught:
        NetnsConnectionFactory({}).open(Endpoint("no-such", "netns"))
    assert "no-such: no network namespace of that name" in caught.value.message
    assert caught.value.hint == "ip netns add no-such, as root"


def test_live_table_on_a_terminal() -> None:
    """Test that it shows rates and probe percentiles, followed by the final table."""
    words = "bench traffic --hosts 127.0.0.1 127.0.0.2 --rate 100mbit --seconds 2.5"
    master, terminal = open_terminal()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "flagscale.cli", *words.split(), "--probe-samples", "100"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    shown = b""
    # Reading fails when the other end of the terminal is closed.
    with suppress(OSError):
        while more := os.read(master, 1 << 16):
            shown += more
    os.close(master)
    assert process.wait(TIMEOUT_SECONDS) == 0
    text = shown.decode()
    live = "127.0.0.1 → 127.0.0.2 .*bit/s .*ring of 256 KiB: p50 .* ms, p99"
    assert re.search(live, text, re.DOTALL), text
    assert "2 tcp flows of 6 Mbit/s" in text
    assert "95 % interval" in text
