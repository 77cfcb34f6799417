"""Trains a tiny GPT for a few steps in several settings and prints what happened as JSON.

Run by the tests under torchrun, with the tree to test first on PYTHONPATH. It uses nothing of
this project, so that it runs on an unadapted tree too, where there is a GPU.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

warnings.filterwarnings("ignore")

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

VOCABULARY, LENGTH, BATCH, STEPS = 96, 32, 2, 3
WARM = torch.cuda.is_available() and os.environ.get("FLAGSCALE_DEVICE") != "cpu"
DEVICE = torch.device("cuda", 0) if WARM else torch.device("cpu")


@dataclass(frozen=True)
class Setting:
    """One way to train the model."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    sharded_optimizer: bool = False
    bf16: bool = False
    model: dict[str, Any] = field(default_factory=dict)


RECOMPUTE = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
ALL_TO_ALL = EXPERTS | {"moe_token_dispatcher_type": "alltoall"}
SETTINGS = {
    "plain": Setting(),
    "again": Setting(),
    "recompute": Setting(model=RECOMPUTE),
    "bf16": Setting(bf16=True, sharded_optimizer=True),
    "experts": Setting(model=EXPERTS | {"moe_token_dispatcher_type": "allgather"}),
    "experts-alltoall": Setting(model=ALL_TO_ALL),
    "tp2": Setting(tp=2),
    "tp2-recompute": Setting(tp=2, model=RECOMPUTE),
    "pp2": Setting(pp=2),
    "dp2-sharded": Setting(sharded_optimizer=True),
    "ep2": Setting(ep=2, sharded_optimizer=True, model=ALL_TO_ALL),
}


def build(setting: Setting) -> tuple[Any, Any, TransformerConfig]:
    dtype = torch.bfloat16 if setting.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=48,
        ffn_hidden_size=96,
        num_attention_heads=4,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=setting.bf16,
        tensor_model_parallel_size=setting.tp,
        pipeline_model_parallel_size=setting.pp,
        expert_model_parallel_size=setting.ep,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        **setting.model,
    )
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).to(DEVICE)
    if setting.bf16:
        model = Float16Module(config, model)
    sharding = DistributedDataParallelConfig(
        use_distributed_optimizer=setting.sharded_optimizer,
        grad_reduce_in_fp32=setting.bf16,
        check_for_nan_in_grad=True,
    )
    wrapped = DistributedDataParallel(config, sharding, model)
    options = OptimizerConfig(
        optimizer="adam",
        lr=1e-2,
        bf16=setting.bf16,
        params_dtype=dtype,
        use_distributed_optimizer=setting.sharded_optimizer,
        clip_grad=1.0,
    )
    optimizer = get_megatron_optimizer(options, [wrapped])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer, config


def forward_step(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    positions = torch.arange(LENGTH, device=DEVICE).unsqueeze(0).expand(BATCH, -1)
    causal = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, device=DEVICE), 1).bool()
    labels = tokens[:, 1:].contiguous()
    output = model(tokens[:, :-1].contiguous(), positions, causal, labels=labels)

    def loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = losses.float().mean()
        return mean, {"loss": mean.detach().clone()}

    return output, loss


def train(setting: Setting) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(
        setting.tp, setting.pp, expert_model_parallel_size=setting.ep
    )
    tensor_parallel.model_parallel_cuda_manual_seed(11, force_reset_rng=True)
    model, optimizer, _ = build(setting)
    model.train()
    generator = torch.Generator().manual_seed(5)
    data = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(DEVICE)
    step = get_forward_backward_func()
    losses, norms = [], []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        parts = step(
            forward_step_func=forward_step,
            data_iterator=iter([data, data]),
            model=[model],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        losses.append([part["loss"].item() for part in parts])
        norms.append(float(norm))
    weights = [float(p.detach().double().abs().sum()) for p in model.parameters()]
    parallel_state.destroy_model_parallel()
    return {"losses": losses, "norms": norms, "weights": weights}


def main(names: list[str]) -> None:
    logging.disable(logging.INFO)
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    warned: list[str] = []
    logger.addFilter(lambda record: bool(warned.append(record.getMessage())) or False)
    torch.set_num_threads(1)
    dist.init_process_group("nccl" if WARM else "gloo")
    results = {name: train(SETTINGS[name]) for name in names}
    if dist.get_rank() == dist.get_world_size() - 1:
        origin = str(tensor_parallel.__file__)
        print("RESULT " + json.dumps({"tree": origin, "warned": warned, "runs": results}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
