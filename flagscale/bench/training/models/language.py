"""Language models of transformers with random weights, and generated batches for them.

Built from the configurations below; nothing is downloaded. Dropout is disabled, so that the losses
of two arms differ only by their reductions. Used by :mod:`.builder`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flagscale.bench.training.models import text
from flagscale.bench.training.models.names import Size

_SPECIAL_TOKENS: dict[str, Any] = {
    "pad_token_id": text.PAD,
    "bos_token_id": text.BOS,
    "eos_token_id": text.EOS,
}
_NO_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob")
_TINY_VOCABULARY = 2048

ConfigKeys = Mapping[str, Any]


def _encoder(vocabulary_size: int, positions: int, hidden: int, layers: int) -> ConfigKeys:
    return {
        "vocab_size": vocabulary_size,
        "max_position_embeddings": positions,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": max(hidden // 64, 2),
        "intermediate_size": 4 * hidden,
        **dict.fromkeys(_NO_DROPOUT, 0.0),
    }


def _gpt2(vocabulary_size: int, positions: int, hidden: int, layers: int) -> ConfigKeys:
    sizes = {
        "vocab_size": vocabulary_size,
        "n_positions": positions,
        "n_embd": hidden,
        "n_layer": layers,
    }
    return {
        **sizes,
        "n_head": max(hidden // 64, 2),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    }


def _bart(vocabulary_size: int, positions: int, hidden: int, layers: int) -> ConfigKeys:
    encoder_decoder_sizes = {
        f"{part}_{key}": value
        for part in ("encoder", "decoder")
        for key, value in (
            ("layers", layers),
            ("ffn_dim", 4 * hidden),
            ("attention_heads", max(hidden // 64, 2)),
        )
    }
    return {
        **encoder_decoder_sizes,
        "vocab_size": vocabulary_size,
        "max_position_embeddings": positions,
        "d_model": hidden,
        "dropout": 0.0,
        "decoder_start_token_id": text.EOS,
        "forced_eos_token_id": text.EOS,
        "num_labels": text.CLASSES,
    }


def _llama(
    vocabulary_size: int, hidden: int, layers: int, ffn_hidden: int, heads: int, kv_heads: int
) -> ConfigKeys:
    return {
        "vocab_size": vocabulary_size,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": ffn_hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }


_TINY_SIZES = (_TINY_VOCABULARY, 128, 128, 2)
# RoBERTa's position ids begin after the padding token's id.
_ROBERTA_OFFSET = text.PAD + 1

CONFIGURATIONS: Mapping[str, Mapping[Size, ConfigKeys]] = {
    "bert": {
        "tiny": _encoder(*_TINY_SIZES),
        "base": _encoder(30522, 512, 768, 12),
        "large": _encoder(30522, 512, 1024, 24),
    },
    "roberta": {
        "tiny": _encoder(_TINY_VOCABULARY, 128 + _ROBERTA_OFFSET, 128, 2),
        "base": {**_encoder(50265, 512 + _ROBERTA_OFFSET, 768, 12), "type_vocab_size": 1},
        "large": {**_encoder(50265, 512 + _ROBERTA_OFFSET, 1024, 24), "type_vocab_size": 1},
    },
    "bart": {
        "tiny": _bart(*_TINY_SIZES),
        "base": _bart(50265, 1024, 768, 6),
        "large": _bart(50265, 1024, 1024, 12),
    },
    "gpt2": {
        "tiny": _gpt2(*_TINY_SIZES),
        "base": _gpt2(50257, 1024, 768, 12),
        "large": _gpt2(50257, 1024, 1280, 36),
    },
    "llama": {
        "tiny": _llama(_TINY_VOCABULARY, 128, 2, 384, 4, 2),
        "base": _llama(32000, 768, 12, 2048, 12, 4),
        "large": _llama(128256, 2048, 16, 8192, 32, 8),
    },
}
"""Configuration of each family by size, without its special tokens."""

_CLASSES = {
    "bert": ("BertConfig", "BertForQuestionAnswering"),
    "roberta": ("RobertaConfig", "RobertaForQuestionAnswering"),
    "bart": ("BartConfig", "BartForSequenceClassification"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
}
_DATA: Mapping[str, Callable[[text.Corpus, int, int, torch.Generator], text.Batch]] = {
    "bert": text.draw_spans,
    "roberta": text.draw_spans,
    "bart": text.draw_classes,
    "gpt2": text.draw_next_tokens,
    "llama": text.draw_next_tokens,
}


class LossModule(nn.Module):
    """Wrapper that returns the mean loss of a transformers model for a batch with labels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss


def build_language_model(family: str, size: Size) -> nn.Module:
    """Build a model of a family and size with weights drawn by torch's default generator. Called
    with a batch from :func:`batch_source`, it returns the mean loss, a scalar.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    # Suppress a warning about every model that its configuration names no loss function.
    transformers.logging.set_verbosity_error()
    keys = CONFIGURATIONS[family][size]
    config, model = (getattr(transformers, name) for name in _CLASSES[family])
    model_config = config(**keys, **_SPECIAL_TOKENS, use_cache=False)
    return LossModule(model(model_config))


def batch_source(family: str, size: Size) -> Callable[[int, int, torch.Generator], text.Batch]:
    """Return a function (batch, length, generator) that draws a batch for a model of this
    family."""
    corpus = text.build_corpus(int(CONFIGURATIONS[family][size]["vocab_size"]))
    return partial(_DATA[family], corpus)
