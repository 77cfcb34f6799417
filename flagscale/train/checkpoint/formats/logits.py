"""Comparison of logits between megatron.core and transformers (``flagscale convert --check``).

Both programs compute in fp32 on the CPU, so differences are rounding errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.spec.command_line import parse_arguments, words_of
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.base import StoredModel

_DEFAULT_TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the Moon; "
    "12 * 12 = 144. Ceci n'est pas une pipe."
)
_RELATIVE_TOLERANCE = 1e-4
_DEFAULT_TOKENS = 64


def compare_logits(
    megatron_model: StoredModel,
    transformers_directory: Path,
    text: str | None,
    rounded_to: torch.dtype | None = None,
) -> str:
    """Compare the fp32 logits of two copies of a model. Both are in memory at once.

    Args:
        megatron_model: model to build with megatron.core.
        transformers_directory: directory that transformers loads.
        text: text to compare on, or comma-separated token ids; None for a default text.
        rounded_to: precision to which the weights of ``megatron_model`` were rounded, and those in
            ``transformers_directory`` were not.

    Returns:
        A line with the largest difference.

    Raises:
        CheckpointError: the difference exceeds rounding errors, or transformers cannot load the
            model.
    """
    tokens, description = _tokenize_text(
        transformers_directory, text, megatron_model.values["vocab_size"]
    )
    reference = compute_transformers_logits(transformers_directory, tokens, rounded_to)
    logits = compute_megatron_logits(megatron_model, tokens)
    difference = float((logits - reference).abs().max())
    max_logit = float(reference.abs().max())
    summary = (
        f"logits on {description}: at most {difference:.2g} apart, the largest is {max_logit:.3g}"
    )
    if not difference <= _RELATIVE_TOLERANCE * max(max_logit, 0.1):
        raise CheckpointError(f"{summary}: this is not the same model")
    return summary


def select_tokens(
    text: str | None, vocab_size: int, directory: Path, file_names: Collection[str]
) -> tuple[list[int], str] | None:
    """Return the tokens to compare on, and their description, if no tokenizer is needed for them.

    Args:
        text: as in :func:`compare_logits`.
        vocab_size: number of tokens.
        directory: directory in which a tokenizer is expected.
        file_names: names of the files in ``directory``.

    Returns:
        None if the text has to be tokenized.

    Raises:
        CheckpointError: a token id is out of range, or a text is given without a tokenizer.
    """
    if text is not None and all(word.strip().isdecimal() for word in text.split(",")):
        tokens = [int(word) for word in text.split(",")]
        if invalid := [token for token in tokens if token >= vocab_size]:
            raise CheckpointError(
                f"--check: {invalid[0]} is not below the vocabulary size {vocab_size}"
            )
        return tokens, f"{len(tokens)} tokens"
    if not {"tokenizer.json", "tokenizer.model"} & {*file_names}:
        if text is not None:
            raise CheckpointError(
                f"--check: {directory} has no tokenizer", hint="give ids of tokens: 1,2,3"
            )
        return [
            (7 * i + 1) % vocab_size for i in range(_DEFAULT_TOKENS)
        ], f"{_DEFAULT_TOKENS} made-up tokens"
    return None


def _tokenize_text(directory: Path, text: str | None, vocab_size: int) -> tuple[list[int], str]:
    """Return the tokens of a text, or the default ones, and their description."""
    file_names = [path.name for path in directory.iterdir()]
    if selected := select_tokens(text, vocab_size, directory, file_names):
        return selected
    from transformers import AutoTokenizer

    with _transformers_errors(directory, "the tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        tokens = list(tokenizer(text or _DEFAULT_TEXT)["input_ids"])
    if not tokens:
        raise CheckpointError("--check: the text has no tokens")
    return tokens, f"a text of {len(tokens)} tokens"


@torch.no_grad()
def compute_transformers_logits(
    directory: Path, tokens: list[int], rounded_to: torch.dtype | None = None
) -> torch.Tensor:
    """Compute logits with transformers, in fp32 on the CPU.

    Weights have the precision in which they are stored, whatever ``dtype`` of config.json is.

    Args:
        directory: directory of the model.
        tokens: token ids.
        rounded_to: precision to which to round the weights first.

    Returns:
        Logits ``[sequence, vocabulary]``.

    Raises:
        CheckpointError: transformers cannot load the model.
    """
    from transformers import AutoModelForCausalLM

    with _transformers_errors(directory, "the model"):
        model = AutoModelForCausalLM.from_pretrained(
            str(directory), local_files_only=True, use_safetensors=True, dtype=torch.float32
        )
        if rounded_to is not None:
            for weight in model.parameters():
                weight.data = weight.data.to(rounded_to).float()
        logits: torch.Tensor = model.eval()(torch.tensor([tokens])).logits[0]
    return logits


@contextmanager
def _transformers_errors(directory: Path, part: str) -> Iterator[None]:
    """Context manager that raises any error of transformers as a CheckpointError."""
    try:
        yield
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip() or 'no reason given'}"
        raise CheckpointError(
            f"--check: transformers cannot load {part} in {directory}: {reason.splitlines()[0]}",
            hint="the output is written, only this comparison is missing",
        ) from error


def compute_megatron_logits(model: StoredModel, tokens: list[int]) -> torch.Tensor:
    """Compute logits with megatron.core, in fp32 on the CPU, in this process.

    Returns:
        Logits ``[sequence, vocabulary]``.
    """
    from flagscale.train import distributed
    from flagscale.train.build import build_state
    from flagscale.train.checkpoint.formats.pretrained import load_weights
    from flagscale.train.device import choose_device
    from flagscale.train.distributed import RankIdentity
    from flagscale.train.models.config import build_transformer_config

    args = derive_arguments(build_model_arguments(model, len(tokens), {"device": "cpu"}), 1)
    device = choose_device("cpu", 0)
    distributed.init_default_group(RankIdentity(0, 0, 1), device, backend="gloo", timeout_minutes=1)
    try:
        distributed.init_model_parallel(args)
        config = build_transformer_config(args, device)
        state = build_state(args, config, args.vocab_size, device, initialize_all=False)
        load_weights(args, state, model)
        gpt: Any = state.modules()[0].eval()
        ids = torch.tensor([tokens])
        positions = torch.arange(len(tokens))[None]
        with torch.no_grad():
            logits: torch.Tensor = gpt(ids, positions, None)
        return logits[0]
    finally:
        distributed.destroy_groups()


def build_model_arguments(
    model: StoredModel, length: int, overrides: Mapping[str, Any]
) -> argparse.Namespace:
    """Build the arguments of a run that would train the model, in fp32 and without dropout.

    Args:
        model: the model.
        length: sequence length.
        overrides: values of further arguments.
    """
    arguments: dict[str, Any] = {
        **model.values,
        "mtp_num_layers": None,  # only the output layer's logits are compared
        "make_vocab_size_divisible_by": 1,
        "seq_length": length,
        "lr": 1e-3,
        "train_iters": 1,
        "mock_data": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **overrides,
    }
    if (arguments["max_position_embeddings"] or 0) < length:
        del arguments["max_position_embeddings"]
    return parse_arguments(words_of(arguments))
