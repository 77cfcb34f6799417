"""BERT: tokens that are masked are told from all others around them.

Devlin et al., "BERT", 2018, trained as Liu et al., "RoBERTa", 2019, found best: sequences are full
of text, documents follow one another, each time a sequence is read other tokens are masked, and
there is no second task. A sequence has no padding, so attention needs no mask.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flagscale.config.arguments.architecture import OWN
from flagscale.config.arguments.families import LAYOUTS, Transformer
from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.values import shown
from flagscale.train.models.base import Chunk, DataKind, ModelSpec

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flagscale.train.data.tokenizers import Tokenizer

_FRAME = 2
"""Tokens of a sequence that are no text, with a tokenizer that has them: the first and the last."""


class Bert(ModelSpec):
    """Encoders of text, with the weights of megatron.core's BertModel but for its second head."""

    name = "bert"
    title = "BERT"
    arguments = ("mask_prob",)
    layouts = tuple(LAYOUTS)
    transformer = Transformer(causal=False, head_layers=1, output_bias=True, masks=True)

    def broken(self, values: Values) -> Iterator[Broken]:
        for name, reason in (
            ("reset_position_ids", "positions are counted through a sequence, whatever is in it"),
            ("reset_attention_mask", "a token attends to all of its sequence, whatever is in it"),
            ("eval_prompts", "nothing is continued"),
            ("peft_type", "adapters are of models of text, token by token"),
            ("sft", "answers are not told token by token"),
            ("eod_mask_loss", "the end of a document is never masked, and so never in the loss"),
            ("window_size", "a token attends to all of its sequence"),
            *((name, "layers have no such part") for name in OWN),
        ):
            if values[name]:
                yield name, f"{shown(values[name])}: with family bert {reason}; leave it out"
        if values["seq_length"] <= _FRAME:
            yield "seq_length", f"{values['seq_length']} leaves no room for text in family bert"

    def build(self, args: Namespace, config: TransformerConfig, chunk: Chunk) -> torch.nn.Module:
        from flagscale.train.models.bert_model import build

        made: torch.nn.Module = build(args, config, chunk)
        return made

    def vocabulary(self, tokenizer: Tokenizer) -> int:
        """With a tokenizer that has no token to mask with, one more than it has."""
        return tokenizer.vocab_size + (tokenizer.mask is None)

    def data(self, args: Namespace, tokenizer: Tokenizer) -> DataKind:
        from flagscale.train.data.masked import MadeUpMaskedDataset, MaskedConfig, MaskedDataset
        from flagscale.train.data.masking import Masks

        size = tokenizer.vocab_size
        framed = tokenizer.cls is not None and tokenizer.sep is not None
        masks = Masks(
            share=args.mask_prob,
            mask=size if tokenizer.mask is None else tokenizer.mask,
            end=tokenizer.eod,
            others=size,
            first=tokenizer.cls if framed else None,
            last=tokenizer.sep if framed else None,
        )
        options = {
            "masks": masks,
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "create_attention_mask": False,
            # No label lies behind the last token.
            "add_extra_token_to_sequence": False,
        }
        length = args.seq_length - (_FRAME if framed else 0)
        return DataKind(MaskedDataset, MadeUpMaskedDataset, MaskedConfig, length, options)
