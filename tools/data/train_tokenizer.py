#!/usr/bin/env python3
"""Train a byte-level BPE tokenizer on text or JSON lines; write a Hugging Face tokenizer directory.

tools/data/train_tokenizer.py --input 'corpus/*.jsonl' --vocab-size 32000 --output data/tok
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from flagscale.errors import FlagscaleError
from flagscale.train.data import corpus, train_bpe
from flagscale.train.data.corpus import BadRecordError, CorpusFormat


def _iter_documents(
    inputs: Sequence[str], file_format: CorpusFormat | None, key: str, max_bytes: int
) -> Iterator[str]:
    """Yield the documents of the inputs in order, from the first ``max_bytes`` (0: all)."""
    remaining_bytes = max_bytes
    for path in corpus.find_inputs(inputs).files:
        for chunk in corpus.split_file(path, file_format or corpus.guess_format(path)):
            if max_bytes and remaining_bytes <= 0:
                return
            remaining_bytes -= chunk.end - chunk.begin
            for texts in corpus.read_documents(chunk, [key]):
                yield texts[0]


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        metavar="FILE",
        help="input files, directories or globs",
    )
    add("--output", required=True, help="tokenizer directory to write")
    add("--vocab-size", type=int, required=True, help="vocabulary size, including special tokens")
    add("--json-key", default="text", help="key of the text in JSON lines (default: %(default)s)")
    add(
        "--format",
        choices=("auto", "jsonl", "text", "lines"),
        default="auto",
        help="input format (default: %(default)s)",
    )
    add(
        "--special-tokens",
        nargs="+",
        default=[train_bpe.BEGIN_TOKEN, train_bpe.END_TOKEN],
        metavar="TOKEN",
        help="special tokens; the first one begins a document, the second one ends it",
    )
    add("--max-megabytes", type=int, default=0, help="megabytes of input to read (default: all)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    from pathlib import Path

    args = _build_parser().parse_args(argv)
    file_format = None if args.format == "auto" else args.format
    settings = train_bpe.BpeSettings(args.vocab_size, tuple(args.special_tokens))
    try:
        texts = _iter_documents(
            args.input, file_format, args.json_key, args.max_megabytes * 1_000_000
        )
        tokenizer = train_bpe.train_tokenizer(texts, settings)
        train_bpe.write_directory(tokenizer, Path(args.output), settings.special_tokens)
    except BadRecordError as error:
        print(f"error: {error.to_data_error()}", file=sys.stderr)
        return 1
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"wrote {args.output} with {args.vocab_size} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
