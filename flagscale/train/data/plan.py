"""Plan of the data that a run reads, with all checks that can be made before datasets are built."""

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
    """Plan of one split.

    ``samples`` is the number of samples that the run needs of it; 0 if the split is not used.
    ``blend`` is the split's own blend, if it has one.
    """

    name: SplitName
    samples: int
    blend: Blend | None = None


@dataclass(frozen=True)
class DataPlan:
    """Everything that building the datasets needs.

    ``blend`` is divided by ``shares``. Without it, each split has a blend of its own, or the data
    is mock data. ``cache_by`` names the argument that ``cache`` follows from.
    """

    splits: tuple[SplitPlan, SplitPlan, SplitPlan]
    blend: Blend | None
    shares: tuple[float, float, float]
    seq_length: int
    seed: int
    cache: Path | None
    cache_by: str
    order: Literal["single", "cyclic"]
    mock: bool
    phases: Phases | None = None
    """Blends of the training data that follow each other."""
    validations: Mapping[str, Blend] = field(default_factory=dict)
    """Validation datasets that are evaluated separately, by name."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Options of megatron.core's datasets that affect how data is read, but not which."""


def plan_data(args: Any, tokenizer: Tokenizer) -> DataPlan:
    """Resolve the data arguments and check the files that they name. Needs no torch and no ranks.

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
    shares = parse_split(args.split or _DEFAULT_SPLIT)
    splits = []
    for name, count, own_blend, share in zip(
        SPLITS, _count_samples(args), split_blends, shares, strict=True
    ):
        has_data = args.mock_data or own_blend or (blend and share > 0)
        used = count if has_data else 0
        splits.append(SplitPlan(name, used, own_blend if used else None))
    files = _validate_datasets(blend, splits, tokenizer)
    _check_tokens(files, blend, splits, shares, args.split or _DEFAULT_SPLIT)
    root, cache_by = data_cache_of(vars(args)) or (None, "")
    return DataPlan(
        splits=(splits[0], splits[1], splits[2]),
        blend=blend,
        shares=shares,
        seq_length=args.seq_length,
        seed=args.seed,
        # megatron.core keys its cache by path alone; the fingerprint invalidates it when a dataset
        # is rewritten.
        cache=None if root is None else root / fingerprint_datasets(files.values()),
        cache_by=cache_by,
        order=args.dataloader_type,
        phases=phases,
        validations=_plan_validations(args, splits[1].blend),
        mock=bool(args.mock_data),
        reading={
            "mmap_bin_files": args.mmap_bin_files,
            "num_dataset_builder_threads": args.num_dataset_builder_threads,
            "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        },
    )


def _parse_split_blend(args: Any, name: SplitName) -> Blend | None:
    key = f"{name}_data_path"
    values = getattr(args, key)
    return parse_blend(values, key) if values else None


def _plan_validations(args: Any, blend: Blend | None) -> dict[str, Blend]:
    if blend is None or not args.multiple_validation_sets:
        return {}
    names = make_unique([Path(prefix).name for prefix in blend.prefixes])
    return {name: Blend((prefix,)) for name, prefix in zip(names, blend.prefixes, strict=True)}


def _check_sources(args: Any, blend: Blend | None, split_blends: list[Blend | None]) -> None:
    split_keys = [
        f"{name}_data_path" for name, item in zip(SPLITS, split_blends, strict=True) if item
    ]
    if args.mock_data and (blend or split_keys):
        raise DataError(
            f"mock_data makes data up, but {'data_path' if blend else split_keys[0]} is set"
        )
    if blend and split_keys:
        raise DataError(f"data_path and {split_keys[0]} are both set; use one or the other")
    if split_keys and split_blends[0] is None and _count_samples(args)[0]:
        raise DataError(f"{split_keys[0]} is set, but train_data_path is not")
    if split_keys and args.split:
        raise DataError(f"split cuts data_path, but {split_keys[0]} names the data of each split")
    if not (args.mock_data or blend or split_keys):
        raise DataError(
            "no training data: data_path is not set",
            hint="tools/data/preprocess.py makes a data set of text; mock_data: true needs none",
        )


def _count_samples(args: Any) -> tuple[int, int, int]:
    """Return the samples that a whole run takes for training, validation and test."""
    steps, evaluations = args.train_iters or 0, 0
    if args.eval_iters and args.eval_interval:
        evaluations = steps // args.eval_interval + 1
    per_evaluation = (args.eval_iters or 0) * args.global_batch_size
    train = args.train_samples or steps * args.global_batch_size
    return int(train), int(evaluations * per_evaluation), int(per_evaluation)


def _validate_datasets(
    blend: Blend | None, splits: list[SplitPlan], tokenizer: Tokenizer
) -> dict[str, IndexedFiles]:
    """Validate every dataset that is read; return them by prefix."""
    blends = [blend] if blend else [s.blend for s in splits if s.samples]
    prefixes = dict.fromkeys(p for item in blends if item for p in item.prefixes)
    files = {prefix: validate_dataset(prefix) for prefix in prefixes}
    for prefix, dataset in files.items():
        _check_vocabulary(prefix, dataset, tokenizer)
    return files


def _check_vocabulary(prefix: str, files: IndexedFiles, tokenizer: Tokenizer) -> None:
    size = tokenizer.vocab_size
    if files.dtype.kind not in "iu":
        raise DataError(f"{files.bin}: holds {files.dtype} values, expected token ids")
    limit = 1 << (8 * files.dtype.itemsize)
    if size > limit:
        raise DataError(
            f"{prefix}: its tokens are {files.dtype} (below {limit}), but the tokenizer has "
            f"{size} entries: the data was made with another tokenizer",
            hint="preprocess the text again with this tokenizer, or name the data's own",
        )
    largest = files.find_largest_token()
    if largest >= size:
        raise DataError(
            f"{prefix}: holds token id {largest}, but the tokenizer has {size} entries: the data "
            "was made with another tokenizer",
            hint="preprocess the text again with this tokenizer, or name the data's own",
        )


def _check_tokens(
    files: dict[str, IndexedFiles],
    blend: Blend | None,
    splits: list[SplitPlan],
    shares: tuple[float, float, float],
    split: str,
) -> None:
    """Check that each dataset has tokens for each split that reads it."""
    begin = 0.0
    for plan, share in zip(splits, shares, strict=True):
        end = begin + share
        part = (begin, end) if blend else (0.0, 1.0)
        begin = end
        source = blend or plan.blend
        if not plan.samples or source is None:
            continue
        for prefix in source.prefixes:
            dataset = files[prefix]
            first, last = (round(edge * dataset.sequences) for edge in part)  # as megatron.core
            if int(dataset.map_lengths()[first:last].sum(dtype="int64")) > 0:
                continue
            suffix = f" with split {split}" if blend else ""
            raise DataError(
                f"{prefix}: nothing is left for {plan.name}{suffix}: the data set has "
                f"{dataset.sequences} sequences in {dataset.documents} documents",
                hint="give this split a larger share, set eval_iters: 0 to do without "
                "evaluation, or use more data",
            )
