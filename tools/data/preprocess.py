#!/usr/bin/env python3
"""Turn text or JSON lines into Megatron's .bin and .idx.

  tools/data/preprocess.py --input 'corpus/*.jsonl' --output-prefix data/my \\
      --tokenizer-path /models/Meta-Llama-3-8B --append-eod

writes data/my_text_document.bin and .idx; data_path in a YAML is data/my_text_document.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from flagscale.errors import FlagscaleError
from flagscale.train.data import corpus
from flagscale.train.data.preprocess import Job, run
from flagscale.train.data.progress import progress
from flagscale.train.data.tokenizers import TOKENIZER_TYPES, TokenizerSpec


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="files, directories or globs")
    add("--output-prefix", required=True, help="outputs are <prefix>_<key>_document.bin and .idx")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to take (text)")
    add(
        "--format",
        choices=("auto", "jsonl", "text", "lines"),
        default="auto",
        help="jsonl: an object a line; text: a file is a document (64 MiB of it at most); lines: "
        "a line is a document; auto: jsonl for .jsonl, .ndjson and .json, text for others",
    )
    add("--tokenizer-type", default="HuggingFaceTokenizer", help=", ".join(TOKENIZER_TYPES))
    add("--tokenizer-path", "--tokenizer-model", help="the tokenizer's directory or file")
    add("--merge-file", help="GPT-2's merges.txt, where the path is its vocab.json")
    add("--special-tokens-file", help="for AquilaTokenizerFS")
    add("--vocab-size", type=int, help="for NullTokenizer")
    add("--append-eod", action="store_true", help="end each document with its token")
    add("--prepend-bos", action="store_true", help="begin each document with its token")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (one a core)")
    add("--overwrite", action="store_true", help="replace outputs that exist")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    if args.workers < 1:
        parser.error(f"--workers must be at least 1, got {args.workers}")
    files = (args.merge_file, args.special_tokens_file)
    try:
        job = Job(
            inputs=tuple(corpus.find_inputs(args.input)),
            output_prefix=args.output_prefix,
            tokenizer=TokenizerSpec(
                args.tokenizer_type, args.tokenizer_path, args.vocab_size, *files
            ),
            keys=tuple(dict.fromkeys(args.json_keys)),
            format=None if args.format == "auto" else args.format,
            append_eod=args.append_eod,
            prepend_bos=args.prepend_bos,
            workers=args.workers,
            overwrite=args.overwrite,
        )
        with progress("tokenizing") as report:
            summary = run(job, report)
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    skipped = f", {summary.empty} empty ones left out" if summary.empty else ""
    print(f"{summary.documents} documents, {summary.tokens} tokens{skipped}")
    for prefix in summary.prefixes:
        print(f"wrote {prefix}.bin and .idx")
    return 0


if __name__ == "__main__":
    sys.exit(main())
