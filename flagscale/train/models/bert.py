"""BERT: masked language modeling with a bidirectional encoder.

Devlin et al., "BERT", 2018, with the training recipe of Liu et al., "RoBERTa", 2019: sequences are
filled with consecutive documents, masks are drawn anew each time that a sequence is read, and there
is no next-sentence task. Sequences have no padding, so attention needs no mask.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flagscale.config.arguments.rules.model_family import FAMILY_LAYOUTS, Transformer
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.model_arguments import ARCHITECTURE_OPTIONS
from flagscale.config.arguments.spec.values import format_value
from flagscale.train.models.base import ChunkSpec, DatasetSpec, ModelSpec

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flagscale.train.data.tokenizers import Tokenizer

_SPECIAL_TOKENS = 2
"""Number of special tokens of a sequence if the tokenizer has them: the first (CLS) and the last
(SEP).
"""


class Bert(ModelSpec):
    """Text encoder with the weights of megatron.core's BertModel, except its binary head."""

    name = "bert"
    title = "BERT"
    arguments = ("mask_prob",)
    layouts = tuple(FAMILY_LAYOUTS)
    transformer = Transformer(
        causal=False, head_layers=1, output_bias=True, masks=True, block="encoder"
    )

    def broken(self, values: Values) -> Iterator[Violation]:
        for name, reason in (
            ("reset_position_ids", "positions always count through the whole sequence"),
            ("reset_attention_mask", "a token always attends to its whole sequence"),
            ("eval_prompts", "text generation is not supported"),
            ("eval_tasks", "text is not predicted token by token"),
            ("peft_type", "adapters are supported for autoregressive models only"),
            ("sft", "answers are not predicted token by token"),
            ("dpo", "answers are not predicted token by token"),
            (
                "eod_mask_loss",
                "the end of a document is never masked, so it is never part of the loss",
            ),
            ("window_size", "a token always attends to its whole sequence"),
            *((name, "it is not supported") for name in ARCHITECTURE_OPTIONS),
        ):
            if values[name]:
                yield name, f"{format_value(values[name])}: with family bert {reason}; leave it out"
        if values["seq_length"] <= _SPECIAL_TOKENS:
            yield "seq_length", f"{values['seq_length']} leaves no room for text in family bert"

    def build(
        self, args: Namespace, config: TransformerConfig, chunk: ChunkSpec
    ) -> torch.nn.Module:
        from flagscale.train.models.bert_model import build_bert

        model: torch.nn.Module = build_bert(args, config, chunk)
        return model

    def vocabulary(self, tokenizer: Tokenizer) -> int:
        """Return the tokenizer's vocabulary size, plus one if it has no mask token."""
        return tokenizer.vocab_size + (tokenizer.mask is None)

    def data(self, args: Namespace, tokenizer: Tokenizer) -> DatasetSpec:
        from flagscale.train.data.masked_dataset import (
            MaskedConfig,
            MaskedDataset,
            MockMaskedDataset,
        )
        from flagscale.train.data.token_masking import MaskingSettings

        size = tokenizer.vocab_size
        has_special_tokens = tokenizer.cls is not None and tokenizer.sep is not None
        masking = MaskingSettings(
            predicted_fraction=args.mask_prob,
            mask_id=size if tokenizer.mask is None else tokenizer.mask,
            eod_id=tokenizer.eod,
            random_id_limit=size,
            cls_id=tokenizer.cls if has_special_tokens else None,
            sep_id=tokenizer.sep if has_special_tokens else None,
        )
        options = {
            "masking": masking,
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "create_attention_mask": False,
            # Labels are not shifted, so a sample needs no token after the last one.
            "add_extra_token_to_sequence": False,
        }
        length = args.seq_length - (_SPECIAL_TOKENS if has_special_tokens else 0)
        return DatasetSpec(MaskedDataset, MockMaskedDataset, MaskedConfig, length, options)
