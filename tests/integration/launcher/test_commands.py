"""Tests of runs whose task is a command, launched and ended like training, without torch."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from support.launch_lab import Lab, rank_processes
from support.waiting import wait_for

from flagscale.hosts import processes

pytestmark = pytest.mark.integration

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
# A torch that cannot be imported.
NO_TORCH = "raise ImportError('there is no torch here')\n"


def configure_command(lab: Lab, *words: str, **runner: Any) -> None:
    """Make the lab's experiment run this command."""
    (lab.root / "torch.py").write_text(NO_TORCH, encoding="utf-8")
    lab.configure(
        "",
        task={"type": "command", "command": list(words)},
        runner={"stop_grace": 5, **runner},
        envs={"PYTHONPATH": str(lab.root)},
    )


def failure(lab: Lab) -> dict[str, Any]:
    return dict(json.loads(lab.run_action("query", "json=true").stdout)["failure"])


def test_each_rank_gets_its_environment(lab: Lab) -> None:
    variables = " ".join(f"${name}" for name in VARIABLES)
    configure_command(lab, "bash", "-c", f'echo "at {variables}"; echo lost >&2', master_port=29511)
    result = lab.run_action("test")
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert f"localhost:{rank}: at {rank} {rank} 2 2 0 127.0.0.1 29511" in result.stdout
    assert result.stdout.count(": lost\n") == 2
    # The order of lines from a rank's two files is undefined.
    assert sorted(lab.run_action("logs", "rank=1").stdout.splitlines()) == [
        "localhost:1: at 1 1 2 2 0 127.0.0.1 29511",
        "localhost:1: lost",
    ]
    # The program's arguments, without a shell, and a single rank without nproc_per_node.
    program = "import sys; print(sys.argv[1:])"
    configure_command(lab, "python", "-c", program, "$HOME", "a  b", "*", nproc_per_node=None)
    assert "localhost:0: ['$HOME', 'a  b', '*']" in lab.run_action("test").stdout


def test_first_failed_rank_ends_the_others_and_determines_the_exit_code(lab: Lab) -> None:
    code = "if [[ $RANK == 1 ]]; then echo out of cheese >&2; exit 7; fi; exec sleep 600"
    configure_command(lab, "bash", "-c", code)
    result = lab.run_action("test")
    assert result.returncode == 7, result.stdout
    assert "first failure: localhost: rank 1 ended with exit code 7" in result.stderr
    assert "out of cheese" in failure(lab)["traceback"]
    lab.wait_until_ended()

    configure_command(lab, "no such program")
    assert lab.run_action("test").returncode == 127
    assert "cannot start no such program: No such file" in failure(lab)["traceback"]
    configure_command(lab, "/nowhere/program")
    rejected = lab.run_action("test")
    assert rejected.returncode == 2
    assert "not there: experiment.task.command: /nowhere/program" in rejected.stderr

    configure_command(lab, "bash", "-c", "((RANK)) || kill -KILL $$; exec sleep 600")
    assert lab.run_action("test").returncode == 128 + signal.SIGKILL
    assert failure(lab)["reason"].startswith("ended with signal 9 (SIGKILL): killed from outside")


def test_failed_command_is_restarted(lab: Lab) -> None:
    """Although its ranks never join."""
    starts = lab.root / "starts"
    code = f"echo $FLAGSCALE_ATTEMPT >>{starts}; [[ $FLAGSCALE_ATTEMPT == 2 ]] || exit 3"
    configure_command(lab, "bash", "-c", code, nproc_per_node=1, max_restarts=5)
    assert lab.run_action("test").returncode == 0
    assert starts.read_text() == "0\n1\n2\n"
    code = "exit 3"
    configure_command(lab, "bash", "-c", code, nproc_per_node=1, max_restarts=1)
    assert lab.run_action("test").returncode == 3
    assert lab.output().count("the job starts again after") == 1


def test_stop_gives_each_rank_its_grace_period(lab: Lab) -> None:
    """The rank that ends first must not end the others as a failure."""
    saving = 'trap "sleep $RANK; echo saved $RANK; exit $((143 * !RANK))" TERM'
    configure_command(
        lab, "bash", "-c", f"{saving}; echo works; while :; do sleep 0.1; done", stop_grace=30
    )
    start_result = lab.run_action("run")
    assert "2 rank process(es) are running" in start_result.stdout, start_result.stderr
    wait_for(lambda: lab.output().count("works") == 2)
    assert lab.run_action("stop").returncode == 0
    assert lab.output().count("saved") == 2
    assert lab.run_processes() == []
    result = json.loads(lab.run_action("query", "json=true").stdout)
    assert (result["state"], result["failure"]) == ("stopped", None)


def test_ranks_do_not_outlive_their_launcher(lab: Lab) -> None:
    configure_command(lab, "sleep", "600", wait_for="none")
    assert lab.run_action("run").returncode == 0
    rank = next(iter(wait_for(lambda: rank_processes(lab.state())).values()))
    starter = processes.parent_pid_of(rank.pid)
    assert starter is not None
    launcher_process = next(member for member in lab.run_processes() if member.pid == starter)
    processes.send_signal(launcher_process, signal.SIGKILL)
    lab.wait_until_ended()
    assert failure(lab)["exit_code"] == 128 + signal.SIGKILL
