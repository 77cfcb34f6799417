"""``flagscale convert``: convert a model from one checkpoint format to another.

    flagscale convert /models/Llama-3.2-1B checkpoints/llama      Hugging Face → FlagScale
    flagscale convert outputs/checkpoints /models/mine            FlagScale → Hugging Face
    flagscale convert IN OUT --to torch --tensor-model-parallel-size 2    any → Megatron-LM's torch

One process reads, rearranges and writes one tensor at a time and needs no accelerator. It then
reads the output again and compares it with the input bit by bit. If a conversion is interrupted,
running the same command again continues with the files that were finished.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from flagscale import __version__
from flagscale.config.arguments.compat.huggingface.config_reader import read_config
from flagscale.config.arguments.compat.huggingface.models import (
    arguments_of,
    disagreements,
    huggingface_family_of,
)
from flagscale.errors import CheckpointError, FlagscaleError
from flagscale.train.checkpoint.formats.adapters import (
    Adapters,
    merge_adapters,
    open_base_model,
    read_adapters,
    write_peft,
)
from flagscale.train.checkpoint.formats.base import (
    FORMATS,
    NOT_FINITE,
    ByteProgress,
    CheckpointFormat,
    LayoutAwareFormat,
    StoredModel,
    describe_difference,
    detect_format,
    raise_if_any,
    trim_vocabulary,
)
from flagscale.train.checkpoint.formats.convert_options import (
    LAYER_OPTIONS,
    LAYOUT_OPTIONS,
    build_parser,
)
from flagscale.train.checkpoint.formats.lazy_tensors import CastTensor
from flagscale.train.checkpoint.formats.megatron_layout import MegatronLayout
from flagscale.train.checkpoint.formats.resumable_directory import (
    ResumeOptions,
    fingerprint_files,
    is_partial,
    measure_disk_usage,
    partial_path,
)
from flagscale.train.checkpoint.formats.sidecar_files import list_sidecar_files
from flagscale.train.data.progress_bar import show_progress

_DTYPES_BY_PRECISION = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TORCH_DIST = "torch_dist"
_PEFT = "peft"
_HUGGING_FACE = "huggingface"


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``flagscale convert``; return the exit code."""
    options = build_parser(__doc__).parse_args(argv)
    # megatron.core warns about optional packages that conversion does not need.
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
    """Convert a model as the command-line options specify.

    Args:
        options: parsed command line.

    Raises:
        CheckpointError: the input cannot be read, the output format cannot represent it, or the
            output differs from the input.
    """
    source, target = options.source.absolute(), options.target.absolute()
    reader = detect_format(source)
    output_format = options.to or (_HUGGING_FACE if reader.name == _TORCH_DIST else _TORCH_DIST)
    adapters = read_adapters(source) if reader.name == _TORCH_DIST else None
    if output_format == _PEFT:
        _check_peft_options(options)
        _export_adapters(adapters, source, target, options.base)
        return
    if options.check is not None and _HUGGING_FACE not in (output_format, reader.name):
        raise CheckpointError(
            f"--check compares with transformers, which reads neither {reader.name} nor "
            f"{output_format}",
            hint="convert to huggingface, or from it",
        )
    writer = _create_writer(output_format, options)
    if adapters is None:
        model = reader.read(source)
    else:
        model = merge_adapters(adapters, open_base_model(adapters, options.base))
    if options.like is not None:
        model = copy_config(model, options.like.absolute())
    if isinstance(writer, LayoutAwareFormat):
        model = model.without_mtp(f"{output_format} is written without them")
    if options.dtype is not None:
        model = model.cast(_DTYPES_BY_PRECISION[options.dtype])
    if options.check is not None:
        _check_tokens(
            model, source if reader.name == _HUGGING_FACE else None, options.check or None
        )
    _prepare_target(model, target)
    model = replace(model, resume=_build_resume_options(options, model, output_format))
    with show_progress("converting") as set_progress:
        # Verification reads the output once more.
        total_bytes = model.total_bytes * (1 if options.no_verify else 2)
        add_progress = _accumulate_progress(set_progress, total_bytes)
        inspect = _skip_verification
        if not options.no_verify:
            inspect = partial(verify, model, report=add_progress)
        output = writer.write(model, target, add_progress, inspect)
    _print_result(model, output, output_format)
    if options.check is not None:
        precision = None if options.dtype is None else _DTYPES_BY_PRECISION[options.dtype]
        _compare_logits(model, writer.read(output), output_format, options.check or None, precision)


def _print_result(model: StoredModel, output: Path, output_format: str) -> None:
    """Print what was written, and what was left out."""
    print(f"{model.model_type}, {model.total_bytes / 1e9:.2f} GB: {output}")
    for note in model.notes:
        print(f"note: {note}")
    if output_format == _HUGGING_FACE and not model.files:
        print("no tokenizer was copied: --like takes one from another directory")
    if model.chat_template is None:
        return
    if output_format == _HUGGING_FACE:
        print("chat template: the one that the model was trained with")
    elif output_format != _TORCH_DIST:
        print(f"note: {output_format} cannot store the chat template of the training")


def _create_writer(output_format: str, options: argparse.Namespace) -> CheckpointFormat:
    """Create the output format, for the parallel layout in the options."""
    writer: CheckpointFormat = FORMATS.create(output_format, CheckpointFormat)
    layout_fields = {
        field: value
        for field, _ in LAYOUT_OPTIONS.values()
        if (value := getattr(options, field)) is not None
    }
    if options.transformer_impl is not None:
        layout_fields["transformer_engine"] = options.transformer_impl == "transformer_engine"
    if options.moe_grouped_gemm:
        layout_fields["grouped_gemm"] = True
    if isinstance(writer, LayoutAwareFormat):
        return writer.for_layout(MegatronLayout(**layout_fields))
    if layout_fields:
        raise CheckpointError(
            f"{output_format} does not depend on the layout: any layout can load it",
            hint="parallel layout options apply to --to torch only",
        )
    return writer


def _build_resume_options(
    options: argparse.Namespace, model: StoredModel, output_format: str
) -> ResumeOptions:
    """Build the identity of a conversion; only the same conversion reuses its files."""
    base, like = options.base, options.like
    sources = [model.path, *model.files, *([base.absolute()] if base else [])]
    values = {
        **vars(options),
        "like": like and fingerprint_files([like.absolute()]),
        "to": output_format,
    }
    ignored_options = ("source", "target", "base", "check", "no_verify", "restart")
    relevant_options = {
        key: str(value) for key, value in values.items() if key not in ignored_options
    }
    # The keys are stored, and printed if a value differs.
    identity = {
        "its source": fingerprint_files(sources),
        "what was asked for": json.dumps(relevant_options),
        "the version of this program": __version__,
    }

    def log(text: str) -> None:
        print(text, file=sys.stderr)

    return ResumeOptions(identity, log, options.restart)


def _check_peft_options(options: argparse.Namespace) -> None:
    """Refuse options that would change adapters: they are exported as they are."""
    values = {"--check": options.check, "--like": options.like, "--dtype": options.dtype}
    values |= {option: getattr(options, field) for option, (field, _) in LAYOUT_OPTIONS.items()}
    values |= {name: getattr(options, name[2:].replace("-", "_")) for name in LAYER_OPTIONS}
    if unsupported := [option for option, value in values.items() if value is not None]:
        raise CheckpointError(
            f"{', '.join(unsupported)}: --to peft writes the adapters as they are",
            hint="merge them first: flagscale convert IN OUT",
        )


def _export_adapters(
    adapters: Adapters | None, source: Path, target: Path, base: Path | None
) -> None:
    """Write the adapters alone, in peft's format."""
    if adapters is None:
        raise CheckpointError(f"{source} contains a whole model and no adapters")
    model = open_base_model(adapters, base)
    _prepare_target(model, target)
    output = write_peft(adapters, model, target, lambda _size: None)
    print(f"adapters of {model.path}, rank {adapters.settings['rank']}: {output}")


def copy_config(model: StoredModel, like: Path) -> StoredModel:
    """Return a model with the ``config.json``, vocabulary size and tokenizer of another directory.

    Raises:
        CheckpointError: the directory's model differs in more than its weights.
    """
    config = read_config(like)
    vocab_size = int(arguments_of(config)["vocab_size"])
    values = {**model.values, "vocab_size": None, "seq_length": sys.maxsize}
    differences = disagreements(config, values)
    raise_if_any(like, "is another model", [f"{name}: {text}" for name, text in differences])
    model_vocab_size = int(model.values["vocab_size"])
    if vocab_size > model_vocab_size:
        raise CheckpointError(f"{like} has {vocab_size} tokens, the model {model_vocab_size}")
    values = {**model.values, "vocab_size": vocab_size}
    tensors = {
        name: trim_vocabulary(name, tensor, values) for name, tensor in model.tensors.items()
    }
    return replace(
        model,
        model_type=huggingface_family_of(config).model_type,
        values=values,
        tensors=tensors,
        config=config,
        files=tuple(list_sidecar_files(like)),
    )


def _prepare_target(model: StoredModel, target: Path) -> None:
    """Create the parent of the target; refuse a target that is in use, or a disk that is too small.

    Temporary directories of an interrupted conversion do not count as content. Their files are
    reused or deleted, so the space that they occupy counts as free.
    """
    if target.exists() and (not target.is_dir() or not all(map(is_partial, target.iterdir()))):
        raise CheckpointError(
            f"{target} already exists", hint="name a directory that does not exist"
        )
    existing_directory = next(parent for parent in (target, *target.parents) if parent.exists())
    reusable_bytes = sum(map(measure_disk_usage, (target, partial_path(target))))
    free_bytes = shutil.disk_usage(existing_directory).free + reusable_bytes
    if free_bytes < model.total_bytes:
        raise CheckpointError(
            f"{existing_directory} has {free_bytes / 1e9:.1f} GB free, the model takes "
            f"{model.total_bytes / 1e9:.1f} GB"
        )
    target.parent.mkdir(parents=True, exist_ok=True)


def _skip_verification(_written: StoredModel) -> None:
    """Accept the written model without reading it (``--no-verify``)."""


def verify(model: StoredModel, written: StoredModel, *, report: ByteProgress) -> None:
    """Compare a written model with its source, bit by bit.

    Raises:
        CheckpointError: names the tensors that differ, or that hold infinities or NaN.
    """
    nonfinite_tensors: list[str] = []
    changed_tensors: list[str] = []
    for name, tensor in model.tensors.items():
        if difference := describe_difference(tensor, written.tensors[name], report):
            (nonfinite_tensors if difference == NOT_FINITE else changed_tensors).append(
                f"{name}: {difference}"
            )
    is_cast = any(isinstance(tensor, CastTensor) for tensor in model.tensors.values())
    hint = "--dtype turns numbers beyond its range into infinities" if is_cast else None
    raise_if_any(model.path, "cannot be used", nonfinite_tensors, hint)
    raise_if_any(written.path, "differs from its source", changed_tensors)


def _accumulate_progress(
    set_progress: Callable[[int, int], None], total_bytes: int
) -> ByteProgress:
    """Return a callback that adds a number of bytes and passes on the sum and the total."""
    done_bytes = 0

    def add(size: int) -> None:
        nonlocal done_bytes
        done_bytes += size
        set_progress(min(done_bytes, total_bytes), total_bytes)

    return add


def _check_tokens(model: StoredModel, source: Path | None, text: str | None) -> None:
    """Check, before anything is written, that logits can be compared on ``text``.

    Args:
        model: the model to convert.
        source: directory of the model if it is in Hugging Face's format, otherwise None.
        text: text or token ids; None for a default text.
    """
    from flagscale.train.checkpoint.formats.logits import select_tokens

    names = [path.name for path in (model.files if source is None else source.iterdir())]
    select_tokens(text, model.values["vocab_size"], source or model.path, names)


def _compare_logits(
    model: StoredModel,
    written: StoredModel,
    output_format: str,
    text: str | None,
    precision: torch.dtype | None,
) -> None:
    """Compare the logits of the written model with those of its source, and print the result.

    Args:
        model: the source, rounded to ``precision`` if it is given.
        written: the written model.
        output_format: format of the written model.
        text: text or token ids; None for a default text.
        precision: precision that ``--dtype`` names.
    """
    from flagscale.train.checkpoint.formats.logits import compare_logits

    if output_format == _HUGGING_FACE:
        print(compare_logits(model, written.path, text))
    else:
        print(compare_logits(written, model.path, text, precision))


if __name__ == "__main__":
    sys.exit(main())
