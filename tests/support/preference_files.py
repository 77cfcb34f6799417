"""Test data of preference training: pairs of answers, and a model whose weights no library draws.

``trl_losses.py`` trains the same model on the same pairs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.chat_files import WORDS, write_tokenizer

PAIR_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Template that writes nothing behind the token that ends a turn. TRL counts such text as part of
an answer."""
PAIR_COUNT = 8
"""Number of pairs of a training step, which has all of them, so that their order is irrelevant."""
STEPS = 4


def write_pair_model(path: Path, **experts: int) -> Path:
    """Write a Hugging Face directory with a small Qwen3 in fp32 and its tokenizer.

    ``experts`` are fields of the configuration that a mixture of experts has in addition.
    """
    import torch
    import transformers

    config_class = transformers.Qwen3MoeConfig if experts else transformers.Qwen3Config
    config = config_class(
        **experts,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=300,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    for seed, (name, weight) in enumerate(sorted(model.named_parameters())):
        if not name.endswith("norm.weight"):
            values = np.random.default_rng(seed).normal(0, 0.2, tuple(weight.shape))
            weight.data.copy_(torch.from_numpy(values))
    model.save_pretrained(path)
    return write_tokenizer(path, PAIR_TEMPLATE)


def make_text_pairs(count: int = PAIR_COUNT, seed: int = 0) -> list[dict[str, str]]:
    """Return pairs of texts with a prompt."""
    return [
        {
            "prompt": f"Question: {_words(generator, 6)}?\n\nAnswer:",
            "chosen": f" {_words(generator, 9)}",
            "rejected": f" not {_words(generator, 9)}",
        }
        for generator in (random.Random(1000 * seed + index) for index in range(count))
    ]


def make_dialog_pairs(count: int = PAIR_COUNT, seed: int = 0) -> list[dict[str, Any]]:
    """Return pairs of conversations of one or two turns without a prompt: TRL's implicit form."""
    pairs = []
    for index in range(count):
        generator = random.Random(1000 * seed + index)
        prompt = [
            message
            for _ in range(index % 2)
            for message in (_message(generator, "user"), _message(generator, "assistant"))
        ]
        prompt.append(_message(generator, "user"))
        answers = {key: _message(generator, "assistant") for key in ("chosen", "rejected")}
        pairs.append({key: [*prompt, answer] for key, answer in answers.items()})
    return pairs


def _message(generator: random.Random, role: str) -> dict[str, str]:
    return {"role": role, "content": _words(generator, 8)}


def _words(generator: random.Random, count: int) -> str:
    return " ".join(generator.choices(WORDS, k=generator.randint(2, count)))


def compute_logps(model: Any, texts: Sequence[tuple[str, str]], tokenizer: Any) -> list[float]:
    """Compute the log-probabilities of answers behind their prompts with transformers.

    Args:
        model: a causal language model of transformers.
        texts: prompts and answers.
        tokenizer: tokenizer of transformers.
    """
    import torch

    logps = []
    for prompt, answer in texts:
        begin = len(tokenizer(prompt)["input_ids"])
        ids = torch.tensor([tokenizer(prompt + answer)["input_ids"]])
        with torch.no_grad():
            predictions = model(input_ids=ids).logits[0, begin - 1 : -1].double().log_softmax(-1)
        logps.append(float(predictions.gather(1, ids[0, begin:, None]).sum()))
    return logps
