"""Test data: conversations, and a tokenizer with a chat template."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML_TEMPLATE = (
    "{%- for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' }}\n"
    "{%- if message.role == 'assistant' %}\n"
    "{%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}\n"
    "{%- else %}{{- message.content + '<|im_end|>' }}{%- endif %}\n"
    "{{- '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}\n"
)
# Like the templates of reasoning models, which omit the reasoning of earlier answers.
REASONING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("abandon", "bring", "copper", "dwell", "eager", "fathom", "gather", "hollow", "jolt")


def write_tokenizer(
    path: Path, template: str | None = CHATML_TEMPLATE, vocabulary: int = 300
) -> Path:
    """Write a Hugging Face directory with a small tokenizer and a chat template."""
    from flagscale.train.data import train_bpe

    settings = train_bpe.BpeSettings(vocabulary, SPECIAL_TOKENS)
    train_bpe.train_tokenizer([" ".join(WORDS) * 20], settings).save(
        _create_path(path, "tokenizer.json")
    )
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }
    if template is not None:
        config["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def _create_path(path: Path, name: str) -> str:
    """Create a directory; return the path of a file in it."""
    path.mkdir(parents=True, exist_ok=True)
    return str(path / name)


def make_conversation(turns: int, words: int, seed: int) -> list[dict[str, str]]:
    """Return the messages of a conversation; each turn is a question and an answer."""
    generator = random.Random(seed)
    content = [
        " ".join(generator.choices(WORDS, k=generator.randint(1, words))) for _ in range(2 * turns)
    ]
    roles = ("user", "assistant") * turns
    return [{"role": role, "content": text} for role, text in zip(roles, content, strict=True)]


def write_lines(path: Path, records: Iterable[Any]) -> Path:
    """Write a file of JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_conversations(path: Path, count: int, *, words: int = 12, seed: int = 0) -> Path:
    """Write a file of conversations of one to three turns."""
    conversations = (
        make_conversation(1 + index % 3, words, seed * 100_000 + index) for index in range(count)
    )
    return write_lines(path, ({"messages": messages} for messages in conversations))


def write_model(path: Path, **experts: int) -> Path:
    """Write a Hugging Face directory with a small random Qwen3 model in fp32 and its tokenizer.

    ``experts`` are fields of the configuration that a mixture of experts has in addition.
    """
    import torch
    import transformers

    torch.manual_seed(11)
    config_class = transformers.Qwen3MoeConfig if experts else transformers.Qwen3Config
    config = config_class(
        **experts,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=300,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(path)
    return write_tokenizer(path)
