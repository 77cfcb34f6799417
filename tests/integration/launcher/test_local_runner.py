"""Tests of scripts, agent and runner on this machine, with a plain program in place of torchrun."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from dataclasses import replace

import pytest
from support.arguments import train_arguments
from support.launch_bench import SLEEPING_PROGRAM, Bench
from support.launch_lab import script_process
from support.waiting import wait_for

from flagscale.config.schema import Commands, Environments, Runner
from flagscale.errors import RunStateError
from flagscale.hosts import processes
from flagscale.launcher.runners.base import ConfigTexts
from flagscale.launcher.runners.hosts import HostRunner
from flagscale.launcher.snapshot import Phase
from flagscale.launcher.state import load_state
from flagscale.launcher.stop_result import StopResult

pytestmark = pytest.mark.integration

HOSTILE = "a 'b' \"c\" $HOME `id` $(id) \\ , ; & | > * ? ~ # ü 🦙 -- \t end\nline 2\n"
HOSTILE_NAME = "a 'b' \"c\" $HOME `id` ü\n,;&"


STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)
"""
# A process in its own session, whose parent has ended.
ORPHAN = """
    import os, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        pytest.param("print('done')", 0, id="success"),
        pytest.param("raise SystemExit(3)", 3, id="own-code"),
        pytest.param("raise ValueError('no')", 1, id="exception"),
        pytest.param("import os; os.kill(os.getpid(), 9)", 137, id="killed"),
        pytest.param("import os; os.kill(os.getpid(), 15)", 143, id="terminated"),
    ],
)
def test_the_script_ends_with_the_jobs_code(bench: Bench, program: str, code: int) -> None:
    assert bench.run(program) == code
    assert bench.exit_record()["code"] == code
    assert f"ended with exit code {code}" in bench.output
    expected = Phase.FAILED if code else Phase.COMPLETED
    assert bench.runner.query(bench.stored_state()).phase is expected


def test_hostile_values_arrive_as_they_are(bench: Bench) -> None:
    exp_dir = bench.root / HOSTILE_NAME / ("very long " * 20)
    program = """
        import json, os, sys
        path = os.path.join(os.environ["TARGET"], "seen.json")
        json.dump([sys.argv[1:], os.environ["EVIL"], os.environ["BEFORE"]], open(path, "w"))
    """
    train = train_arguments(model={"label": HOSTILE, "many": ["x y", "$z", "a,b"]})
    envs = Environments({"EVIL": HOSTILE, "TARGET": str(bench.root)})
    cmds = Commands('export BEFORE="it\'s ${TARGET:+set}"', "echo 'after '\"it's over\"")
    assert bench.run(program, exp_dir=exp_dir, train=train, envs=envs, cmds=cmds) == 0
    arguments, environment_value, before_start_value = json.loads(
        (bench.root / "seen.json").read_text(encoding="utf-8")
    )
    assert arguments[:6] == ["--label", HOSTILE, "--many", "x y", "$z", "a,b"]
    assert arguments[arguments.index("--save") + 1] == str(exp_dir / "checkpoints")
    assert environment_value == HOSTILE
    assert before_start_value == "it's set"
    assert "after it's over" in bench.output


@pytest.mark.parametrize(
    ("command", "code"),
    [
        pytest.param("false\ntrue", 1, id="first-of-two"),
        pytest.param("(exit 7)", 7, id="own-code"),
        pytest.param("exit 5", 5, id="exit"),
        pytest.param("exit 0", 1, id="exit-well"),
        pytest.param("no-such-command-here", 127, id="unknown-command"),
        pytest.param("if then", None, id="no-bash"),
    ],
)
def test_a_failing_before_start_starts_no_job(bench: Bench, command: str, code: int | None) -> None:
    snapshot = bench.run("print('job ran')", cmds=Commands(command, "echo after ran"))
    assert snapshot == code if code is not None else snapshot != 0
    assert "job ran" not in bench.output
    assert "after ran" in bench.output
    assert bench.exit_record()["phase"] == "before_start"
    failure = bench.runner.query(bench.stored_state()).failure
    assert failure is not None
    reason = "left the script with exit code 0" if command == "exit 0" else "failed with exit code"
    assert f"before_start {reason}" in failure.reason
    assert f"before_start {reason}" in bench.output


def test_a_script_that_ends_before_it_is_looked_at_has_started(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleep = bench.root / "programs" / "sleep"
    sleep.parent.mkdir()
    sleep.write_text("#!/bin/sh\nexec /bin/sleep 1\n", encoding="utf-8")
    sleep.chmod(0o700)
    monkeypatch.setenv("PATH", f"{sleep.parent}:{os.environ['PATH']}")
    assert bench.run("", cmds=Commands("exit 5")) == 5


def test_after_stop_always_runs_and_never_changes_the_code(bench: Bench) -> None:
    commands = Commands(after_stop="echo after ran; false")
    assert bench.run("raise SystemExit(4)", cmds=commands) == 4
    assert "after ran" in bench.output
    assert "after_stop failed with exit code 1" in bench.output
    state = bench.start(SLEEPING_PROGRAM, cmds=Commands(after_stop="echo after stop"))
    bench.runner.stop(state)
    assert bench.runner.wait(state) == 143
    assert "after stop" in bench.output


def test_stop_and_stop_again(bench: Bench) -> None:
    state = bench.start(SLEEPING_PROGRAM)
    bench.runner.stop(state)
    assert processes.find_run_processes(state.run_id) == []
    assert bench.exit_record()["signal"] == signal.SIGTERM
    assert bench.runner.query(bench.stored_state()).phase is Phase.STOPPED
    assert bench.runner.stop(state) == StopResult()


def test_stopped_job_has_time_to_save(bench: Bench) -> None:
    program = """
        import signal, sys, time
        def save(*_):
            time.sleep(0.3)
            print("saved", flush=True)
            sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        print("ready", flush=True)
        time.sleep(600)
    """
    # It ends as soon as it has saved, however busy the machine is.
    state = bench.start(program, runner=Runner(stop_grace=30.0))
    bench.runner.stop(state)
    assert "saved" in bench.output
    assert bench.runner.query(bench.stored_state()).phase is Phase.STOPPED


def test_process_that_ignores_term_is_killed_after_the_grace_period(bench: Bench) -> None:
    state = bench.start(STUBBORN, runner=Runner(stop_grace=0.3))
    bench.runner.stop(state)
    assert processes.find_run_processes(state.run_id) == []
    assert bench.exit_record()["code"] == 143


def test_stop_during_before_start(bench: Bench) -> None:
    cmds = Commands("echo ready; sleep 600")
    state = bench.start("print('job ran')", cmds=cmds)
    bench.runner.stop(state)
    assert processes.find_run_processes(state.run_id) == []
    assert "job ran" not in bench.output
    assert bench.runner.query(bench.stored_state()).phase is Phase.STOPPED


def test_stop_ends_no_other_process(bench: Bench) -> None:
    """Neither a process with the same name and arguments nor one of another run."""
    state = bench.start(SLEEPING_PROGRAM)
    other_environment = {**os.environ, "FLAGSCALE_RUN_ID": f"{state.run_id}0"}
    argv = [sys.executable, str(bench.root / "program.py"), "torch.distributed.run"]
    bystander = subprocess.Popen(argv, env=other_environment, stdout=subprocess.DEVNULL)
    try:
        bench.runner.stop(state)
        assert processes.find_run_processes(state.run_id) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_orphans_are_ended_with_the_job(bench: Bench) -> None:
    assert bench.run(ORPHAN) == 0
    state = bench.stored_state()
    assert processes.find_run_processes(state.run_id) == []
    assert len(bench.exit_record()["swept"]) == 1


@pytest.mark.parametrize(
    "program", [SLEEPING_PROGRAM, STUBBORN, "    print('ready')\n" + ORPHAN + SLEEPING_PROGRAM]
)
def test_killed_agent(bench: Bench, program: str) -> None:
    """The kernel and the script end the remaining processes without a stop."""
    state = bench.start(program, runner=Runner(stop_grace=0.3))
    assert processes.send_signal(bench.agent_process(state), signal.SIGKILL)
    assert bench.runner.wait(state) == 137
    assert processes.find_run_processes(state.run_id) == []
    assert bench.exit_record()["phase"] == "agent"
    assert bench.runner.query(bench.stored_state()).phase is Phase.FAILED


def test_the_script_is_killed(bench: Bench) -> None:
    state = bench.start(SLEEPING_PROGRAM)
    script = script_process(state)
    assert processes.send_signal(script, signal.SIGKILL)
    bench.runner.wait(state)
    wait_for(lambda: not processes.find_run_processes(state.run_id))
    assert bench.exit_record()["signal"] is None
    snapshot = bench.runner.query(bench.stored_state())
    assert snapshot.phase is Phase.FAILED
    assert snapshot.failure is not None
    assert "lost its script, which was killed" in snapshot.failure.reason


def test_script_and_agent_are_killed_at_once(bench: Bench) -> None:
    state = bench.start(STUBBORN)
    agent, script = bench.agent_process(state), script_process(state)
    for process in (script, agent):
        processes.send_signal(process, signal.SIGSTOP)
    for process in (script, agent):
        processes.send_signal(process, signal.SIGKILL)
    wait_for(lambda: not processes.is_alive(script) and not processes.is_alive(agent))
    assert processes.find_run_processes(state.run_id) != []
    assert bench.runner.query(bench.stored_state()).phase is Phase.RUNNING
    bench.runner.stop(state)
    assert processes.find_run_processes(state.run_id) == []


def test_killed_program(bench: Bench) -> None:
    """Processes that it started in their own sessions become children of the agent, which ends
    them.
    """
    state = bench.start("    print('ready')\n" + ORPHAN + SLEEPING_PROGRAM)
    agent = bench.agent_process(state).pid
    program = next(
        p
        for p in processes.find_run_processes(state.run_id)
        if processes.parent_pid_of(p.pid) == agent
    )
    processes.send_signal(program, signal.SIGKILL)
    assert bench.runner.wait(state) == 137
    assert processes.find_run_processes(state.run_id) == []


def test_a_second_run_is_refused_by_name(bench: Bench) -> None:
    state = bench.start(SLEEPING_PROGRAM)
    with pytest.raises(RunStateError) as raised:
        HostRunner().submit(bench.plan(SLEEPING_PROGRAM), ConfigTexts())
    assert state.run_id in str(raised.value)
    assert str(state.hosts[0].pid) in str(raised.value)
    assert load_state(bench.plans[0].layout.state) == state


def test_secrets_reach_the_job_and_no_file(bench: Bench) -> None:
    program = """
        import os
        print("length", len(os.environ["MY_API_KEY"]))
    """
    assert bench.run(program, envs=Environments({"MY_API_KEY": "s3cr3t s3cr3t"})) == 0
    assert "length 13" in bench.output
    for path in bench.root.rglob("*"):
        assert path.is_dir() or b"s3cr3t" not in path.read_bytes(), path


@pytest.mark.parametrize("user_secret", ["", "ab" * 16], ids=["of-the-run", "the-users"])
def test_ranks_have_a_secret_which_no_file_has(bench: Bench, user_secret: str) -> None:
    # Digits separated by dashes, so that the printed form in the output differs from the secret.
    program = "import os; print('digits', '-'.join(os.environ['FSCCL_SECRET']))"
    assert (
        bench.run(program, envs=Environments({"FSCCL_SECRET": user_secret} if user_secret else {}))
        == 0
    )
    (digits,) = re.findall("digits ((?:[0-9a-f]-?){32})", bench.output)
    secret = digits.replace("-", "")
    assert user_secret in ("", secret)
    for path in bench.root.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path


def test_everything_is_private(bench: Bench) -> None:
    bench.run("print()")
    for path in [bench.root / "exp", *(bench.root / "exp").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_each_run_has_its_own_output(bench: Bench) -> None:
    bench.run("print('first')")
    first_plan = bench.plans[-1]
    bench.run("print('second')")
    assert "first" not in bench.output
    assert "first" in (first_plan.hosts[0].run_dir / "output").read_text(encoding="utf-8")


def test_a_command_that_cannot_be_started(bench: Bench) -> None:
    planned = bench.plan(SLEEPING_PROGRAM)
    host = replace(planned.hosts[0], starter=("/no/such/python",))
    state = bench.submit(replace(planned, hosts=(host,)))
    assert bench.runner.wait(state) == 127
    assert "cannot start /no/such/python" in bench.output
