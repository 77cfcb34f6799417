"""Training texts: the source code of Python's standard library, as words. Nothing is downloaded."""

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
"""Ids of special tokens, the same in all models. Sequences are full, so padding is only declared.
"""
SPECIAL = 4
CLASSES = 8
"""Number of modules whose passages are classified."""
_QUESTION = 4
_MODULES = 60
_LONGEST = 200_000
"""Characters read of a module."""
_WORDS = re.compile(r"\w+|[^\w\s]|\n")


@dataclass(frozen=True)
class Corpus:
    """Token ids, int64, of each module, the longest module first."""

    modules: tuple[Tensor, ...]
    tokens: Tensor
    """All modules' tokens, concatenated."""


@lru_cache(maxsize=2)
def build_corpus(vocabulary: int) -> Corpus:
    """Return the largest library modules as ids below ``vocabulary``. The most frequent words have
    an id each; all others are unknown.
    """
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


def _draw_passage(tokens: Tensor, length: int, draw: torch.Generator) -> Tensor:
    begin = int(torch.randint(len(tokens) - length, (), generator=draw))
    return tokens[begin : begin + length]


Batch = dict[str, Tensor]


def draw_next_tokens(corpus: Corpus, batch: int, length: int, draw: torch.Generator) -> Batch:
    """Draw passages of ``length`` tokens, shape [batch, length], which are their own labels."""
    ids = torch.stack([_draw_passage(corpus.tokens, length, draw) for _ in range(batch)])
    return {"input_ids": ids, "labels": ids}


def draw_classes(corpus: Corpus, batch: int, length: int, draw: torch.Generator) -> Batch:
    """Draw passages, shape [batch, length], each from one of :data:`CLASSES` modules, and the
    module numbers, shape [batch]. A passage ends in one EOS, whose position BART classifies.
    """
    labels = torch.randint(CLASSES, (batch,), generator=draw)
    rows = [_draw_passage(corpus.modules[int(label)], length - 2, draw) for label in labels]
    return {"input_ids": torch.stack([_add_bos_eos(row) for row in rows]), "labels": labels}


def draw_spans(corpus: Corpus, batch: int, length: int, draw: torch.Generator) -> Batch:
    """Draw questions with passages that contain them, shape [batch, length], and the first and last
    position of each question in its passage, shape [batch].
    """
    rows, starts = [], []
    for _ in range(batch):
        passage = _draw_passage(corpus.tokens, length - _QUESTION - 3, draw)
        offset = int(torch.randint(len(passage) - _QUESTION, (), generator=draw))
        question = torch.cat([passage[offset : offset + _QUESTION], torch.tensor([EOS])])
        rows.append(_add_bos_eos(torch.cat([question, passage])))
        starts.append(offset + _QUESTION + 2)
    start = torch.tensor(starts)
    return {
        "input_ids": torch.stack(rows),
        "start_positions": start,
        "end_positions": start + _QUESTION - 1,
    }


def _add_bos_eos(tokens: Tensor) -> Tensor:
    return torch.cat([torch.tensor([BOS]), tokens, torch.tensor([EOS])])
