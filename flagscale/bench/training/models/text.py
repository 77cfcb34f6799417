"""Texts to learn from: the source of Python's own library, in words. Nothing is downloaded."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

BOS, PAD, EOS, UNKNOWN = range(4)
"""Ids of special tokens, alike in all models; sequences are full, so padding is only declared."""
SPECIAL = 4
CLASSES = 8
"""Modules whose passages are told apart."""
_QUESTION = 4
_MODULES = 60
_LONGEST = 200_000
"""Characters of a module that are read."""
_WORDS = re.compile(r"\w+|[^\w\s]|\n")


@dataclass(frozen=True)
class Corpus:
    """Token ids, int64, of each module, the longest first."""

    modules: tuple[Tensor, ...]
    tokens: Tensor
    """All of them, one after the other."""


@lru_cache(maxsize=2)
def corpus(vocabulary: int) -> Corpus:
    """The library's largest modules as ids below ``vocabulary``: the most frequent words have one
    each, all others are unknown."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    texts = [path.read_text("utf-8", "replace")[:_LONGEST] for path in files[:_MODULES]]
    words = [_WORDS.findall(text) for text in texts]
    counts = Counter(chain.from_iterable(words))
    # Ties by the word itself, so that every rank finds the same ids.
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary - SPECIAL]
    ids = {word: number for number, word in enumerate(frequent, start=SPECIAL)}
    modules = tuple(torch.tensor([ids.get(w, UNKNOWN) for w in some]) for some in words)
    return Corpus(modules, torch.cat(modules))


def _cut(tokens: Tensor, length: int, draw: torch.Generator) -> Tensor:
    begin = int(torch.randint(len(tokens) - length, (), generator=draw))
    return tokens[begin : begin + length]


Batch = dict[str, Tensor]


def next_tokens(known: Corpus, batch: int, length: int, draw: torch.Generator) -> Batch:
    """Passages of ``length`` tokens, [batch, length], which are their own labels."""
    ids = torch.stack([_cut(known.tokens, length, draw) for _ in range(batch)])
    return {"input_ids": ids, "labels": ids}


def classes(known: Corpus, batch: int, length: int, draw: torch.Generator) -> Batch:
    """Passages [batch, length] of one of :data:`CLASSES` modules, and which that is: [batch]. Each
    ends in one EOS, where BART looks for what it classifies."""
    labels = torch.randint(CLASSES, (batch,), generator=draw)
    rows = [_cut(known.modules[int(label)], length - 2, draw) for label in labels]
    return {"input_ids": torch.stack([_framed(row) for row in rows]), "labels": labels}


def spans(known: Corpus, batch: int, length: int, draw: torch.Generator) -> Batch:
    """A few tokens as the question and a passage that holds them, [batch, length]; first and last
    position of them in it, [batch] each."""
    rows, starts = [], []
    for _ in range(batch):
        passage = _cut(known.tokens, length - _QUESTION - 3, draw)
        at = int(torch.randint(len(passage) - _QUESTION, (), generator=draw))
        asked = torch.cat([passage[at : at + _QUESTION], torch.tensor([EOS])])
        rows.append(_framed(torch.cat([asked, passage])))
        starts.append(at + _QUESTION + 2)
    start = torch.tensor(starts)
    return {
        "input_ids": torch.stack(rows),
        "start_positions": start,
        "end_positions": start + _QUESTION - 1,
    }


def _framed(tokens: Tensor) -> Tensor:
    return torch.cat([torch.tensor([BOS]), tokens, torch.tensor([EOS])])
