"""GPT: text is predicted token by token, from what stands before it."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from flagscale.config.arguments.families import LAYOUTS, Transformer
from flagscale.train.models.base import Chunk, DataKind, ModelSpec

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flagscale.train.data.tokenizers import Tokenizer


class Gpt(ModelSpec):
    """Llama, Qwen, Mixtral and their like: megatron.core's GPTModel."""

    name = "gpt"
    title = "GPT"
    arguments = ("reset_position_ids", "eod_mask_loss")
    layouts = tuple(LAYOUTS)
    transformer = Transformer()

    def build(self, args: Namespace, config: TransformerConfig, chunk: Chunk) -> torch.nn.Module:
        from flagscale.train.models.gpt_model import build

        made: torch.nn.Module = build(args, config, chunk)
        return made

    def data(self, args: Namespace, tokenizer: Tokenizer) -> DataKind:
        from megatron.core.datasets.gpt_dataset import (
            GPTDataset,
            GPTDatasetConfig,
            MockGPTDataset,
        )

        del tokenizer
        options = {
            "reset_position_ids": args.reset_position_ids,
            "reset_attention_mask": False,  # attention here is causal over the whole sequence
            "eod_mask_loss": args.eod_mask_loss,
            "create_attention_mask": False,
        }
        return DataKind(GPTDataset, MockGPTDataset, GPTDatasetConfig, args.seq_length, options)
