"""Rules of training data: blends, phases, conversations, prompts, user functions and tokenizers.

No torch. A *blend* is a mixture of data sets with weights; ``data_phases`` replace the blend during
training (both: :mod:`..spec.paths`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.data_arguments import CHAT_TEMPLATES
from flagscale.config.arguments.spec.paths import (
    BLENDS,
    CONVERSATION_SUFFIXES,
    DATA_PHASES,
    EXTERNAL,
    EXTERNAL_DATA,
    FUNCTION_FORM,
    blend_problem,
    blend_words,
    is_conversation_file,
    is_template_file,
    is_weight,
    parse_function_path,
    parse_phase,
    phase_problem,
)
from flagscale.config.arguments.spec.values import format_value


def check_data_phases(values: Values) -> Iterator[Violation]:
    """Check that data phases are well-formed, in order, and compatible with other arguments."""
    phases = values[DATA_PHASES]
    if phases is None:
        return
    try:
        first_samples = [parse_phase(text).first_sample(values["seq_length"]) for text in phases]
    except ValueError as error:
        yield DATA_PHASES, str(error)
        return
    if any(a >= b for a, b in zip([0, *first_samples], first_samples, strict=False)):
        yield (
            DATA_PHASES,
            "expected phases in increasing order of their first sample, found first samples "
            f"{first_samples}",
        )
    if values["data_path"] is None and values["train_data_path"] is None:
        yield (
            DATA_PHASES,
            "requires data_path or train_data_path: the blend at the start of training",
        )
    if values["dataloader_type"] == "cyclic":
        yield (
            "dataloader_type",
            f"cyclic is not supported with {DATA_PHASES}: it shuffles samples across phases; leave "
            "it out",
        )
    if trains_on_conversations(values):
        yield (
            DATA_PHASES,
            f"is not supported with {_conversation_key(values)}: conversations are reshuffled in "
            "every epoch",
        )


def trains_on_conversations(values: Values) -> bool:
    """Return whether the data are conversations (``sft``) or pairs of them (``dpo``)."""
    return bool(values["sft"] or values["dpo"])


def documents_are_separate(values: Values) -> bool:
    """Return whether tokens attend to their own document only.

    With relative positions, it then does not matter at which position a document starts.
    """
    return bool(values["reset_attention_mask"] or trains_on_conversations(values))


def _conversation_key(values: Values) -> str:
    """Return the argument that selects conversations as data."""
    return "sft" if values["sft"] else "dpo"


def uses_external_data(values: Values) -> bool:
    """Return whether the user's own function provides the data."""
    return bool(values["dataloader_type"] == EXTERNAL)


def check_external_data(values: Values) -> Iterator[Violation]:
    """Check the user's function that provides the data, and arguments that it excludes."""
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
            f"is required by dataloader_type: external; expected {FUNCTION_FORM}",
        )
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path", "mock_data"):
        if values[name]:
            yield (
                name,
                "cannot be combined with dataloader_type: external, whose data comes from "
                f"{EXTERNAL_DATA}; leave one out",
            )
    if trains_on_conversations(values):
        yield (
            _conversation_key(values),
            f"is not supported with dataloader_type: external: {EXTERNAL_DATA} returns batches, "
            "not conversations",
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
    """Check that validation sets of plain text can be evaluated separately. ``words`` are those of
    ``valid_data_path``."""
    if not words:
        yield (
            "multiple_validation_sets",
            "requires valid_data_path with one prefix per validation set, or sft or dpo; split "
            "makes only one validation set",
        )
    elif any(map(is_weight, words)):
        yield (
            "valid_data_path",
            "weights are not supported with multiple_validation_sets, because each set is "
            "evaluated separately; leave the weights out",
        )


def _check_prompts(values: Values) -> Iterator[Violation]:
    if not values["eval_prompts"]:
        return
    if values["enable_hetero"]:
        yield "eval_prompts", "is not supported with enable_hetero"
    if not values["eval_iters"]:
        yield (
            "eval_prompts",
            "requires evaluations, which eval_iters: 0 disables",
        )
    if values["eval_prompt_tokens"] >= values["seq_length"]:
        yield (
            "eval_prompt_tokens",
            f"must be less than seq_length {values['seq_length']}, found "
            f"{values['eval_prompt_tokens']}",
        )


def _check_tasks(values: Values) -> Iterator[Violation]:
    if not values["eval_tasks"]:
        return
    if values["enable_hetero"]:
        yield "eval_tasks", "is not supported with enable_hetero"
    tokenizer = values["tokenizer_type"] or "NullTokenizer"
    if tokenizer == "NullTokenizer":
        yield "eval_tasks", "requires a tokenizer; set tokenizer_type and tokenizer_path"


def check_validation(values: Values) -> Iterator[Violation]:
    """Check that there are evaluations if something depends on their loss or scores."""
    yield from _check_tasks(values)
    if values["best_metric"] and not values["eval_tasks"]:
        yield "best_metric", "names a metric of eval_tasks, which is not set"
        return
    if values["best_metric"]:
        is_early = values["early_stopping_patience"] is not None
        if is_early and not (values["eval_tasks_interval"] or values["eval_interval"]):
            yield "early_stopping_patience", "requires evaluations; set eval_tasks_interval"
        return
    for name in ("early_stopping_patience", "save_best"):
        if not values[name]:
            continue
        if not values["eval_iters"]:
            yield name, "requires evaluations, which eval_iters: 0 disables"
        elif values["eval_interval"] is None and name == "early_stopping_patience":
            yield name, "requires evaluations during training; set eval_interval"


def check_conversations(values: Values) -> Iterator[Violation]:
    """Check training on conversations, and prompts."""
    yield from _check_prompts(values)
    sets = {
        name: [word for item in blend_words(values[name]) for word in blend_words(item)]
        for name in sorted(BLENDS)
        if values[name]
    }
    reads_conversations = trains_on_conversations(values)
    key = _conversation_key(values)
    for name, words in sets.items():
        for word in words:
            if is_conversation_file(word) != reads_conversations and not is_weight(word):
                yield name, _wrong_file_message(word, key if reads_conversations else None)
    if not reads_conversations:
        if values["multiple_validation_sets"]:
            yield from _check_validation_sets(sets.get("valid_data_path", ()))
        return
    for name, words in sets.items():
        if any(map(is_weight, words)):
            yield (
                name,
                f"weights are not supported with {key}, which uses every conversation once per "
                "epoch; leave the weights out",
            )
    if values["mock_data"]:
        yield (
            "mock_data",
            f"is not supported with {key}, which has no mock conversations; set data_path",
        )
    if values["tokenizer_type"] in _WITHOUT_CHAT_TEMPLATE:
        message = f"{values['tokenizer_type']} is not supported with {key}: it has no chat template"
        yield "tokenizer_type", f"{message}; use HuggingFaceTokenizer"
    template = values["chat_template"]
    if template is not None and template not in CHAT_TEMPLATES and not is_template_file(template):
        templates = " or ".join(CHAT_TEMPLATES)
        yield "chat_template", f"expected {templates} or a .jinja file, found {template!r}"
    if values["window_size"] and values["attention_backend"] == "local":
        yield (
            "window_size",
            f"is not supported with {key} and attention_backend: local, whose window mask does not "
            "separate conversations; use attention_backend: auto",
        )
    if values["attention_backend"] == "fused":
        yield (
            "attention_backend",
            f"fused is not supported with {key}: the cuDNN kernel cannot separate conversations; "
            "use auto",
        )


def check_preferences(values: Values) -> Iterator[Violation]:
    """Check preference training (``dpo``)."""
    if not values["dpo"]:
        return
    if values["sft"]:
        yield "sft", "cannot be combined with dpo, whose data are pairs of answers; leave one out"
    if values["pretrained_checkpoint"] is None:
        yield (
            "pretrained_checkpoint",
            "is required by dpo: the model to start from, which is also the reference",
        )
    if values["dpo_label_smoothing"] and values["dpo_loss"] != "sigmoid":
        yield (
            "dpo_label_smoothing",
            f"is not supported with dpo_loss: {values['dpo_loss']}; leave it out",
        )
    if values["mtp_num_layers"]:
        yield (
            "mtp_num_layers",
            "is not supported with dpo, which has no loss of single tokens; leave it out, and the "
            "multi-token prediction layers of the model are left out",
        )
    if values["enable_hetero"]:
        yield "enable_hetero", "is not supported with dpo"
    if values["cuda_graph_impl"] == "local":
        yield "cuda_graph_impl", "is not supported with dpo; leave it out"
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        coefficient = values[name] if isinstance(values[name], list | tuple) else [values[name]]
        if values["num_moe_experts"] and any(coefficient) and values["sft_packing"]:
            yield (
                name,
                f"{format_value(values[name])} is not supported with dpo and packing, whose "
                f"sequences have different numbers of pairs; set {name}: 0 or sft_packing: false",
            )


def _wrong_file_message(word: str, key: str | None) -> str:
    """Return the message about a file that does not fit; ``key`` selects conversations."""
    if key is not None:
        kind = "conversation files" if key == "sft" else "files of pairs"
        return f"{key} requires {kind} ({', '.join(CONVERSATION_SUFFIXES)}), found {word}"
    return (
        f"expected the prefix of a data set, found {word}: to train on its conversations set "
        "sft: true; to train on its pairs of answers set dpo: true; to train on its text, convert "
        "it with tools/data/preprocess.py first"
    )


def split_shares(text: str) -> tuple[float, float, float] | None:
    """Parse a ``split`` such as ``969,30,1``.

    Returns:
        The fractions of training, validation and test samples, which sum to 1; None unless the text
        is one to three numbers of at least 0 with a positive sum.
    """
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
            "expected up to three numbers (training, validation, test) such as 969,30,1, found "
            f"{text!r}",
        )


def check_tokenizer(values: Values) -> Iterator[Violation]:
    if values["tokenizer_type"] == "AquilaTokenizerFS":
        for name in ("tokenizer_path", "merge_file", "special_tokens_file"):
            if values[name] is None:
                yield name, "is required by tokenizer_type: AquilaTokenizerFS"


def check_data_sources(values: Values) -> Iterator[Violation]:
    """Check that training data is given exactly once, and that blends are well-formed.

    With ``skip_train``, validation or test data is sufficient. Only the launcher checks this: ranks
    may be started by hand without data.
    """
    is_provided = values["mock_data"] or uses_external_data(values)
    names = ["data_path", "train_data_path"]
    names += ["valid_data_path", "test_data_path"] if values["skip_train"] else []
    if not is_provided and all(values[name] is None for name in names):
        yield "data_path", "is required, or mock_data: true"
    sources = [name for name in sorted(BLENDS) if values[name] is not None]
    for name in sources:
        if message := blend_problem(values[name]):
            yield name, message
    for text in values["data_phases"] or ():
        if message := phase_problem(text):
            yield "data_phases", message
    if sources and values["mock_data"]:
        yield "mock_data", f"cannot be combined with {sources[0]}; leave one out"
    elif len(sources) > 1 and sources[0] == "data_path":
        yield sources[1], "cannot be combined with data_path; leave one out"
