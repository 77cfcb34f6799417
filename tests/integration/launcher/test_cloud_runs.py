"""Runs of hosts that something else has started: two "hosts" of this machine, a process each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.launch_lab import PROJECT
from support.waiting import wait_for

from flagscale.files import read_json
from flagscale.free_port import free_port

pytestmark = pytest.mark.integration

SECRET = "0123456789abcdef" * 3
PROGRAM = """
import os, sys, time
from pathlib import Path

rank = os.environ["RANK"]
here = Path(sys.argv[0]).parent
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "PET_NNODES")
print("has", *(os.environ.get(name, "-") for name in names), flush=True)
(here / f"started_{rank}").touch()
while not (here / "go").exists():
    if (here / f"fail_{rank}").exists():
        sys.exit(7)
    time.sleep(0.05)
"""


class CloudHosts:
    """Two hosts that start the same command; each has a home of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port = free_port()
        self._processes: dict[int, subprocess.Popen[str]] = {}
        (root / "program.py").write_text(PROGRAM)
        (root / "conf").mkdir()
        (root / "conf" / "train.yaml").write_text(
            "experiment:\n"
            "  exp_name: cloud\n"
            f"  exp_dir: {root}/out\n"
            f"  task: {{type: command, command: [{root}/program.py]}}\n"
            "  runner: {type: cloud, nproc_per_node: 2, lost_host_timeout: 60, start_timeout: 90}\n"
        )

    def start(self, rank: int, *overrides: str, **variables: str) -> None:
        """Start the command on one host, with the variables of a PyTorchJob."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(PROJECT),
            "XDG_STATE_HOME": str(self.home(rank)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "PET_NNODES": "2",
            "PET_NODE_RANK": str(rank),
            "FLAGSCALE_RUN_SECRET": SECRET,
            **variables,
        }
        command = [
            sys.executable,
            str(PROJECT / "run.py"),
            "--config-path",
            str(self.root / "conf"),
        ]
        with (self.root / f"output_{rank}").open("w") as output:
            self._processes[rank] = subprocess.Popen(
                [*command, "--config-name", "train", *overrides],
                env=environment,
                stdout=output,
                stderr=output,
                text=True,
                start_new_session=True,
            )

    def home(self, rank: int) -> Path:
        return self.root / f"home_{rank}"

    def output(self, rank: int) -> str:
        return (self.root / f"output_{rank}").read_text()

    def await_ranks(self) -> None:
        """Wait until all four ranks run, and the agents have met."""
        started = [self.root / f"started_{rank}" for rank in range(4)]
        wait_for(lambda: all(path.exists() for path in started))
        (liveness,) = (self.root / "out" / "logs" / "details").glob("host_0_*/*/liveness.json")
        wait_for(lambda: (read_json(liveness) or {}).get("hosts", {}).get("1") != "absent")

    def exit_code(self, rank: int) -> int:
        return self._processes[rank].wait(60)

    def kill(self, rank: int) -> None:
        """Kill every process of a host at once, as the end of a pod does."""
        mark = f"XDG_STATE_HOME={self.home(rank)}\0".encode()
        pids: list[int] = []
        for _ in range(2):
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    is_of_host = mark in (entry / "environ").read_bytes()
                except OSError:
                    continue
                if is_of_host and int(entry.name) not in pids:
                    pids.append(int(entry.name))
                    with suppress(ProcessLookupError):  # it has ended meanwhile
                        os.kill(pids[-1], signal.SIGSTOP)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        for rank, process in self._processes.items():
            if process.poll() is None:
                self.kill(rank)
            process.wait(60)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[CloudHosts]:
    cloud_hosts = CloudHosts(tmp_path)
    yield cloud_hosts
    cloud_hosts.close()


def test_hosts_run_one_job_and_name_the_first_failure(hosts: CloudHosts) -> None:
    for rank in (1, 0):
        hosts.start(rank)
    hosts.await_ranks()
    (hosts.root / "fail_3").touch()
    assert (hosts.exit_code(0), hosts.exit_code(1)) == (1, 7)
    assert "has 1 4 1 0 127.0.0.1 -" in hosts.output(0)
    assert "has 2 4 0 1 127.0.0.1 -" in hosts.output(1)
    for rank in range(2):
        assert "first failure: " in hosts.output(rank)
        assert "rank 3 ended with exit code 7" in hosts.output(rank)
        assert "FLAGSCALE_RUN_SECRET" not in hosts.output(rank)
    files = [path for path in (hosts.root / "out").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET in path.read_text(errors="replace")] == []


def test_killed_host_is_named_and_a_new_start_is_another_run(hosts: CloudHosts) -> None:
    for rank in (0, 1):
        hosts.start(rank, "action=test", "experiment.runner.lost_host_timeout=5")
    hosts.await_ranks()
    hosts.kill(1)
    assert hosts.exit_code(0) == 1
    assert "was lost: no word from its agent for 5 s" in hosts.output(0)
    (hosts.root / "go").touch()
    for rank in (0, 1):
        hosts.start(rank, FLAGSCALE_RUN_SECRET="")
    assert [hosts.exit_code(rank) for rank in (0, 1)] == [0, 0]
    assert "FLAGSCALE_RUN_SECRET is not set: whoever reaches port" in hosts.output(0)


def test_stop_of_one_host_ends_all(hosts: CloudHosts) -> None:
    for rank in (0, 1):
        hosts.start(rank)
    hosts.await_ranks()
    os.kill(hosts._processes[1].pid, signal.SIGTERM)
    codes = [hosts.exit_code(rank) for rank in (0, 1)]
    assert all(code not in (0, 1) for code in codes)
    assert "was stopped" in hosts.output(0)


def test_wrong_number_of_hosts_is_a_sentence(hosts: CloudHosts) -> None:
    hosts.start(0)
    hosts.start(1, PET_NNODES="3")
    assert [hosts.exit_code(rank) for rank in (0, 1)] == [1, 1]
    for rank in range(2):
        assert "is one of 3 host(s)" in hosts.output(rank)
        assert "experiment.runner.nnodes has to be equal on all hosts" in hosts.output(rank)
        assert "Traceback" not in hosts.output(rank)


def test_host_that_fails_its_checks_is_named_on_the_others(hosts: CloudHosts) -> None:
    hosts.start(0)
    hosts.start(1, "experiment.runner.python=/no/python")
    assert (hosts.exit_code(0), hosts.exit_code(1)) == (1, 2)
    assert "(rank 1) cannot start: python: " in hosts.output(0)
    assert "/no/python" in hosts.output(1)
