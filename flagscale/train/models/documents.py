"""Keeping the documents of one sequence apart: a token attends to its own document alone.

What a micro-batch says is a number for each token, alike for the tokens of a document. What the
layers get in place of an attention mask depends on their attention, and is made once a
micro-batch:

========  ======================  ==========================================================
ends      ``[documents + 1]``     where documents end among all tokens, for a kernel (or on a
                                  CPU a loop) that computes nothing between documents
visible   ``[batch, 1, s, s]``    what a token attends to, for kernels that take a mask
hidden    ``[batch, 1, s, s]``    the opposite, as megatron.core's own attention wants it
numbers   ``[batch, s]``          the numbers themselves, of whole sequences, where ranks have
                                  parts of these (context parallelism)
========  ======================  ==========================================================
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal

import torch
from megatron.core.transformer.enums import AttnBackend
from torch.nn import functional

from flagscale.train.device import Device

Form = Literal["ends", "visible", "hidden", "numbers"]

_FLASH = (AttnBackend.auto, AttnBackend.flash)
_WIDEST_HEAD = 256
_TOKENS_A_DOCUMENT = 128
"""What a list of ends on a GPU has room for at first; it grows fourfold. Its length is a part of a
compiled layer, and a kernel asks about each of its places."""


class DocumentMasks:
    """Makes what the layers of this rank take, micro-batch by micro-batch."""

    def __init__(self, config: Any, device: Device) -> None:
        """``config``: the model's configuration."""
        self.form = form_of(config, device)
        self._device = device.torch_device
        # Elsewhere nothing is compiled, and so the length may change.
        self._room = 1 if not device.is_host and self.form == "ends" else 0

    def __call__(self, numbers: torch.Tensor) -> torch.Tensor:
        """
        Args:
            numbers: a document's number for each token, ``[batch, sequence]`` on the CPU. Those of
                one document stand side by side.
        """
        if self.form == "ends":
            found = ends(numbers)
            if self._room:
                found = self._padded(found, numbers)
            return found.to(self._device, non_blocking=True)
        numbers = numbers.to(self._device, non_blocking=True)
        if self.form == "numbers":
            return numbers
        seen = visible(numbers, numbers)
        return seen if self.form == "visible" else ~seen

    def _padded(self, found: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """Ends with empty documents behind them, so that their count is one for all of a run."""
        least = max(numbers.numel() // _TOKENS_A_DOCUMENT, 16)
        self._room = max(self._room, least)
        while len(found) > self._room + 1:
            self._room *= 4
        return functional.pad(found, (0, self._room + 1 - len(found)), value=numbers.numel())


def form_of(config: Any, device: Device) -> Form:
    """What attention of this configuration takes."""
    if config.attention_backend == AttnBackend.local:
        return "hidden"
    if config.context_parallel_size > 1:
        return "numbers"
    bounded = config.window_size or config.attn_logit_softcapping
    if config.attention_backend not in _FLASH or bounded:
        return "visible"
    flash = (
        device.accelerator.fused_attention
        and config.params_dtype != torch.float32
        and not config.multi_latent_attention  # values are narrower than keys
        and config.kv_channels <= _WIDEST_HEAD
        and config.kv_channels % 8 == 0
    )
    return "ends" if flash or device.is_host else "visible"


def ends(numbers: torch.Tensor) -> torch.Tensor:
    """Where documents end among all ``[batch, sequence]`` tokens, from 0 on: int32. No document
    goes on in the next sequence."""
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    found = begins.flatten().nonzero().flatten()
    return torch.cat((found, found.new_tensor([numbers.numel()]))).to(torch.int32)


def visible(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """What each query attends to, ``[batch, 1, queries, keys]``: keys of its document up to its own
    place. The last query stands at the last key.

    Args:
        queries: numbers of documents, ``[batch, queries]``.
        keys: as ``queries``, with what stands before them.
    """
    places = keys.shape[1] - queries.shape[1]
    same = queries[:, :, None] == keys[:, None, :]
    return same.tril(places)[:, None]


def attend_within(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    found: torch.Tensor,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Causal attention within documents.

    Args:
        query: ``[sequence, batch, heads, width]``.
        key: as ``query``, with as many heads as there are query groups.
        value: as ``key``, of any width.
        found: ends of documents.
        scale: of the scores; one over the root of ``width`` if None.
        dropout: share of the scores that is dropped.

    Returns:
        ``[batch, heads, sequence, width of values]``.
    """
    sequence, batch, heads, _ = query.shape
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))
    if query.device.type == "cuda":
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, found, found, sequence, sequence, dropout, True, False, scale=scale
        )[0]
    else:
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        parts = [
            functional.scaled_dot_product_attention(
                q[:, begin:end],
                k[:, begin:end],
                v[:, begin:end],
                dropout_p=dropout,
                is_causal=True,
                scale=scale,
                enable_gqa=True,
            )
            for begin, end in pairwise(found.tolist())
        ]
        out = torch.cat(parts, 1).transpose(0, 1)
    return out.reshape(batch, sequence, heads, value.shape[-1]).transpose(1, 2)


def attend_masked(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attention to what a mask leaves visible: ``[batch, heads, queries, width]``, as the inputs
    are."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type != "cpu":
        # Of torch's kernels that take a mask, those for CUDA want as many keys as queries.
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scale, enable_gqa=True
    )
