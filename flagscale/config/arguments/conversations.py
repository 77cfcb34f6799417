"""What is asked of fine-tuning on conversations. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from flagscale.config.arguments.paths import (
    CONVERSATIONS,
    DATA,
    are_conversations,
    blend,
    is_template_file,
    is_weight,
)
from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.spec import arg

TEMPLATES = ("chatml", "llama3")
"""Chat templates that have a name."""
_PLAIN = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
    "AquilaTokenizerFS",
)
"""Tokenizers that have no chat template, and do not tell where in a text their tokens stand."""


@dataclass(frozen=True)
class Conversations:
    """Fine-tuning on conversations (docs/finetuning.md)."""

    sft: bool = arg(
        False,
        "Train on conversations: data_path and its like name files of JSON lines, a chat template "
        "makes text of them, and the assistant's answers alone are learned",
    )
    sft_format: str = arg(
        "auto",
        "How conversations are written: OpenAI's messages, alpaca, sharegpt; auto goes by each "
        "line's keys",
        choices=("auto", "messages", "alpaca", "sharegpt"),
    )
    chat_template: str | None = arg(
        None,
        f"Template of conversations: {' or '.join(TEMPLATES)}, or a .jinja file; the tokenizer's "
        "own without it",
    )
    sft_packing: bool = arg(
        True,
        "Put several conversations into a sequence, kept apart; without it each has a sequence of "
        "its own, the rest of which is padding",
    )
    sft_too_long: str = arg(
        "truncate",
        "What becomes of conversations longer than seq_length: they are cut (truncate), left out "
        "(drop), or training does not begin (refuse)",
        choices=("truncate", "drop", "refuse"),
    )


@dataclass(frozen=True)
class Prompts:
    """Looking at what a model answers while it is trained."""

    eval_prompts: str | None = arg(
        None,
        'File of JSON lines, {"messages": […]} or {"prompt": "…"}, that the model answers at each '
        "evaluation; a token takes a forward pass of whole sequences",
    )
    eval_prompt_tokens: int = arg(32, "Most tokens of such an answer", minimum=1)


def _validations(words: Sequence[str]) -> Iterator[Broken]:
    """What keeps validation sets of text from being evaluated each by itself."""
    if not words:
        yield (
            "multiple_validation_sets",
            "true needs valid_data_path, which names the sets (or sft): of what split cuts off "
            "there is one validation set",
        )
    elif any(map(is_weight, words)):
        yield (
            "valid_data_path",
            "a blend's weights with multiple_validation_sets: each set is evaluated by itself; "
            "leave the weights out",
        )


def _prompts(values: Values) -> Iterator[Broken]:
    if not values["eval_prompts"]:
        return
    if values["context_parallel_size"] > 1 or values["enable_hetero"]:
        yield "eval_prompts", "prompts are not answered with context parallelism or unlike devices"
    if not values["eval_iters"]:
        yield (
            "eval_prompts",
            "prompts are answered at evaluations, which eval_iters: 0 switches off",
        )
    if values["eval_prompt_tokens"] >= values["seq_length"]:
        yield "eval_prompt_tokens", f"leaves no room in seq_length {values['seq_length']}"


def broken(values: Values) -> Iterator[Broken]:
    """What cannot be, of conversations and prompts."""
    yield from _prompts(values)
    sets = {
        name: [word for item in blend(values[name]) for word in blend(item)]
        for name in sorted(DATA)
        if values[name]
    }
    for name, words in sets.items():
        for word in words:
            if are_conversations(word) != bool(values["sft"]) and not is_weight(word):
                yield name, _wrong_file(word, conversations=values["sft"])
    if not values["sft"]:
        if values["multiple_validation_sets"]:
            yield from _validations(sets.get("valid_data_path", ()))
        return
    for name, words in sets.items():
        if any(map(is_weight, words)):
            yield name, "a conversation is taken once a pass: with sft leave the weights out"
    if values["mock_data"]:
        yield "mock_data", "true with sft: conversations are not made up; name some in data_path"
    if values["tokenizer_type"] in _PLAIN:
        message = f"{values['tokenizer_type']} with sft: it has no chat template"
        yield "tokenizer_type", f"{message}; take HuggingFaceTokenizer"
    template = values["chat_template"]
    if template is not None and template not in TEMPLATES and not is_template_file(template):
        known = " or ".join(TEMPLATES)
        yield "chat_template", f"expected {known} or a .jinja file, found {template!r}"
    if values["window_size"] and values["attention_backend"] == "local":
        message = "not with sft: megatron.core's own attention to a window does not know "
        yield "window_size", message + "conversations; take attention_backend: auto"
    if values["attention_backend"] == "fused":
        message = "fused: cuDNN's kernel takes no documents, which conversations are; take auto"
        yield "attention_backend", message


def _wrong_file(word: str, *, conversations: bool) -> str:
    if conversations:
        return f"{word}: with sft expected files of conversations ({', '.join(CONVERSATIONS)})"
    return (
        f"{word}: sft: true trains on conversations; text of JSON lines is made into a data set by "
        "tools/data/preprocess.py first"
    )
