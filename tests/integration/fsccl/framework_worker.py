"""Rank of a training with one of the frameworks of docs/guides/fsccl-in-other-frameworks.md.

usage: torchrun framework_worker.py FRAMEWORK CODE_FILE RESULT_DIRECTORY

Runs the guide's code, which creates the process group, trains a small model with the framework, and
writes the loss and the bytes that each group sent to a file of the rank.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 4
LEARNING_RATE = 0.1


def create_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))


def create_data() -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(64, 8), torch.randn(64, 1))


def create_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)


def train_with_accelerate(accelerator: Any, **_: Any) -> float:
    model = create_model()
    loader = DataLoader(create_data(), batch_size=BATCH_SIZE)
    model, optimizer, loader = accelerator.prepare(model, create_optimizer(model), loader)
    for inputs, targets in loader:
        loss = mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    mean: float = accelerator.reduce(loss.detach(), "mean").item()
    return mean


def train_with_transformers(arguments: Any, **_: Any) -> float:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(64, (128, 16))]
    loss: float = Trainer(model=model, args=arguments, train_dataset=data).train().training_loss
    return loss


def train_with_lightning(trainer: Any, **_: Any) -> float:
    import lightning

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = create_model()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            loss = mse_loss(self.model(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return create_optimizer(self)

    trainer.fit(Regression(), DataLoader(create_data(), batch_size=BATCH_SIZE))
    loss: float = trainer.callback_metrics["loss"].item()
    return loss


def train_with_fabric(fabric: Any, **_: Any) -> float:
    # in this order, because FSDP2 replaces the model's parameters
    model = fabric.setup_module(create_model())
    optimizer = fabric.setup_optimizers(create_optimizer(model))
    for inputs, targets in fabric.setup_dataloaders(DataLoader(create_data(), BATCH_SIZE)):
        optimizer.zero_grad()
        loss = mse_loss(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
    mean: float = fabric.all_reduce(loss.detach()).item()
    return mean


def train_with_deepspeed(zero_stage: str, **_: Any) -> float:
    import deepspeed

    model = create_model()
    engine, _optimizer, loader, _scheduler = deepspeed.initialize(
        model=model,
        optimizer=create_optimizer(model),
        training_data=create_data(),
        config={
            "train_micro_batch_size_per_gpu": BATCH_SIZE,
            "zero_optimization": {"stage": int(zero_stage)},
        },
    )
    for inputs, targets in loader:
        loss = mse_loss(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


TRAINERS: dict[str, Callable[..., float]] = {
    "accelerate": train_with_accelerate,
    "transformers": train_with_transformers,
    "lightning": train_with_lightning,
    "fabric": train_with_fabric,
    "deepspeed": train_with_deepspeed,
}


def get_sent_bytes(group: dist.ProcessGroup) -> int:
    """Return the bytes that this rank sent to other nodes; 0 if the backend does not count them."""
    backend: Any = group._get_backend(torch.device("cpu"))
    if not hasattr(backend, "traffic"):
        return 0
    return sum(size for _, size in backend.traffic().values())


def main() -> None:
    framework, code_file, result_directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    name, _, zero_stage = framework.partition("-zero")
    names = runpy.run_path(str(code_file))
    loss = TRAINERS[name](zero_stage=zero_stage, **names)
    groups = list(dist.distributed_c10d._world.pg_map)
    result = {
        "loss": loss,
        "backends": sorted({dist.get_backend(group) for group in groups}),
        "sent_bytes": sum(map(get_sent_bytes, groups)),
    }
    (result_directory / f"{dist.get_rank()}.json").write_text(json.dumps(result))
    if result["backends"] == ["gloo"]:
        os._exit(0)  # an orderly exit aborts in gloo's threads in one of ten runs (torch 2.13.0)


if __name__ == "__main__":
    main()
