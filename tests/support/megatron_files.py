"""Reference writer of Megatron-LM's ``torch`` format, following its documentation."""

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
    engine: bool,
    mark: Path | None,
    chunks: int = 1,
) -> None:
    """Shard whole ``weights`` (by the names of FlagScale's checkpoints) and write the files of all
    ranks.

    Args:
        sizes: tensor, pipeline and expert-parallel size.
        chunks: model chunks per stage.
        engine: use the names of Transformer Engine's layers.
    """
    tp, pp, ep = sizes
    padded = weights["embedding.word_embeddings.weight"].shape[0]
    args = build_arguments(values, sizes, padded, mark)
    for t, p, e in [(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)]:
        name = (
            f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        )
        model_chunks = [
            dict(
                _select_weights(weights, values, (t, c * pp + p, e), (tp, pp * chunks, ep), engine)
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
    values: Mapping[str, Any], sizes: tuple[int, int, int], padded: int, mark: Path | None
) -> argparse.Namespace:
    """Build the content of ``args``, with ``mark`` among objects that must not be unpickled."""
    fields = {**values, "num_experts": values["num_moe_experts"]}
    fields.pop("num_moe_experts"), fields.pop("bias_activation_fusion")
    fields["bias_gelu_fusion"] = values["bias_activation_fusion"]
    parallel_sizes = {
        f"{name}_model_parallel_size": size
        for name, size in zip(("tensor", "pipeline", "expert"), sizes, strict=True)
    }
    if mark is not None:
        fields |= {"attention_backend": AttentionBackend.AUTO, "odd": CodeExecutionMark(mark)}
    return argparse.Namespace(
        **fields,
        **parallel_sizes,
        group_query_attention=True,
        padded_vocab_size=padded,
        params_dtype=torch.float32,
    )


def _select_weights(
    weights: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    place: tuple[int, int, int],
    sizes: tuple[int, int, int],
    engine: bool,
) -> Iterator[tuple[str, Any]]:
    (t, p, e), (tp, pp, ep) = place, sizes
    layers_per_stage = values["num_layers"] // pp
    for name, whole in weights.items():
        local = name
        if match := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
            if int(match[1]) // layers_per_stage != p:
                continue
            local = f"decoder.layers.{int(match[1]) % layers_per_stage}.{match[2]}"
        elif (p != 0) if name.startswith("embedding") else (p != pp - 1):
            continue
        if whole.dim() == 3:
            count = whole.shape[0] // ep
            for local_expert in range(count):
                expert_name = local.replace(
                    "experts.experts.", f"experts.local_experts.{local_expert}."
                )
                if engine:
                    expert_name = local.replace("experts.experts.", "experts.") + str(local_expert)
                yield expert_name, _shard(name, whole[e * count + local_expert], values, t, tp)
            continue
        if f"{'.'.join(name.split('.')[:3])}.mlp.router.weight" in weights:
            # In front of experts, the norm is not fused with the layer that follows.
            local = local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        elif engine and values["multi_latent_attention"]:
            local = local.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        if engine and values["multi_latent_attention"]:
            local = re.sub(r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", local)
        if not engine:
            local = local.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            local = local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        duplicated = engine and "_down_proj" in name
        yield local, whole.clone() if duplicated else _shard(name, whole, values, t, tp)


def _shard(name: str, whole: torch.Tensor, values: Mapping[str, Any], t: int, tp: int) -> Any:
    if "norm" in name or "router" in name or "position_embeddings" in name:
        return whole.clone()
    if re.search(r"(linear_proj|linear_fc2)\.weight", name):
        return whole.chunk(tp, 1)[t].clone()
    if re.search(r"(linear_proj|linear_fc2)\.bias", name):
        return whole.clone()
    if "linear_fc1" in name and values["swiglu"]:
        return torch.cat([half.chunk(tp)[t] for half in whole.chunk(2)])
    return whole.chunk(tp)[t].clone()
