"""One update of Adam on weights and moments of any format (:mod:`.state_formats`).

On devices that compile it is one kernel, which reads and writes every tensor once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch

from flagscale.config.arguments.rules.optimizer_states import BLOCK_WEIGHTS
from flagscale.train.device import compile_disabled
from flagscale.train.layers.jit import compiled_if_faster, specialized_integers
from flagscale.train.optim.state_formats import (
    DEVICE_PART,
    HOST_PART,
    NO_THRESHOLDS,
    Format,
    Tensors,
    WeightFormat,
    as_rows,
    block_parts,
    draw_thresholds,
)

_MAX_VARIANTS = 64
"""Number of combinations of formats, dtypes and shapes that may be compiled."""
_COMPILED_HOST_PART = 1 << 20
"""Weights that compiled code updates at once on the host."""


class AdamFormats(NamedTuple):
    """Formats of the weights and of both moments."""

    weights: WeightFormat
    first_moment: Format
    second_moment: Format


class AdamTensors(NamedTuple):
    """Tensors of the weights and of both moments, in their formats."""

    weights: Tensors
    first_moment: Tensors
    second_moment: Tensors

    def cut(self, formats: AdamFormats, part: slice) -> AdamTensors:
        """Return the flat tensors of a part of the weights, which begins with a block."""
        return AdamTensors(
            *(form.cut(tensors, part) for form, tensors in zip(formats, self, strict=True))
        )

    def in_host_memory(self) -> Tensors:
        """Return the tensors that are in host memory if the states are offloaded: all except for
        the model's weights.
        """
        return (*self.weights[1:], *self.first_moment, *self.second_moment)

    def replace_host(self, tensors: Sequence[torch.Tensor]) -> AdamTensors:
        """Return the model's weights with other tensors than those of :meth:`in_host_memory`."""
        remaining = iter(tensors)
        return AdamTensors(
            (self.weights[0], *islice(remaining, len(self.weights) - 1)),
            tuple(islice(remaining, len(self.first_moment))),
            tuple(remaining),
        )


def hyperparameters(
    group: Mapping[str, Any], *, is_decoupled: bool, device: torch.device
) -> torch.Tensor:
    """Return what an update depends on, as a tensor: compiled code does not depend on its values.

    Args:
        group: a parameter group after its step count has been incremented.
        is_decoupled: weight decay is AdamW's.
        device: device of the weights.
    """
    (beta1, beta2), step, decay = group["betas"], group["step"], group["weight_decay"]
    values = [
        1 - group["lr"] * decay if is_decoupled else decay,
        group["lr"] / (1 - beta1**step),
        1 - beta1,
        beta2,
        1 - beta2,
        (1 - beta2**step) ** 0.5,
        group["eps"],
    ]
    # A copy from pinned memory does not synchronize with the device.
    is_pinned = device.type != "cpu"
    return torch.tensor(values, dtype=torch.float32, pin_memory=is_pinned).to(
        device, non_blocking=True
    )


def rounding_key(*identity: object) -> int:
    """Return an int64 key of the thresholds of a tensor, from what identifies it and the step."""
    digest = hashlib.blake2b(repr(identity).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@functools.cache
def get_update(
    formats: AdamFormats, *, is_decoupled: bool, compiles_on_host: bool = False
) -> Update:
    """Return the update of weights and moments of these formats.

    Args:
        formats: formats of weights and moments.
        is_decoupled: weight decay is AdamW's.
        compiles_on_host: compile the update on the host as well. Compilation takes up to a minute;
            the states of a large model are then updated in a tenth of the time.
    """
    return Update(formats, is_decoupled=is_decoupled, compiles_on_host=compiles_on_host)


class Update:
    """Update of weights and moments in place."""

    def __init__(self, formats: AdamFormats, *, is_decoupled: bool, compiles_on_host: bool) -> None:
        self._formats = formats
        self._is_decoupled = is_decoupled
        self._is_rounded = any(form.is_rounded for form in formats)
        self._host_part = HOST_PART
        self._update_blocks = compiled_if_faster(dynamic=True, max_shapes=_MAX_VARIANTS)(
            self._update_rows
        )
        if compiles_on_host and not compile_disabled():
            if shutil.which(os.environ.get("CXX", "g++")) is None:
                warnings.warn(
                    "there is no C++ compiler (g++ or $CXX): updates of the optimizer's states in "
                    "host memory take ten times as long",
                    stacklevel=2,
                )
            else:
                self._host_part = _COMPILED_HOST_PART
                self._update_blocks = torch.compile(self._update_rows, fullgraph=True, dynamic=True)

    def __call__(
        self, tensors: AdamTensors, gradient: torch.Tensor, parameters: torch.Tensor, key: int
    ) -> None:
        """Update weights and moments.

        Args:
            tensors: the tensors of the formats, all on one device.
            gradient: flat, of any dtype.
            parameters: result of :func:`hyperparameters`.
            key: result of :func:`rounding_key`.
        """
        # The formats' numbers of bits are integers.
        with nullcontext() if compile_disabled() else specialized_integers():
            self._update_parts(tensors, gradient, parameters, key)

    def _update_parts(
        self, tensors: AdamTensors, gradient: torch.Tensor, parameters: torch.Tensor, key: int
    ) -> None:
        most = self._host_part if gradient.device.type == "cpu" else DEVICE_PART
        for part in block_parts(gradient.numel(), most):
            flat_tensors = tensors.cut(self._formats, part)
            rows = [f.rows(flat) for f, flat in zip(self._formats, flat_tensors, strict=True)]
            # Parts begin at multiples of powers of two: the keys of all weights differ.
            key_tensor = torch.full((), key ^ part.start, dtype=torch.int64, device=gradient.device)
            is_whole = (part.stop - part.start) % BLOCK_WEIGHTS == 0
            # The last block is shorter; another compilation would take longer than it saves.
            update = self._update_blocks if is_whole else self._update_rows
            update(as_rows(gradient[part]), parameters, key_tensor, *rows)

    def _update_rows(
        self,
        gradient: torch.Tensor,
        parameters: torch.Tensor,
        key: torch.Tensor,
        weights: Tensors,
        first_moment: Tensors,
        second_moment: Tensors,
    ) -> None:
        formats = self._formats
        thresholds = draw_thresholds(key, gradient) if self._is_rounded else NO_THRESHOLDS
        decay, rate, take1, keep2, take2, correction, epsilon = parameters
        value = formats.weights.read(weights)
        mean = formats.first_moment.read(first_moment)
        square = formats.second_moment.read(second_moment)
        slope = gradient.float()
        if self._is_decoupled:
            value = value * decay
        else:
            slope = slope + value * decay
        mean = torch.lerp(mean, slope, take1)
        square = square * keep2 + slope * slope * take2
        value = value - rate * mean / (square.sqrt() / correction + epsilon)
        formats.weights.write(weights, value, thresholds.weights)
        formats.first_moment.write(first_moment, mean, thresholds.first_moment)
        formats.second_moment.write(second_moment, square, thresholds.second_moment)
