"""The sets of conversations of a run: which files, which part of them is for what."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from flagscale.config.arguments import paths
from flagscale.config.arguments.rules import split_shares
from flagscale.errors import DataError
from flagscale.train.checkpoint.agreement import everywhere
from flagscale.train.data.blends import told_apart
from flagscale.train.data.chat.cache import Samples, Source, build, open_samples
from flagscale.train.data.chat.sequences import Sequences, Shape
from flagscale.train.data.chat.templates import open_template
from flagscale.train.data.tokenizers import Tokenizer

_NAMES = ("train", "valid", "test")
_TURN_SECONDS = 0.5
_ALL_FOR_TRAINING = (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class ConversationSets:
    """``valid`` has the sets that are evaluated each by itself, by name; one alone has none.
    ``remarks``: what a user may want to know, a line each."""

    train: Sequences | None
    valid: Mapping[str, Sequences]
    test: Sequences | None
    remarks: tuple[str, ...]


def conversation_sets(args: Any, tokenizer: Tokenizer) -> ConversationSets:
    """All sets that the arguments name. All ranks call it: the first of each host tokenizes what
    has not been tokenized before.

    Raises:
        DataError: on all ranks: a file, a conversation or the template cannot be used.
    """
    files = _files(args)
    root = _cache(args, files)
    every = list(dict.fromkeys(path for own in files.values() for path in own))
    found, error, sources = _Built(None, []), None, dict[Path, Source]()
    try:
        template = open_template(args.chat_template, _directory(args))
        sources = {path: Source(path, args.sft_format, tokenizer, template) for path in every}
    except DataError as problem:
        error = problem
    try:
        found = _patiently(lambda: _build(sources, root))
    except DataError as problem:
        error = problem
    keys = _shared(found.keys, error)
    samples = {path: open_samples(source, root, keys[path]) for path, source in sources.items()}
    return _sets(args, files, samples, found.fresh)


class _Built(NamedTuple):
    """The key of each file in the cache, on the ranks that have looked at the files; the names of
    those that were tokenized now."""

    keys: Mapping[Path, str] | None
    fresh: list[str]


def _build(sources: Mapping[Path, Source], root: Path) -> _Built:
    """Tokenize what has not been; the first rank of each host."""
    if int(os.environ.get("LOCAL_RANK", "0")):
        return _Built(None, [])
    keys = {path: source.key() for path, source in sources.items()}
    fresh = [path.name for path, source in sources.items() if build(source, root, keys[path])]
    return _Built(keys, fresh)


def _patiently(work: Callable[[], _Built]) -> _Built:
    """What ``work`` gives. The other ranks wait in short turns: a single one would time out where
    it takes long."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizing") as pool:
        future = pool.submit(work)
        while dist.is_initialized() and not everywhere(future.done()):
            wait([future], timeout=_TURN_SECONDS)
        return future.result()


def _shared(own: Mapping[Path, str] | None, problem: DataError | None) -> Mapping[Path, str]:
    """The files' keys, from the ranks that have looked at them."""
    error = None
    if problem is not None:
        error = problem.message + (f" ({problem.hint})" if problem.hint else "")
    told: list[Any] = [(own, error)]
    if dist.is_initialized():
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, (own, error))
    for _, text in told:
        if text:
            raise DataError(text)
    keys = [one for one, _ in told if one is not None]
    for path in keys[0]:
        if len({one[path] for one in keys}) > 1:
            raise DataError(f"{path}: hosts have different files of that name, or tokenizers")
    return dict(keys[0])


def _files(args: Any) -> dict[str, tuple[Path, ...]]:
    """Files by split; those that are cut for all three are called ``all``."""
    given = {"all": args.data_path, **{name: getattr(args, f"{name}_data_path") for name in _NAMES}}
    files = {
        name: tuple(dict.fromkeys(map(Path, paths.blend(list(value)))))
        for name, value in given.items()
        if value
    }
    if not files.keys() & {"all", "train"}:
        raise DataError("no conversations to train on: data_path is not set")
    if not args.eval_iters:
        files = {name: own for name, own in files.items() if name in ("all", "train")}
    return files


def _cache(args: Any, files: Mapping[str, Sequence[Path]]) -> Path:
    found = paths.data_cache(vars(args))
    if found is not None:
        return found[0] / "conversations"
    return next(iter(files.values()))[0].parent / "conversations_cache"


def _directory(args: Any) -> Path:
    path = Path(args.tokenizer_path or "")
    return path if path.is_dir() else path.parent


def _sets(
    args: Any,
    files: Mapping[str, Sequence[Path]],
    found: Mapping[Path, Samples],
    fresh: Sequence[str],
) -> ConversationSets:
    shape = Shape(args.seq_length, args.sft_packing, args.sft_too_long, args.seed)
    shares = _ALL_FOR_TRAINING
    if args.split:
        shares = split_shares(args.split) or _ALL_FOR_TRAINING
    made: dict[str, Sequences] = {}
    for split, begin, end in _parts(shares, evaluates=bool(args.eval_iters)):
        own = [
            (found[path], _part(found[path], begin, end, args.seed))
            for path in files.get("all", ())
        ]
        own += [(found[path], np.arange(len(found[path]))) for path in files.get(split, ())]
        named = {"": own}
        if split == "valid" and args.multiple_validation_sets and len(own) > 1:
            names = told_apart([samples.path.stem for samples, _ in own])
            named = {name: [one] for name, one in zip(names, own, strict=True)}
        for name, parts in named.items():
            if sum(len(taken) for _, taken in parts):
                label = f"{split}/{name}" if name else split
                made[label] = Sequences(label, parts, shape)
    if "train" not in made:
        raise DataError("sft: no conversation is left for training")
    valid = {n.partition("/")[2]: one for n, one in made.items() if n.partition("/")[0] == "valid"}
    return ConversationSets(made["train"], valid, made.get("test"), tuple(_told(made, fresh)))


def _parts(shares: Sequence[float], *, evaluates: bool) -> Iterator[tuple[str, float, float]]:
    """Each split and where it begins and ends, as shares of a file."""
    begin = 0.0
    for name, share in zip(_NAMES, shares, strict=True):
        if name == "train" or evaluates:
            yield name, begin, begin + share
        begin += share


def _part(samples: Samples, begin: float, end: float, seed: int) -> Any:
    """Samples of a file, drawn from all over it."""
    order = np.random.default_rng([seed, len(samples)]).permutation(len(samples))
    first, last = (round(edge * len(samples)) for edge in (begin, end))
    return np.sort(order[first:last])


def _told(made: Mapping[str, Sequences], fresh: Sequence[str]) -> Iterator[str]:
    if fresh:
        yield f"tokenized {', '.join(fresh)}; later runs take that from the cache"
    for name, one in made.items():
        text = (
            f"{name}: {one.conversations:,} conversations in {len(one):,} sequences of "
            f"{one.shape.length}, {one.used:.1%} of their tokens used"
        )
        if one.cut:
            text += f"; {one.cut:,} were longer and are cut"
        if one.dropped:
            text += f"; {one.dropped:,} were longer and are left out"
        yield text
