"""Weight initialization that does not depend on the parallel layout.

The values of a parameter are drawn for the whole, unsplit parameter, by a generator seeded with
the run's seed and the parameter's global name. Each rank keeps its shard. Therefore any two
layouts start from the same model, and data-parallel replicas need no broadcast. Generators of
different device kinds draw different numbers, so ranks on several kinds draw in host memory.

The distributions are Megatron-LM's: normal with ``init_method_std``, divided by
``sqrt(2 · num_layers)`` for the two matrices of a layer whose output is added to the residual.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig

from flagscale.config.arguments.parameters import EMBEDDING
from flagscale.train.layers import lora

_LAYER_NAME = re.compile(r"(.*)\.layers\.(\d+)\.(.*)")
_EXPERT_NAME = re.compile(r"(.*\.local_experts\.)(\d+)\.(.*)")
_GROUPED_EXPERTS_NAME = re.compile(r"(.*\.experts\.)(linear_fc[12]\.(?:weight|lora_[ab]))")
_RESIDUAL_NAME = re.compile(r"\.(linear_proj|linear_fc2)\.weight$")
_GATED_NAME = re.compile(r"linear_fc1\.(weight|bias)$")
_GROUPED_DIMENSIONS = 3
"""Dimensions of a parameter that holds one matrix for each expert."""


@torch.no_grad()
def initialize_weights(
    model: Any,
    config: TransformerConfig,
    seed: int,
    *,
    norm_init_value: float | None = None,
    on_host: bool = False,
    selected: Callable[[str], bool] | None = None,
) -> None:
    """Initialize all weights of a model chunk in place.

    Norm weights keep 1 or are set to ``norm_init_value``. Biases and the second matrix of LoRA
    adapters are set to zero.

    Args:
        model: unwrapped model chunk.
        config: the model's configuration.
        seed: seed of the run.
        norm_init_value: initial value of norm weights; 1 if None.
        on_host: draw in host memory, so that weights are identical on all device kinds.
        selected: predicate on global names that selects the weights to initialize; None selects
            all.
    """
    for name, parameter in iter_global_parameters(model, config, selected):
        if name.endswith(("bias", lora.LORA_B)):
            parameter.zero_()
        elif parameter.dim() > 1:
            std = (
                lora.get_initial_std(parameter)
                if lora.is_adapter(name)
                else _standard_deviation(name, config)
            )
            generator = _parameter_generator(seed, name, "cpu" if on_host else parameter.device)
            parameter.copy_(_draw_shard(name, parameter, config, generator, std))
        elif norm_init_value is not None:
            parameter.fill_(norm_init_value - config.layernorm_zero_centered_gamma)


def find_transformer_blocks(model: torch.nn.Module) -> dict[str, Any]:
    """Return the transformer blocks of ``model``, by module name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, TransformerBlock)
    }


def iter_global_parameters(
    model: Any, config: TransformerConfig, selected: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield parameters with names that are the same in every layout.

    Layers and experts are numbered over the whole model. The weight of a tied output layer has the
    name of the embedding. Each expert's matrix of a grouped parameter is yielded by itself.
    ``selected`` is a predicate on the names; None selects all.
    """
    for names, parameter in iter_parameter_names(model, config):
        is_selected = [selected is None or selected(name) for name in names]
        if not any(is_selected):
            continue
        parts = [parameter]
        if parameter.dim() == _GROUPED_DIMENSIONS:
            parts = list(_split_grouped_parameter(parameter))
        yield from compress(zip(names, parts, strict=True), is_selected)


def iter_parameter_names(
    model: Any, config: TransformerConfig
) -> Iterator[tuple[list[str], torch.nn.Parameter]]:
    """Yield each parameter with its global name, or with the names of the experts' matrices that it
    groups; see :func:`iter_global_parameters`.
    """
    experts = config.num_moe_experts or 0
    first_expert = (
        parallel_state.get_expert_model_parallel_rank()
        * experts
        // parallel_state.get_expert_model_parallel_world_size()
    )
    transformer_blocks = find_transformer_blocks(model)
    for local_name, parameter in model.named_parameters():
        name = local_name
        if (match := _LAYER_NAME.fullmatch(name)) and match[1] in transformer_blocks:
            number = transformer_blocks[match[1]].layers[int(match[2])].layer_number - 1
            name = f"{match[1]}.layers.{number}.{match[3]}"
        if match := _EXPERT_NAME.fullmatch(name):
            name = f"{match[1]}{int(match[2]) + first_expert}.{match[3]}"
        if match := _GROUPED_EXPERTS_NAME.fullmatch(name):
            numbers = range(first_expert, first_expert + len(parameter))
            yield [f"{match[1]}local_experts.{i}.{match[2]}" for i in numbers], parameter
            continue
        if name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            name = EMBEDDING
        yield [name], parameter


def _split_grouped_parameter(parameter: torch.nn.Parameter) -> Iterator[Any]:
    """Yield each expert's matrix of a grouped parameter, with its tensor-parallel attributes."""
    for matrix in parameter:
        for attribute in ("tensor_model_parallel", "allreduce", "initial_std"):
            setattr(matrix, attribute, getattr(parameter, attribute, None))
        dimension: int = parameter.partition_dim  # type: ignore[attr-defined]
        matrix.partition_dim = max(dimension - 1, -1)
        yield matrix


def _standard_deviation(name: str, config: TransformerConfig) -> float:
    std: float = config.init_method_std
    if _RESIDUAL_NAME.search(name):
        return std / math.sqrt(2.0 * config.num_layers)
    if name.startswith("embedding.") and config.embedding_init_method_std is not None:
        embedding: float = config.embedding_init_method_std
        return embedding
    return std


def _parameter_generator(seed: int, name: str, device: torch.device | str) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # 63 bits, because seeds are signed.
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big") >> 1)


def _draw_shard(
    name: str,
    parameter: torch.nn.Parameter,
    config: TransformerConfig,
    generator: torch.Generator,
    std: float,
) -> torch.Tensor:
    """Return this rank's shard of the parameter ``name``, with the shape of ``parameter``."""
    shape = list(parameter.shape)
    dimension, shard_index, shard_count = _tensor_parallel_split(parameter)
    shape[dimension] *= shard_count
    full = torch.empty(shape, dtype=torch.float32, device=generator.device)
    full.normal_(0.0, std, generator=generator)
    if shard_count == 1:
        return full
    if config.gated_linear_unit and _GATED_NAME.search(name):
        # Gate and up projections are stacked; each rank holds a shard of both.
        return torch.cat([half.chunk(shard_count)[shard_index] for half in full.chunk(2)])
    return full.chunk(shard_count, dimension)[shard_index]


def count_whole_elements(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of a parameter over the ranks that share it."""
    return parameter.numel() * _tensor_parallel_split(parameter)[2]


def _tensor_parallel_split(parameter: torch.nn.Parameter) -> tuple[int, int, int]:
    """Return the split dimension of a parameter, this rank's index and the number of shards."""
    dimension: int = getattr(parameter, "partition_dim", -1)
    if dimension < 0 or not getattr(parameter, "tensor_model_parallel", False):
        return 0, 0, 1
    if getattr(parameter, "allreduce", True):
        rank = parallel_state.get_tensor_model_parallel_rank()
        return dimension, rank, parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_expert_tensor_parallel_rank()
    return dimension, rank, parallel_state.get_expert_tensor_parallel_world_size()
