"""Tests of a host's script that is run by hand."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from support.launch_bench import SLEEPING_PROGRAM, Bench
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.config.schema import Commands, Environments, Runner
from flagscale.hosts import processes
from flagscale.launcher.layout import (
    AGENT_FILE,
    HOST_RECORD_FILE,
    OUTPUT_TIMES_FILE,
    STATUS_DIRECTORY,
)

pytestmark = pytest.mark.integration


def test_the_script_runs_by_hand_again(bench: Bench) -> None:
    assert bench.run("raise SystemExit(6)") == 6
    script = bench.plans[-1].hosts[0].script
    result = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 6
    assert str(bench.plans[-1].hosts[0].run_dir) in result.stdout
    assert bench.exit_record()["code"] == 6


def files_below(directory: Path) -> dict[Path, tuple[int, bytes]]:
    """Return all files with their modification times and contents."""
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


BESIDE = Commands('touch "$MARKS/before"; echo ready; sleep "$BEFORE"', 'touch "$MARKS/after"')


@pytest.mark.parametrize(
    ("before", "lives"),
    [pytest.param("0", "agent", id="the-job"), pytest.param("600", "script", id="before_start")],
)
def test_a_second_start_of_a_living_runs_script_changes_and_runs_nothing(
    bench: Bench, before: str, lives: str
) -> None:
    marks = bench.root / "marks"
    marks.mkdir()
    envs = Environments({"BEFORE": before, "MARKS": str(marks)})
    # After a stop has begun there is time for after_stop, however busy the machine is.
    state = bench.start(SLEEPING_PROGRAM, envs=envs, cmds=BESIDE, runner=Runner(stop_grace=30.0))
    agent = bench.agent_process(state) if lives == "agent" else None
    if agent is not None:
        wait_for(lambda: bench.output.count("ready") == 2)
        # The agent records the host beside the ranks. The digest of the code comes last.
        record = state.hosts[0].run_dir / STATUS_DIRECTORY / HOST_RECORD_FILE
        wait_for(lambda: record.exists() and '"kind": "code"' in record.read_text())
        # It also adds the output's size to an index some seconds after the output has grown.
        index = state.hosts[0].run_dir / OUTPUT_TIMES_FILE
        size = str(state.hosts[0].output.stat().st_size)
        wait_for(lambda: index.exists() and index.read_text().split()[-1] == size)
    (marks / "before").unlink()
    written = files_below(bench.root)
    script = str(state.hosts[0].script)
    result = subprocess.run(["bash", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stdout == ""
    pid = agent.pid if agent is not None else state.hosts[0].pid
    assert f"is alive already ({lives} {pid}); nothing was changed" in result.stderr
    assert files_below(bench.root) == written
    assert processes.find_run_processes(state.run_id)
    bench.runner.stop(state)
    assert processes.find_run_processes(state.run_id) == []
    # The first start ran after_stop when it ended; now the script can start again.
    assert (marks / "after").exists()
    second_start = subprocess.Popen(["bash", script], stdout=subprocess.PIPE, text=True)
    assert second_start.stdout is not None
    wait_for(lambda: "ready" in second_start.stdout.readline())
    processes.kill_run_processes(state.run_id, 10)
    second_start.communicate(timeout=PATIENCE_SECONDS)


def test_of_two_starts_by_hand_at_once_one_is_refused(bench: Bench) -> None:
    planned = bench.plan(SLEEPING_PROGRAM)
    bench.write_script(planned)
    command = ["bash", str(planned.hosts[0].script)]
    scripts = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    wait_for(lambda: sum(script.poll() is not None for script in scripts) == 7)
    # Once it has started its agent, it has recorded its pid and handles signals.
    wait_for((planned.hosts[0].run_dir / AGENT_FILE).exists)
    for script in scripts:
        if script.poll() is None:
            assert script.pid == int(planned.hosts[0].pid_file.read_text())
            script.terminate()
        script.communicate(timeout=PATIENCE_SECONDS)
    assert sorted(script.returncode for script in scripts) == [1] * 7 + [143]
    assert processes.find_run_processes(planned.run_id) == []


def test_a_signal_right_after_the_start_of_the_agent_ends_it(bench: Bench) -> None:
    planned = bench.plan(SLEEPING_PROGRAM)
    bench.write_script(planned)
    script, start = planned.hosts[0].script, "\nagent_pid=$!\n"
    text = script.read_text()
    assert text.count(start) == 1
    # The agent is at work, so that it would still end its ranks if the script did not wait.
    signalled = 'until [[ -e $agent_file ]]; do sleep 0.05; done; kill -TERM "$$"'
    script.write_text(text.replace(start, f"\n{signalled}{start}"))
    result = subprocess.run(["bash", str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 143, result.stderr
    assert processes.find_run_processes(planned.run_id) == []


def test_ctrl_c_in_a_terminal_stops_a_script_run_by_hand(bench: Bench) -> None:
    planned = bench.plan(SLEEPING_PROGRAM)
    bench.write_script(planned)
    script = subprocess.Popen(
        ["bash", str(planned.hosts[0].script)],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert script.stdout is not None
    wait_for(lambda: "ready" in script.stdout.readline())
    os.killpg(script.pid, signal.SIGINT)  # as a terminal does
    assert script.wait(PATIENCE_SECONDS) == 130
    assert processes.find_run_processes(planned.run_id) == []
