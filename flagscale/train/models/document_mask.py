"""Document masking: a token attends only to tokens of its own document in a packed sequence.

A micro-batch has a document number for each token. The attention implementation determines the form
of the mask, which is built once per micro-batch:

================  ===============  =============================================================
cu_seqlens        [documents + 1]  cumulative sequence lengths, as FlashAttention's variable-length
                                   kernels take them: 0 and the end of each document among all
                                   tokens of the micro-batch (on a CPU a loop over documents)
visible           [b, 1, s, s]     True where a query attends to a key, for kernels with a mask
hidden            [b, 1, s, s]     the inverse, for megatron.core's own attention
document_numbers  [b, s]           document numbers of the whole sequences, for context parallelism
                                   that gathers keys and values
================  ===============  =============================================================
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import torch
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional

from flagscale.train.device import Device

MaskForm = Literal["cu_seqlens", "visible", "hidden", "document_numbers"]

_FLASH_BACKENDS = (AttnBackend.auto, AttnBackend.flash)
_MAX_FLASH_HEAD_DIM = 256
_TOKENS_PER_DOCUMENT = 128
"""Initial capacity of ``cu_seqlens`` on a GPU, as tokens per document; it grows fourfold if it is
too small. The capacity is a static shape of a compiled layer, and a kernel inspects every entry.
"""


class DocumentMaskBuilder:
    """Builds the document masks for the layers of this rank."""

    def __init__(self, config: Any, device: Device) -> None:
        """Select the form of the mask; ``config`` is the model's configuration."""
        self.form = select_mask_form(config, device)
        self._device = device.torch_device
        # Number of documents to which the mask is padded; 0 for no padding. On a CPU nothing is
        # compiled, so the length may change.
        self._capacity = 1 if not device.is_host and self.form == "cu_seqlens" else 0

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        """Build the mask of a micro-batch.

        Args:
            numbers: document number of each token, [b, s] on the CPU. Tokens of a document are
                adjacent.
        """
        if self.form == "cu_seqlens":
            cu_seqlens = compute_cu_seqlens(numbers)
            if self._capacity:
                cu_seqlens = self._pad_cu_seqlens(cu_seqlens, numbers)
            return cu_seqlens.to(self._device, non_blocking=True)
        numbers = numbers.to(self._device, non_blocking=True)
        if self.form == "document_numbers":
            return numbers
        mask = visible_mask(numbers, numbers)
        return mask if self.form == "visible" else ~mask

    def _pad_cu_seqlens(self, cu_seqlens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Pad ``cu_seqlens`` with empty documents, so that the length is constant within a run."""
        min_capacity = max(numbers.numel() // _TOKENS_PER_DOCUMENT, 16)
        self._capacity = max(self._capacity, min_capacity)
        while len(cu_seqlens) > self._capacity + 1:
            self._capacity *= 4
        return functional.pad(
            cu_seqlens, (0, self._capacity + 1 - len(cu_seqlens)), value=numbers.numel()
        )


def select_mask_form(config: Any, device: Device) -> MaskForm:
    """Return the form of the mask that attention of this configuration requires."""
    if config.attention_backend == AttnBackend.local:
        return "hidden"
    if config.context_parallel_size > 1 and config.cp_comm_type != "a2a":
        return "document_numbers"
    needs_mask = config.window_size or config.attn_logit_softcapping
    if config.attention_backend not in _FLASH_BACKENDS or needs_mask:
        return "visible"
    has_flash_kernel = (
        device.accelerator.fused_attention
        and config.params_dtype != torch.float32
        and not config.multi_latent_attention  # values have a smaller head dimension than keys
        and config.kv_channels <= _MAX_FLASH_HEAD_DIM
        and config.kv_channels % 8 == 0
    )
    return "cu_seqlens" if has_flash_kernel or device.is_host else "visible"


def compute_cu_seqlens(numbers: torch.Tensor) -> torch.Tensor:
    """Return 0 and the end of each document among all tokens, in the order of the tokens.

    A document never continues in the next sequence.

    Args:
        numbers: document number of each token, [b, s].

    Returns:
        int32 tensor [documents + 1], which starts with 0.
    """
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    start_positions = starts.flatten().nonzero().flatten()
    return torch.cat((start_positions, start_positions.new_tensor([numbers.numel()]))).to(
        torch.int32
    )


def visible_mask(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the mask [b, 1, queries, keys]: keys of the same document up to the query's position.

    The last query aligns with the last key.

    Args:
        queries: document numbers of the queries, [b, queries].
        keys: document numbers of the keys, [b, keys]; the keys may begin earlier than the queries.
    """
    diagonal = keys.shape[1] - queries.shape[1]
    same_document = queries[:, :, None] == keys[:, None, :]
    return same_document.tril(diagonal)[:, None]


def attend_within_documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute causal attention within documents.

    Args:
        query: [s, b, heads, d].
        key: [s, b, query groups, d].
        value: as ``key``, with any head dimension.
        cu_seqlens: ends of documents, see :func:`compute_cu_seqlens`.
        scale: factor of the scores; 1/sqrt(d) if None.
        dropout: dropout probability of the attention weights.

    Returns:
        [b, heads, s, head dimension of values].
    """
    sequence, batch, heads, _ = query.shape
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    if query.device.type == "cuda":
        output: torch.Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seqlens, cu_seqlens, sequence, sequence, dropout, True, False, scale=scale
        )[0]
    else:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        outputs = [
            functional.scaled_dot_product_attention(
                q[:, begin:end],
                k[:, begin:end],
                v[:, begin:end],
                dropout_p=dropout,
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )
            for begin, end in pairwise(cu_seqlens.tolist())
        ]
        output = torch.cat(outputs, 1).transpose(0, 1)
    return output.reshape(batch, sequence, heads, value.shape[-1]).transpose(1, 2)


def attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute attention with a boolean mask that is True for visible keys.

    Args:
        query: [b, heads, queries, d].
        key: [b, query groups, keys, d].
        value: as ``key``.
        mask: broadcastable to [b, heads, queries, keys].
        scale: factor of the scores; 1/sqrt(d) if None.
        dropout: dropout probability of the attention weights.

    Returns:
        [b, heads, queries, d].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type != "cpu":
        # With a mask, torch's CUDA kernels need as many key heads as query heads.
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=True
    )
