"""Commands on hosts, launched and ended as training is; no torch is there."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from support.launch_lab import Lab, rank_processes, until

from flagscale.hosts import processes

pytestmark = pytest.mark.integration

VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
# A torch that cannot be imported.
NO_TORCH = "raise ImportError('there is no torch here')\n"


def command(lab: Lab, *words: str, **runner: Any) -> None:
    """Make the lab's experiment one that runs these words."""
    (lab.root / "torch.py").write_text(NO_TORCH, encoding="utf-8")
    lab.configure(
        "",
        task={"type": "command", "command": list(words)},
        runner={"stop_grace": 5, **runner},
        envs={"PYTHONPATH": str(lab.root)},
    )


def failure(lab: Lab) -> dict[str, Any]:
    return dict(json.loads(lab.do("query", "json=true").stdout)["failure"])


def test_each_rank_is_told_its_place(lab: Lab) -> None:
    shown = " ".join(f"${name}" for name in VARIABLES)
    command(lab, "bash", "-c", f'echo "at {shown}"; echo lost >&2', master_port=29511)
    done = lab.do("test")
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"localhost:{rank}: at {rank} {rank} 2 2 0 127.0.0.1 29511" in done.stdout
    assert done.stdout.count(": lost\n") == 2
    # Of two files of a rank nothing says which line was written first.
    assert sorted(lab.do("logs", "rank=1").stdout.splitlines()) == [
        "localhost:1: at 1 1 2 2 0 127.0.0.1 29511",
        "localhost:1: lost",
    ]
    # The program's own words, which no shell has seen, and once where nobody says how often.
    program = "import sys; print(sys.argv[1:])"
    command(lab, "python", "-c", program, "$HOME", "a  b", "*", nproc_per_node=None)
    assert "localhost:0: ['$HOME', 'a  b', '*']" in lab.do("test").stdout


def test_the_first_that_fails_ends_the_others_and_gives_its_code(lab: Lab) -> None:
    code = "if [[ $RANK == 1 ]]; then echo out of cheese >&2; exit 7; fi; exec sleep 600"
    command(lab, "bash", "-c", code)
    done = lab.do("test")
    assert done.returncode == 7, done.stdout
    assert "first failure: localhost: rank 1 ended with exit code 7" in done.stderr
    assert "out of cheese" in failure(lab)["traceback"]
    lab.gone()

    command(lab, "no such program")
    assert lab.do("test").returncode == 127
    assert "cannot start no such program: No such file" in failure(lab)["traceback"]
    command(lab, "/nowhere/program")
    refused = lab.do("test")
    assert refused.returncode == 2
    assert "not there: experiment.task.command: /nowhere/program" in refused.stderr

    command(lab, "bash", "-c", "((RANK)) || kill -KILL $$; exec sleep 600")
    assert lab.do("test").returncode == 128 + signal.SIGKILL
    assert failure(lab)["reason"].startswith("ended with signal 9 (SIGKILL): killed from outside")


def test_a_stop_lets_each_rank_end_in_its_own_time(lab: Lab) -> None:
    """The one that ends first must not take the others for failed."""
    saving = 'trap "sleep $RANK; echo saved $RANK; exit $((143 * !RANK))" TERM'
    command(lab, "bash", "-c", f"{saving}; echo works; while :; do sleep 0.1; done", stop_grace=6)
    started = lab.do("run")
    assert "2 rank process(es) are running" in started.stdout, started.stderr
    until(lambda: lab.output().count("works") == 2)
    assert lab.do("stop").returncode == 0
    assert lab.output().count("saved") == 2
    assert lab.members() == []
    seen = json.loads(lab.do("query", "json=true").stdout)
    assert (seen["state"], seen["failure"]) == ("stopped", None)


def test_nothing_outlives_what_starts_the_ranks(lab: Lab) -> None:
    command(lab, "sleep", "600", wait_for="none")
    assert lab.do("run").returncode == 0
    rank = next(iter(until(lambda: rank_processes(lab.state())).values()))
    starter = processes.parent(rank.pid)
    assert starter is not None
    found = next(one for one in lab.members() if one.pid == starter)
    processes.send(found, signal.SIGKILL)
    lab.gone()
    assert failure(lab)["exit_code"] == 128 + signal.SIGKILL
