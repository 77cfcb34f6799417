"""Whether two copies of a model are the same function: their logits on some text."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from flagscale.config.arguments.flatten import flatten
from flagscale.config.arguments.parser import parse_arguments
from flagscale.config.arguments.resolve import resolve
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.base import Model

_TEXT = (
    "The quick brown fox jumps over the lazy dog. In 1969, two people walked on the Moon; "
    "12 * 12 = 144. Ceci n'est pas une pipe."
)
_RELATIVE = 1e-4
_IDS = 64


def compare(ours: Model, theirs: Path, text: str | None) -> str:
    """A line on how far logits in fp32 are apart; both models are in memory at once.

    Args:
        ours: the model that megatron.core is to be.
        theirs: the directory that transformers loads.
        text: what to compare on: text, or ids of tokens with commas between them.

    Raises:
        CheckpointError: they are further apart than rounding takes them.
    """
    tokens, what = _tokens(theirs, text, ours.values["vocab_size"])
    reference = transformers_logits(theirs, tokens, ours.dtype)
    found = megatron_logits(ours, tokens)
    apart = float((found - reference).abs().max())
    largest = float(reference.abs().max())
    line = f"logits on {what}: at most {apart:.2g} apart, the largest is {largest:.3g}"
    if not apart <= _RELATIVE * max(largest, 0.1):
        raise CheckpointError(f"{line}: this is not the same model")
    return line


def given_tokens(
    text: str | None, vocabulary: int, where: Path, names: Collection[str]
) -> tuple[list[int], str] | None:
    """What to compare on, in ids and in words, as far as it takes no tokenizer.

    Args:
        text: as in :func:`compare`.
        vocabulary: how many tokens there are.
        where: the directory that is to have a tokenizer.
        names: of the files there.

    Raises:
        CheckpointError: an id is no token's, or a text is given and there is no tokenizer.
    """
    if text is not None and all(word.strip().isdecimal() for word in text.split(",")):
        found = [int(word) for word in text.split(",")]
        if wrong := [token for token in found if token >= vocabulary]:
            raise CheckpointError(f"--check: {wrong[0]} is no token of {vocabulary}")
        return found, f"{len(found)} tokens"
    if not {"tokenizer.json", "tokenizer.model"} & {*names}:
        if text is not None:
            raise CheckpointError(
                f"--check: {where} has no tokenizer", hint="give ids of tokens: 1,2,3"
            )
        return [(7 * i + 1) % vocabulary for i in range(_IDS)], f"{_IDS} made-up tokens"
    return None


def _tokens(directory: Path, text: str | None, vocabulary: int) -> tuple[list[int], str]:
    names = [path.name for path in directory.iterdir()]
    if given := given_tokens(text, vocabulary, directory, names):
        return given
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    found = list(tokenizer(text or _TEXT)["input_ids"])
    if not found:
        raise CheckpointError("--check: the text has no tokens")
    return found, f"a text of {len(found)} tokens"


@torch.no_grad()
def transformers_logits(directory: Path, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits ``[sequence, vocabulary]`` of transformers, fp32 on the CPU, of weights rounded to
    ``dtype``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        str(directory), local_files_only=True, use_safetensors=True
    )
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    logits: torch.Tensor = model.float().eval()(torch.tensor([tokens])).logits[0]
    return logits


def megatron_logits(model: Model, tokens: list[int]) -> torch.Tensor:
    """Logits ``[sequence, vocabulary]`` of megatron.core, fp32 on the CPU, in this process."""
    from flagscale.train import distributed
    from flagscale.train.build import build_state
    from flagscale.train.checkpoint.formats.pretrained import fill
    from flagscale.train.device import choose
    from flagscale.train.distributed import Rank
    from flagscale.train.models.config import transformer_config

    args = resolve(_arguments(model, len(tokens)), 1)
    device = choose("cpu", 0)
    distributed.join(Rank(0, 0, 1), device, backend="gloo", timeout_minutes=1)
    try:
        distributed.lay_out(args)
        config = transformer_config(args, device)
        state = build_state(args, config, args.vocab_size, device, draw=False)
        fill(args, state, model)
        gpt: Any = state.modules()[0].eval()
        ids = torch.tensor([tokens])
        positions = torch.arange(len(tokens))[None]
        with torch.no_grad():
            logits: torch.Tensor = gpt(ids, positions, None)
        return logits[0]
    finally:
        distributed.leave()


def _arguments(model: Model, length: int) -> argparse.Namespace:
    """Arguments of a run that would train the model in fp32."""
    own: dict[str, Any] = {
        **model.values,
        "mtp_num_layers": None,  # logits are the head's
        "make_vocab_size_divisible_by": 1,
        "seq_length": length,
        "lr": 1e-3,
        "train_iters": 1,
        "mock_data": True,
        "device": "cpu",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if (own["max_position_embeddings"] or 0) < length:
        del own["max_position_embeddings"]
    return parse_arguments(flatten({"model": own}))
