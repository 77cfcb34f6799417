"""Reference writer of Megatron-LM's ``torch`` format, following its documentation.

Tests compare the project's writer and reader with it. In names, ``t``, ``p`` and ``e`` are a rank's
tensor, pipeline and expert-parallel ranks, and ``tp``, ``pp`` and ``ep`` the sizes.
"""

from __future__ import annotations

import argparse
import enum
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


class AttentionBackend(enum.Enum):
    """Enumeration like those among Megatron-LM's arguments."""

    AUTO = 1


class CodeExecutionMark:
    """Object that creates a file when it is unpickled without restrictions."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def write_checkpoint(
    root: Path,
    weights: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    *,
    sizes: tuple[int, int, int],
    transformer_engine: bool,
    mark_path: Path | None,
    chunks: int = 1,
) -> None:
    """Shard a model's weights and write the files of all ranks.

    Args:
        root: directory of checkpoints.
        weights: whole tensors, by the names of FlagScale's checkpoints.
        values: arguments of the model, as Megatron-LM stores them.
        sizes: tensor, pipeline and expert-parallel size.
        transformer_engine: use the names of Transformer Engine's layers.
        mark_path: file that is created if the checkpoint is unpickled without restrictions; None
            stores no such object.
        chunks: model chunks per stage.
    """
    tp, pp, ep = sizes
    padded_vocab_size = weights["embedding.word_embeddings.weight"].shape[0]
    args = build_arguments(values, sizes, padded_vocab_size, mark_path)
    for t, p, e in [(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)]:
        name = (
            f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        )
        model_chunks = [
            dict(
                _select_weights(
                    weights, values, (t, c * pp + p, e), (tp, pp * chunks, ep), transformer_engine
                )
            )
            for c in range(chunks)
        ]
        tensors = (
            {f"model{c}": chunk for c, chunk in enumerate(model_chunks)}
            if chunks > 1
            else {"model": model_chunks[0]}
        )
        directory = root / "iter_0000007" / name
        directory.mkdir(parents=True)
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 7, **tensors}
        torch.save(state, directory / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")


def build_arguments(
    values: Mapping[str, Any],
    sizes: tuple[int, int, int],
    padded_vocab_size: int,
    mark_path: Path | None,
) -> argparse.Namespace:
    """Build the content of ``args``.

    With ``mark_path``, they contain objects that must not be unpickled.
    """
    fields = {**values, "num_experts": values["num_moe_experts"]}
    fields.pop("num_moe_experts"), fields.pop("bias_activation_fusion")
    fields["bias_gelu_fusion"] = values["bias_activation_fusion"]
    parallel_sizes = {
        f"{name}_model_parallel_size": size
        for name, size in zip(("tensor", "pipeline", "expert"), sizes, strict=True)
    }
    if mark_path is not None:
        fields |= {"attention_backend": AttentionBackend.AUTO, "odd": CodeExecutionMark(mark_path)}
    return argparse.Namespace(
        **fields,
        **parallel_sizes,
        group_query_attention=True,
        padded_vocab_size=padded_vocab_size,
        params_dtype=torch.float32,
    )


def _select_weights(
    weights: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    ranks: tuple[int, int, int],
    sizes: tuple[int, int, int],
    transformer_engine: bool,
) -> Iterator[tuple[str, Any]]:
    (t, p, e), (tp, pp, ep) = ranks, sizes
    layers_per_stage = values["num_layers"] // pp
    for name, full_tensor in weights.items():
        local_name = name
        if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
            if int(match[1]) // layers_per_stage != p:
                continue
            local_name = f"decoder.layers.{int(match[1]) % layers_per_stage}.{match[2]}"
        elif (p != 0) if name.startswith("embedding") else (p != pp - 1):
            continue
        if full_tensor.dim() == 3:
            count = full_tensor.shape[0] // ep
            for local_expert in range(count):
                expert_name = local_name.replace(
                    "experts.experts.", f"experts.local_experts.{local_expert}."
                )
                if transformer_engine:
                    expert_name = local_name.replace("experts.experts.", "experts.") + str(
                        local_expert
                    )
                yield (
                    expert_name,
                    _shard(name, full_tensor[e * count + local_expert], values, t, tp),
                )
            continue
        if f"{'.'.join(name.split('.')[:3])}.mlp.router.weight" in weights:
            # In front of experts, the norm is not fused with the layer that follows.
            local_name = local_name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        elif transformer_engine and values["multi_latent_attention"]:
            local_name = local_name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        if transformer_engine and values["multi_latent_attention"]:
            local_name = re.sub(
                r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", local_name
            )
        if not transformer_engine:
            local_name = local_name.replace(
                "self_attention.linear_qkv.layer_norm_", "input_layernorm."
            )
            local_name = local_name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        is_replicated = transformer_engine and "_down_proj" in name
        yield (
            local_name,
            full_tensor.clone() if is_replicated else _shard(name, full_tensor, values, t, tp),
        )


def _shard(name: str, full_tensor: torch.Tensor, values: Mapping[str, Any], t: int, tp: int) -> Any:
    if "norm" in name or "router" in name or "position_embeddings" in name:
        return full_tensor.clone()
    if re.search(r"(linear_proj|linear_fc2)\.weight", name):
        return full_tensor.chunk(tp, 1)[t].clone()
    if re.search(r"(linear_proj|linear_fc2)\.bias", name):
        return full_tensor.clone()
    if "linear_fc1" in name and values["swiglu"]:
        return torch.cat([half.chunk(tp)[t] for half in full_tensor.chunk(2)])
    return full_tensor.chunk(tp)[t].clone()
