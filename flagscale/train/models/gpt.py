"""GPT: decoder-only models that predict the next token."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from flagscale.config.arguments.rules.model_family import FAMILY_LAYOUTS, Transformer
from flagscale.config.arguments.spec.model_arguments import ARCHITECTURE_OPTIONS
from flagscale.train.models.base import (
    BATCH_KEYS,
    DOCUMENT_NUMBERS_KEY,
    ChunkSpec,
    DatasetSpec,
    ModelSpec,
)

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    from flagscale.train.data.tokenizers import Tokenizer


class Gpt(ModelSpec):
    """Llama, Qwen, Mixtral, Gemma and similar models, built as megatron.core's GPTModel."""

    name = "gpt"
    title = "GPT"
    arguments = (
        "reset_position_ids",
        "reset_attention_mask",
        "eod_mask_loss",
        "sft",
        "dpo",
        "peft_type",
        "eval_prompts",
        "eval_tasks",
        "mtp_num_layers",
        *ARCHITECTURE_OPTIONS,
    )
    layouts = tuple(FAMILY_LAYOUTS)
    transformer = Transformer()

    def build(
        self, args: Namespace, config: TransformerConfig, chunk: ChunkSpec
    ) -> torch.nn.Module:
        from flagscale.train.models.gpt_model import build_gpt

        model: torch.nn.Module = build_gpt(args, config, chunk)
        return model

    def data(self, args: Namespace, tokenizer: Tokenizer) -> DatasetSpec:
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        from flagscale.train.data.document_datasets import select_dataset_classes

        del tokenizer
        options = {
            "reset_position_ids": args.reset_position_ids,
            "reset_attention_mask": False,  # datasets number documents instead of building masks
            "eod_mask_loss": args.eod_mask_loss,
            "create_attention_mask": False,
        }
        mask_documents = args.reset_attention_mask
        keys = (*BATCH_KEYS, DOCUMENT_NUMBERS_KEY) if mask_documents else BATCH_KEYS
        indexed_class, mock_class = select_dataset_classes(with_documents=mask_documents)
        return DatasetSpec(
            indexed_class, mock_class, GPTDatasetConfig, args.seq_length, options, keys
        )
