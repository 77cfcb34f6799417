"""GPT: text is predicted token by token, from what stands before it."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from flagscale.config.arguments.architecture import OWN
from flagscale.config.arguments.families import LAYOUTS, Transformer
from flagscale.train.models.base import DOCUMENTS, KEYS, Chunk, DataKind, ModelSpec

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flagscale.train.data.tokenizers import Tokenizer


class Gpt(ModelSpec):
    """Llama, Qwen, Mixtral, Gemma and their like: megatron.core's GPTModel."""

    name = "gpt"
    title = "GPT"
    arguments = (
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        "sft",
        "peft_type",
        "eval_prompts",
        "mtp_num_layers",
        *OWN,
    )
    layouts = tuple(LAYOUTS)
    transformer = Transformer()

    def build(self, args: Namespace, config: TransformerConfig, chunk: Chunk) -> torch.nn.Module:
        from flagscale.train.models.gpt_model import build

        made: torch.nn.Module = build(args, config, chunk)
        return made

    def data(self, args: Namespace, tokenizer: Tokenizer) -> DataKind:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        from flagscale.train.data.documents import data_sets

        del tokenizer
        options = {
            "reset_position_ids": args.reset_position_ids,
            "reset_attention_mask": False,  # documents are numbered, and no mask is made of data
            "eod_mask_loss": args.eod_mask_loss,
            "create_attention_mask": False,
        }
        apart = args.reset_attention_mask
        keys = (*KEYS, DOCUMENTS) if apart else KEYS
        real, made_up = data_sets(apart=apart)
        return DataKind(real, made_up, GPTDatasetConfig, args.seq_length, options, keys)
