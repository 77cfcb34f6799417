"""GEMMs overlapped with communication equal sequential ones, for several numbers of ranks.

Ranks are threads with CPU tensors as workspaces, and the copy stream runs synchronously. Stream
synchronization is tested on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from flagscale.train.layers import symmetric_memory

pytestmark = pytest.mark.torch

# Tokens per rank, sequences, input and output features.
RANK_TOKENS, BATCH, IN_FEATURES, OUT_FEATURES = 6, 2, 5, 3
TIMEOUT_SECONDS = 20


class SimulatedWorld:
    """State that the simulated ranks share.

    Attributes:
        size: number of ranks.
        buffers: workspace of each rank.
        signals: pending signals as (receiver, sender, channel).
        signals_changed: condition that is notified when a signal is sent or received.
        barrier: barrier of all ranks.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffers = [torch.full((1 << 14,), 0xFF, dtype=torch.uint8) for _ in range(size)]
        self.signals: set[tuple[int, int, int]] = set()
        self.signals_changed = threading.Condition()
        self.barrier = threading.Barrier(size, timeout=TIMEOUT_SECONDS)


class SimulatedHandle:
    """Simulation of torch's handle of a rank's workspace."""

    def __init__(self, world: SimulatedWorld, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.size

    def barrier(self, channel: int) -> None:
        self.world.barrier.wait()

    def get_buffer(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int
    ) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return self.world.buffers[rank].view(dtype)[offset : offset + count].view(*shape)

    def put_signal(self, rank: int, channel: int) -> None:
        self._flip_signal((rank, self.rank, channel), value=True)

    def wait_signal(self, rank: int, channel: int) -> None:
        self._flip_signal((self.rank, rank, channel), value=False)

    def _flip_signal(self, signal: tuple[int, int, int], *, value: bool) -> None:
        world = self.world
        with world.signals_changed:
            assert world.signals_changed.wait_for(
                lambda: (signal in world.signals) != value, TIMEOUT_SECONDS
            )
            world.signals ^= {signal}
            world.signals_changed.notify_all()


@pytest.fixture(params=[2, 3, 4])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def run_on_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Run a function on all ranks, twice with the same workspace."""
    world, thread_state = SimulatedWorld(size), threading.local()
    monkeypatch.setattr(symmetric_memory, "get_workspace", lambda *_: thread_state.handle)

    def run(function: Callable[[int], Any]) -> list[Any]:
        def rank(rank_index: int) -> Any:
            thread_state.handle = SimulatedHandle(world, rank_index)
            function(rank_index)
            return function(rank_index)

        with ThreadPoolExecutor(size) as pool:
            results = [*pool.map(rank, range(size))]
        assert not world.signals
        return results

    return run


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("return_gathered", [True, False])
def test_gemm_of_a_gathered_input(
    size: int, run_on_ranks: Callable[..., list[Any]], return_gathered: bool
) -> None:
    parts, factor = (
        random_tensor(size, RANK_TOKENS, BATCH, IN_FEATURES),
        random_tensor(OUT_FEATURES, IN_FEATURES).t(),
    )
    whole = parts.flatten(0, 1)
    for gathered, product in run_on_ranks(
        lambda rank: symmetric_memory.gathered_product(
            parts[rank], factor, size, "", return_gathered
        )
    ):
        torch.testing.assert_close(product, whole @ factor)
        torch.testing.assert_close(gathered, whole if return_gathered else whole.new_empty(0))


def test_gemm_with_scattered_output(size: int, run_on_ranks: Callable[..., list[Any]]) -> None:
    inputs, factors = (
        random_tensor(size, size * RANK_TOKENS, BATCH, IN_FEATURES),
        random_tensor(size, IN_FEATURES, OUT_FEATURES),
    )
    expected = sum(i @ f for i, f in zip(inputs, factors, strict=True))
    summands = run_on_ranks(
        lambda rank: symmetric_memory.scattered_product(inputs[rank], factors[rank], size, "")
    )
    assert {rank_summands.shape for rank_summands in summands} == {
        (size, RANK_TOKENS, BATCH, OUT_FEATURES)
    }
    torch.testing.assert_close(
        torch.cat([rank_summands.sum(0) for rank_summands in summands]), expected
    )


@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_of_a_gathered_input(
    size: int, run_on_ranks: Callable[..., list[Any]], accumulate: bool
) -> None:
    parts, weights = (
        random_tensor(size, RANK_TOKENS, BATCH, IN_FEATURES),
        random_tensor(size, OUT_FEATURES, IN_FEATURES),
    )
    gradients = random_tensor(size, size * RANK_TOKENS, BATCH, OUT_FEATURES)
    totals = torch.zeros(size, OUT_FEATURES, IN_FEATURES, dtype=torch.float64)

    def compute_gradients(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        operands = gradients[rank], weights[rank], parts[rank], size, ""
        if not accumulate:
            return symmetric_memory.shared_gradients(*operands)
        before = totals[rank].clone()
        summands = symmetric_memory.add_shared_gradients(totals[rank], *operands)
        return summands, totals[rank] - before

    results, whole = run_on_ranks(compute_gradients), parts.flatten(0, 2)
    input_gradient = sum(g @ w for g, w in zip(gradients, weights, strict=True))
    torch.testing.assert_close(
        torch.cat([rank_summands.sum(0) for rank_summands, _ in results]), input_gradient
    )
    for rank, (_, weight_gradient) in enumerate(results):
        torch.testing.assert_close(weight_gradient, gradients[rank].flatten(0, 1).t() @ whole)
