"""Conversation datasets of a run: tokenization of its files, and their division into splits.

:mod:`flagscale.train.data.datasets` uses them for supervised fine-tuning (``sft: true``) and for
preference training (``dpo: true``), whose samples are pairs of conversations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from flagscale.config.arguments.rules.data import split_shares
from flagscale.config.arguments.spec.paths import blend_words, data_cache_of
from flagscale.errors import DataError
from flagscale.train.checkpoint.collective_errors import run_while_polling
from flagscale.train.data.blends import make_unique
from flagscale.train.data.chat.packed_dataset import (
    PackedConversations,
    PackedSamples,
    SequenceSettings,
)
from flagscale.train.data.chat.packed_preferences import PackedPreferences
from flagscale.train.data.chat.preference_files import PreferenceFile
from flagscale.train.data.chat.templates import ChatTemplate, open_template, warn_unknown_markers
from flagscale.train.data.chat.token_cache import (
    ConversationFile,
    TokenFile,
    TokenizedSamples,
    build_cache,
    open_samples,
)
from flagscale.train.data.tokenizers import Tokenizer

_SPLIT_NAMES = ("train", "valid", "test")
_ALL_FOR_TRAINING = (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class ConversationSets:
    """Datasets of conversations by split.

    Attributes:
        train: training data.
        valid: validation datasets by name; a single dataset has the name ``""``.
        test: test data.
        remarks: messages for the user, one per line.
        files: the files, tokenized.
    """

    train: PackedSamples | None
    valid: Mapping[str, PackedSamples]
    test: PackedSamples | None
    remarks: tuple[str, ...]
    files: tuple[TokenizedSamples, ...] = ()

    def list_datasets(self) -> list[PackedSamples]:
        """Return the datasets of all splits."""
        datasets = (self.train, *self.valid.values(), self.test)
        return [dataset for dataset in datasets if dataset is not None]


def build_conversation_sets(args: Any, tokenizer: Tokenizer) -> ConversationSets:
    """Build the datasets that the arguments name. Collective: all ranks call it.

    The first rank of each host tokenizes files that are not in the cache.

    Args:
        args: resolved training arguments.
        tokenizer: the run's tokenizer.

    Raises:
        DataError: on all ranks, if a file, a conversation or the template is unusable on any rank.
    """
    files = _list_files(args)
    cache_root = _locate_cache(args, files)
    paths_to_read = list(
        dict.fromkeys(path for split_files in files.values() for path in split_files)
    )
    result = _TokenizationResult(None, [])
    error = None
    sources_by_path: dict[Path, TokenFile] = {}
    template: ChatTemplate | None = None
    try:
        template = _open_template(args, tokenizer)
        sources_by_path = {
            path: _open_file(args, path, tokenizer, template) for path in paths_to_read
        }
    except DataError as problem:
        error = problem
    try:
        result = run_while_polling(lambda: _tokenize_missing(sources_by_path, cache_root))
    except DataError as problem:
        error = problem
    keys = _exchange_keys(result.keys, error)
    samples_by_path = {
        path: open_samples(source, cache_root, keys[path])
        for path, source in sources_by_path.items()
    }
    sets = _build_datasets(args, files, samples_by_path, result.new_names)
    if template is not None and (warning := warn_unknown_markers(template, tokenizer)):
        return replace(sets, remarks=(f"warning: {warning}", *sets.remarks))
    return sets


def _open_template(args: Any, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Open the chat template; None if there is none, which pairs of texts do not need."""
    if args.dpo and args.chat_template is None and not tokenizer.chat_templates:
        return None
    return open_template(args.chat_template, tokenizer, str(args.tokenizer_path))


def _open_file(
    args: Any, path: Path, tokenizer: Tokenizer, template: ChatTemplate | None
) -> TokenFile:
    if args.dpo:
        return PreferenceFile(path, tokenizer, template)
    assert template is not None
    return ConversationFile(path, args.sft_format, tokenizer, template)


class _TokenizationResult(NamedTuple):
    """Result of tokenization on one rank.

    Attributes:
        keys: cache key of each file, or None on ranks that did not read the files.
        new_names: names of the files tokenized now, in contrast to those that were in the cache.
    """

    keys: Mapping[Path, str] | None
    new_names: list[str]


def _tokenize_missing(sources: Mapping[Path, TokenFile], cache_root: Path) -> _TokenizationResult:
    """Tokenize files that are not in the cache. Ranks other than the first of a host do nothing."""
    if int(os.environ.get("LOCAL_RANK", "0")):
        return _TokenizationResult(None, [])
    keys = {path: source.compute_cache_key() for path, source in sources.items()}
    new_names = [
        path.name for path, source in sources.items() if build_cache(source, cache_root, keys[path])
    ]
    return _TokenizationResult(keys, new_names)


def _exchange_keys(
    local_keys: Mapping[Path, str] | None, local_error: DataError | None
) -> Mapping[Path, str]:
    """Exchange the cache keys and errors between ranks; return the keys.

    Raises:
        DataError: on all ranks: a rank had an error, or hosts have different files.
    """
    error_text = None
    if local_error is not None:
        error_text = local_error.message + (f" ({local_error.hint})" if local_error.hint else "")
    rank_results: list[Any] = [(local_keys, error_text)]
    if dist.is_initialized():
        rank_results = [None] * dist.get_world_size()
        dist.all_gather_object(rank_results, (local_keys, error_text))
    for _, text in rank_results:
        if text:
            raise DataError(text)
    host_keys = [rank_keys for rank_keys, _ in rank_results if rank_keys is not None]
    for path in host_keys[0]:
        if len({rank_keys[path] for rank_keys in host_keys}) > 1:
            raise DataError(f"{path}: hosts have different files of that name, or tokenizers")
    return dict(host_keys[0])


def _list_files(args: Any) -> dict[str, tuple[Path, ...]]:
    """Return the files by split; those that are divided between all splits are under ``all``."""
    paths_by_split = {
        "all": args.data_path,
        **{name: getattr(args, f"{name}_data_path") for name in _SPLIT_NAMES},
    }
    files = {
        name: tuple(dict.fromkeys(map(Path, blend_words(list(value)))))
        for name, value in paths_by_split.items()
        if value
    }
    if not args.eval_iters:
        files = {name: files[name] for name in files if name in ("all", "train")}
    if not files.keys() & {"all", "train"} and not (args.skip_train and files):
        noun = "pairs" if args.dpo else "conversations"
        raise DataError(f"no {noun} to train on: data_path is not set")
    return files


def _locate_cache(args: Any, files: Mapping[str, Sequence[Path]]) -> Path:
    """Return the token cache's directory: below ``data_cache_path``, or next to the first file."""
    configured = data_cache_of(vars(args))
    if configured is not None:
        return configured[0] / "conversations"
    return next(iter(files.values()))[0].parent / "conversations_cache"


def _build_datasets(
    args: Any,
    files: Mapping[str, Sequence[Path]],
    samples_by_path: Mapping[Path, TokenizedSamples],
    new_names: Sequence[str],
) -> ConversationSets:
    """Build a dataset per split, or per file with ``multiple_validation_sets``."""
    dataset_class = PackedPreferences if args.dpo else PackedConversations
    settings = sequence_settings(args)
    fractions = _ALL_FOR_TRAINING
    if args.split:
        fractions = split_shares(args.split) or _ALL_FOR_TRAINING
    datasets: dict[str, PackedSamples] = {}
    for split, begin, end in _iter_split_ranges(
        fractions, trains=not args.skip_train, evaluates=bool(args.eval_iters)
    ):
        counts = {
            path: dataset_class.count_samples(samples) for path, samples in samples_by_path.items()
        }
        file_samples = [
            (samples_by_path[path], _select_samples(counts[path], begin, end, args.seed))
            for path in files.get("all", ())
        ]
        file_samples += [
            (samples_by_path[path], np.arange(counts[path])) for path in files.get(split, ())
        ]
        file_groups = {"": file_samples}
        if split == "valid" and args.multiple_validation_sets and len(file_samples) > 1:
            validation_names = make_unique([samples.path.stem for samples, _ in file_samples])
            file_groups = {
                name: [item] for name, item in zip(validation_names, file_samples, strict=True)
            }
        for name, group_samples in file_groups.items():
            if sum(len(selected) for _, selected in group_samples):
                label = f"{split}/{name}" if name else split
                datasets[label] = dataset_class(label, group_samples, settings)
    if "train" not in datasets and not args.skip_train:
        noun = dataset_class.noun.removesuffix("s")
        raise DataError(f"{dataset_class.argument}: no {noun} is left for training")
    valid = {
        label.partition("/")[2]: dataset
        for label, dataset in datasets.items()
        if label.partition("/")[0] == "valid"
    }
    return ConversationSets(
        datasets.get("train"),
        valid,
        datasets.get("test"),
        tuple(_iter_remarks(datasets, new_names)),
        tuple(samples_by_path.values()),
    )


def sequence_settings(args: Any) -> SequenceSettings:
    """Return the settings of sequences in resolved arguments."""
    return SequenceSettings(args.seq_length, args.sft_packing, args.sft_too_long, args.seed)


def _iter_split_ranges(
    fractions: Sequence[float], *, trains: bool, evaluates: bool
) -> Iterator[tuple[str, float, float]]:
    """Yield each split with its begin and end, as fractions of a file."""
    begin = 0.0
    for name, fraction in zip(_SPLIT_NAMES, fractions, strict=True):
        if trains if name == "train" else evaluates:
            yield name, begin, begin + fraction
        begin += fraction


def _select_samples(count: int, begin: float, end: float, seed: int) -> Any:
    """Select the samples of a split from the ``count`` samples of a file, at random.

    Returns:
        Sample numbers in ascending order.
    """
    order = np.random.default_rng([seed, count]).permutation(count)
    first, last = (round(edge * count) for edge in (begin, end))
    return np.sort(order[first:last])


def _iter_remarks(datasets: Mapping[str, PackedSamples], new_names: Sequence[str]) -> Iterator[str]:
    """Yield messages about the files that were tokenized and about each dataset's packing."""
    if new_names:
        yield f"tokenized {', '.join(new_names)}; later runs take that from the cache"
    for name, dataset in datasets.items():
        sequences = "sequences" if dataset.conversations_per_sample == 1 else "pairs of sequences"
        text = (
            f"{name}: {dataset.sample_count:,} {dataset.noun} in {len(dataset):,} "
            f"{sequences} of {dataset.settings.length}, {dataset.token_utilization:.1%} of their "
            "tokens used"
        )
        if dataset.truncated_count:
            text += f"; {dataset.truncated_count:,} were longer and are cut"
        if dataset.dropped_count:
            text += f"; {dataset.dropped_count:,} were longer and are left out"
        yield text
