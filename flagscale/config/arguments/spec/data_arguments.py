"""Arguments of the section ``data``: data sets, conversations and tokenizers. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from flagscale.config.arguments.spec.argument import arg
from flagscale.config.arguments.spec.paths import EXTERNAL, FUNCTION_FORM

TOKENIZERS = (
    "HuggingFaceTokenizer",
    "Llama3TokenizerFS",
    "QwenTokenizerFS",
    "Qwen2TokenizerFS",
    "HFTokenizerFS",
    "HFTokenizersTokenizerFS",
    "GPT2BPETokenizer",
    "AquilaTokenizerFS",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "NullTokenizer",
    "ByteLevelTokenizer",
)


@dataclass(frozen=True)
class Data:
    """Data sets and how they are read."""

    data_path: tuple[str, ...] | None = arg(
        None, "Data set prefixes (of .bin and .idx), or weights and prefixes: 0.3 a 0.7 b"
    )
    train_data_path: tuple[str, ...] | None = arg(None, "As data_path, for training alone")
    valid_data_path: tuple[str, ...] | None = arg(None, "As data_path, for validation alone")
    test_data_path: tuple[str, ...] | None = arg(None, "As data_path, for the test alone")
    data_phases: tuple[str, ...] | None = arg(
        None,
        "Mixtures of training data that follow that of data_path, each from a number of samples "
        "or tokens on: a list of {samples: 100000, data_path: [0.2, web, 0.8, code]}; data sets "
        "go on where the phase before left them",
    )
    split: str | None = arg(
        None, "Shares of data_path for training, validation and test: 949,50,1 (or 1)"
    )
    mock_data: bool = arg(False, "Train on made-up tokens; needs neither data nor tokenizer files")
    data_cache_path: str | None = arg(None, "Directory of the data sets' index caches")
    dataloader_type: str = arg(
        "single",
        "Order of samples: single walks the data set's own shuffle, cyclic reshuffles each epoch; "
        "external takes what external_data gives",
        choices=("single", "cyclic", EXTERNAL),
    )
    num_workers: int = arg(2, "Loader processes a rank; 0 loads in the training process", minimum=0)
    create_attention_mask: bool = arg(
        False, "Make a mask for every sequence; attention here needs none, and none is made"
    )
    reset_position_ids: bool = arg(
        False, "Restart positions, learned or rotary, after an end-of-document token"
    )
    reset_attention_mask: bool = arg(
        False,
        "Keep documents apart: attention does not cross an end-of-document token, which is of the "
        "document that it ends",
    )
    eod_mask_loss: bool = arg(False, "Leave end-of-document tokens out of the loss")


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer and vocabulary."""

    tokenizer_type: str | None = arg(
        None,
        "NullTokenizer, HuggingFaceTokenizer (a local directory; Llama3TokenizerFS means the "
        "same), SentencePieceTokenizer or ByteLevelTokenizer",
        choices=TOKENIZERS,
    )
    tokenizer_path: str | None = arg(None, "The tokenizer's directory or file")
    merge_file: str | None = arg(
        None, "GPT-2's merges.txt, where tokenizer_path (vocab_file) is its vocab.json"
    )
    special_tokens_file: str | None = arg(
        None, "Of AquilaTokenizerFS: special tokens, a line each, whose ids follow the vocabulary"
    )
    vocab_size: int | None = arg(
        None, "Tokens of the vocabulary before padding; the tokenizer's own without it", minimum=1
    )
    make_vocab_size_divisible_by: int = arg(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size", minimum=1
    )
    legacy_tokenizer: bool = arg(
        False, "Chooses between Megatron-LM's two tokenizer classes; of no effect here"
    )


@dataclass(frozen=True)
class External:
    """Micro-batches from a function of the user (docs/reference/models.md)."""

    external_data: str | None = arg(
        None,
        "Of dataloader_type external: the function that gives the micro-batches, as "
        f"{FUNCTION_FORM}",
    )


@dataclass(frozen=True)
class Masking:
    """Masked-token prediction."""

    mask_prob: float = arg(
        0.15,
        "Share of a sequence's tokens that the model is to tell: of ten of them eight are masked, "
        "one is another token and one stays as it is",
        minimum=0.001,
        maximum=0.9,
    )


CHAT_TEMPLATES = ("chatml", "llama3")
"""Chat templates that have a name."""


@dataclass(frozen=True)
class Conversations:
    """Fine-tuning on conversations (docs/guides/fine-tune.md)."""

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
        f"Template of conversations: {' or '.join(CHAT_TEMPLATES)}, or a .jinja file; the "
        "tokenizer's "
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
    """Answers of the model to prompts during training."""

    eval_prompts: str | None = arg(
        None,
        'File of JSON lines, {"messages": […]} or {"prompt": "…"}, that the model answers at each '
        "evaluation; a token takes a forward pass of whole sequences",
    )
    eval_prompt_tokens: int = arg(32, "Most tokens of such an answer", minimum=1)
