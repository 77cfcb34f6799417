"""Micro-batches from a function of the user (``dataloader_type: external``).

It is called as ``function(args, tokenizer, split, samples)``, once per split. ``split`` is
``train``, ``valid`` or ``test``. Iterating over ``samples`` yields, for each micro-batch of this
rank, the list of its sample numbers, without end, starting where the run continues. The function
returns an iterable with a mapping of tensors per micro-batch, or None if it has no such split.
Ranks that train on the same samples get the same numbers.
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

from flagscale.config.arguments.spec.paths import (
    EXTERNAL_DATA,
    MODULE_HINT,
    is_python_file,
    parse_function_path,
)
from flagscale.config.arguments.spec.values import nearest_names
from flagscale.errors import DataError
from flagscale.train.data.samplers import MicroBatchSampler, Shard
from flagscale.train.models.base import DatasetSpec, get_model_spec

if TYPE_CHECKING:
    from flagscale.train.data.tokenizers import Tokenizer

_FLOATS = ("loss_mask",)
_OPTIONAL = ("loss_mask", "position_ids")


class Samples:
    """Sample numbers of a rank: an endless iterable with a list per micro-batch.

    All ranks together have consumed ``consumed`` samples before. Of every ``width`` consecutive
    samples, this rank takes ``micro_batches``, each a range of positions among them.
    """

    def __init__(self, shard: Shard, consumed: int) -> None:
        self._shard = shard
        self.consumed, self.width = consumed, shard.width
        self.micro_batches = shard.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(MicroBatchSampler(sys.maxsize, self._shard, consumed=self.consumed))


DataFunction = Callable[[Any, "Tokenizer", str, Samples], Iterable[Mapping[str, Tensor]] | None]


def find_data_function(text: str) -> DataFunction:
    """Import the function that ``external_data`` names.

    Raises:
        DataError: the file, the module or the function does not exist.
    """
    module_name, name = parse_function_path(text)
    module = (
        _load_file(Path(module_name))
        if is_python_file(module_name)
        else _import_module(module_name)
    )
    attribute = getattr(module, name, None)
    if not callable(attribute):
        near = nearest_names(name, [n for n, value in vars(module).items() if callable(value)])
        hint = f"did you mean {' or '.join(near)}?" if near else None
        raise DataError(f"{EXTERNAL_DATA}: {module_name} has no function {name}", hint=hint)
    function: DataFunction = attribute
    return function


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DataError(f"{EXTERNAL_DATA}: no file {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists; an import inside it failed
        raise DataError(
            f"{EXTERNAL_DATA}: there is no module {name}",
            hint=MODULE_HINT,
        ) from error


def iter_micro_batches(
    function: DataFunction,
    args: Any,
    tokenizer: Tokenizer,
    split: str,
    samples: Samples,
    kind: DatasetSpec,
) -> Iterator[dict[str, Tensor]] | None:
    """Return an iterator over a rank's micro-batches, each of them checked.

    Each has a tensor ``[samples, length]`` for each of the data kind's keys. A missing
    ``loss_mask`` is 1 for all tokens; missing ``position_ids`` count from 0.

    Returns:
        None if the function has no such split.

    Raises:
        DataError: a micro-batch is invalid, or the iterable ends.
    """
    batches = function(args, tokenizer, split, samples)
    if batches is None:
        return None
    if not isinstance(batches, Iterable):
        type_name = type(batches).__name__
        raise DataError(
            f"{EXTERNAL_DATA}: for {split} expected an iterable or None, found {type_name}"
        )
    shape = len(samples.micro_batches[0]), kind.length
    vocabulary = get_model_spec(args).vocabulary(tokenizer)
    return _BatchChecker(split, kind.keys, shape, vocabulary).iter_checked(batches)


class _BatchChecker:
    """Checks the micro-batches of a split and adds default tensors."""

    def __init__(
        self, split: str, keys: tuple[str, ...], shape: tuple[int, int], vocabulary: int
    ) -> None:
        self._split, self._keys = split, keys
        self._shape, self._vocabulary = shape, vocabulary

    def iter_checked(self, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        number = 0
        for number, batch in enumerate(batches, 1):
            yield self._check_batch(
                batch, f"{EXTERNAL_DATA}: micro-batch {number} of {self._split}"
            )
        raise DataError(
            f"{EXTERNAL_DATA}: {self._split} ended after {number} micro-batches of this rank, "
            "and training goes on",
            hint="begin anew after the last sample; or train on fewer (train_samples, train_iters)",
        )

    def _check_batch(self, batch: Any, where: str) -> dict[str, Tensor]:
        if not isinstance(batch, Mapping):
            raise DataError(f"{where}: expected tensors by name, found {type(batch).__name__}")
        missing = [k for k in self._keys if k not in batch and k not in _OPTIONAL]
        if missing:
            has = ", ".join(map(str, batch)) or "nothing"
            raise DataError(f"{where} lacks {', '.join(missing)}; it has {has}")
        tensors = {}
        for key in self._keys:
            tensor = batch.get(key)
            tensors[key] = (
                self._make_default(key)
                if tensor is None
                else self._check_tensor(key, tensor, where)
            )
        return tensors

    def _make_default(self, key: str) -> Tensor:
        if key in _FLOATS:
            return torch.ones(self._shape)
        return torch.arange(self._shape[1]).expand(self._shape).contiguous()

    def _check_tensor(self, key: str, tensor: Any, where: str) -> Tensor:
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != self._shape:
            actual = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise DataError(f"{where}: {key} is {actual}, expected a tensor {list(self._shape)}")
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
