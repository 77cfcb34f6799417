"""``flagscale convert``: a model from one format of checkpoints to another.

    flagscale convert /models/Llama-3.2-1B checkpoints/llama      Hugging Face → ours
    flagscale convert outputs/checkpoints /models/mine            ours → Hugging Face
    flagscale convert IN OUT --to torch --tensor-model-parallel-size 2    any → Megatron-LM's torch

A tensor is read, rearranged and written at a time, in one process and without a device. What was
written is read again and compared with what it was made of, bit by bit. A conversion that was cut
goes on from the files it had finished when the same command is run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from flagscale import __version__
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
    UNSOUND,
    CheckpointFormat,
    LaidOut,
    Model,
    Report,
    differs,
    format_of,
    refuse,
    without_padding,
)
from flagscale.train.checkpoint.formats.megatron_layout import Layout
from flagscale.train.checkpoint.formats.parts import (
    Origin,
    disk_used,
    identity_of,
    is_partial,
    partial_of,
)
from flagscale.train.checkpoint.formats.sidecar_files import beside
from flagscale.train.checkpoint.formats.tensors import Cast
from flagscale.train.data.progress import progress

_PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_OURS, _PEFT, _HUGGING_FACE = "torch_dist", "peft", "huggingface"
_LAYOUT = {
    "--tensor-model-parallel-size": ("tensor", "ranks that share a layer's tensors (1)"),
    "--pipeline-model-parallel-size": ("pipeline", "stages (1)"),
    "--expert-model-parallel-size": ("expert", "ranks that share out a layer's experts (1)"),
    "--num-virtual-stages-per-pipeline-rank": ("chunks", "model chunks of a stage (1)"),
    "--decoder-first-pipeline-num-layers": ("first", "layers of the first stage, if unlike others"),
    "--decoder-last-pipeline-num-layers": ("last", "layers of the last stage, if unlike others"),
    "--make-vocab-size-divisible-by": ("rows", "pads the vocabulary for each tensor rank (1)"),
}
"""Options of a layout: the field that each is, and its help."""
_OF_LAYERS = ("--transformer-impl", "--moe-grouped-gemm")
"""Options of a layout that say whose layers it has."""


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
        help="huggingface or torch_dist (the other one than IN's); megatron_dist or torch: "
        "Megatron-LM's torch_dist or torch; or peft: adapters alone",
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
    add("--restart", action="store_true", help="begin anew, whatever a cut conversion has finished")
    _add_layout(parser)
    return parser


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the layout of --to torch", "by Megatron-LM's names; it must train in the same one"
    )
    for name, (field, text) in _LAYOUT.items():
        group.add_argument(name, dest=field, metavar="N", type=_count, help=text)
    group.add_argument(
        "--transformer-impl",
        choices=("transformer_engine", "local"),
        help="whose layers it has (transformer_engine)",
    )
    text = "experts are Transformer Engine's, together"
    group.add_argument("--moe-grouped-gemm", action="store_true", default=None, help=text)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, found {text!r}")
    return int(text)


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
    name = options.to or (_HUGGING_FACE if reader.name == _OURS else _OURS)
    adapters = read_adapters(source) if reader.name == _OURS else None
    if name == _PEFT:
        _refuse_for_peft(options)
        _convert_adapters(adapters, source, target, options.base)
        return
    if options.check is not None and _HUGGING_FACE not in (name, reader.name):
        raise CheckpointError(
            f"--check compares with transformers, which reads neither {reader.name} nor {name}",
            hint="convert to huggingface, or from it",
        )
    writer = _writer(name, options)
    if adapters is None:
        model = reader.read(source)
    else:
        model = merged(adapters, base_of(adapters, options.base))
    if options.like is not None:
        model = dressed(model, options.like.absolute())
    if isinstance(writer, LaidOut):
        model = model.alone(f"{name} is written without them")
    if options.dtype is not None:
        model = model.cast(_PRECISIONS[options.dtype])
    if options.check is not None:
        _check_text(model, source if reader.name == _HUGGING_FACE else None, options.check or None)
    _make_room(model, target)
    model = replace(model, origin=_origin(options, model, name))
    with progress("converting") as report:
        total = model.size * (1 if options.no_verify else 2)
        count = _counted(report, total)
        inspect = _trusting if options.no_verify else partial(verify, model, report=count)
        written = writer.write(model, target, count, inspect)
    print(f"{model.kind}, {model.size / 1e9:.2f} GB: {written}")
    for note in model.notes:
        print(f"note: {note}")
    if name == _HUGGING_FACE and not model.files:
        print("no tokenizer was copied: --like takes one from another directory")
    if options.check is not None:
        _check(model, writer.read(written), name, options.check or None)


def _writer(name: str, options: argparse.Namespace) -> CheckpointFormat:
    """The format to write, in the layout that is given."""
    writer: CheckpointFormat = FORMATS.made(name, CheckpointFormat)
    fields = [field for field, _ in _LAYOUT.values()]
    given = {field: value for field in fields if (value := getattr(options, field)) is not None}
    if options.transformer_impl is not None:
        given["engine"] = options.transformer_impl == "transformer_engine"
    if options.moe_grouped_gemm:
        given["grouped"] = True
    if isinstance(writer, LaidOut):
        return writer.laid_out(Layout(**given))
    if given:
        raise CheckpointError(
            f"{name} is of no layout: any one loads it",
            hint="options of a layout are for --to torch",
        )
    return writer


def _origin(options: argparse.Namespace, model: Model, name: str) -> Origin:
    """What the conversion is made of, for one that was cut to be known again."""
    base, like = options.base, options.like
    sources = [model.path, *model.files, *([base.absolute()] if base else [])]
    given = {**vars(options), "like": like and identity_of([like.absolute()]), "to": name}
    ignored = ("source", "target", "base", "check", "no_verify", "restart")
    chosen = {key: str(value) for key, value in given.items() if key not in ignored}
    identity = {
        "its source": identity_of(sources),
        "what was asked for": json.dumps(chosen),
        "the version of this program": __version__,
    }

    def tell(text: str) -> None:
        print(text, file=sys.stderr)

    return Origin(identity, tell, options.restart)


def _refuse_for_peft(options: argparse.Namespace) -> None:
    """Adapters are written as they are."""
    given = {"--check": options.check, "--like": options.like, "--dtype": options.dtype}
    given |= {option: getattr(options, field) for option, (field, _) in _LAYOUT.items()}
    given |= {name: getattr(options, name[2:].replace("-", "_")) for name in _OF_LAYERS}
    if wrong := [option for option, value in given.items() if value is not None]:
        raise CheckpointError(
            f"{', '.join(wrong)}: --to peft writes the adapters as they are",
            hint="merge them first: flagscale convert IN OUT",
        )


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
    return not is_partial(path)


def _make_room(model: Model, target: Path) -> None:
    """Refuse a target that is in use, or a disk that is too small."""
    if target.exists() and (not target.is_dir() or any(map(_is_content, target.iterdir()))):
        raise CheckpointError(
            f"{target} is there already", hint="name a directory that does not exist"
        )
    existing = next(parent for parent in (target, *target.parents) if parent.exists())
    # What a conversion that was cut has left is gone on from, or goes.
    left = sum(map(disk_used, (target, partial_of(target))))
    free = shutil.disk_usage(existing).free + left
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
    unsound, changed = list[str](), list[str]()
    for name, tensor in model.tensors.items():
        if text := differs(tensor, written.tensors[name], report):
            (unsound if text == UNSOUND else changed).append(f"{name}: {text}")
    rounded = any(isinstance(tensor, Cast) for tensor in model.tensors.values())
    hint = "--dtype makes infinities of numbers that it has no room for" if rounded else None
    refuse(model.path, "cannot be used", unsound, hint)
    refuse(written.path, "is not what it was to be", changed)


def _counted(report: object, total: int) -> Report:
    done = 0

    def add(size: int) -> None:
        nonlocal done
        done += size
        report(min(done, total), total)  # type: ignore[operator]

    return add


def _check_text(model: Model, source: Path | None, text: str | None) -> None:
    """Refuse what logits could not be compared on, before anything is written. ``source``: the
    model of Hugging Face that is converted, if it is one."""
    from flagscale.train.checkpoint.formats.logits import given_tokens

    names = [path.name for path in (model.files if source is None else source.iterdir())]
    given_tokens(text, model.values["vocab_size"], source or model.path, names)


def _check(model: Model, written: Model, name: str, text: str | None) -> None:
    from flagscale.train.checkpoint.formats.logits import compare

    ours, theirs = (model, written) if name == _HUGGING_FACE else (written, model)
    print(compare(ours, theirs.path, text))


if __name__ == "__main__":
    sys.exit(main())
