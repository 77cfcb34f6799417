"""Initial weights that do not depend on the parallel layout.

Each parameter's values are drawn for the whole, unsplit parameter by a generator seeded with the
run's seed and the parameter's global name, and each rank keeps its part. So any two layouts start
from the same model, and so does every data-parallel replica without a broadcast. Generators of
unlike devices draw unlike numbers: ranks on several kinds of them draw in their hosts' memory. The
distributions are Megatron-LM's: a normal one of ``init_method_std``, narrower by
``sqrt(2 x layers)`` for the two matrices of a layer whose output is added to the residual.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.train.layers import lora

_LAYER = re.compile(r"(.*)\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)\.(.*)")
_GROUPED = re.compile(r"(.*\.experts\.)(linear_fc[12]\.weight)")
_RESIDUAL = re.compile(r"\.(linear_proj|linear_fc2)\.weight$")
_GATED = re.compile(r"linear_fc1\.(weight|bias)$")
_EMBEDDING = "embedding.word_embeddings.weight"


@torch.no_grad()
def initialize(
    model: Any,
    config: TransformerConfig,
    seed: int,
    *,
    norms: float | None = None,
    on_host: bool = False,
    wanted: Callable[[str], bool] | None = None,
) -> None:
    """Draw every weight of the bare model ``model`` (a chunk of it), in place.

    Norms keep what they multiply by, 1, or get the value ``norms``; biases, and the second matrix
    of adapters, become zero. ``on_host``: numbers are drawn in the host's memory, so that they are
    the same on every kind of device. ``wanted`` tells by their global names which weights alone.
    """
    for name, parameter in global_parameters(model, config):
        if wanted is not None and not wanted(name):
            continue
        if name.endswith(("bias", lora.B)):
            parameter.zero_()
        elif parameter.dim() > 1:
            std = lora.spread(parameter) if lora.is_adapter(name) else _std(name, config)
            generator = _generator(seed, name, "cpu" if on_host else parameter.device)
            parameter.copy_(_own_part(name, parameter, config, generator, std))
        elif norms is not None:
            parameter.fill_(norms - config.layernorm_zero_centered_gamma)


def blocks(model: torch.nn.Module) -> dict[str, Any]:
    """The stacks of transformer layers inside ``model``, by name."""
    return {n: part for n, part in model.named_modules() if isinstance(part, TransformerBlock)}


def global_parameters(
    model: Any, config: TransformerConfig
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters with names that are the same in every layout: layers and experts are counted
    over the whole model, and a tied output layer is the embedding."""
    experts = config.num_moe_experts or 0
    first_expert = (
        parallel_state.get_expert_model_parallel_rank()
        * experts
        // parallel_state.get_expert_model_parallel_world_size()
    )
    stacks = blocks(model)
    for local, parameter in model.named_parameters():
        name = local
        if (found := _LAYER.fullmatch(name)) and found[1] in stacks:
            number = stacks[found[1]].layers[int(found[2])].layer_number - 1
            name = f"{found[1]}.layers.{number}.{found[3]}"
        if found := _EXPERT.fullmatch(name):
            name = f"{found[1]}{int(found[2]) + first_expert}.{found[3]}"
        if found := _GROUPED.fullmatch(name):
            for index, own in enumerate(_of_experts(parameter)):
                yield f"{found[1]}local_experts.{index + first_expert}.{found[2]}", own
            continue
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = _EMBEDDING
        yield name, parameter


def _of_experts(parameter: torch.nn.Parameter) -> Iterator[Any]:
    """The matrices of the experts that lie in one parameter, each split as the whole is."""
    for matrix in parameter:
        for attribute in ("tensor_model_parallel", "allreduce"):
            setattr(matrix, attribute, getattr(parameter, attribute))
        matrix.partition_dim = parameter.partition_dim - 1  # type: ignore[attr-defined]
        yield matrix


def _std(name: str, config: TransformerConfig) -> float:
    std: float = config.init_method_std
    if _RESIDUAL.search(name):
        return std / math.sqrt(2.0 * config.num_layers)
    if name.startswith("embedding.") and config.embedding_init_method_std is not None:
        embedding: float = config.embedding_init_method_std
        return embedding
    return std


def _generator(seed: int, name: str, device: torch.device | str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # One bit less than 64: generators take signed seeds.
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def _own_part(
    name: str,
    parameter: torch.nn.Parameter,
    config: TransformerConfig,
    generator: torch.Generator,
    std: float,
) -> torch.Tensor:
    """This rank's part of the parameter called ``name``, of the shape of ``parameter``."""
    shape = list(parameter.shape)
    dimension, rank, size = _split(parameter)
    shape[dimension] *= size
    whole = torch.empty(shape, dtype=torch.float32, device=generator.device)
    whole.normal_(0.0, std, generator=generator)
    if size == 1:
        return whole
    if config.gated_linear_unit and _GATED.search(name):
        # Gate and up projections are stacked; each rank holds a part of both.
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dimension)[rank]


def _split(parameter: torch.nn.Parameter) -> tuple[int, int, int]:
    """Dimension a parameter is split in, this rank's place, number of parts."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return 0, 0, 1
    dimension: int = parameter.partition_dim  # type: ignore[attr-defined]
    if getattr(parameter, "allreduce", True):
        rank = parallel_state.get_tensor_model_parallel_rank()
        return dimension, rank, parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_expert_tensor_parallel_rank()
    return dimension, rank, parallel_state.get_expert_tensor_parallel_world_size()
