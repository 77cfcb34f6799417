"""A training that several hosts do in a moment, and what its ranks have reported of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flagscale.launcher.layout import STATUS_DIRECTORY
from flagscale.status import read_events, status_files
from support.launch_lab import Lab

PROGRAM = Path(__file__).parents[2] / "flagscale" / "train" / "train_gpt.py"
# The tiny Llama-3 of the examples, smaller still: two CPU cores train two ranks twice here.
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
        "train_iters": 1000,  # of which a run takes the first few
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


def sections(steps: int | None = None, **system: Any) -> dict[str, Any]:
    """A YAML's ``train`` by which it goes on until the number of steps divides by this one."""
    logging = {**LOGGING, **system.get("logging", {}), "exit_interval": steps}
    return {**LLAMA, "system": {**LLAMA["system"], **system, "logging": logging}}


def losses(lab: Lab, reports: str = STATUS_DIRECTORY) -> list[Step]:
    """Step, loss and gradient norm of every step that ranks, whichever did, have reported in the
    last run's directories of this name."""
    found = []
    for host in lab.state().hosts:
        for path in status_files(host.run_dir / reports):
            rows = read_events(path)[0]
            found += [
                (e.get("step"), e.get("loss"), e.get("grad_norm"))
                for e in rows
                if e.event == "progress"
            ]
    return sorted(found)
