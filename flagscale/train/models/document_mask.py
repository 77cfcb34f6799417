"""Document masking: a token attends only to tokens of its own document in a packed sequence.

A micro-batch has a document number for each token. The attention implementation determines the form
of the mask, which is built once per micro-batch:

================  ===============  =============================================================
cu_seqlens        [documents + 1]  cumulative sequence lengths, as FlashAttention's variable-length
                                   kernels take them: 0 and the end of each document among all
                                   tokens of the micro-batch (on a CPU a loop over documents)
visible           [b, 1, s, s]     True where a query attends to a key, for kernels with a mask
hidden            [b, 1, s, s]     the inverse, for megatron.core's own attention
chunk_cu_seqlens  [2, 2, n]        for the same kernels and context parallelism that gathers keys
                                   and values: of each chunk of this rank, cumulative sequence
                                   lengths of queries and keys (:func:`compute_chunk_cu_seqlens`)
document_numbers  [b, s]           document numbers of the whole sequences, for context parallelism
                                   that gathers keys and values, and kernels with a mask
================  ===============  =============================================================
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional

from flagscale.train.device import Device
from flagscale.train.models.context_parallel import select_attention_groups

MaskForm = Literal["cu_seqlens", "visible", "hidden", "chunk_cu_seqlens", "document_numbers"]

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
        has_cu_seqlens = self.form in ("cu_seqlens", "chunk_cu_seqlens")
        self._capacity = 1 if not device.is_host and has_cu_seqlens else 0
        self._config = config

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        """Build the mask of a micro-batch.

        Args:
            numbers: document number of each token, [b, s] on the CPU. Tokens of a document are
                adjacent.
        """
        if self.form in ("cu_seqlens", "chunk_cu_seqlens"):
            cu_seqlens = self._compute_cu_seqlens(numbers)
            if self._capacity:
                cu_seqlens = self._pad_cu_seqlens(cu_seqlens, numbers)
            return cu_seqlens.to(self._device, non_blocking=True)
        numbers = numbers.to(self._device, non_blocking=True)
        if self.form == "document_numbers":
            return numbers
        mask = visible_mask(numbers, numbers)
        return mask if self.form == "visible" else ~mask

    def _compute_cu_seqlens(self, numbers: torch.Tensor) -> torch.Tensor:
        if self.form == "cu_seqlens":
            return compute_cu_seqlens(numbers)
        cp_group = parallel_state.get_context_parallel_group()
        _, group = select_attention_groups(self._config, cp_group)
        if group is None:  # all ranks exchange heads
            return compute_cu_seqlens(numbers)
        return compute_chunk_cu_seqlens(numbers, group.rank(), group.size())

    def _pad_cu_seqlens(self, cu_seqlens: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Pad ``cu_seqlens`` with empty documents, so that the length is constant within a run."""
        min_capacity = max(numbers.numel() // _TOKENS_PER_DOCUMENT, 16)
        self._capacity = max(self._capacity, min_capacity)
        while cu_seqlens.shape[-1] > self._capacity + 1:
            self._capacity *= 4
        return _pad_with_empty_documents(cu_seqlens, self._capacity + 1)


def _pad_with_empty_documents(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    padding = length - cu_seqlens.shape[-1]
    return torch.cat((cu_seqlens, *[cu_seqlens[..., -1:]] * padding), -1)


def select_mask_form(config: Any, device: Device) -> MaskForm:
    """Return the form of the mask that attention of this configuration requires."""
    if config.attention_backend == AttnBackend.local:
        return "hidden"
    gathers_keys = config.context_parallel_size > 1 and config.cp_comm_type != "a2a"
    form_of_masks: MaskForm = "document_numbers" if gathers_keys else "visible"
    needs_mask = config.window_size or config.attn_logit_softcapping
    if config.attention_backend not in _FLASH_BACKENDS or needs_mask:
        return form_of_masks
    has_flash_kernel = (
        device.accelerator.fused_attention
        and config.params_dtype != torch.float32
        and not config.multi_latent_attention  # values have a smaller head dimension than keys
        and config.kv_channels <= _MAX_FLASH_HEAD_DIM
        and config.kv_channels % 8 == 0
    )
    if not (has_flash_kernel or device.is_host):
        return form_of_masks
    return "chunk_cu_seqlens" if gathers_keys else "cu_seqlens"


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


def compute_chunk_cu_seqlens(numbers: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return cumulative sequence lengths for the queries of a rank's two chunks.

    The keys of a chunk are those from the start of its sequence to the end of the chunk. A document
    has the queries that are in the chunk, and the keys up to the last of these queries. All keys of
    earlier documents together are a document without queries.

    Args:
        numbers: document number of each token of the whole sequences, [b, s].
        rank: rank among those that share the sequences.
        ranks: number of these ranks.

    Returns:
        int32 tensor [chunks, queries and keys, documents + 1]. The tokens of a chunk are in the
        order of the sequences. Empty documents make both chunks equally long.
    """
    length = numbers.shape[1] // (2 * ranks)
    chunks = []
    for index in (rank, 2 * ranks - 1 - rank):
        begin, end = index * length, (index + 1) * length
        lengths = []
        for row in numbers[:, :end]:
            keys = row.unique_consecutive(return_counts=True)[1]
            queries = (keys.cumsum(0) - begin).clamp(min=0).minimum(keys)
            first = int((queries == 0).sum())
            earlier_keys = keys[:first].sum(0, keepdim=True)
            lengths.append(torch.stack((torch.zeros_like(earlier_keys), earlier_keys)))
            lengths.append(torch.stack((queries[first:], keys[first:])))
        cumulative = torch.cat(lengths, 1).cumsum(1)
        chunks.append(functional.pad(cumulative, (1, 0)))
    longest = max(chunk.shape[1] for chunk in chunks)
    padded = [_pad_with_empty_documents(chunk, longest) for chunk in chunks]
    return torch.stack(padded).to(torch.int32)


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


def attend_to_earlier_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute causal attention within documents of a chunk's queries to its and earlier keys.

    Args:
        query: [b, heads, queries, d].
        key: [b, query groups, keys, d].
        value: as ``key``.
        cu_seqlens: [queries and keys, documents + 1], see :func:`compute_chunk_cu_seqlens`.
        scale: factor of the scores; 1/sqrt(d) if None.
        dropout: dropout probability of the attention weights.

    Returns:
        [b, heads, queries, d].
    """
    cu_queries, cu_keys = cu_seqlens
    if query.device.type == "cuda":
        # The gradient of keys without queries is zero, whatever a kernel leaves in its place.
        positions = torch.arange(key.shape[0] * key.shape[2], device=key.device)
        documents = torch.searchsorted(cu_keys, positions, right=True, out_int32=True) - 1
        has_queries = cu_queries.diff() > 0
        is_visible = has_queries[documents].view(key.shape[0], 1, key.shape[2], 1)
        key, value = (torch.where(is_visible, x, x.detach()) for x in (key, value))
    return attend_packed(query, key, value, cu_queries, cu_keys, scale=scale, dropout=dropout)


def attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute causal attention within documents, in each of which the last query aligns with the
    last key.

    Args:
        query: [b, heads, queries, d].
        key: [b, query groups, keys, d].
        value: as ``key``, with any head dimension on a CPU.
        cu_queries: 0 and the ends of the documents among the queries of all sequences.
        cu_keys: the same of the keys.
        scale: factor of the scores; 1/sqrt(d) if None.
        dropout: dropout probability of the attention weights.

    Returns:
        [b, heads, queries, head dimension of values].
    """
    batch, _, length, _ = query.shape
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if query.device.type == "cuda":
        output: torch.Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_queries, cu_keys, length, key.shape[2], dropout, True, False, scale=scale
        )[0]
    else:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        ranges = zip(pairwise(cu_queries.tolist()), pairwise(cu_keys.tolist()), strict=True)
        outputs = [
            attend_causal_to_end(
                q[:, first_query:last_query],
                k[:, first_key:last_key],
                v[:, first_key:last_key],
                scale=scale,
                dropout=dropout,
            )
            for (first_query, last_query), (first_key, last_key) in ranges
            if last_query > first_query
        ]
        output = torch.cat(outputs, 1).transpose(0, 1)
    return output.reshape(batch, length, *output.shape[1:]).transpose(1, 2)


def attend_causal_to_end(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute causal attention in which the last query aligns with the last key.

    Args:
        query: [..., heads, queries, d].
        key: [..., query groups, keys, d], with at least as many keys as queries.
        value: as ``key``.
        scale: factor of the scores; 1/sqrt(d) if None.
        dropout: dropout probability of the attention weights.

    Returns:
        [..., heads, queries, head dimension of values].
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if query.device.type == "cuda" and query.dtype != torch.float32 and queries < keys:
        # With fewer queries than keys, torch's function aligns the first query with the first key.
        # The flash kernel, available on CUDA only, aligns the last ones and needs no mask.
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout, is_causal=True, scale=scale
        )
        output: torch.Tensor = outputs[0]
        return output
    mask = None
    if queries < keys:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
    return functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=True,
    )


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
