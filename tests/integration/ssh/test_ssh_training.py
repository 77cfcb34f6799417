"""Training on two machines gives what the same layout gives on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bed.lab import Bed
from ssh_lab import SshLab, ssh_lab

from flagscale.status import read_events, status_files

pytestmark = [pytest.mark.integration, pytest.mark.torch]

PROGRAM = Path(__file__).parents[3] / "flagscale" / "train" / "train_gpt.py"
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
        "train_iters": 3,
        "normalization": "RMSNorm",
        "swiglu": True,
        "disable_bias_linear": True,
        "position_embedding_type": "rope",
        "eval_iters": 0,
        "optimizer": {"lr": 1.0e-3, "lr_decay_style": "constant"},
    },
    "data": {"mock_data": True, "vocab_size": 100, "num_workers": 0},
}
LOGGING = {"log_interval": 1, "save": None, "load": None, "tensorboard_dir": None}


def losses(lab: SshLab) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every step, whichever rank reported them."""
    found = []
    for host in lab.state().hosts:
        for path in status_files(host.run_dir / "status"):
            rows = read_events(path)[0]
            found += [
                (e.get("step"), e.get("loss"), e.get("grad_norm"))
                for e in rows
                if e.event == "progress"
            ]
    return sorted(found)


def test_two_hosts_train_as_one_machine_does(bed: Bed, tmp_path: Path) -> None:
    train = {**LLAMA, "system": {**LLAMA["system"], "logging": LOGGING}}
    task = {"entrypoint": str(PROGRAM)}
    with ssh_lab(bed, tmp_path / "two") as two, ssh_lab(bed, tmp_path / "one") as one:
        two.configure(light=False, task=task, top={"train": train})
        done = two.do("test", timeout=240)
        assert done.returncode == 0, done.stderr + done.stdout
        lines = done.stdout.splitlines()
        assert {line.partition(":")[0] for line in lines} >= {"h00", "h01"}
        one.configure(
            light=False,
            task=task,
            runner={"type": "local", "hostfile": None, "nproc_per_node": 2},
            top={"train": train},
        )
        alone = one.do("test", timeout=240)
        assert alone.returncode == 0, alone.stderr + alone.stdout
        assert len(losses(one)) == 3
        assert losses(two) == losses(one)
        assert {h.boot_id is not None for h in two.state().hosts} == {True}
        assert two.orphans() == {}
