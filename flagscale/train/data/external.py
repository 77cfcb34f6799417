"""Micro-batches from a function of the user (``dataloader_type: external``).

The argument ``external_data`` names the function. It is called as ``function(args, tokenizer,
split, samples)``, once per split. ``split`` is ``train``, ``valid`` or ``test``. ``samples`` is an
endless iterable: for each micro-batch of this rank it yields the list of its sample numbers, from
the sample at which the run continues. Ranks that train on the same samples, such as
tensor-parallel ranks, get the same numbers. The function returns an iterable with a mapping of
tensors per micro-batch, or None if it has no such split.
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

_FLOAT_KEYS = ("loss_mask",)
_OPTIONAL_KEYS = ("loss_mask", "position_ids")


class Samples:
    """Sample numbers of a rank: an endless iterable with a list per micro-batch.

    Attributes:
        consumed: samples that all ranks together have consumed before.
        width: number of consecutive samples that the ranks divide between them.
        micro_batches: this rank's micro-batches of every ``width`` samples, each a range of
            positions in ``[0, width)``.
    """

    def __init__(self, shard: Shard, consumed: int) -> None:
        self._shard = shard
        self.consumed, self.width = consumed, shard.width
        self.micro_batches = shard.micro_batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(MicroBatchSampler(sys.maxsize, self._shard, consumed=self.consumed))


DataFunction = Callable[[Any, "Tokenizer", str, Samples], Iterable[Mapping[str, Tensor]] | None]


def find_data_function(function_path: str) -> DataFunction:
    """Import the function that ``external_data`` names.

    Args:
        function_path: ``module:function`` or ``file.py:function``.

    Raises:
        DataError: the file, the module or the function does not exist.
    """
    module_name, function_name = parse_function_path(function_path)
    module = (
        _load_file(Path(module_name))
        if is_python_file(module_name)
        else _import_module(module_name)
    )
    attribute = getattr(module, function_name, None)
    if not callable(attribute):
        similar_names = nearest_names(
            function_name, [n for n, value in vars(module).items() if callable(value)]
        )
        hint = f"did you mean {' or '.join(similar_names)}?" if similar_names else None
        raise DataError(
            f"{EXTERNAL_DATA}: {module_name} has no function {function_name}", hint=hint
        )
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
    dataset_spec: DatasetSpec,
) -> Iterator[dict[str, Tensor]] | None:
    """Return an iterator over a rank's micro-batches, each of them checked.

    A micro-batch has a tensor of shape ``[micro_batch_size, length]`` for each key of
    ``dataset_spec``. A missing ``loss_mask`` is 1 for all tokens; missing ``position_ids`` count
    from 0.

    Args:
        function: the user's function.
        args: resolved training arguments.
        tokenizer: the run's tokenizer.
        split: ``train``, ``valid`` or ``test``.
        samples: sample numbers of this rank.
        dataset_spec: keys and length of a sample.

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
    shape = len(samples.micro_batches[0]), dataset_spec.length
    vocabulary_size = get_model_spec(args).vocabulary(tokenizer)
    return _BatchChecker(split, dataset_spec.keys, shape, vocabulary_size).iter_checked(batches)


class _BatchChecker:
    """Checks the micro-batches of a split and adds default tensors.

    ``shape`` is ``[micro_batch_size, length]``; ``vocabulary_size`` is the number of valid token
    ids.
    """

    def __init__(
        self, split: str, keys: tuple[str, ...], shape: tuple[int, int], vocabulary_size: int
    ) -> None:
        self._split, self._keys = split, keys
        self._shape, self._vocabulary_size = shape, vocabulary_size

    def iter_checked(self, batches: Iterable[Mapping[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Check and yield the micro-batches. Raise DataError when they end."""
        number = 0
        for number, batch in enumerate(batches, 1):
            yield self._check_batch(
                batch, f"{EXTERNAL_DATA}: micro-batch {number} of {self._split}"
            )
        raise DataError(
            f"{EXTERNAL_DATA}: {self._split} ended after {number} micro-batches of this rank, "
            "before training did",
            hint="begin again after the last sample, or reduce train_samples or train_iters",
        )

    def _check_batch(self, batch: Any, batch_name: str) -> dict[str, Tensor]:
        if not isinstance(batch, Mapping):
            raise DataError(f"{batch_name}: expected tensors by name, found {type(batch).__name__}")
        missing_keys = [k for k in self._keys if k not in batch and k not in _OPTIONAL_KEYS]
        if missing_keys:
            present_keys = ", ".join(map(str, batch)) or "nothing"
            raise DataError(f"{batch_name} lacks {', '.join(missing_keys)}; it has {present_keys}")
        tensors = {}
        for key in self._keys:
            tensor = batch.get(key)
            tensors[key] = (
                self._make_default(key)
                if tensor is None
                else self._check_tensor(key, tensor, batch_name)
            )
        return tensors

    def _make_default(self, key: str) -> Tensor:
        if key in _FLOAT_KEYS:
            return torch.ones(self._shape)
        return torch.arange(self._shape[1]).expand(self._shape).contiguous()

    def _check_tensor(self, key: str, tensor: Any, batch_name: str) -> Tensor:
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != self._shape:
            actual_shape = (
                list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            )
            raise DataError(
                f"{batch_name}: {key} is {actual_shape}, expected a tensor {list(self._shape)}"
            )
        if key in _FLOAT_KEYS:
            return tensor.float()
        if tensor.is_floating_point() or tensor.is_complex():
            raise DataError(f"{batch_name}: {key} is of {tensor.dtype}, expected integers")
        size = self._vocabulary_size
        if key == "tokens" and not 0 <= int(tensor.min()) <= int(tensor.max()) < size:
            min_token, max_token = int(tensor.min()), int(tensor.max())
            raise DataError(
                f"{batch_name}: tokens are {min_token} to {max_token}, expected ids of the "
                f"vocabulary, 0 to {size - 1}"
            )
        return tensor.long()
