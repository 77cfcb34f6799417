"""Tests of the rendered script: golden files, bash and shellcheck.

One golden file is a whole script; the others are the blocks that contain values.
``FLAGSCALE_UPDATE_GOLDEN=1`` rewrites the golden files.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arguments import train_arguments

from flagscale.config.interpolation import host_reference
from flagscale.config.schema import Commands, Environments, Notify, Runner, Task
from flagscale.files import format_json
from flagscale.hosts.hostfile import Host
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.launcher.planning import script as script_module
from flagscale.launcher.planning.environment import SCRIPT_VARIABLES, EnvironmentVariable
from flagscale.launcher.planning.model import HostPlan, LaunchPlan, Machine, RunnerHandle
from flagscale.launcher.planning.script import render

MakePlan = Callable[..., LaunchPlan]
GOLDEN = Path(__file__).resolve().parents[3] / "golden" / "launcher"
HOSTILE = "a 'b' \"c\" $HOME `id` $(id) \\ , ; & | > * ? ~ ! {x,y} [z] # ü 🦙 -- \t end\nline 2\n"

# Beginning of the part that is the same in every script.
FRAME = "# If this run is still alive"

CASES = {
    "plain": {},
    "guide": {
        "hosts": (Host("localhost", 8, "A800"),),
        "runner": Runner(nproc_per_node=8, master_port=29500, max_restarts=1),
        "envs": Environments(
            {
                "PATH": f"/opt/x/bin:{host_reference('PATH')}",
                "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
                "WANDB_API_KEY": "s3cr3t",
            },
            {"A800": {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}},
            {"localhost": {"NCCL_DEBUG": "INFO"}},
        ),
        "cmds": Commands("source /opt/env.sh\nulimit -l unlimited", 'echo "it\'s over"'),
        "train": train_arguments(
            system={"tensor_model_parallel_size": 2, "checkpoint": {"save_interval": 100}},
            model={"num_layers": 32, "bf16": True},
            data={"data_path": [0.3, "/data/a", 0.7, "/data/b"], "split": "99,1,0"},
        ),
    },
    "hostile": {
        "name": "evil\nname; rm -rf $HOME",
        "exp_dir": Path("/data/a 'b' \"c\" $HOME `id`\nü"),
        "task": Task(entrypoint=Path("/x y/$(id)/program's.py"), external=True),
        "envs": Environments(
            {
                **{"EVIL": HOSTILE, "EMPTY": "", "COMMA": "0,1", "TYPED": "${host:EVIL}"},
                "AROUND": f"{HOSTILE}{host_reference('EVIL')}{HOSTILE}{host_reference('host_x')}",
                "PYTHONPATH": f"/own:{host_reference('PYTHONPATH')}:/last",
                "host_x": "none of the script's",
            }
        ),
        "cmds": Commands("echo \"END_BEFORE_START\"\necho 'it''s $HOME'", "END_AFTER_STOP"),
        "train": train_arguments(model={"label": HOSTILE, "many": ["x y", "$z"]}),
    },
    "command": {
        "task": Task(type="command", command=("/opt/x y", "--", HOSTILE, ""), external=True),
        "runner": Runner(stop_grace=30, master_port=29500),
    },
}


SECOND = {
    "hosts": (Host("h00", 2), Host("h01", 2)),
    "runner": Runner(
        max_restarts=3,
        lost_host_timeout=20.0,
        notify=Notify("mail -s 'it''s over' $USER", "https://chat/s3cr3t"),
    ),
}


@pytest.fixture(params=[*CASES, "second"])
def case(request: pytest.FixtureRequest, make_plan: MakePlan) -> tuple[str, str]:
    """``second`` is the second host of a run of two, whose agents share a secret."""
    if request.param == "second":
        plan = make_plan(**SECOND)
        return request.param, render(plan, plan.hosts[1])
    plan = make_plan(**CASES[request.param])
    return request.param, render(plan, plan.hosts[0])


def shellcheck() -> str:
    beside = Path(sys.executable).parent / "shellcheck"
    path = str(beside) if beside.exists() else shutil.which("shellcheck")
    if path is None:
        pytest.skip("shellcheck is not installed")
    return path


@pytest.mark.parametrize("case", ["second", "guide", "hostile", "command"], indirect=True)
def test_golden(case: tuple[str, str]) -> None:
    name, text = case
    if name != "second":
        _, marker, blocks = text.partition("# Identity of the run")
        text = marker + blocks.partition(FRAME)[0]
    text = text.replace(f"flagscale {script_module.__version__} ", "flagscale VERSION ")
    path = GOLDEN / f"{name}.sh"
    if os.environ.get("FLAGSCALE_UPDATE_GOLDEN") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_bash_accepts_the_syntax(case: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(case[1], encoding="utf-8")
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_shellcheck_finds_nothing(case: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "script.sh"
    path.write_text(case[1], encoding="utf-8")
    result = subprocess.run([shellcheck(), str(path)], capture_output=True, text=True, check=False)
    assert result.stdout == ""
    assert result.returncode == 0


def test_secrets_are_required_from_the_environment_and_never_written(make_plan: MakePlan) -> None:
    plan = make_plan(**CASES["guide"])
    text = render(plan, plan.hosts[0])
    assert "s3cr3t" not in text
    assert ': "${WANDB_API_KEY:?' in text


def test_agent_secrets_reach_only_the_agent(make_plan: MakePlan, tmp_path: Path) -> None:
    """Neither the script nor the plan contains them, and the user's commands do not see them."""
    plan = make_plan(**SECOND, cmds=Commands("env", "env"), run_secret="h1dden")
    host = plan.hosts[1]
    places = {"run_dir": tmp_path / "run", "pid_file": tmp_path / "pid", "workdir": tmp_path}
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\nenv | sed s/^/agent:/\n")
    python.chmod(0o700)
    text = render(plan, replace(host, python=str(python), **places))
    for written in (text, format_json(plan.to_json()), repr(plan)):
        assert "h1dden" not in written
        assert "s3cr3t" not in written
    fields = {value.name: value.value for value in host.environment if value.secret}
    assert set(fields) == {"FLAGSCALE_RUN_SECRET", "FLAGSCALE_NOTIFY_WEBHOOK"}
    result = subprocess.run(
        ["bash", "-c", text],
        env={**os.environ, **fields},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in result.stdout.splitlines() if "h1dden" in line or "s3cr3t" in line]
    assert sorted(lines) == [
        "agent:FLAGSCALE_NOTIFY_WEBHOOK=https://chat/s3cr3t",
        "agent:FLAGSCALE_RUN_SECRET=h1dden",
    ]


TEXTS = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=80)


@settings(max_examples=25, deadline=None)
@given(value=TEXTS, argument=TEXTS, command=TEXTS)
def test_bash_reproduces_any_value(
    value: str, argument: str, command: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs the head of the script only, and prints the assigned values."""
    plan = _plan_of(value, argument, command, tmp_path_factory.getbasetemp())
    head = render(plan, plan.hosts[0]).partition(FRAME)[0]
    show = 'printf "%s\\0" "$VALUE" "${agent[4]}" "${program[@]}" "$before_start"\n'
    result = subprocess.run(
        ["bash", "-c", head + show], capture_output=True, check=True, timeout=30
    )
    decoded = result.stdout.decode().split("\0")[:-1]
    expected_command = command.rstrip("\n") + "\n" if command.strip() else ""
    assert AgentOptions.from_json(decoded.pop(1)) == plan.hosts[0].agent
    assert decoded == [value, argument, expected_command]


def _plan_of(value: str, word: str, command: str, workdir: Path) -> LaunchPlan:
    directory = Path("/x")
    agent = AgentOptions(
        max_restarts=0,
        on_failure="stop",
        lost_host_timeout=1.0,
        start_timeout=1.0,
        hang_detection_timeout=1.0,
        run_name=value,
        run_dir=directory,
        name="localhost",
        node_rank=0,
        first_rank=0,
        nproc=1,
        stop_grace=1.0,
    )
    host = HostPlan(
        node_rank=0,
        name="localhost",
        device_type=None,
        address="localhost",
        nproc=1,
        first_rank=0,
        environment=(EnvironmentVariable("VALUE", value, "envs"),),
        python_path=("/p",),
        workdir=workdir,
        python="python",
        agent=agent,
        starter=("torchrun",),
        program=(word,),
        run_dir=directory,
        script=directory,
        output=directory,
        pid_file=directory,
        before_start=command,
    )
    return LaunchPlan(
        run_id="r",
        name=value,
        exp_dir=directory,
        log_dir=None,
        master_addr="127.0.0.1",
        master_port=1,
        hosts=(host,),
        external=True,
        start_timeout=1,
        stop_grace=1,
        runner=RunnerHandle("local"),
    )


def test_a_very_long_path_and_list(make_plan: MakePlan, tmp_path: Path) -> None:
    long = Path("/" + "/".join(["directory with a long name"] * 100))
    plan = make_plan(train=train_arguments(data={"data_path": [str(long)] * 50}))
    path = tmp_path / "script.sh"
    path.write_text(render(plan, plan.hosts[0]), encoding="utf-8")
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_thousands_of_unordered_names_reach_the_agent(make_plan: MakePlan, tmp_path: Path) -> None:
    """One argument of a command line is limited to 128 KiB, and these names are longer."""
    names = [f"ip-10-{n % 7}-{n % 251}-{n}.us-west-2.compute.internal" for n in range(5000)]
    plan = make_plan(
        hosts=tuple(Host(name, 1) for name in names),
        machine=Machine("python", tmp_path, tmp_path, cpus=8, devices={}),
    )
    host = plan.hosts[0]
    assert len(host.agent.to_json()) > 1 << 17
    path = tmp_path / "script.sh"
    show = '/usr/bin/env printf "%s\\n" "${agent[@]:3}"\n'
    path.write_text(render(plan, host).partition(FRAME)[0] + show, encoding="utf-8")
    result = subprocess.run(["bash", str(path)], capture_output=True, text=True, check=True)
    option, _, output = result.stdout.partition("\n")
    assert option == "--options"
    assert AgentOptions.from_json(output) == host.agent
    assert AgentOptions.from_json(output).names == names


def test_rendering_changes_nothing_but_the_host(make_plan: MakePlan) -> None:
    plan = make_plan(hosts=(Host("a", 1), Host("b", 1)))
    first, second = (render(plan, host) for host in plan.hosts)
    assert first != second
    assert render(replace(plan), plan.hosts[0]) == first


def test_every_variable_of_the_script_is_reserved(
    case: tuple[str, str],
) -> None:
    script = case[1]
    assigned = set(re.findall(r"(?m)^ *([a-z_]+)=", script))
    read_variables = re.findall(r"(?m)^ *(?:IFS= )?read -r(?: -d '')? ([a-z_ ]+?) *<", script)
    assigned.update(name for names in read_variables for name in names.split())
    assert {"run_label", "before_start", "other_ticks", "agent_pid"} <= assigned
    script_names = {name for name in assigned if not name.startswith("host_")}
    assert [name for name in sorted(script_names) if not SCRIPT_VARIABLES.fullmatch(name)] == []
