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
        None,
        "Prefixes of data sets (without .bin and .idx), or a blend of weights and prefixes: "
        "0.3 a 0.7 b",
    )
    train_data_path: tuple[str, ...] | None = arg(None, "Like data_path, for training only")
    valid_data_path: tuple[str, ...] | None = arg(None, "Like data_path, for validation only")
    test_data_path: tuple[str, ...] | None = arg(None, "Like data_path, for the test only")
    data_phases: tuple[str, ...] | None = arg(
        None,
        "Blends of training data that replace that of data_path after a number of samples or "
        "tokens: a list of {samples: 100000, data_path: [0.2, web, 0.8, code]}. Data sets used in "
        "an earlier phase continue at their position",
    )
    split: str | None = arg(
        None, "Fractions of data_path for training, validation and test: 949,50,1 (or 1)"
    )
    mock_data: bool = arg(
        False, "Train on synthetic tokens; requires neither data nor tokenizer files"
    )
    data_cache_path: str | None = arg(None, "Directory of index caches of data sets")
    dataloader_type: str = arg(
        "single",
        "Order of samples. single: the shuffled order of the data set; cyclic: reshuffled in every "
        "epoch; external: batches from the function external_data",
        choices=("single", "cyclic", EXTERNAL),
    )
    num_workers: int = arg(
        2, "Data loader processes per rank; 0 loads data in the training process", minimum=0
    )
    create_attention_mask: bool = arg(
        False, "Create a mask tensor for every sequence; no attention kernel needs one here"
    )
    reset_position_ids: bool = arg(
        False, "Restart positions, learned or rotary, after an end-of-document token"
    )
    reset_attention_mask: bool = arg(
        False,
        "Restrict attention to documents. An end-of-document token belongs to the document that it "
        "ends",
    )
    eod_mask_loss: bool = arg(False, "Exclude end-of-document tokens from the loss")


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer and vocabulary."""

    tokenizer_type: str | None = arg(
        None,
        "Type of the tokenizer: NullTokenizer, HuggingFaceTokenizer (a local directory; equivalent "
        "to Llama3TokenizerFS), SentencePieceTokenizer or ByteLevelTokenizer",
        choices=TOKENIZERS,
    )
    tokenizer_path: str | None = arg(None, "Directory or file of the tokenizer")
    merge_file: str | None = arg(
        None, "merges.txt of GPT-2, if tokenizer_path (vocab_file) is its vocab.json"
    )
    special_tokens_file: str | None = arg(
        None,
        "For AquilaTokenizerFS: file of special tokens, one per line, whose ids follow the "
        "vocabulary",
    )
    vocab_size: int | None = arg(
        None,
        "Size of the vocabulary before padding (default: that of the tokenizer)",
        minimum=1,
    )
    make_vocab_size_divisible_by: int = arg(
        128, "Pad the vocabulary to a multiple of this times the tensor-parallel size", minimum=1
    )
    legacy_tokenizer: bool = arg(False, "Choose between Megatron-LM's two tokenizer classes")


@dataclass(frozen=True)
class External:
    """Micro-batches from a function of the user (docs/reference/models.md)."""

    external_data: str | None = arg(
        None,
        f"For dataloader_type: external: function that returns micro-batches, as {FUNCTION_FORM}",
    )


@dataclass(frozen=True)
class Masking:
    """Masked-token prediction."""

    mask_prob: float = arg(
        0.15,
        "Fraction of the tokens of a sequence that the model predicts. 80 % of them are masked, "
        "10 % are replaced by another token and 10 % are unchanged",
        minimum=0.001,
        maximum=0.9,
    )


CHAT_TEMPLATES = ("chatml", "llama3")
"""Built-in chat templates."""


@dataclass(frozen=True)
class Conversations:
    """Fine-tuning on conversations (docs/guides/fine-tune.md)."""

    sft: bool = arg(
        False,
        "Supervised fine-tuning: data_path names JSON lines files of conversations, which a chat "
        "template converts to text; only the answers of the assistant count in the loss",
    )
    sft_format: str = arg(
        "auto",
        "Format of conversations: messages (OpenAI), alpaca or sharegpt; auto detects the format "
        "of each line by its keys",
        choices=("auto", "messages", "alpaca", "sharegpt"),
    )
    chat_template: str | None = arg(
        None,
        f"Chat template: {' or '.join(CHAT_TEMPLATES)}, or a .jinja file (default: that of the "
        "tokenizer)",
    )
    sft_packing: bool = arg(
        True,
        "Pack several conversations, or pairs of them (dpo), into a sequence; attention does not "
        "cross them. False pads each conversation to a sequence",
    )
    sft_too_long: str = arg(
        "truncate",
        "Handling of conversations longer than seq_length: truncate them, drop them, or refuse to "
        "start training. A pair (dpo) is too long if either answer is",
        choices=("truncate", "drop", "refuse"),
    )


DPO_LOSSES = ("sigmoid", "ipo")
"""Loss functions of preference training."""


@dataclass(frozen=True)
class Preferences:
    """Training on preferences between answers (docs/guides/fine-tune.md)."""

    dpo: bool = arg(
        False,
        "Direct preference optimization: data_path names JSON lines or Parquet files of pairs, a "
        "chosen and a rejected answer to the same prompt. The reference model is "
        "pretrained_checkpoint, which scores all pairs once",
    )
    dpo_beta: float = arg(
        0.1,
        "Weight of the divergence from the reference model; lower values allow more divergence. "
        "With dpo_loss: ipo, the regularization parameter (tau in the paper)",
        minimum=1e-4,
    )
    dpo_loss: str = arg(
        "sigmoid",
        "Loss of a pair. sigmoid: DPO; ipo: squared distance of the mean log-probability ratio per "
        "token from 1 / (2 dpo_beta)",
        choices=DPO_LOSSES,
    )
    dpo_label_smoothing: float = arg(
        0.0,
        "Assumed fraction of pairs whose answers are interchanged (conservative DPO), for "
        "dpo_loss: sigmoid",
        minimum=0.0,
        maximum=0.49,
    )


@dataclass(frozen=True)
class Prompts:
    """Generation of answers to prompts during training."""

    eval_prompts: str | None = arg(
        None,
        'JSON lines file of prompts, {"messages": […]} or {"prompt": "…"}, that the model answers '
        "at each evaluation. Each generated token requires a forward pass of whole sequences",
    )
    eval_prompt_tokens: int = arg(32, "Maximum number of tokens per answer", minimum=1)


@dataclass(frozen=True)
class Tasks:
    """Evaluation on tasks of lm-evaluation-harness during training."""

    eval_tasks: tuple[str, ...] | None = arg(
        None,
        "Tasks of lm-evaluation-harness on which the model is evaluated during training: names, or "
        "YAML files. Requires the package lm_eval on the first host. Data is never downloaded",
    )
    eval_tasks_interval: int | None = arg(
        None,
        "Training steps between evaluations on eval_tasks (default: eval_interval). The last step "
        "is always evaluated",
        minimum=1,
    )
    eval_tasks_fewshot: int | None = arg(
        None,
        "Number of solved examples before each question of eval_tasks (default: that of the task)",
        minimum=0,
    )
    eval_tasks_limit: int | None = arg(
        None, "Maximum number of documents of each task of eval_tasks (default: all)", minimum=1
    )
