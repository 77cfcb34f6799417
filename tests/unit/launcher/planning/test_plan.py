from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from support.arguments import arguments_of, train_arguments

from flagscale.config.schema import (
    PROJECT,
    Environments,
    Experiment,
    HostOverride,
    Notify,
    Runner,
    Task,
)
from flagscale.errors import ConfigError
from flagscale.files import format_json
from flagscale.hosts.hostfile import Host
from flagscale.launcher.liveness.options import NOTIFY_COMMAND_VARIABLE, Policy
from flagscale.launcher.planning.assignment import assign_ranks, describe_machines
from flagscale.launcher.planning.model import HostPlan, LaunchPlan, Machine, RunnerHandle
from flagscale.launcher.planning.per_host import resolve_all_settings
from flagscale.launcher.planning.plan import plan
from flagscale.launcher.planning.script import render

MakePlan = Callable[..., LaunchPlan]


def values(host: HostPlan) -> dict[str, str]:
    return {value.name: value.value for value in host.environment}


def options(argv: tuple[str, ...]) -> dict[str, str]:
    return {
        argument: argv[index + 1]
        for index, argument in enumerate(argv[:-1])
        if argument.startswith("--")
    }


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
    plan = values(make_plan(hosts=(host,), envs=envs).hosts[0])
    assert {name: plan[name] for name in expected} == expected


def test_each_value_has_its_origin(make_plan: MakePlan) -> None:
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
    ("configured", "inherited", "expected"),
    [
        pytest.param({}, {}, "4", id="cores-by-ranks"),
        pytest.param({"OMP_NUM_THREADS": "1"}, {}, "1", id="the-users"),
        pytest.param({}, {"OMP_NUM_THREADS": "3"}, "3", id="inherited"),
    ],
)
def test_threads(
    make_plan: MakePlan,
    machine: Machine,
    configured: dict[str, str],
    inherited: dict[str, str],
    expected: str,
) -> None:
    on = replace(machine, environment=inherited)
    host = make_plan(machine=on, envs=Environments(configured)).hosts[0]
    assert values(host).get("OMP_NUM_THREADS") == expected


@pytest.mark.parametrize(("gpus", "dynamo", "nvls"), [(0, "1", None), (2, None, "0")])
def test_defaults_by_device(
    make_plan: MakePlan, machine: Machine, gpus: int, dynamo: str | None, nvls: str | None
) -> None:
    plan = values(make_plan(machine=replace(machine, devices={"cuda": gpus})).hosts[0])
    assert plan.get("TORCHDYNAMO_DISABLE") == dynamo
    assert plan.get("NCCL_NVLS_ENABLE") == nvls


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
    plan = make_plan(
        hosts=(Host("localhost", slots),),
        machine=replace(machine, devices={"cuda": gpus}),
        runner=runner,
        envs=Environments(envs),
    )
    assert plan.world_size == expected


def test_ranks_are_numbered_through_the_hosts(make_plan: MakePlan) -> None:
    hosts = (Host("a", 2), Host("b", 3))
    plan = make_plan(hosts=hosts, runner=Runner(nproc_per_node=4))
    assert [list(host.ranks) for host in plan.hosts] == [[0, 1], [2, 3, 4]]
    for host in plan.hosts:
        starter_options = options(host.starter)
        assert starter_options["--nnodes"] == "2"
        assert starter_options["--node_rank"] == str(host.node_rank)
        assert starter_options["--nproc_per_node"] == str(host.nproc)
        assert starter_options["--master_addr"] == "a"


def test_hosts_and_ranks_are_numbered_and_identical_hosts_share_objects(
    make_experiment: Callable[..., Experiment], machine: Machine
) -> None:
    override = HostOverride(python="/own/bin/python", arguments=arguments_of({"a": 1}))
    experiment = make_experiment(
        by_host={"c": override}, by_type={"T": HostOverride(build_dir=Path("/b"))}
    )
    hosts = [Host("a", 1), Host("b", 2), Host("c", 1), Host("d", 2, "T")]
    settings = resolve_all_settings(experiment, hosts)
    a, b, c, d = assign_ranks(experiment, hosts, [machine] * 4, settings)
    assert [(s.node_rank, s.first_rank, s.nproc) for s in (a, b, c, d)] == [
        (0, 0, 1),
        (1, 1, 2),
        (2, 3, 1),
        (3, 4, 2),
    ]
    assert settings[0] is settings[1]
    assert a.machine is b.machine
    assert (a.machine.python, c.machine.python) == (machine.python, "/own/bin/python")
    assert (c.machine.project, d.machine.project) == (machine.project, Path("/b"))


@pytest.mark.parametrize(
    ("no_shared_fs", "build_dir", "expected"),
    [
        pytest.param(False, None, Path.cwd(), id="shared"),
        pytest.param(True, None, PROJECT, id="not-shared"),
        pytest.param(True, Path("/there"), Path("/there"), id="elsewhere"),
    ],
)
def test_the_working_directory_of_another_host(
    make_experiment: Callable[..., Experiment],
    no_shared_fs: bool,
    build_dir: Path | None,
    expected: Path,
) -> None:
    runner = Runner(no_shared_fs=no_shared_fs, build_dir=build_dir)
    experiment, hosts = make_experiment(runner=runner), [Host("a", 1), Host("b", 1)]
    machines = describe_machines(hosts, {}, is_local=False, shared_fs=not no_shared_fs)
    assignments = assign_ranks(experiment, hosts, machines)
    launch_plan = plan(
        experiment, assignments, run_id="r", master_port=1, runner=RunnerHandle("ssh")
    )
    assert [host.workdir for host in launch_plan.hosts] == [expected] * 2


def test_planning_is_deterministic(
    make_experiment: Callable[..., Experiment], machine: Machine
) -> None:
    """The same assignments result in the same plan; without a secret no agent has peers."""
    experiment, hosts = make_experiment(), [Host("a", 1), Host("b", 1)]
    assignments = assign_ranks(experiment, hosts, [machine] * 2)
    fields: dict[str, Any] = {
        "run_id": "r",
        "master_port": 1,
        "runner": RunnerHandle("x", {"y": 1}),
    }
    assert plan(experiment, assignments, **fields) == plan(experiment, assignments, **fields)
    assert "FLAGSCALE_RUN_SECRET" not in values(plan(experiment, assignments, **fields).hosts[0])
    launch_plan = plan(experiment, assignments, **fields, run_secret="s3cr3t").hosts
    assert [values(host)["FLAGSCALE_RUN_SECRET"] for host in launch_plan] == ["s3cr3t"] * 2


def test_agents_get_the_runners_keys_by_name(make_plan: MakePlan) -> None:
    runner = Runner(
        max_restarts=3,
        on_failure="leave",
        lost_host_timeout=7.0,
        start_timeout=8.0,
        hang_detection_timeout=9.0,
        stop_grace=10.0,
        liveness_port=4000,
        notify=Notify("mail", on=("failed",)),
    )
    hosts = (Host("a1", 2), Host("b", 1, addr="10.0.0.2"), Host("a2", 1))
    first, second, third = (host.agent for host in make_plan(hosts=hosts, runner=runner).hosts)
    for name in (f.name for f in fields(Policy)):
        assert getattr(first, name) == getattr(runner, name)
    assert (first.stop_grace, first.liveness_port, first.master_addr) == (10.0, 4000, "a1")
    assert (first.hosts, first.master_name) == (("a1", "b", "a2"), "")
    assert (second.hosts, second.master_name) == ((), "a1")
    assert [host.notify_on for host in (first, second, third)] == [("failed",), ("failed",), ()]
    assert (third.name, third.node_rank, third.first_rank, third.nproc) == ("a2", 2, 3, 1)
    single_agent = make_plan(runner=runner).hosts[0].agent
    assert (single_agent.liveness_port, single_agent.master_addr, single_agent.hosts) == (
        None,
        "",
        (),
    )


def test_agents_get_the_places_of_heterogeneous_hosts(make_plan: MakePlan) -> None:
    """Host 0 gets the places of all hosts, since it may lose any; the other hosts get that of host
    0.
    """
    meshes = {"enable_hetero": True, "hetero_process_meshes": ["tp=2,dp=2", "dp=2"]}
    model = {"num_layers": 4, "micro_batch_size": 1}
    fields = {"train": train_arguments(system=meshes, model=model), "task": Task()}
    hosts = tuple(Host(name, 2) for name in ("a", "b", "c"))
    first, second, third = (host.agent for host in make_plan(hosts=hosts, **fields).hosts)
    assert first.places == ("0 stage 0 of 2, mesh 0 (tp2 dp2)", "2 stage 1 of 2, mesh 1 (dp2)")
    assert first.master_place == ""
    assert second.master_place == third.master_place == "stage 0 of 2, mesh 0 (tp2 dp2)"
    assert second.places == ()
    homogeneous_hosts = make_plan(hosts=hosts, task=Task()).hosts
    assert [(host.agent.places, host.agent.master_place) for host in homogeneous_hosts] == [
        ((), "")
    ] * 3


@pytest.mark.parametrize("address", ["-rf", "a b", "a;b", "--help", "10.0.0.1:29500", ""])
@pytest.mark.parametrize("key", ["master_addr", "rdzv_endpoint"])
def test_master_address_that_is_none_is_refused(
    make_plan: MakePlan, key: str, address: str
) -> None:
    value = address if key == "master_addr" else f"{address}:29500"
    if not address:
        assert make_plan(runner=Runner(master_addr=address)).master_addr == "127.0.0.1"
    else:
        with pytest.raises(ConfigError, match=rf"experiment\.runner\.{key}: expected a host name"):
            make_plan(runner=Runner(**{key: value}))


@pytest.mark.parametrize(
    "address", ["node-1.cluster", "node_1", "10.0.0.1", "fe80::1", "::1", "fe80::1%eth0", "[::1]"]
)
def test_names_and_addresses_of_the_master(make_plan: MakePlan, address: str) -> None:
    assert make_plan(runner=Runner(master_addr=address)).master_addr == address


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
    argv = make_plan(runner=runner).hosts[0].starter
    allowed = {
        *("-u", "--nnodes", "--node_rank", "--nproc_per_node", "--rdzv_id"),
        *("--master_addr", "--master_port", "--log_dir", "--redirects", "--tee"),
        *("--max_restarts", "--monitor_interval", "--no_python"),
    }
    assert {argument for argument in argv if argument.startswith("-")} == allowed
    assert argv[-3:] == ("--monitor_interval", "1", "--no_python")


def test_rendezvous_id_is_the_run_id_or_the_users(make_plan: MakePlan) -> None:
    assert options(make_plan().hosts[0].starter)["--rdzv_id"] == "20250102-030405-abcdef"
    plan = options(make_plan(runner=Runner(rdzv_id="mine")).hosts[0].starter)
    assert plan["--rdzv_id"] == "mine"
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
    argv = make_plan(train=train_arguments(system=system)).hosts[0].program
    assert {name: options(argv)[name] for name in expected} == expected
    assert argv.count("--save") == 1


def test_null_switches_a_directory_off(make_plan: MakePlan) -> None:
    system = {"checkpoint": {"save": None}, "logging": {"tensorboard_dir": None}}
    argv = make_plan(train=train_arguments(system=system)).hosts[0].program
    assert "--save" not in argv
    assert "--tensorboard-dir" not in argv
    assert options(argv)["--load"] == "/data/runs/tiny/checkpoints"


def test_json_is_json_and_holds_no_secret(make_plan: MakePlan) -> None:
    envs = Environments({"WANDB_API_KEY": "s3cr3t", "WANDB_MODE": "offline"})
    plan = make_plan(envs=envs)
    text = format_json(plan.to_json())
    assert "s3cr3t" not in text
    assert "s3cr3t" not in repr(plan)
    record = json.loads(text)
    assert record["world_size"] == 2
    variables = {value["name"]: value for value in record["hosts"][0]["environment"]}
    assert variables["WANDB_API_KEY"] == {"name": "WANDB_API_KEY", "origin": "envs", "secret": True}
    assert variables["WANDB_MODE"]["value"] == "offline"


def test_a_secret_among_the_arguments_is_refused(make_plan: MakePlan) -> None:
    train = train_arguments(system={"logging": {"wandb_api_key": "s3cr3t"}})
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
        ("run_dir", "x", "is a variable of the script"),
        ("UID", "7", "is reserved by bash"),
    ],
)
def test_impossible_variables(make_plan: MakePlan, name: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(envs=Environments({name: value}))


def test_python_path_puts_the_adapted_backend_first(make_plan: MakePlan) -> None:
    host = make_plan(envs=Environments({"PYTHONPATH": "/mine"})).hosts[0]
    backend = "/opt/flagscale/third_party/Megatron-LM"
    hooks = "/opt/flagscale/flagscale/rank_hooks"
    assert host.python_path == (backend, hooks, "/opt/flagscale")
    assert values(host)["PYTHONPATH"] == "/mine"
    own_program = make_plan(task=Task()).hosts[0]
    assert own_program.python_path == (backend, "/opt/flagscale")


def test_a_foreign_programs_packages_come_before_the_backend(make_plan: MakePlan) -> None:
    packages = (Path("/theirs/third_party/Megatron-LM"), Path("/theirs"))
    host = make_plan(task=Task(Path("/theirs/x.py"), external=True, packages=packages)).hosts[0]
    assert host.python_path[:2] == tuple(map(str, packages))
    assert host.python_path[-1] == "/opt/flagscale"


def test_the_programs_own_arguments(make_plan: MakePlan) -> None:
    task = Task(entrypoint=Path("/x y/program.py"), external=True)
    train = train_arguments(
        model={"a_b": 1, "c": {"d_e": True, "f": False, "g": None}, "h": [1, "x y"]}
    )
    argv = make_plan(task=task, train=train).hosts[0].program
    assert argv[:7] == ("/x y/program.py", "--a-b", "1", "--d-e", "--h", "1", "x y")


def test_device_type_is_used_on_this_machine_too(make_plan: MakePlan) -> None:
    envs = Environments(by_type={"CPU": {"KIND": "cpu"}})
    host = make_plan(hosts=(Host("localhost", 1, "CPU"),), envs=envs).hosts[0]
    assert values(host)["KIND"] == "cpu"


def test_every_host_that_may_coordinate_sends_notifications(make_plan: MakePlan) -> None:
    notify = Notify("mail", "https://chat/s3cr3t", on=("failed",))
    runner = Runner(nproc_per_node=1, spares=1, on_bad_host="replace", notify=notify)
    launch_plan = make_plan(hosts=tuple(Host(f"h{n}", 1) for n in range(4)), runner=runner)
    for host in launch_plan.hosts:
        assert host.agent.notify_on == ("failed",)
        assert values(host)[NOTIFY_COMMAND_VARIABLE] == "mail"


def test_spare_has_an_agent_without_ranks(make_plan: MakePlan) -> None:
    runner = Runner(nproc_per_node=2, spares=1, on_bad_host="replace")
    hosts = tuple(Host(f"h{number}", 2) for number in range(3))
    launch_plan = make_plan(hosts=hosts, runner=runner)
    first, second, spare = launch_plan.hosts
    assert launch_plan.world_size == 4
    assert [len(host.ranks) for host in launch_plan.hosts] == [2, 2, 0]
    assert [host.is_spare for host in launch_plan.hosts] == [False, False, True]
    assert (first.agent.spares, first.agent.on_bad_host) == (1, "replace")
    # Each host may coordinate the run after the first one is lost.
    for host in launch_plan.hosts:
        assert host.agent.names == host.agent.addresses_by_host == ["h0", "h1", "h2"]
    assert (spare.agent.is_spare, spare.agent.nproc) == (True, 2)
    assert {options(host.starter)["--nnodes"] for host in launch_plan.hosts} == {"2"}
    assert options(spare.starter)["--node_rank"] == "2", "replaced by the place that it takes"
    assert values(spare)["OMP_NUM_THREADS"] == values(second)["OMP_NUM_THREADS"]
    text = render(launch_plan, spare)
    assert "host 2 of 3, a spare, without ranks until it takes the place of a lost host." in text
