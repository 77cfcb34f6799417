"""A small training run over several hosts, and the losses that its ranks report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flagscale.launcher.layout import STATUS_DIRECTORY
from flagscale.status import Event, list_status_files, read_events
from support.launch_lab import Lab

PROGRAM = Path(__file__).parents[2] / "flagscale" / "train" / "train_gpt.py"
# The tiny Llama-3 of the examples with smaller sizes: two CPU cores run two ranks twice.
LLAMA: dict[str, Any] = {
    "system": {"distributed_backend": "gloo", "precision": {"bf16": False}},
    "model": {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "ffn_hidden_size": 64,
        "seq_length": 16,
        "micro_batch_size": 1,
        "global_batch_size": 4,
        "train_iters": 1000,  # more than a run takes
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "eval_iters": 0,
        "optimizer": {"lr": 1.0e-3, "lr_decay_style": "constant"},
    },
    # Padded to 128 for one and for two tensor-parallel ranks.
    "data": {
        "mock_data": True,
        "vocab_size": 100,
        "make_vocab_size_divisible_by": 64,
        "num_workers": 0,
    },
}
LOGGING = {"log_interval": 1, "save": None, "load": None, "tensorboard_dir": None}
Step = tuple[int, float, float]


def train_sections(steps: int | None = None, **system: Any) -> dict[str, Any]:
    """Return the ``train`` sections of a run that exits at the next multiple of ``steps``."""
    logging = {**LOGGING, **system.get("logging", {}), "exit_interval": steps}
    return {**LLAMA, "system": {**LLAMA["system"], **system, "logging": logging}}


def read_losses(lab: Lab, status_directory: str = STATUS_DIRECTORY) -> list[Step]:
    """Return step, loss and gradient norm of all reported steps of the last run.

    ``status_directory`` is the name of the status directory on each host.
    """
    return sorted(
        (event.get("step"), event.get("loss"), event.get("grad_norm"))
        for event in read_events_of_ranks(lab, status_directory)
        if event.event == "progress"
    )


def read_events_of_ranks(lab: Lab, status_directory: str = STATUS_DIRECTORY) -> list[Event]:
    """Return the events of all ranks of the last run, from a status directory on each host."""
    return [
        event
        for host in lab.state().hosts
        for path in list_status_files(host.run_dir / status_directory)
        for event in read_events(path)[0]
    ]
