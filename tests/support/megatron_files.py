"""Writes a checkpoint in Megatron-LM's ``torch`` format, as its documentation describes it."""

from __future__ import annotations

import argparse
import enum
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch


class Backend(enum.Enum):
    """Stands among the arguments, as enumerations of Megatron-LM do."""

    AUTO = 1


class Mark:
    """Leaves a file where it is unpickled without care."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def write(
    root: Path,
    weights: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    *,
    sizes: tuple[int, int, int],
    engine: bool,
    mark: Path | None,
    chunks: int = 1,
) -> None:
    """Cut whole ``weights`` (by the names of our checkpoints) for ``sizes``: tensor, pipeline and
    expert parallelism; ``chunks`` are those of a stage. ``engine``: Transformer Engine's names."""
    tp, pp, ep = sizes
    padded = weights["embedding.word_embeddings.weight"].shape[0]
    args = arguments(values, sizes, padded, mark)
    for t, p, e in [(t, p, e) for t in range(tp) for p in range(pp) for e in range(ep)]:
        name = (
            f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "") + (f"_{e:03d}" if ep > 1 else "")
        )
        made = [
            dict(_own(weights, values, (t, c * pp + p, e), (tp, pp * chunks, ep), engine))
            for c in range(chunks)
        ]
        own = {f"model{c}": one for c, one in enumerate(made)} if chunks > 1 else {"model": made[0]}
        directory = root / "iter_0000007" / name
        directory.mkdir(parents=True)
        state = {"args": args, "checkpoint_version": 3.0, "iteration": 7, **own}
        torch.save(state, directory / "model_optim_rng.pt")
    (root / "latest_checkpointed_iteration.txt").write_text("7")


def arguments(
    values: Mapping[str, Any], sizes: tuple[int, int, int], padded: int, mark: Path | None
) -> argparse.Namespace:
    """What its ``args`` says; with a ``mark`` among things that are not read."""
    given = {**values, "num_experts": values["num_moe_experts"]}
    given.pop("num_moe_experts"), given.pop("bias_activation_fusion")
    given["bias_gelu_fusion"] = values["bias_activation_fusion"]
    sizes_given = {
        f"{name}_model_parallel_size": size
        for name, size in zip(("tensor", "pipeline", "expert"), sizes, strict=True)
    }
    if mark is not None:
        given |= {"attention_backend": Backend.AUTO, "odd": Mark(mark)}
    return argparse.Namespace(
        **given,
        **sizes_given,
        group_query_attention=True,
        padded_vocab_size=padded,
        params_dtype=torch.float32,
    )


def _own(
    weights: Mapping[str, torch.Tensor],
    values: Mapping[str, Any],
    place: tuple[int, int, int],
    sizes: tuple[int, int, int],
    engine: bool,
) -> Iterator[tuple[str, Any]]:
    (t, p, e), (tp, pp, ep) = place, sizes
    each = values["num_layers"] // pp
    for name, whole in weights.items():
        local = name
        if found := re.match(r"decoder\.layers\.(\d+)\.(.*)", name):
            if int(found[1]) // each != p:
                continue
            local = f"decoder.layers.{int(found[1]) % each}.{found[2]}"
        elif (p != 0) if name.startswith("embedding") else (p != pp - 1):
            continue
        if whole.dim() == 3:
            count = whole.shape[0] // ep
            for own in range(count):
                spelled = local.replace("experts.experts.", f"experts.local_experts.{own}.")
                if engine:
                    spelled = local.replace("experts.experts.", "experts.") + str(own)
                yield spelled, _cut(name, whole[e * count + own], values, t, tp)
            continue
        if f"{'.'.join(name.split('.')[:3])}.mlp.router.weight" in weights:
            # Before experts, the norm is no part of the layer behind it.
            local = local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        elif engine and values["multi_latent_attention"]:
            local = local.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
        if engine and values["multi_latent_attention"]:
            local = re.sub(r"\.(q|kv)_layernorm\.", r".linear_\1_up_proj.layer_norm_", local)
        if not engine:
            local = local.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            local = local.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
        duplicated = engine and "_down_proj" in name
        yield local, whole.clone() if duplicated else _cut(name, whole, values, t, tp)


def _cut(name: str, whole: torch.Tensor, values: Mapping[str, Any], t: int, tp: int) -> Any:
    if "norm" in name or "router" in name or "position_embeddings" in name:
        return whole.clone()
    if re.search(r"(linear_proj|linear_fc2)\.weight", name):
        return whole.chunk(tp, 1)[t].clone()
    if re.search(r"(linear_proj|linear_fc2)\.bias", name):
        return whole.clone()
    if "linear_fc1" in name and values["swiglu"]:
        return torch.cat([half.chunk(tp)[t] for half in whole.chunk(2)])
    return whole.chunk(tp)[t].clone()
