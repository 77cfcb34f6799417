"""Tests of jobs that lose a host: a spare takes its place, or the job goes on without it.

``lab`` (support/ssh_lab.py) has an experiment on the hosts of the test bed ``lab.bed`` (tests/bed),
which are namespaces of this machine, each with a real sshd. h00 and h01 train, h02 is a spare.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from bed.host import Host
from bed.lab import Bed
from support.health_lab import install_chip
from support.liveness_lab import TOY_PROGRAM
from support.ssh_lab import PROJECT, SshLab, ssh_lab
from support.training_lab import PROGRAM, read_losses, train_sections
from support.waiting import wait_for

from flagscale.free_port import free_port
from flagscale.launcher.host_record import read_host_record
from flagscale.launcher.layout import LIVENESS_FILE, STATUS_DIRECTORY, status_directory
from flagscale.status import read_progress

pytestmark = [pytest.mark.integration, pytest.mark.bed(hosts=3), pytest.mark.timeout(300)]

REPLACING = {"nnodes": 2, "spares": 1, "on_bad_host": "replace", "lost_host_timeout": 4}
SHRINKING = {"nnodes": "2:3", "on_bad_host": "shrink", "lost_host_timeout": 4}
SMALLEST = {**SHRINKING, "nnodes": "1:2"}
FAULTS_IN_A_ROW = 6
# From the fault to the next step.
MAX_SECONDS = 30.0


def start(
    lab: SshLab, *, runner: Mapping[str, Any] = REPLACING, light: bool = True, **environment: str
) -> None:
    """Start the toy program, whose ranks stay in step over the network."""
    with lab.bed.ssh_config.open("a") as config:
        config.write("  ConnectTimeout 3\n")
    fields = {"TOY_PORT": str(free_port())}
    lab.configure(
        f"import sys; sys.path.insert(0, {str(PROJECT)!r})\n{TOY_PROGRAM}",
        light=light,
        runner=dict(runner),
        envs={**fields, **environment},
    )
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr


def run_dir(lab: SshLab, host: str) -> Path:
    return next(h.run_dir for h in lab.state().hosts if h.name == host)


def start_script(lab: SshLab, host: Host, number: int) -> None:
    """Start the script of a host again."""
    script = lab.state().hosts[number].script
    host.run(["bash", "-c", f"nohup bash {script} </dev/null >/dev/null 2>&1 &"])


def signal_all(lab: SshLab, host: Host, number: signal.Signals) -> None:
    """Send a signal to all processes of the run on a host."""
    for process in lab.run_processes(host):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process.pid, number)


def kill_rank(lab: SshLab, host: Host) -> None:
    """Kill the rank on a host that has one."""
    ranks = [p.pid for p in lab.run_processes(host) if "LOCAL_RANK" in p.environment()]
    os.kill(min(ranks), signal.SIGKILL)


def wait_for_step(
    lab: SshLab, host: str = "h02", attempt: int = 1, rank: int = 1, after: int = 2
) -> None:
    """Wait until the rank of a host is past a step of an attempt."""
    status = run_dir(lab, host) / status_directory(attempt)
    wait_for(lambda: (p := read_progress(status, rank)) is not None and p.step > after)


def start_training(lab: SshLab, **options: Any) -> None:
    """Start the toy program, and wait until all agents know what a successor needs."""
    start(lab, **options)
    wait_for_step(lab, "h01", 0, after=20)


FAULTS: dict[str, tuple[Callable[[SshLab, Host], None], Callable[[SshLab, Host], None]]] = {
    "partitioned": (
        lambda _, host: host.set_link("down"),
        lambda _, host: host.set_link("up"),
    ),
    "frozen": (
        lambda lab, host: signal_all(lab, host, signal.SIGSTOP),
        lambda lab, host: signal_all(lab, host, signal.SIGCONT),
    ),
}
"""A fault of a host, and its end, after which the host is there again."""


@pytest.mark.parametrize(
    "fault", [pytest.param("partitioned"), pytest.param("frozen", marks=pytest.mark.slow)]
)
def test_host_that_comes_back_keeps_no_process(lab: SshLab, fault: str) -> None:
    start(lab)
    assert lab.query()["state"] == "running"
    fail, recover = FAULTS[fault]
    lost, spare = lab.bed["h01"], lab.bed["h02"]
    fail(lab, lost)
    fault_time = time.monotonic()
    wait_for_step(lab)
    assert time.monotonic() - fault_time < MAX_SECONDS
    recover(lab, lost)
    wait_for(lambda: not lab.run_processes(lost), seconds=MAX_SECONDS)
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["attempt"]) == ("running", 2)
    hosts = {row["host"]: row for row in snapshot["hosts"]}
    assert hosts["h01"]["trouble"] == "lost; h02 has taken its place"
    assert (hosts["h02"]["state"], hosts["h02"]["joined"]) == ("running", 1)
    summary = json.loads((run_dir(lab, "h00") / LIVENESS_FILE).read_text())
    assert summary["places"] == [0, 2]
    output = lab.state().hosts[0].output.read_text()
    assert "h02 takes the place of h01" in output
    record = run_dir(lab, "h02") / STATUS_DIRECTORY
    wait_for(lambda: read_host_record(record)[0] is not None)
    assert lab.run_processes(spare)
    result = lab.run_action("stop")
    assert result.returncode == 0, result.stderr
    assert lab.remaining_processes() == {}
    assert lab.query()["state"] == "stopped"


def test_job_goes_on_with_fewer_hosts(lab: SshLab) -> None:
    start(lab, runner=SHRINKING)
    fail, recover = FAULTS["partitioned"]
    lost = lab.bed["h01"]
    fail(lab, lost)
    wait_for_step(lab, "h02", rank=1)
    recover(lab, lost)
    wait_for(lambda: not lab.run_processes(lost), seconds=MAX_SECONDS)
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["attempt"]) == ("running", 2)
    assert (snapshot["joined"], snapshot["world_size"]) == (2, 2)
    rows = {row["host"]: row for row in snapshot["hosts"]}
    assert rows["h01"]["trouble"] == "lost"
    output = lab.state().hosts[0].output.read_text()
    assert "the job goes on without h01: 2 host(s) are left" in output
    assert lab.run_action("stop").returncode == 0
    assert lab.remaining_processes() == {}


@pytest.mark.torch
@pytest.mark.parametrize("number", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_sick_host_is_replaced_after_a_failure(lab: SshLab, tmp_path: Path, number: int) -> None:
    """A device reports a fault once training runs. Then a rank on another host fails. If the sick
    host is the first one, another host coordinates the run from then on.
    """
    site = tmp_path / "site"
    install_chip(site, {name: {"rate": 100} for name in lab.bed.names})
    path = os.pathsep.join([str(site), str(PROJECT)])
    start_training(lab, runner={**REPLACING, "health": "quick"}, light=False, PYTHONPATH=path)
    sick = lab.bed.hosts[number]
    install_chip(site, {sick.name: {"rate": 100, "fault": "its memory is broken"}})
    kill_rank(lab, lab.bed.hosts[1 - number])
    wait_for((run_dir(lab, "h02") / status_directory(1)).exists)  # two measurements
    wait_for_step(lab, rank=number)
    wait_for(lambda: not lab.run_processes(sick), seconds=MAX_SECONDS)
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["attempt"]) == ("running", 2)
    assert snapshot["earlier"][0]["rank"] == 1 - number
    rows = {row["host"]: row for row in snapshot["hosts"]}
    reason = "device state: Demo device 0: its memory is broken"
    assert rows[sick.name]["trouble"] == f"sick: {reason}; h02 has taken its place"
    outputs = [host.output.read_text() for host in lab.state().hosts]
    assert f"{sick.name} is sick: {reason}" in outputs[0]
    assert f"h02 takes the place of {sick.name}" in outputs[1 - number]
    assert lab.run_action("stop").returncode == 0
    # Neither the run nor the check has left a process.
    wait_for(lambda: not any(host.find("flagscale") for host in lab.bed.hosts), seconds=20)


@pytest.mark.slow
def test_unused_spare_ends_with_the_job(lab: SshLab) -> None:
    start(lab, TOY_STEPS="60")
    wait_for(lambda: not lab.remaining_processes(), seconds=MAX_SECONDS)
    snapshot = lab.query()
    assert snapshot["state"] == "completed"
    assert [row["host"] for row in snapshot["hosts"]] == ["h00", "h01", "h02"]
    output = lab.state().hosts[2].output.read_text()
    assert "this host is a spare" in output
    assert lab.run_action("stop").returncode == 0


@pytest.mark.slow
def test_second_lost_host_ends_the_job(lab: SshLab) -> None:
    start(lab)
    lab.bed["h01"].cut_power()
    wait_for_step(lab)
    lab.bed["h02"].cut_power()
    wait_for(lambda: not lab.run_processes(lab.bed["h00"]), seconds=MAX_SECONDS)
    failure = lab.query()["failure"]
    assert failure["host"] == "h02"
    output = lab.state().hosts[0].output.read_text()
    assert "the job does not start again: 1 host(s) were lost, and 0 spare(s) are there" in output


def test_first_host_without_power_is_replaced(lab: SshLab) -> None:
    """The next host coordinates the run, and a spare gets the first node rank."""
    start_training(lab)
    lab.bed["h00"].cut_power()
    wait_for_step(lab, rank=0)
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["attempt"], snapshot["joined"]) == ("running", 2, 2)
    hosts = {row["host"]: row for row in snapshot["hosts"]}
    assert hosts["h00"]["trouble"] == "lost; h02 has taken its place"
    assert snapshot["earlier"][0]["host"] == "h00"
    output = lab.state().hosts[1].output.read_text()
    assert "h01 coordinates the run from now on, because h00 was lost" in output
    assert lab.run_action("stop").returncode == 3, "h00 does not answer"
    assert lab.remaining_processes() == {}


@pytest.mark.slow
def test_only_host_that_trains_is_replaced(lab: SshLab) -> None:
    start(lab, runner={**REPLACING, "nnodes": 1, "spares": 2})
    wait_for_step(lab, "h00", 0, rank=0, after=20)
    lab.bed["h00"].cut_power()
    wait_for_step(lab, "h01", rank=0)
    assert lab.run_action("stop").returncode == 3
    assert lab.remaining_processes() == {}


@pytest.mark.slow
@pytest.mark.parametrize("runner", [REPLACING, SHRINKING], ids=["replace", "shrink"])
@pytest.mark.parametrize("fault", FAULTS)
def test_first_host_that_comes_back_keeps_no_process(
    lab: SshLab, fault: str, runner: dict[str, Any]
) -> None:
    start_training(lab, runner=runner)
    fail, recover = FAULTS[fault]
    lost = lab.bed["h00"]
    fail(lab, lost)
    is_replaced = runner is REPLACING
    wait_for_step(lab, "h02" if is_replaced else "h01", rank=0)
    recover(lab, lost)
    wait_for(lambda: not lab.run_processes(lost), seconds=MAX_SECONDS)
    sentence = "has lost the contact to most of the run's hosts: if they are there, they go on"
    assert f"h00: {sentence}" in lab.state().hosts[0].output.read_text()
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["attempt"], snapshot["joined"]) == ("running", 2, 2)
    rows = {row["host"]: row for row in snapshot["hosts"]}
    assert rows["h00"]["trouble"] == "lost" + "; h02 has taken its place" * is_replaced
    if is_replaced:
        result = lost.run(["bash", lab.state().hosts[0].script], check=False)
        sentence = "the run goes on without this host, which was lost, and does not take it back"
        assert (result.returncode, sentence in result.stderr) == (1, True), result
        assert lab.query()["joined"] == 2
    assert lab.run_action("stop").returncode == 0
    assert lab.remaining_processes() == {}
    assert lab.query()["state"] == "stopped"


@pytest.mark.slow
def test_job_takes_the_first_host_back(lab: SshLab) -> None:
    """Its script finds the host that coordinates the run now."""
    start_training(lab, runner={**SHRINKING, "max_restarts": 1})
    lost = lab.bed["h00"]
    lost.set_link("down")
    wait_for_step(lab, "h01", rank=0)
    lost.set_link("up")
    wait_for(lambda: not lab.run_processes(lost), seconds=MAX_SECONDS)
    start_script(lab, lost, 0)
    output = lab.state().hosts[1].output
    wait_for(lambda: "h00 is back, and joins the job" in output.read_text())
    kill_rank(lab, lab.bed["h02"])
    wait_for_step(lab, "h00", attempt=2, rank=2)
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["attempt"], snapshot["joined"]) == ("running", 3, 3)
    assert {row["host"]: row["state"] for row in snapshot["hosts"]} == dict.fromkeys(
        lab.bed.names, "running"
    )
    assert lab.run_action("stop").returncode == 0
    assert lab.remaining_processes() == {}


@pytest.mark.slow
@pytest.mark.bed(hosts=5)
def test_hosts_that_coordinate_are_lost_in_turn(lab: SshLab) -> None:
    start_training(lab, runner={**REPLACING, "spares": 3})
    lab.bed["h00"].cut_power()
    wait_for_step(lab, "h02", 1, rank=0, after=20)
    lab.bed["h01"].cut_power()
    wait_for_step(lab, "h02", 2, rank=0)
    snapshot = lab.query()
    assert (snapshot["state"], snapshot["attempt"], snapshot["joined"]) == ("running", 3, 2)
    assert [failure["host"] for failure in snapshot["earlier"]] == ["h00", "h01"]
    output = lab.state().hosts[2].output.read_text()
    assert "h02 coordinates the run from now on, because h01 was lost" in output
    assert lab.run_action("stop").returncode == 3
    assert lab.remaining_processes() == {}


@pytest.mark.slow
@pytest.mark.bed(hosts=2 + FAULTS_IN_A_ROW)
def test_random_faults_in_a_row(lab: SshLab) -> None:
    """Each fault is of the host that took the place before; some hosts come back, at any time."""
    generator = random.Random(0)
    start(lab, runner={**REPLACING, "spares": FAULTS_IN_A_ROW})
    lost: list[tuple[Host, str]] = []
    for attempt in range(1, FAULTS_IN_A_ROW + 1):
        victim = lab.bed[f"h{attempt:02}"]
        fault = generator.choice([*FAULTS, "off"])
        if fault == "off":
            victim.cut_power()
        else:
            FAULTS[fault][0](lab, victim)
            lost.append((victim, fault))
        wait_for_step(lab, f"h{attempt + 1:02}", attempt)
        if lost and generator.random() < 0.5:
            host, earlier_fault = lost.pop()
            FAULTS[earlier_fault][1](lab, host)
    for host, fault in lost:
        FAULTS[fault][1](lab, host)
    last = lab.bed[f"h{FAULTS_IN_A_ROW + 1:02}"]
    training = {"h00", last.name}
    wait_for(lambda: set(lab.remaining_processes()) == training, seconds=MAX_SECONDS)
    assert lab.query()["state"] == "running"
    lab.run_action("stop")
    assert lab.remaining_processes() == {}


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize(
    ("runner", "lost"),
    [
        pytest.param(REPLACING, "h01", id="replace"),
        pytest.param(SMALLEST, "h01", id="shrink"),
        pytest.param(REPLACING, "h00", id="replace-the-first"),
    ],
)
@pytest.mark.parametrize("is_in_memory", [False, True], ids=["disk", "memory"])
def test_training_continues_with_the_same_losses(
    bed: Bed, tmp_path: Path, is_in_memory: bool, runner: dict[str, Any], lost: str
) -> None:
    """The power of a host is cut: from the last checkpoint on, or from the copies in memory, the
    losses are those of a run on one machine without a fault.
    """
    with ssh_lab(bed, tmp_path / "one") as lab:
        local = {"type": "local", "hostfile": None, "nproc_per_node": 2}
        lab.configure(
            light=False,
            task={"entrypoint": str(PROGRAM)},
            top={"train": train_sections(40)},
            runner=local,
        )
        assert lab.run_action("test", timeout=240).returncode == 0
        expected = read_losses(lab)
    with ssh_lab(bed, tmp_path / "lab") as lab:
        with bed.ssh_config.open("a") as config:
            config.write("  ConnectTimeout 3\n")
        checkpoints = str(lab.exp_dir / "checkpoints")
        logging = {"save_interval": 5, "save": checkpoints, "load": checkpoints}
        if is_in_memory:
            logging = {"non_persistent_save_interval": 1}
        lab.configure(
            light=False,
            task={"entrypoint": str(PROGRAM)},
            top={"train": train_sections(None, logging=logging)},
            runner=runner,
        )
        result = lab.run_action("run")
        assert result.returncode == 0, result.stderr
        wait_for(lambda: len(read_losses(lab)) >= 8)
        bed[lost].cut_power()
        fault_time = time.monotonic()
        wait_for(lambda: len(read_losses(lab, "status.1")) >= 8)
        seconds = time.monotonic() - fault_time
        before, after = read_losses(lab), read_losses(lab, "status.1")
        output = "".join(host.output.read_text() for host in lab.state().hosts)
        assert lab.run_action("stop").returncode == 3  # the lost host does not answer
        assert lab.remaining_processes() == {}
    first, last = after[0][0], before[-1][0]
    if is_in_memory:
        assert first >= last - 1, "one step was lost, and another one was not copied yet"
        moved = ", 1 of 2 ranks' from another host" if runner is REPLACING else "\n"
        assert f"from host memory{moved}" in output
    else:
        assert (first - 1) % 5 == 0
    assert 1 < first <= last + 1
    for row in (*before, *after):
        if row[0] <= len(expected):
            assert row == pytest.approx(expected[row[0] - 1], rel=1e-5)
    assert after[7][0] <= len(expected), "eight steps after the fault were compared"
    assert seconds < MAX_SECONDS + 10


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.bed(hosts=3, root="private", shared=[])
def test_training_continues_without_shared_files(lab: SshLab) -> None:
    """The spare gets its part of the training state from the memory of another host."""
    logging = {"save": None, "load": None, "non_persistent_save_interval": 1}
    lab.configure(
        light=False,
        task={"entrypoint": str(PROGRAM)},
        top={"train": train_sections(None, logging=logging)},
        runner={**REPLACING, "no_shared_fs": True},
    )
    result = lab.run_action("run")
    assert result.returncode == 0, result.stderr
    wait_for(lambda: (lab.query()["step"] or 0) >= 8)
    lab.bed["h01"].cut_power()
    wait_for(lambda: (row := lab.query())["attempt"] == 2 and (row["step"] or 0) > 16)
    output = lab.run_action("logs").stdout
    assert "from host memory, 1 of 2 ranks' from another host" in output
    assert lab.run_action("stop").returncode == 3  # h01 does not answer
    assert lab.remaining_processes() == {}


@pytest.mark.slow
@pytest.mark.torch
def test_job_takes_a_host_back(bed: Bed, tmp_path: Path) -> None:
    """A host is lost and comes back: its script is started again. The losses of all attempts are
    those of a run on one machine without a fault.
    """
    with ssh_lab(bed, tmp_path / "lab") as lab:
        checkpoints = str(lab.exp_dir / "checkpoints")
        logging = {"save": checkpoints, "load": checkpoints, "keep_last": 2}
        logging["non_persistent_save_interval"] = 1
        lab.configure(
            light=False,
            task={"entrypoint": str(PROGRAM)},
            top={"train": train_sections(None, logging=logging)},
            runner=SMALLEST,
        )
        result = lab.run_action("run")
        assert result.returncode == 0, result.stderr
        wait_for(lambda: len(read_losses(lab)) >= 8)
        lost = bed["h01"]
        lost.set_link("down")
        wait_for(lambda: len(read_losses(lab, "status.1")) >= 8)
        lost.set_link("up")
        wait_for(lambda: not lab.run_processes(lost), seconds=MAX_SECONDS)
        start_script(lab, lost, 1)
        wait_for(lambda: len(read_losses(lab, "status.2")) >= 8)
        assert lab.query()["world_size"] == 2
        attempts = [read_losses(lab, name) for name in ("status", "status.1", "status.2")]
        output = lab.state().hosts[0].output.read_text()
        assert lab.run_action("stop").returncode == 0
        assert lab.remaining_processes() == {}
    assert "h01 joins the job: 2 host(s)" in output
    assert attempts[2][0][0] == attempts[1][-1][0] + 1, "no step was lost for the host's return"
    last = attempts[2][7][0]
    with ssh_lab(bed, tmp_path / "one") as lab:
        local = {"type": "local", "hostfile": None, "nproc_per_node": 2}
        lab.configure(
            light=False,
            task={"entrypoint": str(PROGRAM)},
            top={"train": train_sections(last)},
            runner=local,
        )
        assert lab.run_action("test", timeout=400).returncode == 0
        expected = read_losses(lab)
    for row in (row for rows in attempts for row in rows if row[0] <= last):
        assert row == pytest.approx(expected[row[0] - 1], rel=1e-5)
