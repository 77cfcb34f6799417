"""New experiments: ``flagscale init [DIR] [--model NAME|HF_DIR]``.

Two files are written: ``conf/train.yaml``, where and how to run, and ``conf/train/MODEL.yaml``,
what to train. The latter is one of the project's examples, or, for a Hugging Face model, a file
whose ``pretrained_checkpoint`` fills in the numbers of the model's config.json.
"""

from __future__ import annotations

import os
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flagscale.config import schemas
from flagscale.config.arguments.compat.huggingface.models import arguments_of, config_in
from flagscale.config.arguments.spec.values import nearest_names
from flagscale.config.schema import PROJECT
from flagscale.config.yaml_file import short_path
from flagscale.errors import CheckpointError, ConfigError

DEFAULT_MODEL = "llama3_tiny"
_EXAMPLES = PROJECT / "examples"
_MISSING = "???"
_DATA_COMMENT = "prefix of your data set, DIR/NAME for DIR/NAME.bin and .idx (docs/guides/data.md)"
_CHAT_COMMENT = "conversations in JSON lines, or a list of such files (docs/guides/fine-tune.md)"
_DIRECTORY_COMMENT = "Hugging Face directory"
_PLACEHOLDERS = {
    "data_path": _DATA_COMMENT,
    "train_data_path": _CHAT_COMMENT,
    "valid_data_path": _CHAT_COMMENT,
    "tokenizer_path": f"{_DIRECTORY_COMMENT} with tokenizer.json",
    "pretrained_checkpoint": f"{_DIRECTORY_COMMENT} with config.json and *.safetensors",
}
"""Keys of an example that name files of its own, with a comment for who fills them in."""
_PLACEHOLDER_LINE = re.compile(rf"^(?P<start>\s*(?P<key>{'|'.join(_PLACEHOLDERS)}):) .*$", re.M)
_DROPPED_LINE = re.compile(r"^\s*(eval_prompts|multiple_validation_sets):.*\n", re.M)
"""Keys of an example that need files or lists of its own and may be omitted."""

_EXPERIMENT = """\
# yaml-language-server: $schema={schema}
# Where and how to run. What to train is in train/{model}.yaml.
#
#   flagscale check {config}   # every problem, before a run
#   flagscale run {config}     # start in the background
#
# Any value can be overridden: flagscale run {config} train.model.lr=1e-4
# `flagscale explain KEY` describes a key, and searches words such as `learning rate`.

defaults:
  - _self_
  - train: {model} # the file train/{model}.yaml; add others next to it
  # Hydra's log files and messages would only repeat those of the launcher.
  - override hydra/job_logging: disabled
  - override hydra/hydra_logging: disabled

experiment:
  exp_name: {name}
  exp_dir: ./outputs_${{experiment.exp_name}} # scripts, logs, checkpoints and TensorBoard files

  runner:
    nproc_per_node: auto # one rank per device; one rank on a machine without devices
    # hosts: [node01, node02] # several hosts over SSH (docs/guides/many-hosts.md)
    # type: slurm # one Slurm job (docs/guides/slurm.md)
    # max_restarts: 3 # restarts from the last checkpoint after a failure

  envs:
    CUDA_DEVICE_MAX_CONNECTIONS: 1 # keeps the launch order of communication and computation kernels
    # CUDA_VISIBLE_DEVICES: 0,1,2,3

hydra:
  run:
    dir: ${{experiment.exp_dir}}/hydra
  output_subdir: null # the launcher stores the resolved configuration with its scripts
"""
_HUGGINGFACE = """\
# yaml-language-server: $schema={schema}
{summary}
#
# To adapt: data_path, train_iters, global_batch_size, lr. For conversations in place of text, and
# for LoRA, see docs/guides/fine-tune.md; `flagscale estimate` calculates the memory of a layout.

system:
  pretrained_checkpoint: {path} # weights, and the numbers of config.json
  distributed_backend: auto # nccl on GPUs, gloo on CPUs
  tensor_model_parallel_size: 1 # splits every layer over this many devices
  pipeline_model_parallel_size: 1 # splits the layers into this many stages
  use_distributed_optimizer: true # shards optimizer states over the data-parallel ranks
  # recompute_granularity: auto # recomputes activations as far as memory requires

  precision:
    bf16: true # false on CPUs without AVX-512, which compute bf16 slowly

  logging:
    log_interval: 1
    log_throughput: true

  checkpoint:
    save_interval: 200
    keep_last: 2
    export_huggingface: ${{experiment.exp_dir}}/huggingface # the trained model

model:
  seq_length: {seq_length}
  attention_dropout: 0.0
  hidden_dropout: 0.0
  seed: 1234

  micro_batch_size: 1
  # global_batch_size: 32 # default: micro_batch_size x data-parallel ranks
  train_iters: 1000
  eval_interval: 200
  eval_iters: 5
  clip_grad: 1.0

  optimizer:
    weight_decay: 0.1
    adam_beta1: 0.9
    adam_beta2: 0.95
    lr_scheduler:
      lr: 1.0e-5
      min_lr: 1.0e-6
      lr_warmup_iters: 20
      lr_decay_style: cosine

data:
  data_path: ??? # {data_comment}
  split: 98,2,0 # shares for training, validation and test
  tokenizer:
    tokenizer_type: HuggingFaceTokenizer
    tokenizer_path: {path}
"""
_MAX_SEQUENCE = 4096
"""Largest sequence length of a new experiment; longer ones need a layout for their memory."""


@dataclass(frozen=True)
class Model:
    """Model of a new experiment: its name, and the text of its file without the first line."""

    name: str
    text: str


def create_experiment(directory: Path, model_name: str | None) -> int:
    """Write an experiment and print what to do next; return the exit code.

    Raises:
        ConfigError: the model is unknown, or a file exists; nothing is written.
    """
    conf = directory / "conf"
    config = shlex.quote(short_path(conf / "train.yaml"))
    model = find_model(model_name or DEFAULT_MODEL)
    files = {
        conf / "train.yaml": _EXPERIMENT.format(
            schema=_schema_location(conf, schemas.EXPERIMENT_FILE),
            model=model.name,
            name=_file_name(directory.absolute().name) or model.name,
            config=config,
        ),
        conf / "train" / f"{model.name}.yaml": model.text.replace(
            "{schema}", _schema_location(conf / "train", schemas.TRAIN_FILE), 1
        ),
    }
    _write_files(files)
    for path, text in zip(files, ("where and how to run", "what to train"), strict=True):
        print(f"wrote {short_path(path)}: {text}")
    model_file = list(files)[1]
    for number, key in _find_missing(files[model_file]):
        print(f"fill in {short_path(model_file)}:{number}: {key}, {_PLACEHOLDERS[key]}")
    print(f"then:\n  flagscale check {config}\n  flagscale run {config}")
    return 0


def _file_name(text: str) -> str:
    """Return a text as the name of a file or an experiment; may be empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).strip("._-")


def find_model(name: str) -> Model:
    """Return the model of a name or of a Hugging Face directory.

    Raises:
        ConfigError: there is none, with the names that there are.
    """
    if Path(name).is_dir():
        return _huggingface_model(Path(name).absolute())
    names = model_names()
    example = names.get(name) or names.get(_find_equal(name, names))
    if example is not None:
        return _example_model(next(n for n, path in names.items() if path == example), example)
    if not names:
        raise ConfigError(
            "this installation has no examples to start from",
            hint="give the directory of a Hugging Face model: --model DIR",
        )
    hint = f"models: {', '.join(names)}"
    if "/" in name:
        hint += f"\n  hint: or download it: hf download {name} --local-dir DIR, and give DIR"
    near = _nearest_name(name, names)
    raise ConfigError(
        f"no model {name!r}, and no directory of this name"
        + (f"; did you mean {near!r}?" if near else ""),
        hint=hint,
    )


def model_names() -> dict[str, Path]:
    """Return the example of each model, by the model's name."""
    paths = sorted(_EXAMPLES.glob("*/conf/train/*.yaml"))
    # Files with a defaults list are variants of another file.
    return {
        f"{path.parents[2].name}_{path.stem}": path
        for path in paths
        if "\ndefaults:" not in path.read_text(encoding="utf-8")
    }


def _simplify(name: str) -> str:
    """Return a name for comparison: ``meta-llama/Llama-3-8B`` and ``llama3_8b`` are equal."""
    return re.sub(r"[^a-z0-9]", "", name.rpartition("/")[2].lower().removeprefix("meta-"))


def _find_equal(name: str, names: Mapping[str, Path]) -> str:
    return next((known for known in names if _simplify(known) == _simplify(name)), "")


def _nearest_name(name: str, names: Mapping[str, Path]) -> str | None:
    simplified = {_simplify(known): known for known in names}
    nearest = nearest_names(_simplify(name), simplified, count=1)
    return simplified[nearest[0]] if nearest else None


def _example_model(name: str, path: Path) -> Model:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    comment = [line for line in lines if line.startswith("# yaml-language-server")]
    text = "".join(lines[len(comment) :])
    header, body = text[: text.index("\n\n") + 1], text[text.index("\n\n") + 1 :]
    summary = header.partition("#\n")[0]
    body = _PLACEHOLDER_LINE.sub(
        lambda match: f"{match['start']} {_MISSING} # {_PLACEHOLDERS[match['key']]}",
        _DROPPED_LINE.sub("", body),
    )
    origin = f"# From {path.relative_to(PROJECT)}.\n"
    return Model(name, f"# yaml-language-server: $schema={{schema}}\n{summary}{origin}{body}")


def _huggingface_model(path: Path) -> Model:
    """Return a model that starts from a Hugging Face model.

    Raises:
        ConfigError: the directory has no model that can be trained.
    """
    try:
        config = config_in(path)
        if config is None:
            raise ConfigError(
                f"{short_path(path)} is no Hugging Face model: it has no config.json",
                hint="give a directory with config.json, *.safetensors and tokenizer.json, or a "
                f"name: {', '.join(model_names())}",
            )
        values = arguments_of(config)
    except CheckpointError as error:
        raise ConfigError(f"{short_path(path)}: {error.message}") from error
    name = _file_name(path.name).lower() or "model"
    text = _HUGGINGFACE.format(
        schema="{schema}",
        summary=_summarize(path, config, values),
        path=_quote(str(path)),
        seq_length=min(int(values.get("max_position_embeddings") or _MAX_SEQUENCE), _MAX_SEQUENCE),
        data_comment=_DATA_COMMENT,
    )
    return Model(name, text)


def _summarize(path: Path, config: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    layers, width = values.get("num_layers"), values.get("hidden_size")
    text = (
        f"Trains {path.name} ({config.get('model_type')}, {layers} layers of width {width}) "
        "further. Its numbers are read from its config.json: what is not set here is as there."
    )
    return textwrap.fill(text, 98, initial_indent="# ", subsequent_indent="# ")


def _quote(text: str) -> str:
    """Return a path as YAML writes it."""
    from flagscale.config.interpolation import escape_interpolations

    escaped = escape_interpolations(text)
    is_plain = re.fullmatch(r"[A-Za-z0-9/._+@-]+", escaped)
    return escaped if is_plain else "'" + escaped.replace("'", "''") + "'"


def _find_missing(text: str) -> Iterator[tuple[int, str]]:
    """Yield line number and key of each value that the user has to fill in."""
    for number, line in enumerate(text.splitlines(), start=1):
        key, _, value = line.strip().partition(": ")
        if value.startswith(_MISSING):
            yield number, key


def _schema_location(directory: Path, name: str) -> str:
    """Return the schema's location for an editor: relative within this project, otherwise absolute,
    because the files of an experiment may move."""
    path = schemas.DIRECTORY / name
    if directory.absolute().is_relative_to(PROJECT):
        return os.path.relpath(path, directory.absolute())
    return str(path)


def _write_files(files: Mapping[Path, str]) -> None:
    """Write new files. None is written if one of them exists."""
    existing = [short_path(path) for path in files if path.exists() or path.is_symlink()]
    if existing:
        raise ConfigError(
            f"already there: {', '.join(existing)}; nothing was written",
            hint="give another directory: flagscale init DIR",
        )
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
