"""Tests of the counts of bytes between ranks, and of the algorithms in NCCL's log."""

from __future__ import annotations

import socket

import pytest

from flagscale.bench.training.byte_counts import (
    add_matrices,
    connection_bytes,
    count_growth,
    count_nccl_algorithms,
    covers_gradients,
    matrix_from_connections,
    matrix_from_counts,
)


def test_kernel_counts_the_bytes_of_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        with client, peer:
            forward, backward = (
                f"127.0.0.1 {sock.getsockname()[1]}>127.0.0.1 {sock.getpeername()[1]}"
                for sock in (client, peer)
            )
            before = connection_bytes()
            client.sendall(b"x" * 10_000)
            received = 0
            while received < 10_000:
                received += len(peer.recv(1 << 16))
            peer.sendall(b"y")
            client.recv(1)
            growth = count_growth(before, connection_bytes())
    assert growth[forward] == 10_000
    assert growth[backward] == 1


def test_connections_of_ranks_are_matched_by_their_endpoints() -> None:
    endpoints = ["10.0.0.1 11", "10.0.0.1 12", "10.0.0.2 21", "10.0.0.3 31"]
    store = "10.0.0.9 1"
    connections_by_rank = [
        {
            f"{endpoints[0]}>{endpoints[2]}": 100,
            f"{endpoints[1]}>{endpoints[3]}": 7,
            f"10.0.0.1 13>{store}": 5000,
        },
        {f"{endpoints[2]}>{endpoints[0]}": 40},
        {f"{endpoints[3]}>{endpoints[1]}": 9},
    ]
    assert matrix_from_connections(connections_by_rank) == ((0, 100, 7), (40, 0, 0), (9, 0, 0))
    assert matrix_from_connections([{}, {}]) == ((0, 0), (0, 0))


def test_counts_by_rank_are_added_by_transport() -> None:
    messages, datagrams = (
        matrix_from_counts([{"1": 9}, {"0": 1}]),
        matrix_from_counts([{"1": 100}, {}]),
    )
    assert (messages, datagrams) == (((0, 9), (1, 0)), ((0, 100), (0, 0)))
    assert add_matrices(messages, datagrams) == ((0, 109), (1, 0))


@pytest.mark.parametrize(("sent", "expected"), [(2000, True), (99, False), (0, False)])
def test_small_control_traffic_is_no_evidence(sent: int, expected: bool) -> None:
    """With 1000 bytes of gradients, a total below 100 bytes can only be other communication."""
    assert covers_gradients(((0, sent), (0, 0)), 1000) is expected


@pytest.mark.parametrize(
    ("line", "counts"),
    [
        pytest.param(
            "h:1:2 [0] NCCL INFO AllReduce: 4194304 Bytes -> Algo RING proto SIMPLE channel{0..7}",
            {"RING": 1},
            id="by name",
        ),
        pytest.param(
            "NCCL INFO AllReduce: 512 Bytes -> Algo 0 proto 1 time 12.5", {"TREE": 1}, id="old"
        ),
        pytest.param(
            "NCCL INFO Broadcast: 512 Bytes -> Algo RING proto LL", {}, id="another operation"
        ),
        pytest.param("NCCL INFO NCCL_ALGO set by environment to Tree", {}, id="no choice"),
    ],
)
def test_nccl_log_names_algorithms(line: str, counts: dict[str, int]) -> None:
    assert count_nccl_algorithms([line, "something else"]) == counts
