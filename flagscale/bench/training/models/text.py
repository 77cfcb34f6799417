"""Training text: source code of Python's standard library, tokenized into words and symbols.

Nothing is downloaded. Batches are drawn for three tasks: next token, class of a passage, and span
of a passage that a question is about. Used by :mod:`.language`.
"""

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
"""Ids of special tokens, the same in all models. All sequences have full length, so that no padding
occurs.
"""
SPECIAL_TOKENS = 4
CLASSES = 8
"""Number of library modules from which passages for classification are drawn."""
_QUESTION_TOKENS = 4
_MODULE_COUNT = 60
_MAX_MODULE_CHARACTERS = 200_000
_TOKEN_PATTERN = re.compile(r"\w+|[^\w\s]|\n")


@dataclass(frozen=True)
class Corpus:
    """Token ids, int64, of each module, the longest module first."""

    modules: tuple[Tensor, ...]
    tokens: Tensor
    """All modules' tokens, concatenated."""


@lru_cache(maxsize=2)
def build_corpus(vocabulary_size: int) -> Corpus:
    """Return the largest library modules as token ids below ``vocabulary_size``. The most frequent
    words have an id each; all others are :data:`UNKNOWN`.
    """
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    texts = [
        path.read_text("utf-8", "replace")[:_MAX_MODULE_CHARACTERS]
        for path in files[:_MODULE_COUNT]
    ]
    words = [_TOKEN_PATTERN.findall(text) for text in texts]
    counts = Counter(chain.from_iterable(words))
    # Words of the same frequency are sorted, so that every rank has the same ids.
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[
        : vocabulary_size - SPECIAL_TOKENS
    ]
    ids = {word: number for number, word in enumerate(frequent, start=SPECIAL_TOKENS)}
    modules = tuple(
        torch.tensor([ids.get(w, UNKNOWN) for w in module_words]) for module_words in words
    )
    return Corpus(modules, torch.cat(modules))


def _draw_passage(tokens: Tensor, length: int, generator: torch.Generator) -> Tensor:
    begin = int(torch.randint(len(tokens) - length, (), generator=generator))
    return tokens[begin : begin + length]


Batch = dict[str, Tensor]


def draw_next_tokens(corpus: Corpus, batch: int, length: int, generator: torch.Generator) -> Batch:
    """Draw passages of ``length`` tokens, shape [batch, length], which are their own labels."""
    ids = torch.stack([_draw_passage(corpus.tokens, length, generator) for _ in range(batch)])
    return {"input_ids": ids, "labels": ids}


def draw_classes(corpus: Corpus, batch: int, length: int, generator: torch.Generator) -> Batch:
    """Draw passages, shape [batch, length], each from one of :data:`CLASSES` modules, and the
    module numbers, shape [batch]. A passage ends in one EOS, whose position BART classifies.
    """
    labels = torch.randint(CLASSES, (batch,), generator=generator)
    rows = [_draw_passage(corpus.modules[int(label)], length - 2, generator) for label in labels]
    return {"input_ids": torch.stack([_add_bos_eos(row) for row in rows]), "labels": labels}


def draw_spans(corpus: Corpus, batch: int, length: int, generator: torch.Generator) -> Batch:
    """Draw questions with passages that contain them, shape [batch, length], and the first and last
    position of each question in its passage, shape [batch].
    """
    rows, starts = [], []
    for _ in range(batch):
        passage = _draw_passage(corpus.tokens, length - _QUESTION_TOKENS - 3, generator)
        offset = int(torch.randint(len(passage) - _QUESTION_TOKENS, (), generator=generator))
        question = torch.cat([passage[offset : offset + _QUESTION_TOKENS], torch.tensor([EOS])])
        rows.append(_add_bos_eos(torch.cat([question, passage])))
        starts.append(offset + _QUESTION_TOKENS + 2)
    start = torch.tensor(starts)
    return {
        "input_ids": torch.stack(rows),
        "start_positions": start,
        "end_positions": start + _QUESTION_TOKENS - 1,
    }


def _add_bos_eos(tokens: Tensor) -> Tensor:
    return torch.cat([torch.tensor([BOS]), tokens, torch.tensor([EOS])])
