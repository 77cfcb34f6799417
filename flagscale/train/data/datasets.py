"""Iterators over micro-batches of training, validation and test data.

megatron.core builds the datasets (blends, epochs, shuffles, cached indices). Conditions under which
it would fail in an assertion or loop forever are checked before.
:mod:`flagscale.train.data.samplers` defines the order of samples and the samples that each rank
reads. :mod:`flagscale.train.setup` creates :class:`Datasets`, and the trainer reads the iterators.

Every rank reads its own micro-batches; tensor- and pipeline-parallel ranks read the same ones.
There is no broadcast, and ranks of a host share the page cache of data files.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flagscale.accelerators.device import current_device
from flagscale.config.arguments.rules.data import trains_on_conversations, uses_external_data
from flagscale.errors import DataError
from flagscale.train.data import external
from flagscale.train.data.chat.conversation_sets import ConversationSets, build_conversation_sets
from flagscale.train.data.chat.packed_preferences import REFERENCE_KEY, collate_pairs
from flagscale.train.data.phases import apply_phases
from flagscale.train.data.plan import SPLITS, DataPlan, SplitPlan, plan_data
from flagscale.train.data.samplers import MicroBatchSampler, SampleOrder, Shard
from flagscale.train.data.tokenizers import Tokenizer
from flagscale.train.models.base import (
    BATCH_KEYS,
    DOCUMENT_NUMBERS_KEY,
    DatasetSpec,
    get_model_spec,
)

if TYPE_CHECKING:
    from flagscale.train.state import Progress

Batch = dict[str, Tensor]
"""Tensors of a micro-batch on the CPU, by name, as defined by the model family's dataset.

With GPT: ``tokens``, ``labels``, ``position_ids`` (int64) and ``loss_mask`` (float32), each
``[micro_batch_size, seq_length]``. Pairs of conversations have twice as many rows.
"""


Collate = Callable[[list[Batch]], Batch]
"""Function that combines samples to a micro-batch."""

Batches = Iterator[Batch] | list[Iterator[Batch]]
"""A rank's micro-batches. With several model chunks (virtual pipeline stages), a list with one
iterator per chunk; all of them yield the same micro-batches.
"""


@dataclass(frozen=True)
class DataIterators:
    """Micro-batches of each split.

    Attributes:
        train: training data; None if the run does not train.
        valid: validation data; None without evaluation or with ``validation_sets``.
        test: test data; None without a final test.
        validation_sets: data of the validation datasets that are evaluated separately, by name.
    """

    train: Batches | None
    valid: Batches | None
    test: Batches | None
    validation_sets: Mapping[str, Batches] = field(default_factory=dict)


def build_data_iterators(
    args: Any,
    tokenizer: Tokenizer,
    progress: Progress,
    *,
    model_chunks: int = 1,
    shard: Shard | None = None,
) -> DataIterators:
    """Build the datasets of a run and the iterators that continue after ``progress``.

    See :class:`Datasets` and :meth:`Datasets.build_iterators` for arguments and errors.
    """
    return Datasets(args, tokenizer).build_iterators(
        progress, model_chunks=model_chunks, shard=shard
    )


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
        self.conversations: ConversationSets | None = None
        """Conversations, or pairs of them; None for other data."""
        if trains_on_conversations(vars(args)):
            self.conversations = build_conversation_sets(args, tokenizer)
            self.remarks = self.conversations.remarks
            return
        self._dataset_spec = get_model_spec(args).data(args, tokenizer)
        self._data_function: external.DataFunction | None = None
        if uses_external_data(vars(args)):
            self._data_function, self._tokenizer = (
                external.find_data_function(args.external_data),
                tokenizer,
            )
            return
        self._plans_by_validation_set = _split_by_validation_set(plan_data(args, tokenizer))
        self._datasets_by_validation_set = {
            name: _build_datasets(plan, self._dataset_spec, tokenizer)
            for name, plan in self._plans_by_validation_set.items()
        }

    def build_iterators(
        self, progress: Progress, *, model_chunks: int = 1, shard: Shard | None = None
    ) -> DataIterators:
        """Build the iterators that continue after the samples in ``progress``.

        Args:
            progress: samples that the run has consumed.
            model_chunks: number of model chunks (virtual pipeline stages) of this rank.
            shard: the samples that this rank reads; by default, those of its data-parallel rank.

        Raises:
            DataError: there are too few samples.
        """
        shard = shard or get_rank_shard(self._args)
        consumed_by_split = (progress.consumed_train_samples, progress.consumed_valid_samples, 0)
        if self.conversations is not None:
            return _build_conversation_iterators(
                self._args, self.conversations, consumed_by_split, model_chunks, shard
            )
        if self._data_function is not None:
            return self._build_external(self._data_function, consumed_by_split, model_chunks, shard)
        iterators = {
            name: [
                _build_split(
                    self._args,
                    plan,
                    split,
                    dataset,
                    consumed_samples,
                    model_chunks,
                    shard,
                    self._dataset_spec.keys,
                )
                for split, dataset, consumed_samples in zip(
                    plan.splits,
                    self._datasets_by_validation_set[name],
                    consumed_by_split,
                    strict=True,
                )
            ]
            for name, plan in self._plans_by_validation_set.items()
        }
        # the plan without separate validation datasets: see _split_by_validation_set
        train, valid, test = iterators.pop("")
        validation_sets = {
            name: validation
            for name, (_, validation, _) in iterators.items()
            if validation is not None
        }
        return DataIterators(train, valid, test, validation_sets)

    def _build_external(
        self,
        data_function: external.DataFunction,
        consumed_by_split: tuple[int, int, int],
        model_chunks: int,
        shard: Shard,
    ) -> DataIterators:
        """Build iterators over the micro-batches of the user's function (``external_data``)."""
        iterators: list[Batches | None] = []
        for split, consumed_samples in zip(SPLITS, consumed_by_split, strict=True):
            if split == "train" and self._args.skip_train:
                iterators.append(None)
                continue
            samples = external.Samples(shard, consumed_samples)
            batches = external.iter_micro_batches(
                data_function, self._args, self._tokenizer, split, samples, self._dataset_spec
            )
            iterators.append(
                None if batches is None else _duplicate_for_chunks(batches, model_chunks)
            )
        return DataIterators(iterators[0], iterators[1], iterators[2])


def get_rank_shard(args: Any) -> Shard:
    """Return the samples that this rank reads, from its data-parallel rank.

    Replicas read micro-batches of different sizes if microbatch balancing has divided the global
    batch (``args.shares``), or if meshes have different data-parallel sizes (``args.meshes``).
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    if args.shares is not None:
        return Shard(args.global_batch_size, args.share.micro_batches)
    if args.meshes is not None:
        sequences = args.meshes.sequences_of(args.stage.mesh, rank)
        return Shard(args.meshes.sequences, (sequences,))
    size = parallel_state.get_data_parallel_world_size()
    return Shard.for_equal_ranks(rank, size, args.micro_batch_size)


def _split_by_validation_set(plan: DataPlan) -> dict[str, DataPlan]:
    """Split a plan by validation dataset.

    Returns:
        A plan per separately evaluated validation dataset, by name, and the remaining plan as
        ``""``.
    """
    if not plan.validation_blends:
        return {"": plan}
    train, valid, test = plan.splits
    unused_train, unused_valid, unused_test = (
        replace(split, sample_count=0, blend=None) for split in plan.splits
    )
    plans = {"": replace(plan, splits=(train, unused_valid, test))}
    for name, blend in plan.validation_blends.items():
        splits = (unused_train, replace(valid, blend=blend), unused_test)
        plans[name] = replace(plan, splits=splits, phases=None)
    return plans


def _build_datasets(
    plan: DataPlan, dataset_spec: DatasetSpec, tokenizer: Tokenizer
) -> list[Dataset[Batch] | None]:
    """Build the training, validation and test datasets; None for a split that is not used."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )

    config = _build_config(plan, dataset_spec, tokenizer)
    dataset_class = dataset_spec.mock if plan.is_mock else dataset_spec.indexed
    sample_counts = [split.sample_count for split in plan.splits]
    if plan.phases is not None and sample_counts[0]:
        sample_counts[0] = plan.phases.max_samples
    builder = BlendedMegatronDatasetBuilder(dataset_class, sample_counts, lambda: True, config)
    try:
        datasets: list[Dataset[Batch] | None] = builder.build()
        if plan.phases is not None and datasets[0] is not None:
            apply_phases(datasets[0], plan.phases, plan.cache_directory)
    except (FileNotFoundError, ValueError, EOFError) as error:
        # Only rank 0 writes the cache. A run that is killed meanwhile leaves half a file.
        raise DataError(
            f"the data's index cache cannot be read: {error}",
            hint=f"all hosts must see {plan.cache_directory}; if they do, remove it: it is built "
            "anew",
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
    return datasets


def _cache_hint(plan: DataPlan) -> str:
    """Return the advice for an index cache that cannot be written."""
    hint = "set data_cache_path to a directory that all hosts can write"
    if plan.cache_argument in ("", "data_cache_path"):
        return hint
    return f"without data_cache_path the cache is next to {plan.cache_argument}; {hint}"


def _build_config(plan: DataPlan, dataset_spec: DatasetSpec, tokenizer: Tokenizer) -> Any:
    """Build megatron.core's dataset configuration."""
    blends = [split.blend for split in plan.splits]
    has_split_blends = plan.blend is None and not plan.is_mock
    config = dataset_spec.config(
        random_seed=plan.seed,
        sequence_length=dataset_spec.length,
        blend=plan.blend.as_config() if plan.blend else None,
        blend_per_split=[b and b.as_config() for b in blends] if has_split_blends else None,
        split=",".join(map(repr, plan.split_fractions)) if plan.blend else None,
        path_to_cache=None if plan.cache_directory is None else str(plan.cache_directory),
        tokenizer=tokenizer,
        **dataset_spec.options,
        **plan.reader_options,
    )
    if config.split_matrix is not None:
        # Unused splits are not built. A small dataset may have no document for them, and
        # megatron.core would then count epochs of an empty split forever.
        for index, split in enumerate(plan.splits):
            if split.sample_count == 0:
                config.split_matrix[index] = None
    return config


def _build_split(
    args: Any,
    plan: DataPlan,
    split: SplitPlan,
    dataset: Dataset[Batch] | None,
    consumed_samples: int,
    model_chunks: int,
    shard: Shard,
    keys: Sequence[str],
) -> Batches | None:
    """Build the iterators of one split, or return None if the split is not used."""
    if dataset is None or split.sample_count == 0:
        return None
    order: SampleOrder = "wrapped"
    if split.name == "train":
        order = args.dataloader_type
        _require_samples(plan, split, len(dataset), consumed_samples)  # type: ignore[arg-type]
    return _create_loader(
        args,
        dataset,
        order,
        consumed_samples,
        model_chunks,
        shard,
        partial(_collate, keys=keys),
        start_workers=split.name == "train",
    )


def _build_conversation_iterators(
    args: Any,
    conversation_sets: ConversationSets,
    consumed_by_split: tuple[int, int, int],
    model_chunks: int,
    shard: Shard,
) -> DataIterators:
    """Build the iterators of conversations. Training reads them in another order in each epoch."""
    keys = (*BATCH_KEYS, DOCUMENT_NUMBERS_KEY)
    collate: Collate = partial(_collate, keys=keys)
    if args.dpo:
        collate = partial(collate_pairs, keys=(*keys, REFERENCE_KEY))

    def create_loader(
        data: Dataset[Batch] | None, order: SampleOrder, consumed_samples: int
    ) -> Batches | None:
        if data is None:
            return None
        start_workers = order == "cyclic"
        return _create_loader(
            args,
            data,
            order,
            consumed_samples,
            model_chunks,
            shard,
            collate,
            start_workers=start_workers,
        )

    valid = {
        name: create_loader(data, "wrapped", consumed_by_split[1])
        for name, data in conversation_sets.valid.items()
    }
    return DataIterators(
        train=create_loader(conversation_sets.train, "cyclic", consumed_by_split[0]),
        valid=valid.pop("", None),
        test=create_loader(conversation_sets.test, "wrapped", consumed_by_split[2]),
        validation_sets={name: batches for name, batches in valid.items() if batches is not None},
    )


def _create_loader(
    args: Any,
    dataset: Dataset[Batch],
    order: SampleOrder,
    consumed_samples: int,
    model_chunks: int,
    shard: Shard,
    collate: Collate,
    *,
    start_workers: bool,
) -> Batches:
    """Create the data loader of a dataset for this rank.

    Args:
        args: resolved training arguments.
        dataset: source of the samples.
        order: order of samples.
        consumed_samples: samples of the dataset that all ranks have consumed before.
        model_chunks: number of model chunks of this rank.
        shard: the samples that this rank reads.
        collate: combines samples to a micro-batch.
        start_workers: start the loader's worker processes now.
    """
    sampler = MicroBatchSampler(
        len(dataset),  # type: ignore[arg-type]
        shard,
        consumed=consumed_samples,
        order=order,
        seed=args.seed,
    )
    loader: DataLoader[Batch] = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=not current_device().is_host,
        persistent_workers=args.num_workers > 0,
        collate_fn=collate,
        worker_init_fn=_ignore_stop_signals,
    )
    # iter() starts the worker processes: now for training, and on first use for the test split,
    # which may never be read.
    batches = iter(loader) if start_workers else (batch for batch in loader)
    return _duplicate_for_chunks(batches, model_chunks)


def _require_samples(
    plan: DataPlan, split: SplitPlan, available_samples: int, consumed_samples: int
) -> None:
    """Check before training that a blend without weights has enough samples.

    Such a blend is read only once.
    """
    needed_samples = max(split.sample_count, consumed_samples)
    if plan.sample_order == "single" and available_samples < needed_samples:
        raise DataError(
            f"the training data holds {available_samples} samples of {plan.seq_length} tokens, but "
            f"training takes {needed_samples}: data sets without weights are read once",
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


def _duplicate_for_chunks(batches: Iterator[Batch], model_chunks: int) -> Batches:
    """Duplicate the batches for several model chunks.

    Each chunk gets its own dictionaries, but shares the tensors, which must not be written to.
    """
    if model_chunks == 1:
        return batches
    return [map(dict, chunk_batches) for chunk_batches in itertools.tee(batches, model_chunks)]
