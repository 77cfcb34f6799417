#!/usr/bin/env python3
r"""Tokenize text or JSON lines into Megatron's indexed data sets (.bin and .idx).

  tools/data/preprocess.py --input 'corpus/*.jsonl' --output-prefix data/my \
      --tokenizer-path /models/Meta-Llama-3-8B --append-eod

This writes data/my_text_document.bin and .idx. Use data/my_text_document as data_path in a YAML.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from flagscale.errors import FlagscaleError
from flagscale.train.data import corpus
from flagscale.train.data.preprocess import PreprocessJob, preprocess
from flagscale.train.data.progress_bar import show_progress
from flagscale.train.data.tokenizers import TOKENIZER_TYPES, TokenizerSpec


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
        help="input files, directories or globs; - is standard input. Compressed files (.gz, .zst, "
        ".xz, .bz2) are read as they are. Directories and globs leave out hidden files, leftovers "
        "of editors, and descriptions such as README",
    )
    add(
        "--output-prefix",
        required=True,
        help="prefix of the outputs <prefix>_<key>_document.bin and .idx",
    )
    add(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="JSON keys or Parquet columns to tokenize, each into its own data set (default: text)",
    )
    add(
        "--format",
        choices=("auto", "jsonl", "text", "lines", "parquet"),
        default="auto",
        help="input format. jsonl: one object per line; text: one document per file (at most "
        "64 MiB); lines: one document per line; parquet: one document per row; auto: by the "
        "suffix (.jsonl, .ndjson, .json, .jl; .txt, .text, .md, .rst; .parquet), and jsonl for "
        "standard input (default: %(default)s)",
    )
    add(
        "--tokenizer-type",
        default="HuggingFaceTokenizer",
        help=f"one of {', '.join(TOKENIZER_TYPES)} (default: %(default)s)",
    )
    add("--tokenizer-path", "--tokenizer-model", help="directory or file of the tokenizer")
    add("--merge-file", help="merges.txt of GPT-2, if the tokenizer path is its vocab.json")
    add("--special-tokens-file", help="special tokens of AquilaTokenizerFS")
    add("--vocab-size", type=int, help="vocabulary size of NullTokenizer")
    add(
        "--append-eod",
        action="store_true",
        help="append the end-of-document token to each document",
    )
    add(
        "--prepend-bos",
        action="store_true",
        help="prepend the beginning-of-sequence token to each document",
    )
    add(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="number of processes (default: one per core)",
    )
    add("--overwrite", action="store_true", help="overwrite existing outputs")
    return parser


def _describe_skipped(skipped: Mapping[Path, str]) -> str:
    """Return the number of files that were left out by reason, with an example of each."""
    names: dict[str, list[str]] = {}
    for path, reason in skipped.items():
        names.setdefault(reason, []).append(str(path))
    counts = (f"{len(paths)} {reason} ({paths[0]})" for reason, paths in names.items())
    return f"left out {len(skipped)} file(s): {', '.join(counts)}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = _build_parser()
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, got {args.workers}")
    try:
        corpus_files = corpus.find_inputs(args.input)
        if corpus_files.skipped:
            print(f"note: {_describe_skipped(corpus_files.skipped)}", file=sys.stderr)
        job = PreprocessJob(
            inputs=corpus_files.files,
            skipped=corpus_files.skipped,
            output_prefix=args.output_prefix,
            tokenizer=TokenizerSpec(
                args.tokenizer_type,
                args.tokenizer_path,
                vocab_size=args.vocab_size,
                merge_file=args.merge_file,
                special_tokens_file=args.special_tokens_file,
            ),
            keys=tuple(dict.fromkeys(args.json_keys)),
            file_format=None if args.format == "auto" else args.format,
            append_eod=args.append_eod,
            prepend_bos=args.prepend_bos,
            workers=args.workers,
            overwrite=args.overwrite,
        )
        with show_progress("tokenizing") as report:
            summary = preprocess(job, report)
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    skipped = f", {summary.empty_texts} empty documents skipped" if summary.empty_texts else ""
    sources = f"{len(job.inputs)} file{'s' * (len(job.inputs) != 1)}"
    print(
        f"{summary.document_count} documents, {summary.token_count} tokens from {sources}{skipped}"
    )
    for prefix in summary.prefixes:
        print(f"wrote {prefix}.bin and .idx")
    print(f"wrote {args.output_prefix}.summary.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
