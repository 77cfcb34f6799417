"""A job that is started again goes on from the memory of its host."""

from __future__ import annotations

import os
import signal

import pytest
from support.launch_lab import Lab, rank_processes
from support.training_lab import PROGRAM, read_losses, train_sections
from support.waiting import wait_for

from flagscale.launcher.layout import status_directory

pytestmark = [pytest.mark.integration, pytest.mark.torch]


def test_a_killed_rank_costs_no_more_than_a_step(lab: Lab) -> None:
    train = train_sections(
        None, device="cpu", checkpoint={"save": None, "non_persistent_save_interval": 1}
    )
    runner = {"nproc_per_node": 2, "max_restarts": 1}
    lab.configure("", task={"entrypoint": str(PROGRAM)}, runner=runner, train=train)
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    wait_for(lambda: len(read_losses(lab)) >= 3)
    os.kill(rank_processes(lab.state())[1].pid, signal.SIGKILL)
    wait_for(lambda: "from host memory" in lab.output())
    second = status_directory(1)
    wait_for(lambda: len(read_losses(lab, second)) >= 2)
    assert lab.run_action("stop").returncode == 0
    last_step, first_step = read_losses(lab)[-1][0], read_losses(lab, second)[0][0]
    # The steps that are not reported yet are those of one logged step, and of one in progress.
    assert last_step - 1 <= first_step <= last_step + 3
