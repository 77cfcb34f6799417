"""Tests that training on two machines gives the same results as the same layout on one.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bed.lab import Bed
from support.ssh_lab import SshLab, ssh_lab
from support.training_lab import PROGRAM, Step, read_losses, train_sections
from support.waiting import wait_for

pytestmark = [pytest.mark.integration, pytest.mark.torch]

# The pair of tensor-parallel ranks is on the host that the hostfile lists last.
MESHES = {
    "enable_hetero": True,
    "hetero_process_meshes": [
        {"device_type": "PAIR", "tp": 2, "layers": [1]},
        {"device_type": "SINGLE", "layers": [1]},
    ],
}
# The remaining host after the loss of the other.
SMALLER = {
    "enable_hetero": True,
    "hetero_process_meshes": [
        {"device_type": "PAIR", "layers": [1]},
        {"device_type": "PAIR", "layers": [1]},
    ],
}


def configure(lab: SshLab, steps: int | None, system: dict[str, Any], **options: Any) -> None:
    """Write a YAML that trains for up to this many steps."""
    top = {"train": train_sections(steps, **system)}
    lab.configure(light=False, task={"entrypoint": str(PROGRAM)}, top=top, **options)


def train(lab: SshLab, steps: int = 3, **options: Any) -> list[Step]:
    """Return the steps of a run, and check that no process is left."""
    configure(lab, steps, options.pop("system", {}), **options)
    result = lab.run_action("test", timeout=240)
    assert result.returncode == 0, result.stderr + result.stdout
    lines = result.stdout.splitlines()
    assert {line.partition(":")[0] for line in lines} >= {h.name for h in lab.state().hosts}
    assert lab.remaining_processes() == {}
    return read_losses(lab)


def expect_equal(own: list[Step], expected: list[Step]) -> None:
    assert [step for step, _, _ in own] == [step for step, _, _ in expected]
    for ours, theirs in zip(own, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)


def train_on_one_machine(bed: Bed, directory: Path, steps: int) -> list[Step]:
    """Return the steps of a run on one machine."""
    local_runner = {"type": "local", "hostfile": None, "nproc_per_node": 2}
    with ssh_lab(bed, directory) as lab:
        losses = train(lab, steps, runner=local_runner)
    assert [step for step, _, _ in losses] == list(range(1, steps + 1))
    return losses


def test_hosts_train_like_one_machine(bed: Bed, tmp_path: Path) -> None:
    """Two identical hosts; and two of different types with one stage each, one of which is lost:
    the other continues with both stages.
    """
    expected = train_on_one_machine(bed, tmp_path / "one", 40)
    with ssh_lab(bed, tmp_path / "two") as two, ssh_lab(bed, tmp_path / "unlike") as unlike:
        assert train(two) == expected[:3]
        assert {h.boot_id is not None for h in two.state().hosts} == {True}
        lose_a_host(unlike, expected)


@pytest.mark.slow
def test_meshes_are_chosen_from_device_types(bed: Bed, tmp_path: Path) -> None:
    """The hostfile contains only the types."""
    expected = train_on_one_machine(bed, tmp_path / "one", 3)
    with ssh_lab(bed, tmp_path / "two") as lab:
        choose_meshes(lab, expected)


def choose_meshes(lab: SshLab, expected: list[Step]) -> None:
    types = "h00 slots=1 type=QUICK\nh01 slots=1 type=SLOW\n"
    system = {"hetero": {"enable_hetero": True, "hetero_process_meshes": "auto"}}
    expect_equal(train(lab, system=system, hostfile=types), expected)
    first_host = lab.state().hosts[0]
    assert first_host.name == "h00"
    output = first_host.output.read_text()
    assert "to choose between" in output
    assert "by measured times a step takes" in output


def lose_a_host(lab: SshLab, expected: list[Step]) -> None:
    """Train on two meshes, lose the host of the second one, and continue without it."""
    types = "h00 slots=1 type=SINGLE\nh01 slots=2 type=PAIR\n"
    checkpoints = str(lab.exp_dir / "checkpoints")
    saving = {"save_interval": 2, "save": checkpoints, "load": checkpoints}
    system: dict[str, Any] = {"hetero": MESHES, "logging": saving}
    runner = {"nproc_per_node": 2, "lost_host_timeout": 10}
    with lab.bed.ssh_config.open("a") as config:
        config.write("  ConnectTimeout 3\n")
    configure(lab, None, system, hostfile=types, runner=runner)
    start_result = lab.run_action("run")
    assert start_result.returncode == 0, start_result.stderr
    assert [host.name for host in lab.state().hosts] == ["h01", "h00"]
    wait_for(lambda: len(read_losses(lab)) >= 3)
    lab.bed["h00"].cut_power()
    wait_for(lambda: not lab.run_processes(lab.bed["h01"]), seconds=60)
    failure = lab.state().hosts[0].exit_record()["failure"]
    assert (failure["host"], failure["rank"]) == ("h00", None)
    assert failure["reason"] == (
        "was lost: no word from its agent for 10 s; it held stage 1 of 2, mesh 1 (SINGLE 1 rank)"
    )
    losses_before = read_losses(lab)
    expect_equal(losses_before, expected[: len(losses_before)])

    system["hetero"] = SMALLER
    losses_after = train(lab, 2, system=system, hostfile="h01 slots=2 type=PAIR\n", runner=runner)
    assert 2 < losses_after[0][0] <= losses_before[-1][0] + 1
    expect_equal(losses_after, expected[losses_after[0][0] - 1 :][:2])
