"""Core attention with torch's ``scaled_dot_product_attention`` (SDPA).

On CUDA this is flash attention: no [s, s] matrix in memory, and 2.6 times the training speed of
megatron.core's local attention on an H200. On the CPU it is fused too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch.nn import functional
from torch.nn.attention import SDPBackend

from flagscale.errors import ConfigError
from flagscale.train.device import Device
from flagscale.train.models.context_parallel import select_attention_groups
from flagscale.train.models.document_mask import attend_masked, attend_packed
from flagscale.train.models.gathered_attention import attend_causal, attend_gathered
from flagscale.train.models.head_exchange import gather_heads, gather_sequence

_SDP_BACKENDS = {
    AttnBackend.flash: SDPBackend.FLASH_ATTENTION,
    AttnBackend.fused: SDPBackend.CUDNN_ATTENTION,
    AttnBackend.unfused: SDPBackend.MATH,
}

_SDP_SWITCHES: Mapping[SDPBackend, Callable[[bool], None]] = {
    SDPBackend.FLASH_ATTENTION: torch.backends.cuda.enable_flash_sdp,
    SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.enable_cudnn_sdp,
    SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.enable_mem_efficient_sdp,
    SDPBackend.MATH: torch.backends.cuda.enable_math_sdp,
}


class SDPAttention(MegatronModule):  # type: ignore[misc]
    """Causal or bidirectional attention over the heads of this tensor-parallel rank.

    ``attention_backend`` selects torch's kernel for the process (:func:`select_sdp_kernels`):
    ``auto`` (the fastest supported), ``flash``, ``fused`` (cuDNN) or ``unfused`` (separate GEMMs
    and softmax).
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        *,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self._exchange_group, self._sequence_group = select_attention_groups(
            config, pg_collection.cp
        )
        self._has_ring = config.cp_comm_type in ("p2p", "a2a+p2p")
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.no_mask):
            raise ConfigError(f"attention with a {attn_mask_type.name} mask is not supported")
        self.causal = attn_mask_type == AttnMaskType.causal
        self.scale = config.softmax_scale if softmax_scale is None else softmax_scale
        self.dropout: float = (
            config.attention_dropout if attention_dropout is None else attention_dropout
        )

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Compute attention.

        Args:
            query: [s, b, heads, d].
            key: [s, b, query groups, d].
            value: as ``key``.
            attention_mask: None, or the document mask
                (:mod:`flagscale.train.models.document_mask`).

        Returns:
            [s, b, heads · d].
        """
        if self._exchange_group is None:
            return self._attend_to_sequence(query, key, value, attention_mask)
        gathered = gather_sequence(query, key, value, self._exchange_group)
        output = self._attend_to_sequence(*gathered, attention_mask)
        return gather_heads(output, self._exchange_group)

    def _attend_to_sequence(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention to the whole sequence, with keys and values of other ranks if they have
        a part of it; arguments and result as :meth:`forward`'s.
        """
        if self._sequence_group is None:
            return self.attend(query, key, value, attention_mask)
        dropout = self.dropout if self.training else 0.0
        if self.causal and not dropout and attention_mask is None:
            output = attend_causal(
                query,
                key,
                value,
                self._sequence_group,
                scale=self.scale,
                in_ring=self._has_ring,
            )
            return output.permute(2, 0, 1, 3).flatten(2)
        with self._dropout_rng(dropout):
            output = attend_gathered(
                query,
                key,
                value,
                self._sequence_group,
                causal=self.causal,
                scale=self.scale,
                dropout=dropout,
                documents=attention_mask,
            )
        return output.permute(2, 0, 1, 3).flatten(2)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute attention of whole sequences; arguments and result as :meth:`forward`'s."""
        dropout = self.dropout if self.training else 0.0
        with self._dropout_rng(dropout):
            if attention_mask is not None:
                output = self._attend_within_documents(query, key, value, attention_mask, dropout)
            else:
                q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
                output = functional.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    dropout_p=dropout,
                    is_causal=self.causal,
                    scale=self.scale,
                    enable_gqa=q.shape[1] != k.shape[1],
                )
        return output.permute(2, 0, 1, 3).flatten(2)

    def _attend_within_documents(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        dropout: float,
    ) -> torch.Tensor:
        """Compute causal attention within documents; ``mask`` has the form
        ``cu_seqlens`` or ``visible``.
        """
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if mask.dim() == 1:
            return attend_packed(q, k, v, mask, mask, scale=self.scale, dropout=dropout)
        return attend_masked(q, k, v, mask, scale=self.scale, dropout=dropout)

    def _dropout_rng(self, dropout: float) -> AbstractContextManager[Any]:
        """Return the RNG context of dropout.

        Tensor-parallel ranks have different heads, so they must draw different masks.
        """
        if not dropout or self.config.sequence_parallel:
            return nullcontext()
        fork: AbstractContextManager[Any] = tensor_parallel.get_cuda_rng_tracker().fork()
        return fork


def select_sdp_kernels(config: Any, device: Device) -> None:
    """Restrict SDPA in this process to the kernels that ``attention_backend`` selects.

    ``auto`` selects cuDNN on Hopper and later if it supports the head dimension. There it is nearly
    twice as fast as flash attention.
    """
    if not device.accelerator.fused_attention:
        return  # other devices select their own kernel
    requested = config.attention_backend
    if requested == AttnBackend.auto and _prefers_cudnn(config, device):
        allowed = {SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH}
    elif requested == AttnBackend.unfused or (
        # Neither flash attention nor cuDNN supports fp32.
        requested in _SDP_BACKENDS and config.params_dtype != torch.float32
    ):
        allowed = {_SDP_BACKENDS[requested]}
    else:
        allowed = set(_SDP_SWITCHES)
    for kernel, switch in _SDP_SWITCHES.items():
        switch(kernel in allowed)


def _prefers_cudnn(config: Any, device: Device) -> bool:
    return bool(
        torch.cuda.get_device_capability(device.torch_device)[0] >= 9
        and config.params_dtype != torch.float32
        and config.kv_channels <= 128
        and config.kv_channels % 8 == 0
        and not config.attention_dropout
        and not config.deterministic_mode
    )
