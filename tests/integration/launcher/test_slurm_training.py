"""Test of training as a Slurm job."""

from __future__ import annotations

import pytest
from support.slurm_lab import Cluster, slurm_lab
from support.training_lab import PROGRAM, read_losses, train_sections
from support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.integration, pytest.mark.torch]


def test_requeued_training_continues(slurm_cluster: Cluster) -> None:
    """At the step after the last completed one, with its state restored."""
    with slurm_lab(slurm_cluster, "training") as lab:
        slurm = {"nodes": 2, "requeue": 1}
        runner = {"type": "slurm", "nproc_per_node": 1, "stop_grace": 20, "slurm": slurm}
        task = {"entrypoint": str(PROGRAM)}
        checkpoints = str(lab.exp_dir / "checkpoints")
        train = train_sections(
            checkpoint={"save": checkpoints, "load": checkpoints, "ckpt_format": "torch_dist"}
        )
        lab.configure("", runner=runner, task=task, train=train)
        lab.submit()
        wait_for(lambda: len(read_losses(lab)) >= 3)
        lab.cluster.slurm.run("scontrol", "requeue", lab.job_id)
        wait_for(lambda: (finished_steps := read_losses(lab)) and finished_steps[0][0] > 1)
        assert lab.run_action("stop").returncode == 0
        steps = [
            step for step, *_ in (*read_losses(lab, "status-before-1-status"), *read_losses(lab))
        ]
        assert steps == [*range(1, len(steps) + 1)]
