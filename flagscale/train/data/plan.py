"""Plan of a run's data, with all checks that can be made before datasets are built.

:mod:`flagscale.train.data.datasets` builds the datasets from the plan. The terms are
megatron.core's: a blend is one dataset or a weighted mixture of several, and a split is the
training, validation or test part of the data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flagscale.config.arguments.spec.paths import data_cache_of
from flagscale.errors import DataError
from flagscale.train.data.blends import Blend, make_unique, parse_blend, parse_split
from flagscale.train.data.indexed_dataset import (
    IndexedFiles,
    fingerprint_datasets,
    validate_dataset,
)
from flagscale.train.data.phases import Phases, parse_phases
from flagscale.train.data.tokenizers import Tokenizer

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
_DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's default


@dataclass(frozen=True)
class SplitPlan:
    """Plan of the training, validation or test split.

    Attributes:
        name: name of the split.
        sample_count: number of samples that the run needs of the split; 0 if the split is not used.
        blend: the blend of this split alone, if the arguments name one (``train_data_path`` etc.).
    """

    name: SplitName
    sample_count: int
    blend: Blend | None = None


@dataclass(frozen=True)
class DataPlan:
    """Parameters of the datasets of a run.

    The data comes from one of three sources: ``blend``, which is divided between the splits; a
    blend per split (:attr:`SplitPlan.blend`); or mock data.

    Attributes:
        splits: training, validation and test.
        blend: blend that is divided by ``split_fractions``, or None.
        split_fractions: fractions of ``blend`` for training, validation and test; they sum to 1.
        seq_length: tokens of a sample.
        seed: seed of megatron.core's shuffles.
        cache_directory: directory of megatron.core's index cache, or None without a cache.
        cache_argument: name of the argument from which ``cache_directory`` is derived; empty
            without a cache.
        sample_order: ``single`` reads the training samples once, ``cyclic`` reads them in epochs.
        is_mock: the data is generated, and no file is read.
        phases: blends of the training data that follow each other, if there are several.
        validation_blends: blends of the validation datasets that are evaluated separately, by name.
        reader_options: options of megatron.core's datasets that affect how data is read, but not
            which data.
    """

    splits: tuple[SplitPlan, SplitPlan, SplitPlan]
    blend: Blend | None
    split_fractions: tuple[float, float, float]
    seq_length: int
    seed: int
    cache_directory: Path | None
    cache_argument: str
    sample_order: Literal["single", "cyclic"]
    is_mock: bool
    phases: Phases | None = None
    validation_blends: Mapping[str, Blend] = field(default_factory=dict)
    reader_options: Mapping[str, Any] = field(default_factory=dict)


def plan_data(args: Any, tokenizer: Tokenizer) -> DataPlan:
    """Resolve the data arguments and check the files that they name.

    This needs neither torch nor an initialized process group.

    Args:
        args: resolved training arguments.
        tokenizer: the run's tokenizer, which must match the data.

    Raises:
        DataError: no data is named, or contradictory data; files are missing or damaged; a split
            that is needed has no tokens; the data was made with another tokenizer.
    """
    split_blends = [_parse_split_blend(args, name) for name in SPLITS]
    blend = parse_blend(args.data_path) if args.data_path else None
    _check_sources(args, blend, split_blends)
    phases = parse_phases(args, blend or split_blends[0], _count_samples(args)[0])
    if phases is not None:
        # The blend to build has all datasets, each with as many samples as the phases need.
        blend, split_blends[0] = (
            (phases.combined_blend, split_blends[0]) if blend else (None, phases.combined_blend)
        )
    split_fractions = parse_split(args.split or _DEFAULT_SPLIT)
    splits = []
    for name, needed_samples, split_blend, fraction in zip(
        SPLITS, _count_samples(args), split_blends, split_fractions, strict=True
    ):
        has_data = args.mock_data or split_blend or (blend and fraction > 0)
        sample_count = needed_samples if has_data else 0
        splits.append(SplitPlan(name, sample_count, split_blend if sample_count else None))
    files = _validate_datasets(blend, splits, tokenizer)
    _check_tokens(files, blend, splits, split_fractions, args.split or _DEFAULT_SPLIT)
    cache_root, cache_argument = data_cache_of(vars(args)) or (None, "")
    return DataPlan(
        splits=(splits[0], splits[1], splits[2]),
        blend=blend,
        split_fractions=split_fractions,
        seq_length=args.seq_length,
        seed=args.seed,
        # megatron.core keys its cache by path alone; the fingerprint invalidates it when a dataset
        # is rewritten.
        cache_directory=cache_root and cache_root / fingerprint_datasets(files.values()),
        cache_argument=cache_argument,
        sample_order=args.dataloader_type,
        phases=phases,
        validation_blends=_list_validation_blends(args, splits[1].blend),
        is_mock=bool(args.mock_data),
        reader_options={
            "mmap_bin_files": args.mmap_bin_files,
            "num_dataset_builder_threads": args.num_dataset_builder_threads,
            "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        },
    )


def _parse_split_blend(args: Any, name: SplitName) -> Blend | None:
    """Parse ``train_data_path``, ``valid_data_path`` or ``test_data_path``."""
    argument = f"{name}_data_path"
    value = getattr(args, argument)
    return parse_blend(value, argument) if value else None


def _list_validation_blends(args: Any, blend: Blend | None) -> dict[str, Blend]:
    """Return a blend per validation dataset if ``multiple_validation_sets`` is set."""
    if blend is None or not args.multiple_validation_sets:
        return {}
    names = make_unique([Path(prefix).name for prefix in blend.prefixes])
    return {name: Blend((prefix,)) for name, prefix in zip(names, blend.prefixes, strict=True)}


def _check_sources(args: Any, blend: Blend | None, split_blends: list[Blend | None]) -> None:
    """Check that the arguments name one source of data, and name it completely."""
    split_arguments = [
        f"{name}_data_path"
        for name, split_blend in zip(SPLITS, split_blends, strict=True)
        if split_blend
    ]
    if args.mock_data and (blend or split_arguments):
        raise DataError(
            f"mock_data makes data up, but {'data_path' if blend else split_arguments[0]} is set"
        )
    if blend and split_arguments:
        raise DataError(f"data_path and {split_arguments[0]} are both set; use one or the other")
    if split_arguments and split_blends[0] is None and _count_samples(args)[0]:
        raise DataError(f"{split_arguments[0]} is set, but train_data_path is not")
    if split_arguments and args.split:
        raise DataError(
            f"split cuts data_path, but {split_arguments[0]} names the data of each split"
        )
    if not (args.mock_data or blend or split_arguments):
        raise DataError(
            "no training data: data_path is not set",
            hint="tools/data/preprocess.py makes a data set of text; mock_data: true needs none",
        )


def _count_samples(args: Any) -> tuple[int, int, int]:
    """Return the samples that a whole run takes for training, validation and test.

    With ``skip_train``, the validation data is that of a run of ``train_iters`` steps.
    """
    steps, evaluations = args.train_iters or 0, 0
    if args.eval_iters and args.eval_interval:
        evaluations = steps // args.eval_interval + 1
    samples_per_evaluation = (args.eval_iters or 0) * args.global_batch_size
    train_samples = args.train_samples or steps * args.global_batch_size
    if args.skip_train:
        train_samples = 0
    return (
        int(train_samples),
        int(evaluations * samples_per_evaluation),
        int(samples_per_evaluation),
    )


def _validate_datasets(
    blend: Blend | None, splits: list[SplitPlan], tokenizer: Tokenizer
) -> dict[str, IndexedFiles]:
    """Validate every dataset that is read; return them by prefix."""
    blends = [blend] if blend else [s.blend for s in splits if s.sample_count]
    prefixes = dict.fromkeys(p for item in blends if item for p in item.prefixes)
    files = {prefix: validate_dataset(prefix) for prefix in prefixes}
    for prefix, dataset in files.items():
        _check_vocabulary(prefix, dataset, tokenizer)
    return files


def _check_vocabulary(prefix: str, files: IndexedFiles, tokenizer: Tokenizer) -> None:
    """Check that the token ids of a dataset are in the tokenizer's vocabulary."""
    vocab_size = tokenizer.vocab_size
    if files.dtype.kind not in "iu":
        raise DataError(f"{files.bin}: holds {files.dtype} values, expected token ids")
    dtype_limit = 1 << (8 * files.dtype.itemsize)
    if vocab_size > dtype_limit:
        raise DataError(
            f"{prefix}: its tokens are {files.dtype} (below {dtype_limit}), but the tokenizer has "
            f"{vocab_size} entries: the data was made with another tokenizer",
            hint="preprocess the text again with this tokenizer, or name the data's own",
        )
    smallest_token, largest_token = files.find_token_range()
    if smallest_token < 0:
        raise DataError(
            f"{prefix}: holds the token id {smallest_token}: the file is damaged or holds no "
            "token ids",
            hint="preprocess the text again",
        )
    if largest_token >= vocab_size:
        raise DataError(
            f"{prefix}: holds token id {largest_token}, but the tokenizer has {vocab_size} "
            "entries: the data was made with another tokenizer",
            hint="preprocess the text again with this tokenizer, or name the data's own",
        )


def _check_tokens(
    files: dict[str, IndexedFiles],
    blend: Blend | None,
    splits: list[SplitPlan],
    split_fractions: tuple[float, float, float],
    split: str,
) -> None:
    """Check that each dataset has tokens for each split that reads it."""
    begin = 0.0
    for plan, fraction in zip(splits, split_fractions, strict=True):
        end = begin + fraction
        fraction_range = (begin, end) if blend else (0.0, 1.0)
        begin = end
        split_blend = blend or plan.blend
        if not plan.sample_count or split_blend is None:
            continue
        for prefix in split_blend.prefixes:
            dataset = files[prefix]
            # megatron.core rounds in the same way.
            first, last = (round(edge * dataset.sequence_count) for edge in fraction_range)
            if int(dataset.map_lengths()[first:last].sum(dtype="int64")) > 0:
                continue
            split_text = f" with split {split}" if blend else ""
            raise DataError(
                f"{prefix}: nothing is left for {plan.name}{split_text}: the data set has "
                f"{dataset.sequence_count} sequences in {dataset.document_count} documents",
                hint="give this split a larger share, set eval_iters: 0 to do without "
                "evaluation, or use more data",
            )
