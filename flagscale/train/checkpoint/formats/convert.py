"""``flagscale convert``: a model from one format of checkpoints to another.

    flagscale convert /models/Llama-3.2-1B checkpoints/llama      Hugging Face → ours
    flagscale convert outputs/checkpoints /models/mine            ours → Hugging Face

A tensor is read, rearranged and written at a time, in one process and without a device. What was
written is read again and compared with what it was made of, bit by bit.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from flagscale.config.arguments.huggingface.models import arguments_of, disagreements
from flagscale.config.arguments.huggingface.reading import read_config
from flagscale.errors import CheckpointError, FlagscaleError
from flagscale.train.checkpoint.formats.adapters import (
    Adapters,
    base_of,
    merged,
    read_adapters,
    write_peft,
)
from flagscale.train.checkpoint.formats.base import (
    FORMATS,
    CheckpointFormat,
    Model,
    Report,
    differs,
    format_of,
    refuse,
    without_padding,
)
from flagscale.train.checkpoint.formats.companions import beside
from flagscale.train.data.progress import progress

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OURS, _PEFT = "torch_dist", "peft"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flagscale convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("source", metavar="IN", type=Path, help="a model's directory, or one of checkpoints")
    add("target", metavar="OUT", type=Path, help="where to write; there must be nothing yet")
    add(
        "--to",
        metavar="FORMAT",
        help="huggingface or torch_dist; the other one than IN's. Or peft: adapters alone",
    )
    add(
        "--base",
        metavar="DIR",
        type=Path,
        help="the model that adapters are of; the one that they were trained on without it",
    )
    add(
        "--like",
        metavar="DIR",
        type=Path,
        help="take config.json and tokenizer from this model of Hugging Face",
    )
    add("--dtype", choices=tuple(_PRECISIONS), help="precision to write; IN's without it")
    add(
        "--check",
        nargs="?",
        const="",
        metavar="TEXT",
        help="compare logits with those of transformers, on a text or on ids of tokens (1,2,3)",
    )
    add("--no-verify", action="store_true", help="do not read again what was written")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Convert as the command line says; returns the exit code."""
    options = _parser().parse_args(argv)
    # Of packages that are not installed; megatron.core is imported for a format's sake.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    try:
        convert(options)
    except FlagscaleError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"error: {error.filename or options.target}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def convert(options: argparse.Namespace) -> None:
    """
    Raises:
        CheckpointError: what cannot be read, said or written, or is not as it was to be.
    """
    source, target = options.source.absolute(), options.target.absolute()
    reader = format_of(source)
    name = options.to or ("huggingface" if reader.name == _OURS else _OURS)
    adapters = read_adapters(source) if reader.name == _OURS else None
    if name == _PEFT:
        _convert_adapters(adapters, source, target, options.base)
        return
    writer: CheckpointFormat = FORMATS.made(name, CheckpointFormat)
    if adapters is None:
        model = reader.read(source)
    else:
        model = merged(adapters, base_of(adapters, options.base))
    if options.like is not None:
        model = dressed(model, options.like.absolute())
    if options.dtype is not None:
        model = model.cast(_PRECISIONS[options.dtype])
    _make_room(model, target)
    with progress("converting") as report:
        total = model.size * (1 if options.no_verify else 2)
        count = _counted(report, total)
        inspect = _trusting if options.no_verify else partial(verify, model, report=count)
        written = writer.write(model, target, count, inspect)
    print(f"{model.kind}, {model.size / 1e9:.2f} GB: {written}")
    for note in model.notes:
        print(f"note: {note}")
    if name == "huggingface" and not model.files:
        print("no tokenizer was copied: --like takes one from another directory")
    if options.check is not None:
        _check(model, writer.read(written), name, options.check or None)


def _convert_adapters(
    adapters: Adapters | None, source: Path, target: Path, base: Path | None
) -> None:
    if adapters is None:
        raise CheckpointError(f"{source} holds no adapters, but a whole model")
    model = base_of(adapters, base)
    _make_room(model, target)
    written = write_peft(adapters, model, target, lambda _size: None)
    print(f"adapters of {model.path}, rank {adapters.about['rank']}: {written}")


def dressed(model: Model, like: Path) -> Model:
    """A model with the config.json and the tokenizer of another directory, which must be the same
    but for its weights.

    Raises:
        CheckpointError: it is another model.
    """
    config = read_config(like)
    size = int(arguments_of(config)["vocab_size"])
    values = {**model.values, "vocab_size": None, "seq_length": sys.maxsize}
    wrong = disagreements(config, values)
    refuse(like, "is another model", [f"{name}: {text}" for name, text in wrong])
    rows = int(model.values["vocab_size"])
    if size > rows:
        raise CheckpointError(f"{like} has {size} tokens, the model {rows}")
    values = {**model.values, "vocab_size": size}
    tensors = {
        name: without_padding(name, tensor, values) for name, tensor in model.tensors.items()
    }
    kind = str(config["model_type"])
    return replace(
        model, kind=kind, values=values, tensors=tensors, config=config, files=tuple(beside(like))
    )


def _is_content(path: Path) -> bool:
    """Whether something in a directory is more than what a conversion that was killed has left."""
    return not (path.name.startswith(".") and path.name.endswith(".partial"))


def _make_room(model: Model, target: Path) -> None:
    """Refuse a target that is in use, or a disk that is too small."""
    if target.exists() and (not target.is_dir() or any(map(_is_content, target.iterdir()))):
        raise CheckpointError(
            f"{target} is there already", hint="name a directory that does not exist"
        )
    existing = next(parent for parent in (target, *target.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < model.size:
        raise CheckpointError(
            f"{existing} has {free / 1e9:.1f} GB free, the model takes {model.size / 1e9:.1f} GB"
        )
    target.parent.mkdir(parents=True, exist_ok=True)


def _trusting(_written: Model) -> None:
    """Looks at nothing."""


def verify(model: Model, written: Model, *, report: Report) -> None:
    """Compare what was written with what it was made of, bit by bit.

    Raises:
        CheckpointError: the tensors that differ, or that hold infinities or no numbers.
    """
    wrong = []
    for name, tensor in model.tensors.items():
        if text := differs(tensor, written.tensors[name], report):
            wrong.append(f"{name}: {text}")
    refuse(written.path, "is not what it was to be", wrong)


def _counted(report: object, total: int) -> Report:
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        report(done, total)  # type: ignore[operator]

    return add


def _check(model: Model, written: Model, name: str, text: str | None) -> None:
    from flagscale.train.checkpoint.formats.logits import compare

    ours, theirs = (model, written) if name == "huggingface" else (written, model)
    print(compare(ours, theirs.path, text))


if __name__ == "__main__":
    sys.exit(main())
