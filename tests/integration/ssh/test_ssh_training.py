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


# The pair of tensor-parallel ranks is on the host that the hostfile lists last.
MESHES = {
    "enable_hetero": True,
    "hetero_process_meshes": [
        {"device_type": "PAIR", "tp": 2, "layers": [1]},
        {"device_type": "SINGLE", "layers": [1]},
    ],
}


def train(lab: SshLab, system: dict[str, Any], **options: Any) -> list[tuple[int, float, float]]:
    """The steps of a run, and that it leaves nothing behind."""
    sections = {**LLAMA, "system": {**LLAMA["system"], "logging": LOGGING, **system}}
    lab.configure(
        light=False, task={"entrypoint": str(PROGRAM)}, top={"train": sections}, **options
    )
    done = lab.do("test", timeout=240)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = done.stdout.splitlines()
    assert {line.partition(":")[0] for line in lines} >= {h.name for h in lab.state().hosts}
    assert lab.orphans() == {}
    found = losses(lab)
    assert [step for step, _, _ in found] == [1, 2, 3]
    return found


def test_hosts_train_as_one_machine_does(bed: Bed, tmp_path: Path) -> None:
    """Two alike, and two of unlike types that hold a stage each."""
    here = {"type": "local", "hostfile": None, "nproc_per_node": 2}
    types = "h00 slots=1 type=SINGLE\nh01 slots=2 type=PAIR\n"
    with (
        ssh_lab(bed, tmp_path / "one") as one,
        ssh_lab(bed, tmp_path / "two") as two,
        ssh_lab(bed, tmp_path / "unlike") as unlike,
    ):
        alone = train(one, {}, runner=here)
        assert train(two, {}) == alone
        assert {h.boot_id is not None for h in two.state().hosts} == {True}
        meshes = train(unlike, {"hetero": MESHES}, hostfile=types, runner={"nproc_per_node": 2})
        assert [host.name for host in unlike.state().hosts] == ["h01", "h00"]
        for own, expected in zip(meshes, alone, strict=True):
            assert own == pytest.approx(expected, rel=1e-5)
