"""Which data a run reads and how much of it: every check that can be made before it is built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flagscale.config.arguments.paths import data_cache
from flagscale.errors import DataError
from flagscale.train.data.blends import Blend, parse_blend, parse_split, told_apart
from flagscale.train.data.indexed import IndexedFiles, fingerprint, inspect
from flagscale.train.data.phases import Phases, phases_of
from flagscale.train.data.tokenizers import Tokenizer

SplitName = Literal["train", "valid", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "valid", "test")
_DEFAULT_SPLIT = "969,30,1"  # Megatron-LM's


@dataclass(frozen=True)
class SplitPlan:
    """One split: the samples wanted of it (0: it is not used) and, where it has one, its own
    blend."""

    name: SplitName
    samples: int
    blend: Blend | None = None


@dataclass(frozen=True)
class DataPlan:
    """All that building the data sets needs. ``blend`` is cut by ``shares``; without it each
    split has its own, or the data is made up. ``cache_by`` is the argument that ``cache`` follows
    from."""

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
    """Mixtures of the training data that follow each other."""
    validations: Mapping[str, Blend] = field(default_factory=dict)
    """By their names, the sets of the validation's blend where each is evaluated by itself."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """Options of megatron.core's data sets that change how they are read, not what."""


def plan_data(args: Any, tokenizer: Tokenizer) -> DataPlan:
    """Read the data arguments and check what they name. No torch, no process group.

    Raises:
        DataError: no data is named or named twice over; files are missing or damaged; a split
            that is needed has no tokens; the data is of another tokenizer.
    """
    own = [_own_blend(args, name) for name in SPLITS]
    blend = parse_blend(args.data_path) if args.data_path else None
    _check_choice(args, blend, own)
    phases = phases_of(args, blend or own[0], _samples(args)[0])
    if phases is not None:
        # What is built has all data sets, and of each as much as the phases take.
        blend, own[0] = (phases.whole, own[0]) if blend else (None, phases.whole)
    shares = parse_split(args.split or _DEFAULT_SPLIT)
    splits = []
    for name, count, own_blend, share in zip(SPLITS, _samples(args), own, shares, strict=True):
        has_data = args.mock_data or own_blend or (blend and share > 0)
        used = count if has_data else 0
        splits.append(SplitPlan(name, used, own_blend if used else None))
    files = _inspect_all(blend, splits, tokenizer)
    _check_tokens(files, blend, splits, shares, args.split or _DEFAULT_SPLIT)
    root, cache_by = data_cache(vars(args)) or (None, "")
    return DataPlan(
        splits=(splits[0], splits[1], splits[2]),
        blend=blend,
        shares=shares,
        seq_length=args.seq_length,
        seed=args.seed,
        # The cache's own key is the path of the data: it would outlive data written anew there.
        cache=None if root is None else root / fingerprint(files.values()),
        cache_by=cache_by,
        order=args.dataloader_type,
        phases=phases,
        validations=_validations(args, splits[1].blend),
        mock=bool(args.mock_data),
        reading={
            "mmap_bin_files": args.mmap_bin_files,
            "num_dataset_builder_threads": args.num_dataset_builder_threads,
            "mid_level_dataset_surplus": args.mid_level_dataset_surplus,
        },
    )


def _own_blend(args: Any, name: SplitName) -> Blend | None:
    key = f"{name}_data_path"
    values = getattr(args, key)
    return parse_blend(values, key) if values else None


def _validations(args: Any, blend: Blend | None) -> dict[str, Blend]:
    if blend is None or not args.multiple_validation_sets:
        return {}
    names = told_apart([Path(prefix).name for prefix in blend.prefixes])
    return {name: Blend((one,)) for name, one in zip(names, blend.prefixes, strict=True)}


def _check_choice(args: Any, blend: Blend | None, own: list[Blend | None]) -> None:
    given = [f"{name}_data_path" for name, item in zip(SPLITS, own, strict=True) if item]
    if args.mock_data and (blend or given):
        raise DataError(f"mock_data makes data up, but {'data_path' if blend else given[0]} is set")
    if blend and given:
        raise DataError(f"data_path and {given[0]} are both set; use one or the other")
    if given and own[0] is None and _samples(args)[0]:
        raise DataError(f"{given[0]} is set, but train_data_path is not")
    if given and args.split:
        raise DataError(f"split cuts data_path, but {given[0]} names the data of each split")
    if not (args.mock_data or blend or given):
        raise DataError(
            "no training data: data_path is not set",
            hint="tools/data/preprocess.py makes a data set of text; mock_data: true needs none",
        )


def _samples(args: Any) -> tuple[int, int, int]:
    """Samples that a whole run takes for training, validation and test."""
    steps, evaluations = args.train_iters or 0, 0
    if args.eval_iters and args.eval_interval:
        evaluations = steps // args.eval_interval + 1
    one = (args.eval_iters or 0) * args.global_batch_size
    train = args.train_samples or steps * args.global_batch_size
    return int(train), int(evaluations * one), int(one)


def _inspect_all(
    blend: Blend | None, splits: list[SplitPlan], tokenizer: Tokenizer
) -> dict[str, IndexedFiles]:
    """Every data set that is read, checked, by prefix."""
    blends = [blend] if blend else [s.blend for s in splits if s.samples]
    prefixes = dict.fromkeys(p for item in blends if item for p in item.prefixes)
    files = {prefix: inspect(prefix) for prefix in prefixes}
    for prefix, found in files.items():
        _check_vocabulary(prefix, found, tokenizer)
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
    largest = files.largest_token()
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
    """Each data set has tokens for each split that reads it."""
    begin = 0.0
    for plan, share in zip(splits, shares, strict=True):
        end = begin + share
        part = (begin, end) if blend else (0.0, 1.0)
        begin = end
        source = blend or plan.blend
        if not plan.samples or source is None:
            continue
        for prefix in source.prefixes:
            found = files[prefix]
            first, last = (round(edge * found.sequences) for edge in part)  # as megatron.core
            if int(found.lengths()[first:last].sum(dtype="int64")) > 0:
                continue
            of = f" with split {split}" if blend else ""
            raise DataError(
                f"{prefix}: nothing is left for {plan.name}{of}: the data set has "
                f"{found.sequences} sequences in {found.documents} documents",
                hint="give this split a larger share, set eval_iters: 0 to do without "
                "evaluation, or use more data",
            )
