"""Iterators over micro-batches of training, validation and test data.

megatron.core builds the datasets (blends, epochs, shuffles, cached indices). Conditions under which
it would fail in an assertion or loop forever are checked before.
:mod:`flagscale.train.data.samplers` defines the order of samples and the share of each rank.

Every rank reads its own micro-batches; tensor- and pipeline-parallel ranks read the same ones.
There is no broadcast, and ranks of a host share the page cache of data files.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flagscale.accelerators.device import current_device
from flagscale.config.arguments.rules.data import uses_external_data
from flagscale.errors import DataError
from flagscale.train.data import external
from flagscale.train.data.chat.conversation_sets import ConversationSets, build_conversation_sets
from flagscale.train.data.phases import apply_phases
from flagscale.train.data.plan import SPLITS, DataPlan, SplitPlan, plan_data
from flagscale.train.data.samplers import MicroBatchSampler, Order, Shard
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.models.base import DOCUMENTS, KEYS, DatasetSpec, get_model_spec

if TYPE_CHECKING:
    from flagscale.train.state import Progress

Batch = dict[str, Tensor]
"""Tensors of a micro-batch on the CPU, by name, as defined by the model family's dataset.

With GPT: ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), each
``[micro_batch_size, seq_length]``.
"""


Batches = Iterator[Batch] | list[Iterator[Batch]]
"""A rank's micro-batches, or a list with one iterator over the same ones per model chunk."""


@dataclass(frozen=True)
class DataIterators:
    """Micro-batches of each split, or None for a split that is not used."""

    train: Batches | None
    valid: Batches | None
    test: Batches | None
    validations: Mapping[str, Batches] = field(default_factory=dict)
    """Instead of ``valid``: validation datasets that are evaluated separately, by name."""


def build_data_iterators(
    args: Any,
    tokenizer: Tokenizer,
    progress: Progress,
    *,
    chunks: int = 1,
    shard: Shard | None = None,
) -> DataIterators:
    """Build the datasets of a run and the iterators that continue after ``progress``.

    See :class:`Datasets`.
    """
    return Datasets(args, tokenizer).build_iterators(progress, chunks=chunks, shard=shard)


class Datasets:
    """Datasets of a run, from which any rank can read any shard.

    All ranks create it, after torch.distributed is initialized.
    """

    def __init__(self, args: Any, tokenizer: Tokenizer) -> None:
        """Build the datasets.

        Args:
            args: resolved arguments (:mod:`flagscale.config.arguments.derive`).
            tokenizer: the run's tokenizer.

        Raises:
            DataError: data is missing, damaged, or was made with another tokenizer.
        """
        self._args = args
        self.remarks: tuple[str, ...] = ()
        """Messages about the data for the user, one per line."""
        self._conversations: ConversationSets | None = None
        if args.sft:
            self._conversations = build_conversation_sets(args, tokenizer)
            self.remarks = self._conversations.remarks
            return
        self._spec = get_model_spec(args).data(args, tokenizer)
        self._function: external.DataFunction | None = None
        if uses_external_data(vars(args)):
            self._function, self._tokenizer = (
                external.find_data_function(args.external_data),
                tokenizer,
            )
            return
        self._plans = _split_validations(plan_data(args, tokenizer))
        self._built = {
            name: _build_datasets(plan, self._spec, tokenizer) for name, plan in self._plans.items()
        }

    def build_iterators(
        self, progress: Progress, *, chunks: int = 1, shard: Shard | None = None
    ) -> DataIterators:
        """Build the iterators that continue after the samples in ``progress``.

        Args:
            progress: samples that the run has consumed.
            chunks: number of model chunks of this rank.
            shard: this rank's part of the data; by default, that of its data-parallel rank.

        Raises:
            DataError: there are too few samples.
        """
        shard = shard or get_own_shard(self._args)
        consumed = (progress.consumed_train_samples, progress.consumed_valid_samples, 0)
        if self._conversations is not None:
            return _build_conversations(self._args, self._conversations, consumed, chunks, shard)
        if self._function is not None:
            return self._build_external(self._function, consumed, chunks, shard)
        iterators = {
            name: [
                _build_split(
                    self._args, plan, split, data, consumed_samples, chunks, shard, self._spec.keys
                )
                for split, data, consumed_samples in zip(
                    plan.splits, self._built[name], consumed, strict=True
                )
            ]
            for name, plan in self._plans.items()
        }
        train, valid, test = iterators.pop("")  # see _split_validations
        sets = {
            name: validation
            for name, (_, validation, _) in iterators.items()
            if validation is not None
        }
        return DataIterators(train, valid, test, sets)

    def _build_external(
        self,
        function: external.DataFunction,
        consumed: tuple[int, int, int],
        chunks: int,
        shard: Shard,
    ) -> DataIterators:
        iterators: list[Batches | None] = []
        for split, consumed_samples in zip(SPLITS, consumed, strict=True):
            samples = external.Samples(shard, consumed_samples)
            batches = external.iter_micro_batches(
                function, self._args, self._tokenizer, split, samples, self._spec
            )
            iterators.append(None if batches is None else _duplicate_for_chunks(batches, chunks))
        return DataIterators(iterators[0], iterators[1], iterators[2])


def get_own_shard(args: Any) -> Shard:
    """Return this rank's part of the data, from its data-parallel rank."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    if args.shares is not None:
        return Shard(args.global_batch_size, args.share.micro_batches)
    if args.meshes is not None:
        sequences = args.meshes.sequences_of(args.stage.mesh, rank)
        return Shard(args.meshes.sequences, (sequences,))
    size = parallel_state.get_data_parallel_world_size()
    return Shard.even(rank, size, args.micro_batch_size)


def _split_validations(plan: DataPlan) -> dict[str, DataPlan]:
    """Split a plan by validation dataset.

    Returns:
        A plan per separately evaluated validation dataset, by name, and the remaining plan as
        ``""``.
    """
    if not plan.validations:
        return {"": plan}
    train, valid, test = plan.splits
    no_train, no_valid, no_test = (replace(split, samples=0, blend=None) for split in plan.splits)
    plans = {"": replace(plan, splits=(train, no_valid, test))}
    for name, blend in plan.validations.items():
        splits = (no_train, replace(valid, blend=blend), no_test)
        plans[name] = replace(plan, splits=splits, phases=None)
    return plans


def _build_datasets(
    plan: DataPlan, kind: DatasetSpec, tokenizer: Tokenizer
) -> list[Dataset[Batch] | None]:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    config = _build_config(plan, kind, tokenizer)
    built_of = kind.mock if plan.mock else kind.indexed
    sizes = [split.samples for split in plan.splits]
    if plan.phases is not None and sizes[0]:
        sizes[0] = plan.phases.max_samples
    builder = BlendedMegatronDatasetBuilder(built_of, sizes, lambda: True, config)
    try:
        built: list[Dataset[Batch] | None] = builder.build()
        if plan.phases is not None and built[0] is not None:
            apply_phases(built[0], plan.phases, plan.cache)
    except (FileNotFoundError, ValueError, EOFError) as error:
        # Only rank 0 writes the cache. A run that is killed meanwhile leaves half a file.
        raise DataError(
            f"the data's index cache cannot be read: {error}",
            hint=f"all hosts must see {plan.cache}; if they do, remove it: it is built anew",
        ) from error
    except IndexError as error:
        raise DataError(f"the blend does not suffice: {error}") from error
    except Exception as error:  # megatron.core wraps a failed write in a bare Exception
        if isinstance(error.__cause__, OSError):
            raise DataError(
                f"the data's index cache cannot be written: {error.__cause__}",
                hint=_cache_hint(plan),
            ) from error
        raise
    return built


def _cache_hint(plan: DataPlan) -> str:
    hint = "set data_cache_path to a directory that all hosts can write"
    if plan.cache_by in ("", "data_cache_path"):
        return hint
    return f"without data_cache_path the cache lies beside {plan.cache_by}; {hint}"


def _build_config(plan: DataPlan, kind: DatasetSpec, tokenizer: Tokenizer) -> Any:
    blends = [split.blend for split in plan.splits]
    per_split = plan.blend is None and not plan.mock
    config = kind.config(
        random_seed=plan.seed,
        sequence_length=kind.length,
        blend=plan.blend.as_config() if plan.blend else None,
        blend_per_split=[b and b.as_config() for b in blends] if per_split else None,
        split=",".join(map(repr, plan.shares)) if plan.blend else None,
        path_to_cache=None if plan.cache is None else str(plan.cache),
        tokenizer=tokenizer,
        **kind.options,
        **plan.reading,
    )
    if config.split_matrix is not None:
        # Unused splits are not built. A small dataset may have no document for them, and
        # megatron.core would then count epochs of an empty split forever.
        for index, split in enumerate(plan.splits):
            if split.samples == 0:
                config.split_matrix[index] = None
    return config


def _build_split(
    args: Any,
    plan: DataPlan,
    split: SplitPlan,
    data: Dataset[Batch] | None,
    consumed: int,
    chunks: int,
    shard: Shard,
    keys: Sequence[str],
) -> Batches | None:
    if data is None or split.samples == 0:
        return None
    order: Order = "wrapped"
    if split.name == "train":
        order = args.dataloader_type
        _require_samples(plan, split, len(data), consumed)  # type: ignore[arg-type]
    return _create_loader(
        args, data, order, consumed, chunks, shard, keys, start_workers=split.name == "train"
    )


def _build_conversations(
    args: Any,
    sets: ConversationSets,
    consumed: tuple[int, int, int],
    chunks: int,
    shard: Shard,
) -> DataIterators:
    """Build the iterators of conversations. Training reads them in another order in each epoch."""
    keys = (*KEYS, DOCUMENTS)

    def create_loader(
        data: Dataset[Batch] | None, order: Order, consumed_samples: int
    ) -> Batches | None:
        if data is None:
            return None
        start_workers = order == "cyclic"
        return _create_loader(
            args, data, order, consumed_samples, chunks, shard, keys, start_workers=start_workers
        )

    valid = {name: create_loader(data, "wrapped", consumed[1]) for name, data in sets.valid.items()}
    return DataIterators(
        train=create_loader(sets.train, "cyclic", consumed[0]),
        valid=valid.pop("", None),
        test=create_loader(sets.test, "wrapped", consumed[2]),
        validations={name: batches for name, batches in valid.items() if batches is not None},
    )


def _create_loader(
    args: Any,
    data: Dataset[Batch],
    order: Order,
    consumed: int,
    chunks: int,
    shard: Shard,
    keys: Sequence[str],
    *,
    start_workers: bool,
) -> Batches:
    """Create the data loader of a dataset for this rank.

    Args:
        start_workers: start the loader's worker processes now.
    """
    sampler = MicroBatchSampler(
        len(data),  # type: ignore[arg-type]
        shard,
        consumed=consumed,
        order=order,
        seed=args.seed,
    )
    loader: DataLoader[Batch] = DataLoader(
        data,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=not current_device().is_host,
        persistent_workers=args.num_workers > 0,
        collate_fn=partial(_collate, keys=keys),
        worker_init_fn=_ignore_stop_signals,
    )
    # iter() starts the worker processes: now for training, and on first use for the test split,
    # which may never be read.
    batches = iter(loader) if start_workers else (batch for batch in loader)
    return _duplicate_for_chunks(batches, chunks)


def _require_samples(plan: DataPlan, split: SplitPlan, available: int, consumed: int) -> None:
    """Check before training that a blend without weights has enough samples.

    Such a blend is read only once.
    """
    needed = max(split.samples, consumed)
    if plan.order == "single" and available < needed:
        raise DataError(
            f"the training data holds {available} samples of {plan.seq_length} tokens, but "
            f"training takes {needed}: data sets without weights are passed through once",
            hint="give each data set of data_path a weight, to repeat it as needed; or set "
            "dataloader_type: cyclic; or train on fewer samples",
        )


def _ignore_stop_signals(_: int) -> None:
    """Ignore stop signals in a data loader's worker process.

    A stop request reaches the whole process group of a rank. The rank needs its loaders to finish
    its last step and save; they exit with it.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collate(samples: list[Batch], *, keys: Sequence[str]) -> Batch:
    return {key: torch.stack([sample[key] for sample in samples]) for key in keys}


def _duplicate_for_chunks(batches: Iterator[Batch], chunks: int) -> Batches:
    """Duplicate the batches for several model chunks.

    Each chunk gets its own dictionaries, but shares the tensors, which must not be written to.
    """
    if chunks == 1:
        return batches
    return [map(dict, copy) for copy in itertools.tee(batches, chunks)]
