"""Who sends how many bytes to whom."""

from __future__ import annotations

import socket

import pytest

from flagscale.bench.training.counting import (
    added,
    between,
    chosen_by_nccl,
    connections,
    grown,
    matrix,
    seen,
)


def test_the_kernel_counts_what_a_connection_carries() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        with client, other:
            key, back = (
                f"127.0.0.1 {one.getsockname()[1]}>127.0.0.1 {one.getpeername()[1]}"
                for one in (client, other)
            )
            before = connections()
            client.sendall(b"x" * 10_000)
            received = 0
            while received < 10_000:
                received += len(other.recv(1 << 16))
            other.sendall(b"y")
            client.recv(1)
            found = grown(before, connections())
    assert found[key] == 10_000
    assert found[back] == 1


def test_connections_of_ranks_are_joined_by_their_ends() -> None:
    ends = ["10.0.0.1 11", "10.0.0.1 12", "10.0.0.2 21", "10.0.0.3 31"]
    store = "10.0.0.9 1"
    of_each = [
        {f"{ends[0]}>{ends[2]}": 100, f"{ends[1]}>{ends[3]}": 7, f"10.0.0.1 13>{store}": 5000},
        {f"{ends[2]}>{ends[0]}": 40},
        {f"{ends[3]}>{ends[1]}": 9},
    ]
    assert matrix(of_each) == ((0, 100, 7), (40, 0, 0), (9, 0, 0))
    assert matrix([{}, {}]) == ((0, 0), (0, 0))


def test_what_ranks_count_by_rank_is_added_up_by_way() -> None:
    messages, datagrams = between([{"1": 9}, {"0": 1}]), between([{"1": 100}, {}])
    assert (messages, datagrams) == (((0, 9), (1, 0)), ((0, 100), (0, 0)))
    assert added(messages, datagrams) == ((0, 109), (1, 0))


@pytest.mark.parametrize(("sent", "told"), [(2000, True), (99, False), (0, False)])
def test_a_few_words_beside_are_no_proof(sent: int, told: bool) -> None:
    """Such as notices over the reliable way, beside sums that go another one."""
    assert seen(((0, sent), (0, 0)), 1000) is told


@pytest.mark.parametrize(
    ("line", "found"),
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
def test_nccl_says_what_it_chose(line: str, found: dict[str, int]) -> None:
    assert chosen_by_nccl([line, "something else"]) == found
