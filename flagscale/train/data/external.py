"""Micro-batches that a function of the user's makes (``dataloader_type: external``).

It is called as ``function(args, tokenizer, split, samples)``, once for each split. ``split`` is
``train``, ``valid`` or ``test``; ``samples`` says which samples this rank takes: iterating over it
gives for one micro-batch after the other the list of their numbers, without end, from where the run
goes on. What the function returns is iterated over, a mapping of tensors for each micro-batch; or
None, where it has no such split. Ranks that train on the same samples get the same numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flagscale.config.arguments.external import NAME, NO_MODULE, is_file, place
from flagscale.config.arguments.values import nearest
from flagscale.errors import DataError
from flagscale.train.data.samplers import MicroBatchSampler, Shard
from flagscale.train.models.base import DataKind, spec_of

if TYPE_CHECKING:
    from flagscale.train.data.tokenizers import Tokenizer

_FLOATS = ("loss_mask",)
_CAN_BE_LEFT_OUT = ("loss_mask", "position_ids")


class Samples:
    """The samples of a rank, by their numbers: a list for each micro-batch, without end.

    ``consumed`` have been taken by all ranks before; of every ``width`` consecutive ones this rank
    takes ``micro_batches``, each a range of places among them.
    """

    def __init__(self, shard: Shard, consumed: int) -> None:
        self._shard = shard
        self.consumed, self.width = consumed, shard.width
        self.micro_batches = shard.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(MicroBatchSampler(sys.maxsize, self._shard, consumed=self.consumed))


Function = Callable[[Any, "Tokenizer", str, Samples], Iterable[Mapping[str, Tensor]] | None]


def find(text: str) -> Function:
    """The function that ``external_data`` names.

    Raises:
        DataError: there is none.
    """
    where, name = place(text)
    module = _of_file(Path(where)) if is_file(where) else _of_package(where)
    found = getattr(module, name, None)
    if not callable(found):
        near = nearest(name, [n for n, value in vars(module).items() if callable(value)])
        hint = f"did you mean {' or '.join(near)}?" if near else None
        raise DataError(f"{NAME}: {where} has no function {name}", hint=hint)
    function: Function = found
    return function


def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DataError(f"{NAME}: no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _of_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks another one
        raise DataError(
            f"{NAME}: there is no module {name}",
            hint=NO_MODULE,
        ) from error


def batches(
    function: Function,
    args: Any,
    tokenizer: Tokenizer,
    split: str,
    samples: Samples,
    kind: DataKind,
) -> Iterator[dict[str, Tensor]] | None:
    """The micro-batches of a rank, each checked: for each of the kind's keys a tensor
    ``[samples, length]``. Where ``loss_mask`` is missing all tokens count, where ``position_ids``
    is they are counted from 0. None where the function has no such split.

    Raises:
        DataError: one is not as it has to be, or there are no more.
    """
    made = function(args, tokenizer, split, samples)
    if made is None:
        return None
    if not isinstance(made, Iterable):
        found = type(made).__name__
        raise DataError(f"{NAME}: for {split} expected an iterable or None, found {found}")
    shape = len(samples.micro_batches[0]), kind.length
    vocabulary = spec_of(args).vocabulary(tokenizer)
    return _Checked(split, kind.keys, shape, vocabulary).each(made)


class _Checked:
    """What has to be true of each micro-batch of a split."""

    def __init__(
        self, split: str, keys: tuple[str, ...], shape: tuple[int, int], vocabulary: int
    ) -> None:
        self._split, self._keys = split, keys
        self._shape, self._vocabulary = shape, vocabulary

    def each(self, made: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        number = 0
        for number, batch in enumerate(made, 1):
            yield self._checked(batch, f"{NAME}: micro-batch {number} of {self._split}")
        raise DataError(
            f"{NAME}: {self._split} ended after {number} micro-batches of this rank, and training "
            "goes on",
            hint="begin anew after the last sample; or train on fewer (train_samples, train_iters)",
        )

    def _checked(self, batch: Any, where: str) -> dict[str, Tensor]:
        if not isinstance(batch, Mapping):
            raise DataError(f"{where}: expected tensors by name, found {type(batch).__name__}")
        missing = [k for k in self._keys if k not in batch and k not in _CAN_BE_LEFT_OUT]
        if missing:
            has = ", ".join(map(str, batch)) or "nothing"
            raise DataError(f"{where} lacks {', '.join(missing)}; it has {has}")
        found = {}
        for key in self._keys:
            tensor = batch.get(key)
            found[key] = self._usual(key) if tensor is None else self._tensor(key, tensor, where)
        return found

    def _usual(self, key: str) -> Tensor:
        if key in _FLOATS:
            return torch.ones(self._shape)
        return torch.arange(self._shape[1]).expand(self._shape).contiguous()

    def _tensor(self, key: str, tensor: Any, where: str) -> Tensor:
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != self._shape:
            found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DataError(f"{where}: {key} is {found}, expected a tensor {list(self._shape)}")
        if key in _FLOATS:
            return tensor.float()
        if tensor.is_floating_point() or tensor.is_complex():
            raise DataError(f"{where}: {key} is of {tensor.dtype}, expected integers")
        if key == "tokens" and not 0 <= int(tensor.min()) <= int(tensor.max()) < self._vocabulary:
            low, high = int(tensor.min()), int(tensor.max())
            raise DataError(
                f"{where}: tokens are {low} to {high}, and the {self._vocabulary} known ones are "
                f"0 to {self._vocabulary - 1}"
            )
        return tensor.long()
