"""Rules of training data: blends, phases, conversations, prompts, functions of the user,
tokenizers.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.data_arguments import CHAT_TEMPLATES
from flagscale.config.arguments.spec.data_phases import DATA_PHASES, parse_phase
from flagscale.config.arguments.spec.paths import (
    BLENDS,
    CONVERSATION_SUFFIXES,
    EXTERNAL,
    EXTERNAL_DATA,
    FUNCTION_FORM,
    blend_problem,
    blend_words,
    is_conversation_file,
    is_template_file,
    is_weight,
    parse_function_path,
    phase_problem,
)


def check_data_phases(values: Values) -> Iterator[Violation]:
    """Check the order of data phases and their other requirements."""
    phases = values[DATA_PHASES]
    if phases is None:
        return
    try:
        begins = [parse_phase(text).begin(values["seq_length"]) for text in phases]
    except ValueError as error:
        yield DATA_PHASES, str(error)
        return
    if any(begin >= next_begin for begin, next_begin in zip([0, *begins], begins, strict=False)):
        yield DATA_PHASES, f"expected phases that begin one after the other, found {begins} samples"
    if values["data_path"] is None and values["train_data_path"] is None:
        yield (
            DATA_PHASES,
            "needs data_path or train_data_path, the mixture that training begins with",
        )
    if values["dataloader_type"] == "cyclic":
        yield (
            "dataloader_type",
            f"{values['dataloader_type']} shuffles all samples, and so the phases of "
            f"{DATA_PHASES}; "
            "leave it out",
        )
    if values["sft"]:
        yield DATA_PHASES, "is for text: conversations are taken in another order in each pass"


def uses_external_data(values: Values) -> bool:
    """Return whether the user's own function provides the data."""
    return bool(values["dataloader_type"] == EXTERNAL)


def check_external_data(values: Values) -> Iterator[Violation]:
    """Check the function that provides the data, and arguments that it excludes."""
    function_path = values[EXTERNAL_DATA]
    if function_path is not None:
        try:
            parse_function_path(function_path)
        except ValueError as error:
            yield EXTERNAL_DATA, str(error)
    if not uses_external_data(values):
        return
    if function_path is None:
        yield (
            EXTERNAL_DATA,
            f"is required by dataloader_type external: the function, as {FUNCTION_FORM}",
        )
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data"):
        if values[name]:
            yield name, f"not with dataloader_type external: the data is {EXTERNAL_DATA}'s"
    if values["sft"]:
        yield (
            "sft",
            f"true with dataloader_type external: {EXTERNAL_DATA} makes batches, not conversations",
        )


_WITHOUT_CHAT_TEMPLATE = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
    "AquilaTokenizerFS",
)
"""Tokenizers that have no chat template, and do not return the character offsets of tokens."""


def _check_validation_sets(words: Sequence[str]) -> Iterator[Violation]:
    """Check that validation sets of text can be evaluated separately."""
    if not words:
        yield (
            "multiple_validation_sets",
            "true needs valid_data_path, which names the sets (or sft): split makes a single "
            "validation set",
        )
    elif any(map(is_weight, words)):
        yield (
            "valid_data_path",
            "a blend's weights with multiple_validation_sets: each set is evaluated by itself; "
            "leave the weights out",
        )


def _check_prompts(values: Values) -> Iterator[Violation]:
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


def check_conversations(values: Values) -> Iterator[Violation]:
    """Check training on conversations, and prompts."""
    yield from _check_prompts(values)
    sets = {
        name: [word for item in blend_words(values[name]) for word in blend_words(item)]
        for name in sorted(BLENDS)
        if values[name]
    }
    for name, words in sets.items():
        for word in words:
            if is_conversation_file(word) != bool(values["sft"]) and not is_weight(word):
                yield name, _wrong_file_message(word, conversations=values["sft"])
    if not values["sft"]:
        if values["multiple_validation_sets"]:
            yield from _check_validation_sets(sets.get("valid_data_path", ()))
        return
    for name, words in sets.items():
        if any(map(is_weight, words)):
            yield name, "a conversation is taken once a pass: with sft leave the weights out"
    if values["mock_data"]:
        yield "mock_data", "true with sft: conversations are not made up; name some in data_path"
    if values["tokenizer_type"] in _WITHOUT_CHAT_TEMPLATE:
        message = f"{values['tokenizer_type']} with sft: it has no chat template"
        yield "tokenizer_type", f"{message}; take HuggingFaceTokenizer"
    template = values["chat_template"]
    if template is not None and template not in CHAT_TEMPLATES and not is_template_file(template):
        templates = " or ".join(CHAT_TEMPLATES)
        yield "chat_template", f"expected {templates} or a .jinja file, found {template!r}"
    if values["window_size"] and values["attention_backend"] == "local":
        message = "not with sft: megatron.core's own attention to a window does not know "
        yield "window_size", message + "conversations; take attention_backend: auto"
    if values["attention_backend"] == "fused":
        message = "fused: cuDNN's kernel takes no documents, which conversations are; take auto"
        yield "attention_backend", message


def _wrong_file_message(word: str, *, conversations: bool) -> str:
    if conversations:
        return (
            f"{word}: with sft expected files of conversations ({', '.join(CONVERSATION_SUFFIXES)})"
        )
    return (
        f"{word}: sft: true trains on conversations; text of JSON lines is made into a data set by "
        "tools/data/preprocess.py first"
    )


def split_shares(text: str) -> tuple[float, float, float] | None:
    """Shares of training, validation and test of a ``split`` such as ``969,30,1``, which sum to 1;
    None unless they are one to three numbers of at least 0 with a positive sum."""
    try:
        shares = [float(part) for part in text.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        return None
    shares += [0.0] * (3 - len(shares))
    if len(shares) != 3 or not all(math.isfinite(share) and share >= 0 for share in shares):
        return None
    total = sum(shares)
    return (shares[0] / total, shares[1] / total, shares[2] / total) if total > 0 else None


def check_split_text(values: Values) -> Iterator[Violation]:
    text = values["split"]
    if text and split_shares(text) is None:
        yield (
            "split",
            f"expected up to three numbers for training, validation and test, such as 969,30,1, "
            f"found {text!r}",
        )


def check_tokenizer(values: Values) -> Iterator[Violation]:
    if values["tokenizer_type"] == "AquilaTokenizerFS":
        for name in ("tokenizer_path", "merge_file", "special_tokens_file"):
            if values[name] is None:
                yield name, "is required by tokenizer_type AquilaTokenizerFS"


def check_data_sources(values: Values) -> Iterator[Violation]:
    """Check that training data is given, once, and that blends are well-formed. The launcher alone
    checks this: ranks may be started by hand without data."""
    is_provided = values["mock_data"] or uses_external_data(values)
    if not is_provided and all(values[name] is None for name in ("data_path", "train_data_path")):
        yield "data_path", "is required (or `mock_data: true`)"
    sources = [name for name in sorted(BLENDS) if values[name] is not None]
    for name in sources:
        if message := blend_problem(values[name]):
            yield name, message
    for text in values["data_phases"] or ():
        if message := phase_problem(text):
            yield "data_phases", message
    if sources and values["mock_data"]:
        yield "mock_data", f"makes data up, but {sources[0]} is set"
    elif len(sources) > 1 and sources[0] == "data_path":
        yield sources[1], "excludes data_path: use one or the other"
