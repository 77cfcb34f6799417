"""Products that hide their exchange compute what the plain ones do, for any number of ranks.

Ranks are threads whose workspaces are plain tensors that each can read; a device's second stream
does its work at once. What streams have to wait for is for tests on GPUs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from flagscale.train.layers import symmetric

pytestmark = pytest.mark.torch

SEQUENCE, BATCH, IN, OUT = 6, 2, 5, 3
SECONDS = 20


class World:
    """What the ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.buffers = [torch.full((1 << 14,), 0xFF, dtype=torch.uint8) for _ in range(size)]
        self.signals: set[tuple[int, int, int]] = set()
        self.changed = threading.Condition()
        self.all = threading.Barrier(size, timeout=SECONDS)


class Handle:
    """torch's handle of a workspace, of one rank."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank, self.world_size = world, rank, world.size

    def barrier(self, channel: int) -> None:
        self.world.all.wait()

    def get_buffer(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, offset: int
    ) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return self.world.buffers[rank].view(dtype)[offset : offset + count].view(*shape)

    def put_signal(self, rank: int, channel: int) -> None:
        self._turn((rank, self.rank, channel), on=True)

    def wait_signal(self, rank: int, channel: int) -> None:
        self._turn((self.rank, rank, channel), on=False)

    def _turn(self, signal: tuple[int, int, int], *, on: bool) -> None:
        world = self.world
        with world.changed:
            assert world.changed.wait_for(lambda: (signal in world.signals) != on, SECONDS)
            world.signals ^= {signal}
            world.changed.notify_all()


@pytest.fixture(params=[2, 3, 4])
def size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture
def on_ranks(size: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs a function of a rank on all of them, twice over the same workspace."""
    world, own = World(size), threading.local()
    monkeypatch.setattr(symmetric, "workspace", lambda *_: own.handle)

    def run(function: Callable[[int], Any]) -> list[Any]:
        def rank(number: int) -> Any:
            own.handle = Handle(world, number)
            function(number)
            return function(number)

        with ThreadPoolExecutor(size) as pool:
            found = [*pool.map(rank, range(size))]
        assert not world.signals
        return found

    return run


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("wanted", [True, False])
def test_gathered_product(size: int, on_ranks: Callable[..., list[Any]], wanted: bool) -> None:
    parts, factor = drawn(size, SEQUENCE, BATCH, IN), drawn(OUT, IN).t()
    whole = parts.flatten(0, 1)
    for found, product in on_ranks(
        lambda rank: symmetric.gathered_product(parts[rank], factor, size, "", wanted)
    ):
        torch.testing.assert_close(product, whole @ factor)
        torch.testing.assert_close(found, whole if wanted else whole.new_empty(0))


def test_scattered_product(size: int, on_ranks: Callable[..., list[Any]]) -> None:
    inputs, factors = drawn(size, size * SEQUENCE, BATCH, IN), drawn(size, IN, OUT)
    expected = sum(i @ f for i, f in zip(inputs, factors, strict=True))
    found = on_ranks(
        lambda rank: symmetric.scattered_product(inputs[rank], factors[rank], size, "")
    )
    assert {each.shape for each in found} == {(size, SEQUENCE, BATCH, OUT)}
    torch.testing.assert_close(torch.cat([each.sum(0) for each in found]), expected)


@pytest.mark.parametrize("added", [True, False])
def test_gradients_of_a_gathered_input(
    size: int, on_ranks: Callable[..., list[Any]], added: bool
) -> None:
    parts, weights = drawn(size, SEQUENCE, BATCH, IN), drawn(size, OUT, IN)
    gradients = drawn(size, size * SEQUENCE, BATCH, OUT)
    totals = torch.zeros(size, OUT, IN, dtype=torch.float64)

    def of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        given = gradients[rank], weights[rank], parts[rank], size, ""
        if not added:
            return symmetric.shared_gradients(*given)
        before = totals[rank].clone()
        summands = symmetric.add_shared_gradients(totals[rank], *given)
        return summands, totals[rank] - before

    found, whole = on_ranks(of), parts.flatten(0, 2)
    of_input = sum(g @ w for g, w in zip(gradients, weights, strict=True))
    torch.testing.assert_close(torch.cat([each.sum(0) for each, _ in found]), of_input)
    for rank, (_, of_weight) in enumerate(found):
        torch.testing.assert_close(of_weight, gradients[rank].flatten(0, 1).t() @ whole)
