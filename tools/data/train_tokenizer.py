#!/usr/bin/env python3
"""Train a byte-level BPE tokenizer on text or JSON lines and write a Hugging Face directory.

tools/data/train_tokenizer.py --input 'corpus/*.jsonl' --vocab-size 32000 --output data/tok
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from flagscale.errors import FlagscaleError
from flagscale.train.data import corpus, train_bpe
from flagscale.train.data.corpus import BadRecordError, Format


def _texts(inputs: Sequence[str], kind: Format | None, key: str, limit: int) -> Iterator[str]:
    """Documents of the inputs, in order, until ``limit`` bytes of input are read (0: all)."""
    left = limit
    for path in corpus.find_inputs(inputs):
        for piece in corpus.cut(path, kind or corpus.format_of(path)):
            if limit and left <= 0:
                return
            left -= piece.end - piece.begin
            for texts in corpus.read(piece, [key]):
                yield texts[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="files, directories or globs")
    add("--output", required=True, help="the directory to write")
    add("--vocab-size", type=int, required=True, help="tokens, special ones included")
    add("--json-key", default="text", help="key to take from JSON lines (text)")
    add("--format", choices=("auto", "jsonl", "text", "lines"), default="auto")
    add(
        "--special-tokens",
        nargs="+",
        default=[train_bpe.BEGIN, train_bpe.END],
        metavar="TOKEN",
        help="the first begins a document, the second ends it",
    )
    add("--max-megabytes", type=int, default=0, help="stop after this much input (0: all)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    from pathlib import Path

    args = _parser().parse_args(argv)
    kind = None if args.format == "auto" else args.format
    settings = train_bpe.BpeSettings(args.vocab_size, tuple(args.special_tokens))
    try:
        texts = _texts(args.input, kind, args.json_key, args.max_megabytes * 1_000_000)
        tokenizer = train_bpe.train(texts, settings)
        train_bpe.write_directory(tokenizer, Path(args.output), settings.special_tokens)
    except BadRecordError as error:
        print(f"error: {error.located()}", file=sys.stderr)
        return 1
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {args.output} with {args.vocab_size} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
