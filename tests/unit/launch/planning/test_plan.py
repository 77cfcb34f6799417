from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.schema import Environments, Runner, Task, Train
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import Host
from flagscale.launch.planning.plan import HostPlan, LaunchPlan, Machine

MakePlan = Callable[..., LaunchPlan]


def values(host: HostPlan) -> dict[str, str]:
    return {value.name: value.value for value in host.environment}


def options(words: tuple[str, ...]) -> dict[str, str]:
    return {word: words[at + 1] for at, word in enumerate(words[:-1]) if word.startswith("--")}


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (Host("h0", 1, "A800"), {"A": "10", "B": "2"}),
        (Host("h1", 1, "BI"), {"A": "20", "B": "99"}),
        (Host("h2", 1), {"A": "1", "B": "2"}),
    ],
)
def test_environment_precedence(make_plan: MakePlan, host: Host, expected: dict[str, str]) -> None:
    envs = Environments(
        common={"A": "1", "B": "2"},
        by_type={"A800": {"A": "10"}, "BI": {"A": "20"}},
        by_host={"h1": {"B": "99"}},
    )
    given = values(make_plan(hosts=(host,), envs=envs).hosts[0])
    assert {name: given[name] for name in expected} == expected


def test_each_value_tells_where_it_comes_from(make_plan: MakePlan) -> None:
    envs = Environments({"A": "1", "B": "1", "C": "1"}, {"T": {"B": "2"}}, {"h": {"C": "3"}})
    host = make_plan(hosts=(Host("h", 1, "T"),), envs=envs).hosts[0]
    origins = {value.name: value.origin for value in host.environment}
    assert origins["A"] == "envs"
    assert origins["B"] == "envs.device_type_specific.T"
    assert origins["C"] == "envs.node_specific.h"
    assert origins["OMP_NUM_THREADS"] == "default"
    assert origins["FLAGSCALE_RUN_ID"] == "run"


def test_one_hosts_overrides_do_not_leak_to_the_next(make_plan: MakePlan) -> None:
    envs = Environments(by_host={"h0": {"ONLY": "here"}})
    first, second = make_plan(hosts=(Host("h0", 1), Host("h1", 1)), envs=envs).hosts
    assert values(first)["ONLY"] == "here"
    assert "ONLY" not in values(second)


@pytest.mark.parametrize(
    ("given", "inherited", "expected"),
    [
        pytest.param({}, {}, "4", id="cores-by-ranks"),
        pytest.param({"OMP_NUM_THREADS": "1"}, {}, "1", id="the-users"),
        pytest.param({}, {"OMP_NUM_THREADS": "3"}, "3", id="inherited"),
    ],
)
def test_threads(
    make_plan: MakePlan,
    machine: Machine,
    given: dict[str, str],
    inherited: dict[str, str],
    expected: str,
) -> None:
    on = replace(machine, environment=inherited)
    host = make_plan(machine=on, envs=Environments(given)).hosts[0]
    assert values(host).get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(("gpus", "dynamo", "nvls"), [(0, "1", None), (2, None, "0")])
def test_defaults_by_device(
    make_plan: MakePlan, machine: Machine, gpus: int, dynamo: str | None, nvls: str | None
) -> None:
    given = values(make_plan(machine=replace(machine, gpus=gpus)).hosts[0])
    assert given.get("TORCHDYNAMO_DISABLE") == dynamo
    assert given.get("NCCL_NVLS_ENABLE") == nvls


@pytest.mark.parametrize(
    ("runner", "envs", "slots", "gpus", "expected"),
    [
        pytest.param(Runner(), {}, None, 0, 1, id="nothing-said"),
        pytest.param(Runner(nproc_per_node=8), {}, 2, 0, 2, id="slots"),
        pytest.param(Runner(nproc_per_node=8), {"CUDA_VISIBLE_DEVICES": "0,1"}, 4, 8, 2, id="all"),
        pytest.param(Runner(nproc_per_node="auto"), {}, None, 8, 8, id="auto"),
        pytest.param(Runner(nproc_per_node="auto"), {}, None, 0, 1, id="auto-on-a-cpu"),
        pytest.param(Runner(nproc_per_node="auto"), {}, 4, 8, 4, id="auto-and-slots"),
    ],
)
def test_ranks(
    make_plan: MakePlan,
    machine: Machine,
    runner: Runner,
    envs: dict[str, str],
    slots: int | None,
    gpus: int,
    expected: int,
) -> None:
    made = make_plan(
        hosts=(Host("localhost", slots),),
        machine=replace(machine, gpus=gpus),
        runner=runner,
        envs=Environments(envs),
    )
    assert made.world_size == expected


def test_ranks_are_numbered_through_the_hosts(make_plan: MakePlan) -> None:
    hosts = (Host("a", 2), Host("b", 3))
    made = make_plan(hosts=hosts, runner=Runner(nproc_per_node=4))
    assert [list(host.ranks) for host in made.hosts] == [[0, 1], [2, 3, 4]]
    for host in made.hosts:
        given = options(host.torchrun)
        assert given["--nnodes"] == "2"
        assert given["--node_rank"] == str(host.rank)
        assert given["--nproc_per_node"] == str(host.nproc)
        assert given["--master_addr"] == "a"


def test_launcher_only_keys_never_reach_torchrun(make_plan: MakePlan) -> None:
    runner = Runner(
        nproc_per_node=2,
        no_shared_fs=True,
        hang_detection_timeout=7.0,
        enable_monitoring=False,
        per_node_task=True,
        stop_grace=5.0,
        extra={"monitor_interval": "1", "no_python": None},
    )
    words = make_plan(runner=runner).hosts[0].torchrun
    allowed = {
        *("-u", "-m", "--nnodes", "--node_rank", "--nproc_per_node", "--rdzv_id"),
        *("--master_addr", "--master_port", "--log_dir", "--redirects", "--tee"),
        *("--max_restarts", "--monitor_interval", "--no_python"),
    }
    assert {word for word in words if word.startswith("-")} == allowed
    assert words[-3:] == ("--monitor_interval", "1", "--no_python")


def test_rendezvous_has_a_name_of_its_own_and_can_be_given(make_plan: MakePlan) -> None:
    assert options(make_plan().hosts[0].torchrun)["--rdzv_id"] == "20250102-030405-abcdef"
    given = options(make_plan(runner=Runner(rdzv_id="mine")).hosts[0].torchrun)
    assert given["--rdzv_id"] == "mine"
    endpoint = make_plan(runner=Runner(rdzv_endpoint="10.0.0.7:2900"))
    assert endpoint.master_addr == "10.0.0.7"
    with pytest.raises(ConfigError, match="expected host:port"):
        make_plan(runner=Runner(rdzv_endpoint="a:b"))


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        pytest.param({}, {"--save": "/data/runs/tiny/checkpoints"}, id="defaults"),
        pytest.param({"checkpoint": {"save": "/elsewhere"}}, {"--save": "/elsewhere"}, id="save"),
        pytest.param(
            {"logging": {"tensorboard_dir": "/tb"}}, {"--tensorboard-dir": "/tb"}, id="tb"
        ),
    ],
)
def test_directories(make_plan: MakePlan, system: dict[str, Any], expected: dict[str, str]) -> None:
    words = make_plan(train=Train(system=system)).hosts[0].program
    assert {name: options(words)[name] for name in expected} == expected
    assert words.count("--save") == 1


def test_null_switches_a_directory_off(make_plan: MakePlan) -> None:
    system = {"checkpoint": {"save": None}, "logging": {"tensorboard_dir": None}}
    words = make_plan(train=Train(system=system)).hosts[0].program
    assert "--save" not in words
    assert "--tensorboard-dir" not in words
    assert options(words)["--load"] == "/data/runs/tiny/checkpoints"


def test_json_is_json_and_holds_no_secret(make_plan: MakePlan) -> None:
    envs = Environments({"WANDB_API_KEY": "s3cr3t", "WANDB_MODE": "offline"})
    made = make_plan(envs=envs)
    text = json.dumps(made.to_json())
    assert "s3cr3t" not in text
    assert "s3cr3t" not in repr(made)
    record = json.loads(text)
    assert record["world_size"] == 2
    shown = {value["name"]: value for value in record["hosts"][0]["environment"]}
    assert shown["WANDB_API_KEY"] == {"name": "WANDB_API_KEY", "origin": "envs", "secret": True}
    assert shown["WANDB_MODE"]["value"] == "offline"


def test_a_secret_among_the_arguments_is_refused(make_plan: MakePlan) -> None:
    train = Train(system={"logging": {"wandb_api_key": "s3cr3t"}})
    with pytest.raises(ConfigError, match=r"train\.system\.logging\.wandb_api_key") as raised:
        make_plan(train=train)
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("1A", "x", "is no name"),
        ("A B", "x", "is no name"),
        ("A;rm", "x", "is no name"),
        ("FLAGSCALE_RUN_ID", "x", "set by the launcher"),
        ("A", "a\0b", "NUL"),
    ],
)
def test_impossible_variables(make_plan: MakePlan, name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(envs=Environments({name: value}))


def test_python_path_puts_the_adapted_backend_first(make_plan: MakePlan) -> None:
    host = make_plan(envs=Environments({"PYTHONPATH": "/mine"})).hosts[0]
    backend = "/opt/flagscale/third_party/Megatron-LM"
    assert host.python_path == (backend, "/opt/flagscale")
    assert values(host)["PYTHONPATH"] == "/mine"


def test_the_programs_own_arguments(make_plan: MakePlan) -> None:
    task = Task(entrypoint=Path("/x y/program.py"), external=True)
    train = Train(model={"a_b": 1, "c": {"d_e": True, "f": False, "g": None}, "h": [1, "x y"]})
    words = make_plan(task=task, train=train).hosts[0].program
    assert words[:7] == ("/x y/program.py", "--a-b", "1", "--d-e", "--h", "1", "x y")


def test_device_type_is_used_on_this_machine_too(make_plan: MakePlan) -> None:
    envs = Environments(by_type={"CPU": {"KIND": "cpu"}})
    host = make_plan(hosts=(Host("localhost", 1, "CPU"),), envs=envs).hosts[0]
    assert values(host)["KIND"] == "cpu"
