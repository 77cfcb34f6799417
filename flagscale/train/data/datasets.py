"""Training, validation and test data as iterators of micro-batches.

megatron.core builds the data sets (blends, epochs, shuffles, cached indices); what it would die
of in an assertion or an endless loop is checked before. The order of samples and the share of a
rank are :mod:`flagscale.train.data.samplers`'s.

Every rank reads its own micro-batches, tensor- and pipeline-parallel ranks the same ones as
their partners: no broadcast, and the pages of a data file are shared by the ranks of a host.
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

from flagscale.accelerators.device import current
from flagscale.config.arguments.external import is_external
from flagscale.errors import DataError
from flagscale.train.data import external
from flagscale.train.data.chat.sets import ConversationSets, conversation_sets
from flagscale.train.data.phases import take_turns
from flagscale.train.data.plan import SPLITS, DataPlan, SplitPlan, plan_data
from flagscale.train.data.samplers import MicroBatchSampler, Order, Shard
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.models.base import DOCUMENTS, KEYS, DataKind, spec_of

if TYPE_CHECKING:
    from flagscale.train.state import Progress

Batch = dict[str, Tensor]
"""What a family's data gives (:class:`DataKind`). With GPT's ``tokens``, ``labels``,
``position_ids`` (int64) and ``loss_mask`` (float32), each ``[micro_batch_size, seq_length]`` on the
CPU."""


Batches = Iterator[Batch] | list[Iterator[Batch]]
"""The micro-batches of a rank, or for each of its model chunks the same ones."""


@dataclass(frozen=True)
class DataIterators:
    """An iterator a split, None for a split that is not used. With several model chunks it is a
    list: one iterator a chunk, all of the same micro-batches."""

    train: Batches | None
    valid: Batches | None
    test: Batches | None
    validations: Mapping[str, Batches] = field(default_factory=dict)
    """In place of ``valid`` the sets that are evaluated each by itself, by name."""


def build_data_iterators(
    args: Any,
    tokenizer: Tokenizer,
    progress: Progress,
    *,
    chunks: int = 1,
    shard: Shard | None = None,
) -> DataIterators:
    """The data of a run that has consumed what ``progress`` says; see :class:`Datasets`."""
    return Datasets(args, tokenizer).iterators(progress, chunks=chunks, shard=shard)


class Datasets:
    """The data sets of a run, from which any rank can take any part. Built on all ranks, after
    torch.distributed is up."""

    def __init__(self, args: Any, tokenizer: Tokenizer) -> None:
        """``args`` has passed :mod:`flagscale.config.arguments.resolve`.

        Raises:
            DataError: data is missing, damaged or of another tokenizer.
        """
        self._args = args
        self.remarks: tuple[str, ...] = ()
        """What a user may want to know of the data, a line each."""
        self._conversations: ConversationSets | None = None
        if args.sft:
            self._conversations = conversation_sets(args, tokenizer)
            self.remarks = self._conversations.remarks
            return
        self._kind = spec_of(args).data(args, tokenizer)
        self._function: external.Function | None = None
        if is_external(vars(args)):
            self._function, self._tokenizer = external.find(args.external_data), tokenizer
            return
        self._plans = _each_by_itself(plan_data(args, tokenizer))
        self._built = {
            name: _build_datasets(plan, self._kind, tokenizer) for name, plan in self._plans.items()
        }

    def iterators(
        self, progress: Progress, *, chunks: int = 1, shard: Shard | None = None
    ) -> DataIterators:
        """The data of a run that has consumed what ``progress`` says. ``shard`` is this rank's part
        of it; without it that of its data-parallel group.

        Raises:
            DataError: there is too little.
        """
        shard = shard or own_shard(self._args)
        consumed = (progress.consumed_train_samples, progress.consumed_valid_samples, 0)
        if self._conversations is not None:
            return _of_conversations(self._args, self._conversations, consumed, chunks, shard)
        if self._function is not None:
            return self._of_function(self._function, consumed, chunks, shard)
        found = {
            name: [
                _iterators(self._args, plan, split, data, taken, chunks, shard, self._kind.keys)
                for split, data, taken in zip(plan.splits, self._built[name], consumed, strict=True)
            ]
            for name, plan in self._plans.items()
        }
        train, valid, test = found.pop("")
        sets = {name: one for name, (_, one, _) in found.items() if one is not None}
        return DataIterators(train, valid, test, sets)

    def _of_function(
        self,
        function: external.Function,
        consumed: tuple[int, int, int],
        chunks: int,
        shard: Shard,
    ) -> DataIterators:
        found: list[Batches | None] = []
        for split, taken in zip(SPLITS, consumed, strict=True):
            samples = external.Samples(shard, taken)
            made = external.batches(
                function, self._args, self._tokenizer, split, samples, self._kind
            )
            found.append(None if made is None else _chunked(made, chunks))
        return DataIterators(found[0], found[1], found[2])


def own_shard(args: Any) -> Shard:
    """This rank's part of the data, of its data-parallel group's."""
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    if args.shares is not None:
        return Shard(args.global_batch_size, args.share.micro_batches)
    if args.meshes is not None:
        own = args.meshes.sequences_of(args.stage.mesh, rank)
        return Shard(args.meshes.sequences, (own,))
    size = parallel_state.get_data_parallel_world_size()
    return Shard.even(rank, size, args.micro_batch_size)


def _each_by_itself(plan: DataPlan) -> dict[str, DataPlan]:
    """By name, a plan of each validation set that is evaluated by itself; as ``""`` that of the
    rest."""
    if not plan.validations:
        return {"": plan}
    train, valid, test = plan.splits
    no_train, no_valid, no_test = (replace(one, samples=0, blend=None) for one in plan.splits)
    made = {"": replace(plan, splits=(train, no_valid, test))}
    for name, blend in plan.validations.items():
        splits = (no_train, replace(valid, blend=blend), no_test)
        made[name] = replace(plan, splits=splits, phases=None)
    return made


def _build_datasets(
    plan: DataPlan, kind: DataKind, tokenizer: Tokenizer
) -> list[Dataset[Batch] | None]:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    config = _config(plan, kind, tokenizer)
    built_of = kind.made_up if plan.mock else kind.real
    sizes = [split.samples for split in plan.splits]
    if plan.phases is not None and sizes[0]:
        sizes[0] = plan.phases.most
    builder = BlendedMegatronDatasetBuilder(built_of, sizes, lambda: True, config)
    try:
        built: list[Dataset[Batch] | None] = builder.build()
        if plan.phases is not None and built[0] is not None:
            take_turns(built[0], plan.phases, plan.cache)
    except (FileNotFoundError, ValueError, EOFError) as error:
        # Only rank 0 writes the cache, and a run killed while it wrote leaves half a file.
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


def _config(plan: DataPlan, kind: DataKind, tokenizer: Tokenizer) -> Any:
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
        # A split that nobody reads is not built: with few documents it may have none, and
        # megatron.core then counts epochs of nothing for ever.
        for index, split in enumerate(plan.splits):
            if split.samples == 0:
                config.split_matrix[index] = None
    return config


def _iterators(
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
        _enough(plan, split, len(data), consumed)  # type: ignore[arg-type]
    return _loaded(args, data, order, consumed, chunks, shard, keys, at_once=split.name == "train")


def _of_conversations(
    args: Any,
    sets: ConversationSets,
    consumed: tuple[int, int, int],
    chunks: int,
    shard: Shard,
) -> DataIterators:
    """Conversations are taken in another order in each pass, until training ends."""
    keys = (*KEYS, DOCUMENTS)

    def loaded(data: Dataset[Batch] | None, order: Order, taken: int) -> Batches | None:
        if data is None:
            return None
        at_once = order == "cyclic"
        return _loaded(args, data, order, taken, chunks, shard, keys, at_once=at_once)

    valid = {name: loaded(one, "wrapped", consumed[1]) for name, one in sets.valid.items()}
    return DataIterators(
        train=loaded(sets.train, "cyclic", consumed[0]),
        valid=valid.pop("", None),
        test=loaded(sets.test, "wrapped", consumed[2]),
        validations={name: one for name, one in valid.items() if one is not None},
    )


def _loaded(
    args: Any,
    data: Dataset[Batch],
    order: Order,
    consumed: int,
    chunks: int,
    shard: Shard,
    keys: Sequence[str],
    *,
    at_once: bool,
) -> Batches:
    """A rank's micro-batches of a data set. ``at_once``: its loaders are sure to be needed."""
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
        pin_memory=not current().is_host,
        persistent_workers=args.num_workers > 0,
        collate_fn=partial(_collate, keys=keys),
        worker_init_fn=_ignore_stop_signals,
    )
    # The loaders' processes start with the first batch that is wanted: at once for training,
    # perhaps never for the test.
    batches = iter(loader) if at_once else (batch for batch in loader)
    return _chunked(batches, chunks)


def _enough(plan: DataPlan, split: SplitPlan, have: int, consumed: int) -> None:
    """A blend without weights is taken once. Say so now, not when it ends in mid-training."""
    needed = max(split.samples, consumed)
    if plan.order == "single" and have < needed:
        raise DataError(
            f"the training data holds {have} samples of {plan.seq_length} tokens, but training "
            f"takes {needed}: data sets without weights are passed through once",
            hint="give each data set of data_path a weight, to repeat it as needed; or set "
            "dataloader_type: cyclic; or train on fewer samples",
        )


def _ignore_stop_signals(_: int) -> None:
    """A stop request goes to a rank's whole process group. The rank ends its last steps and
    saves, for which it needs its loaders; they end with it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _collate(samples: list[Batch], *, keys: Sequence[str]) -> Batch:
    return {key: torch.stack([sample[key] for sample in samples]) for key in keys}


def _chunked(batches: Iterator[Batch], chunks: int) -> Batches:
    """The batches; for several model chunks each gets all of them. A chunk's batch is a
    dictionary of its own, but its tensors are shared: they must not be written to."""
    if chunks == 1:
        return batches
    return [map(dict, copy) for copy in itertools.tee(batches, chunks)]
