"""Conversation datasets of a run: tokenization of its files, and their division into splits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from flagscale.config.arguments.rules.data import split_shares
from flagscale.config.arguments.spec.paths import blend_words, data_cache_of
from flagscale.errors import DataError
from flagscale.train.checkpoint.collective_errors import true_on_all_ranks
from flagscale.train.data.blends import make_unique
from flagscale.train.data.chat.packed_dataset import PackedConversations, SequenceSettings
from flagscale.train.data.chat.templates import open_template
from flagscale.train.data.chat.token_cache import (
    ConversationFile,
    TokenizedSamples,
    build_cache,
    open_samples,
)
from flagscale.train.data.tokenizers import Tokenizer

_NAMES = ("train", "valid", "test")
_POLL_SECONDS = 0.5
_ALL_FOR_TRAINING = (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class ConversationSets:
    """Datasets of conversations by split.

    ``valid`` maps the names of separately evaluated datasets to them; a single dataset has the name
    ``""``. ``remarks`` are messages for the user, one per line.
    """

    train: PackedConversations | None
    valid: Mapping[str, PackedConversations]
    test: PackedConversations | None
    remarks: tuple[str, ...]


def build_conversation_sets(args: Any, tokenizer: Tokenizer) -> ConversationSets:
    """Build the datasets that the arguments name. Collective: all ranks call it.

    The first rank of each host tokenizes files that are not in the cache.

    Raises:
        DataError: on all ranks: a file, a conversation or the template is unusable.
    """
    files = _list_files(args)
    root = _locate_cache(args, files)
    paths_to_read = list(
        dict.fromkeys(path for split_files in files.values() for path in split_files)
    )
    result, error, sources = _TokenizationResult(None, []), None, dict[Path, ConversationFile]()
    try:
        template = open_template(args.chat_template, _tokenizer_directory(args))
        sources = {
            path: ConversationFile(path, args.sft_format, tokenizer, template)
            for path in paths_to_read
        }
    except DataError as problem:
        error = problem
    try:
        result = _run_while_polling(lambda: _tokenize_missing(sources, root))
    except DataError as problem:
        error = problem
    keys = _exchange_keys(result.keys, error)
    samples = {path: open_samples(source, root, keys[path]) for path, source in sources.items()}
    return _build_datasets(args, files, samples, result.fresh)


class _TokenizationResult(NamedTuple):
    """Result of tokenization on one rank.

    ``keys`` are the files' keys in the cache, or None on ranks that did not read the files;
    ``fresh`` are the names of files tokenized now.
    """

    keys: Mapping[Path, str] | None
    fresh: list[str]


def _tokenize_missing(sources: Mapping[Path, ConversationFile], root: Path) -> _TokenizationResult:
    """Tokenize files that are not in the cache. Only the first rank of each host does it."""
    if int(os.environ.get("LOCAL_RANK", "0")):
        return _TokenizationResult(None, [])
    keys = {path: source.compute_key() for path, source in sources.items()}
    fresh = [path.name for path, source in sources.items() if build_cache(source, root, keys[path])]
    return _TokenizationResult(keys, fresh)


def _run_while_polling(function: Callable[[], _TokenizationResult]) -> _TokenizationResult:
    """Run a function in a thread while all ranks poll for its end in short collectives.

    A single collective would time out if the function takes long on one rank.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizing") as pool:
        future = pool.submit(function)
        while dist.is_initialized() and not true_on_all_ranks(future.done()):
            wait([future], timeout=_POLL_SECONDS)
        return future.result()


def _exchange_keys(
    own_keys: Mapping[Path, str] | None, problem: DataError | None
) -> Mapping[Path, str]:
    """Exchange the files' keys and errors between ranks.

    Raises:
        DataError: on all ranks: a rank had an error, or hosts have different files.
    """
    error = None
    if problem is not None:
        error = problem.message + (f" ({problem.hint})" if problem.hint else "")
    results: list[Any] = [(own_keys, error)]
    if dist.is_initialized():
        results = [None] * dist.get_world_size()
        dist.all_gather_object(results, (own_keys, error))
    for _, text in results:
        if text:
            raise DataError(text)
    keys = [rank_keys for rank_keys, _ in results if rank_keys is not None]
    for path in keys[0]:
        if len({rank_keys[path] for rank_keys in keys}) > 1:
            raise DataError(f"{path}: hosts have different files of that name, or tokenizers")
    return dict(keys[0])


def _list_files(args: Any) -> dict[str, tuple[Path, ...]]:
    """Return the files by split; those that are divided into all splits are under ``all``."""
    values = {
        "all": args.data_path,
        **{name: getattr(args, f"{name}_data_path") for name in _NAMES},
    }
    files = {
        name: tuple(dict.fromkeys(map(Path, blend_words(list(value)))))
        for name, value in values.items()
        if value
    }
    if not files.keys() & {"all", "train"}:
        raise DataError("no conversations to train on: data_path is not set")
    if not args.eval_iters:
        files = {name: files[name] for name in files if name in ("all", "train")}
    return files


def _locate_cache(args: Any, files: Mapping[str, Sequence[Path]]) -> Path:
    configured = data_cache_of(vars(args))
    if configured is not None:
        return configured[0] / "conversations"
    return next(iter(files.values()))[0].parent / "conversations_cache"


def _tokenizer_directory(args: Any) -> Path:
    path = Path(args.tokenizer_path or "")
    return path if path.is_dir() else path.parent


def _build_datasets(
    args: Any,
    files: Mapping[str, Sequence[Path]],
    samples_by_path: Mapping[Path, TokenizedSamples],
    fresh: Sequence[str],
) -> ConversationSets:
    shape = SequenceSettings(args.seq_length, args.sft_packing, args.sft_too_long, args.seed)
    shares = _ALL_FOR_TRAINING
    if args.split:
        shares = split_shares(args.split) or _ALL_FOR_TRAINING
    datasets: dict[str, PackedConversations] = {}
    for split, begin, end in _iter_split_ranges(shares, evaluates=bool(args.eval_iters)):
        file_samples = [
            (samples_by_path[path], _select_samples(samples_by_path[path], begin, end, args.seed))
            for path in files.get("all", ())
        ]
        file_samples += [
            (samples_by_path[path], np.arange(len(samples_by_path[path])))
            for path in files.get(split, ())
        ]
        groups = {"": file_samples}
        if split == "valid" and args.multiple_validation_sets and len(file_samples) > 1:
            names = make_unique([samples.path.stem for samples, _ in file_samples])
            groups = {name: [item] for name, item in zip(names, file_samples, strict=True)}
        for name, parts in groups.items():
            if sum(len(selected) for _, selected in parts):
                label = f"{split}/{name}" if name else split
                datasets[label] = PackedConversations(label, parts, shape)
    if "train" not in datasets:
        raise DataError("sft: no conversation is left for training")
    valid = {
        label.partition("/")[2]: dataset
        for label, dataset in datasets.items()
        if label.partition("/")[0] == "valid"
    }
    return ConversationSets(
        datasets["train"], valid, datasets.get("test"), tuple(_iter_remarks(datasets, fresh))
    )


def _iter_split_ranges(
    shares: Sequence[float], *, evaluates: bool
) -> Iterator[tuple[str, float, float]]:
    """Yield each split with its begin and end, as fractions of a file."""
    begin = 0.0
    for name, share in zip(_NAMES, shares, strict=True):
        if name == "train" or evaluates:
            yield name, begin, begin + share
        begin += share


def _select_samples(samples: TokenizedSamples, begin: float, end: float, seed: int) -> Any:
    """Select samples from the whole file, at random."""
    order = np.random.default_rng([seed, len(samples)]).permutation(len(samples))
    first, last = (round(edge * len(samples)) for edge in (begin, end))
    return np.sort(order[first:last])


def _iter_remarks(
    datasets: Mapping[str, PackedConversations], fresh: Sequence[str]
) -> Iterator[str]:
    if fresh:
        yield f"tokenized {', '.join(fresh)}; later runs take that from the cache"
    for name, dataset in datasets.items():
        text = (
            f"{name}: {dataset.conversation_count:,} conversations in {len(dataset):,} sequences "
            f"of {dataset.shape.length}, {dataset.token_utilization:.1%} of their tokens used"
        )
        if dataset.cut:
            text += f"; {dataset.cut:,} were longer and are cut"
        if dataset.dropped:
            text += f"; {dataset.dropped:,} were longer and are left out"
        yield text
