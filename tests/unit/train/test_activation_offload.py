"""Activations in host memory between the passes of their layer, on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from flagscale.train.layers.activation_offload import (
    LayerOffload,
    Transfers,
    copy_deadlines,
)

pytestmark = pytest.mark.torch

WIDTH = 64


class Layer(torch.nn.Module):
    """Layer that keeps its input and the output of its activation function."""

    def __init__(self, number: int, log: list[str]) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.number, self.log = number, log
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: Any, shared: Any = None) -> tuple[Any, None]:
        self.log.append(f"forward {self.number}")
        activated: Any = torch.tanh(self.linear(hidden_states))
        activated.register_hook(lambda _: self.log.append(f"backward {self.number}"))
        return activated * shared, None


class RecordedTransfers(Transfers):
    """Copies that are recorded, with the device memory that they read."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(torch.device("cpu"))
        self.log = log
        self.sources: list[Any] = []
        self.bytes = 0

    def copy_to_host(self, tensors: Sequence[Any]) -> Any:
        self.log.append("to host")
        reference: Any = StorageWeakRef
        self.sources += [reference(tensor.untyped_storage()) for tensor in tensors]
        self.bytes += sum(tensor.numel() for tensor in tensors)
        return super().copy_to_host(tensors)

    def copy_to_device(self, buffers: Sequence[Any]) -> Any:
        self.log.append("to device")
        return super().copy_to_device(buffers)

    @property
    def host_buffers(self) -> int:
        return sum(map(len, self._free_buffers.values()))


def run_layers(layers: Sequence[Layer]) -> Any:
    hidden, shared = torch.ones(16, WIDTH, requires_grad=True) * 2, torch.full((16, WIDTH), 0.5)
    for layer in layers:
        hidden, _ = layer(hidden_states=hidden, shared=shared)
    return hidden.square().sum()


def gradients(layers: Sequence[Layer]) -> list[Any]:
    parameters: list[Any] = [p for layer in layers for p in layer.parameters()]
    return [parameter.grad.clone() for parameter in parameters]


@pytest.mark.parametrize(
    ("layers", "offloaded", "expected"),
    [
        (4, 3, [1, 2, 3]),
        (8, 2, [4, 7]),
        (8, 4, [2, 4, 6, 7]),
        (2, 1, [1]),
    ],
)
def test_copies_are_spread_over_the_layers(
    layers: int, offloaded: int, expected: list[int]
) -> None:
    assert copy_deadlines(layers, offloaded) == expected


def test_offloaded_layers_free_their_memory_and_get_it_back() -> None:
    log: list[str] = []
    layers = [Layer(number, log) for number in range(4)]
    run_layers(layers).backward()
    expected = gradients(layers)
    log.clear()
    for layer in layers:
        layer.zero_grad()
    transfers = RecordedTransfers(log)
    LayerOffload(layers, 3, transfers, smallest=1)
    for micro_batch in range(2):
        loss = run_layers(layers)
        # The input of a layer and the output of its tanh. The input of the next layer is saved by
        # that layer; inputs that layers share stay.
        assert transfers.bytes == 4 * 16 * WIDTH * 2 * 3 * (micro_batch + 1)
        assert [source.expired() for source in transfers.sources[-6:]] == [True] * 6
        loss.backward()
    assert all(
        torch.equal(actual, 2 * gradient)
        for actual, gradient in zip(gradients(layers), expected, strict=True)
    )
    assert transfers.host_buffers == 6  # reused by the second micro-batch
    assert log[: len(log) // 2] == [
        "forward 0", "to host", "forward 1", "to host", "forward 2", "to host", "forward 3",
        "to device", "backward 3", "to device", "backward 2", "to device", "backward 1",
        "backward 0",
    ]  # fmt: skip


def test_micro_batches_in_flight_are_kept_apart() -> None:
    log: list[str] = []
    layers = [Layer(number, log) for number in range(3)]
    LayerOffload(layers, 2, RecordedTransfers(log), smallest=1)
    first, second = run_layers(layers), run_layers(layers)
    first.backward()
    once = gradients(layers)
    second.backward()
    twice = gradients(layers)
    assert all(torch.equal(2 * a, b) for a, b in zip(once, twice, strict=True))


@pytest.mark.parametrize(
    ("smallest", "training"), [(16 * WIDTH + 1, True), (1, False)], ids=["small", "evaluation"]
)
def test_nothing_is_copied(smallest: int, training: bool) -> None:
    log: list[str] = []
    layers = [Layer(number, log).train(training) for number in range(3)]
    transfers = RecordedTransfers(log)
    LayerOffload(layers, 2, transfers, smallest=smallest)
    run_layers(layers).backward()
    assert transfers.bytes == 0


def test_a_failing_layer_leaves_no_hooks_behind() -> None:
    log: list[str] = []
    layers = [Layer(number, log) for number in range(3)]
    transfers = RecordedTransfers(log)
    LayerOffload(layers, 2, transfers, smallest=1)
    with pytest.raises(TypeError):
        layers[0](hidden_states=torch.ones(16, WIDTH), shared=None)
    loss: Any = torch.tanh(torch.ones(16, WIDTH, requires_grad=True)).sum()
    loss.backward()
    assert transfers.bytes == 0
