"""Agreement of the hosts of a run: real sockets of this machine, a thread for each host."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.waiting import PATIENCE_SECONDS

from flagscale.errors import JobError
from flagscale.free_port import free_port
from flagscale.launcher.liveness.protocol import MAGIC
from flagscale.launcher.runners.cloud import rendezvous
from flagscale.launcher.runners.cloud.position import Position
from flagscale.launcher.runners.cloud.rendezvous import Agreement, Introduction, agree

SECRET = b"s" * 32
HOSTS = tuple(Introduction(rank, 3, f"pod-{rank}", rank + 1, {"lr": "0.1"}) for rank in range(3))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(rendezvous, "_REFUSAL_SECONDS", 4.0)


def _agree_all(
    hosts: tuple[Introduction, ...],
    *,
    secrets: tuple[bytes, ...] = (SECRET,) * 3,
    timeout: float = PATIENCE_SECONDS,
    port: int | None = None,
) -> list[Agreement | str]:
    """Return the result of each host: the agreement, or the message of the error."""
    used_port = port or free_port()

    def run(host: Introduction, secret: bytes) -> Agreement | str:
        position = Position(host.node_rank, host.nnodes, "127.0.0.1", 1)
        try:
            return agree(host, position, used_port, secret, f"run-{host.node_rank}", timeout)
        except JobError as error:
            return error.message

    with ThreadPoolExecutor(len(hosts)) as executor:
        return list(executor.map(run, hosts, secrets))


def test_all_hosts_get_the_first_ones_run() -> None:
    expected = Agreement("run-0", ("pod-0", "pod-1", "pod-2"), (1, 2, 3))
    assert _agree_all(HOSTS) == [expected] * 3


def test_equal_names_get_their_rank() -> None:
    hosts = tuple(replace(host, name="vm") for host in HOSTS)
    results = _agree_all(hosts)
    assert [result.names for result in results if isinstance(result, Agreement)] == [
        ("vm-0", "vm-1", "vm-2")
    ] * 3


REFUSALS = {
    "count": (
        replace(HOSTS[2], nnodes=4),
        "pod-2 (rank 2) is one of 4 host(s), pod-0 (rank 0) one of 3: experiment.runner.nnodes",
    ),
    "rank-twice": (replace(HOSTS[2], node_rank=1), "have rank 1: each host needs its own rank"),
    "setting": (
        replace(HOSTS[2], settings={"lr": "0.2"}),
        "the hosts have different settings: lr is 0.1 on pod-0 (rank 0) and 0.2 on pod-2 (rank 2)",
    ),
    "problem": (replace(HOSTS[2], problem="no data"), "pod-2 (rank 2) cannot start: no data"),
    "beyond": (replace(HOSTS[2], node_rank=7), "pod-2 have rank 7"),
}


@pytest.mark.parametrize(("last", "message"), REFUSALS.values(), ids=REFUSALS)
def test_host_that_does_not_fit_is_named_to_all(
    last: Introduction, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendezvous, "_REFUSAL_SECONDS", PATIENCE_SECONDS)  # all hosts come
    results = _agree_all((*HOSTS[:2], last))
    assert [message in str(result) for result in results] == [True] * 3


def test_first_host_that_cannot_start_is_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REFUSAL_SECONDS", PATIENCE_SECONDS)  # all hosts come
    hosts = (replace(HOSTS[0], problem="no GPU"), *HOSTS[1:])
    assert _agree_all(hosts) == ["pod-0 (rank 0) cannot start: no GPU"] * 3


def test_missing_host_is_named() -> None:
    results = _agree_all(HOSTS[:2], timeout=5.0)
    assert results == ["1 of 3 hosts (rank 2) did not come in time"] * 2


def test_host_with_another_secret_is_kept_out() -> None:
    results = _agree_all(HOSTS, secrets=(SECRET, SECRET, b"t" * 32), timeout=5.0)
    assert "1 of 3 hosts (rank 2) did not come in time; " in str(results[0])
    assert "without this job's secret (FLAGSCALE_RUN_SECRET) were closed" in str(results[0])
    assert "it has another secret" in str(results[2])


def test_strangers_do_not_delay_the_hosts() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as executor:
        future = executor.submit(_agree_all, HOSTS[:1], port=port)
        sockets: list[socket.socket] = []
        while len(sockets) < 3:
            try:
                sockets.append(socket.create_connection(("127.0.0.1", port)))
            except OSError:
                continue
        sockets[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
        sockets[2].sendall(MAGIC + b"n" * 32 + b"p" * 32)
        others = _agree_all(HOSTS[1:], port=port)
        (first,) = future.result()
        for sock in sockets:
            sock.close()
    assert [first, *others] == [Agreement("run-0", ("pod-0", "pod-1", "pod-2"), (1, 2, 3))] * 3


def test_first_host_that_is_absent_is_named_with_its_port() -> None:
    port = free_port()
    (result,) = _agree_all(HOSTS[1:2], port=port, timeout=0.5)
    assert result == f"the host with rank 0 was not reached at 127.0.0.1:{port}: connection refused"


def test_occupied_port_is_reported() -> None:
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as listener:
        port = int(listener.getsockname()[1])
        (result,) = _agree_all(HOSTS[:1], port=port, timeout=1.0)
    assert f"the hosts cannot connect to port {port} of this host" in str(result)
