"""Tests of the preflight checks that combine the results of many hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from flagscale.config.arguments.spec.train_arguments import read_arguments
from flagscale.config.schema import Environments, Experiment, Runner
from flagscale.errors import ConfigError, UnreachableError
from flagscale.hosts.errors import ChangedHostKeyError, NoRouteError
from flagscale.hosts.facts import NOT_WRITABLE, HostFacts, PathState
from flagscale.hosts.hostfile import Host
from flagscale.hosts.python_environment import PythonEnvironment
from flagscale.launcher.planning.model import LaunchPlan
from flagscale.launcher.planning.per_host import resolve_all_settings
from flagscale.launcher.preflight.checks import Check, compute_exit_code, require_passed
from flagscale.launcher.preflight.host_probe import HostReplies
from flagscale.launcher.preflight.hosts import check_hosts, require_usable
from flagscale.launcher.preflight.user_code import (
    CheckpointStorage,
    EvaluationTasks,
    MetricsSinks,
)

HOSTS = tuple(Host(f"n{number:02}", 1) for number in range(1, 31))
PYTHON = PythonEnvironment("3.11.7", "/opt/python", {"torch": "2.13.0", "numpy": "2.0"})
PLACE = PathState("/data", user="trainer", free_bytes=1 << 40)
FACTS = HostFacts(
    cpus=8,
    devices={},
    interface="eth0",
    boot_id="b",
    clock_offset=0.0,
    port=29500,
    python=PYTHON,
    has_project=True,
    exp_dir=PLACE,
)


def make_replies(experiment: Experiment, facts: dict[int, HostFacts], **more: Any) -> HostReplies:
    needed = ({"/d/x.bin": "train.data.data_path"},) * len(HOSTS)
    settings = resolve_all_settings(experiment, HOSTS)
    return HostReplies(HOSTS, settings, required_paths=needed, facts=facts, **more)


@pytest.fixture
def run_checks(
    make_plan: Callable[..., LaunchPlan], make_experiment: Callable[..., Experiment]
) -> Callable[..., list[Check]]:
    def run(changes: dict[int, HostFacts] | None = None, **errors: Any) -> list[Check]:
        facts = dict.fromkeys(range(len(HOSTS)), FACTS) | (changes or {})
        unreachable = errors.get("errors", {})
        facts = {rank: host_facts for rank, host_facts in facts.items() if rank not in unreachable}
        experiment = make_experiment()
        replies = make_replies(
            experiment, facts, errors=unreachable, code_digest=errors.get("code", "")
        )
        plan = make_plan(hosts=HOSTS, runner=Runner(nproc_per_node=1))
        return check_hosts(experiment, plan, replies)

    return run


def python(**changes: Any) -> HostFacts:
    return replace(FACTS, python=replace(PYTHON, **changes))


def place(**changes: Any) -> HostFacts:
    return replace(FACTS, exp_dir=replace(PLACE, **changes))


def test_equal_hosts_are_one_row(run_checks: Callable[..., list[Check]]) -> None:
    results = run_checks()
    assert all(check.ok for check in results)
    names = [check.name for check in results]
    assert len(names) == len(set(names))
    assert {check.hosts for check in results} == {"n[01-30]", "n01"}
    assert compute_exit_code(results) == 0


@pytest.mark.parametrize(
    ("facts", "name", "message"),
    [
        pytest.param(
            python(packages={"torch": "2.12.0", "numpy": "2.0"}),
            "packages",
            "torch 2.12.0 (others: 2.13.0)",
            id="other-torch",
        ),
        pytest.param(python(packages={"numpy": "2.0"}), "packages", "no torch", id="no-torch"),
        pytest.param(
            python(version="3.10.1"), "python", "the other hosts have 3.11.7", id="python"
        ),
        pytest.param(
            replace(FACTS, python=None, python_error="No such file"), "python", "No such", id="none"
        ),
        pytest.param(replace(FACTS, has_project=False), "code", "no flagscale", id="no-code"),
        pytest.param(
            replace(FACTS, missing_paths=("/d/x.bin",)),
            "files",
            "train.data.data_path: /d/x.bin",
            id="no-data",
        ),
        pytest.param(replace(FACTS, interface=None), "interface", "means nothing", id="interface"),
        pytest.param(
            replace(FACTS, is_master_loopback=True, boot_id="another"),
            "interface",
            "n01 is a loopback address there",
            id="loopback",
        ),
        pytest.param(place(free_bytes=1000), "exp_dir", "0 MiB free", id="disk"),
        pytest.param(
            place(problem=NOT_WRITABLE),
            "exp_dir",
            "/data is not writable for user trainer",
            id="rights",
        ),
        pytest.param(
            place(problem="not a directory"), "exp_dir", "/data is not a directory", id="file"
        ),
        pytest.param(replace(FACTS, clock_offset=-90.0), "clock", "90 s behind ours", id="clock"),
        pytest.param(
            replace(FACTS, live_run_id="2025-x"), "earlier run", "2025-x is alive", id="alive"
        ),
    ],
)
def test_deviating_host_is_named(
    run_checks: Callable[..., list[Check]], facts: HostFacts, name: str, message: str
) -> None:
    results = run_checks({7: facts})
    (failed,) = [check for check in results if not check.ok and check.name == name]
    assert failed.hosts == "n08"
    assert message in failed.found
    assert compute_exit_code(results) == 2
    with pytest.raises(ConfigError, match="n08"):
        require_passed(results)


def test_names_of_one_machine_may_meet_at_its_loopback_address(
    run_checks: Callable[..., list[Check]],
) -> None:
    results = run_checks(
        {rank: replace(FACTS, is_master_loopback=True) for rank in range(len(HOSTS))}
    )
    assert compute_exit_code(results) == 0


def test_code_is_compared_without_a_shared_file_system(
    run_checks: Callable[..., list[Check]],
) -> None:
    same = {rank: python(code="d1") for rank in range(len(HOSTS))}
    assert compute_exit_code(run_checks(same, code="d1")) == 0
    results = run_checks({**same, 3: python(code="d2")}, code="d1")
    assert [check.hosts for check in results if not check.ok] == ["n04"]


def test_unreachable_hosts_come_first_and_decide(run_checks: Callable[..., list[Check]]) -> None:
    errors = {
        4: NoRouteError("n05", "no route to 10.0.0.5"),
        5: NoRouteError("n06", "no route to 10.0.0.6"),
        9: ChangedHostKeyError("n10", "another key", hint="ssh-keygen -R n10"),
    }
    results = run_checks({7: replace(FACTS, clock_offset=90.0)}, errors=errors)
    rows = [(check.hosts, check.ok) for check in results if check.name == "reachable"]
    assert rows[:2] == [("n[05-06]", False), ("n10", False)]
    # Names are in a separate column.
    assert results[0].found == "no route to host; for example: n05: no route to 10.0.0.5"
    assert results[1].found == "another key"
    assert compute_exit_code(results) == 3
    with pytest.raises(UnreachableError, match=r"n\[05-06\]") as raised:
        require_passed(results)
    assert "ssh-keygen -R n10" in str(raised.value)


@pytest.mark.parametrize(
    ("runner", "expected"),
    [
        pytest.param(
            {}, ["29500, free, picked there", "29501, free, next to the master port"], id="picked"
        ),
        pytest.param(
            {"master_port": 29500, "liveness_port": 7000},
            [
                "29500, free, as experiment.runner.master_port says",
                "7000, free, as experiment.runner.liveness_port says",
            ],
            id="given",
        ),
        pytest.param(
            {"rdzv_endpoint": "n01:29500"},
            [
                "29500, free, as experiment.runner.rdzv_endpoint says",
                "29501, free, next to the master port",
            ],
            id="endpoint",
        ),
    ],
)
def test_both_ports_are_reported_with_their_keys(
    make_plan: Callable[..., LaunchPlan],
    make_experiment: Callable[..., Experiment],
    runner: dict[str, Any],
    expected: list[str],
) -> None:
    configured = Runner(nproc_per_node=1, **runner)
    experiment = make_experiment(runner=configured)
    replies = make_replies(experiment, {0: FACTS})
    results = check_hosts(experiment, make_plan(hosts=HOSTS, runner=configured), replies)
    rows = [check for check in results if check.name in ("master port", "liveness port")]
    assert [check.found for check in rows] == expected
    assert {check.hosts for check in rows} == {"n01"}


@pytest.mark.parametrize(
    ("runner", "busy", "key", "advice"),
    [
        ({"master_port": 29500}, 29500, "master_port", "choose another one"),
        ({"master_port": 29500}, 29501, "liveness_port", "next to experiment.runner.master_port"),
        ({"liveness_port": 7000}, 7000, "liveness_port", "choose another one"),
    ],
    ids=["port-of-ranks", "default-port-of-agents", "liveness-port"],
)
def test_port_in_use_is_reported_with_its_key(
    make_experiment: Callable[..., Experiment],
    runner: dict[str, Any],
    busy: int,
    key: str,
    advice: str,
) -> None:
    facts = replace(FACTS, port=None, busy_port=busy, port_holder="process 7 (nc)")
    experiment = make_experiment(runner=Runner(nproc_per_node=1, **runner))
    replies = make_replies(experiment, dict.fromkeys(range(len(HOSTS)), facts))
    with pytest.raises(ConfigError, match=advice) as raised:
        require_usable(experiment, replies)
    assert f"runner.{key}: port {busy} of n01 is in use by process 7 (nc)" in str(raised.value)


@pytest.mark.parametrize(
    ("reply", "is_ok", "text"),
    [
        pytest.param({"found": "MLflow"}, True, "MLflow", id="installed"),
        pytest.param({"problem": "no mlflow", "hint": "install it"}, False, "no mlflow", id="none"),
        pytest.param(None, False, "its Python was not queried", id="not-queried"),
    ],
)
def test_metrics_sinks_are_needed_by_the_first_host(
    make_plan: Callable[..., LaunchPlan],
    make_experiment: Callable[..., Experiment],
    reply: dict[str, str] | None,
    is_ok: bool,
    text: str,
) -> None:
    sinks = MetricsSinks()
    experiment = make_experiment()
    assert sinks.query_arguments(experiment) is None
    arguments = read_arguments({"mlflow_experiment": "tiny", "tensorboard_dir": "/board"})
    assert sinks.query_arguments(replace(experiment, train=arguments.arguments)) is None
    task = replace(experiment.task, external=False)
    experiment = replace(experiment, train=arguments.arguments, task=task)
    assert sinks.query_arguments(experiment) == ["mlflow"]
    facts = python(module_replies={} if reply is None else {"metrics": reply})
    first, second = make_plan(hosts=HOSTS[:2], runner=Runner(nproc_per_node=1)).hosts
    check = sinks.check_host(experiment, first, facts)
    assert (check.ok, check.found) == (is_ok, text)
    assert sinks.check_host(experiment, second, FACTS).ok


BUCKET = "s3://bucket/run"


@pytest.mark.parametrize(
    ("save", "query"),
    [
        pytest.param(BUCKET, [BUCKET], id="address"),
        pytest.param("/s3", None, id="path"),
        pytest.param(None, None, id="none"),
    ],
)
def test_every_host_is_asked_for_the_storage_of_checkpoints(
    make_experiment: Callable[..., Experiment], save: str | None, query: list[str] | None
) -> None:
    experiment = make_experiment()
    task = replace(experiment.task, external=False)
    arguments = read_arguments({"save": save}).arguments
    storage = CheckpointStorage()
    assert storage.query_arguments(replace(experiment, train=arguments, task=task)) == query


NO_CREDENTIALS = {"problem": "none there", "hint": "set some", "lacks_credentials": True}


@pytest.mark.parametrize(
    ("reply", "envs", "row"),
    [
        pytest.param({"found": "usable"}, {}, (True, False, "usable"), id="usable"),
        pytest.param({"problem": "denied"}, {}, (False, False, "denied"), id="denied"),
        pytest.param(None, {}, (False, False, "its Python was not queried"), id="no-python"),
        pytest.param(NO_CREDENTIALS, {}, (False, False, "none there"), id="no-credentials"),
        pytest.param(
            NO_CREDENTIALS,
            {"AWS_SECRET_ACCESS_KEY": "abcdefgh"},
            (True, True, "none there, apart from secrets of experiment.envs, which only ranks get"),
            id="credentials-of-the-ranks",
        ),
    ],
)
def test_storage_of_checkpoints(
    make_plan: Callable[..., LaunchPlan],
    make_experiment: Callable[..., Experiment],
    reply: dict[str, object] | None,
    envs: dict[str, str],
    row: tuple[bool, bool, str],
) -> None:
    environments = Environments(common=envs)
    host = make_plan(envs=environments, runner=Runner(nproc_per_node=1)).hosts[0]
    facts = python(module_replies={} if reply is None else {"save": reply})
    check = CheckpointStorage().check_host(make_experiment(), host, facts)
    assert (check.ok, check.warning, check.found) == row


def test_tasks_need_a_package_on_the_first_host(
    make_plan: Callable[..., LaunchPlan], make_experiment: Callable[..., Experiment]
) -> None:
    tasks, experiment = EvaluationTasks(), make_experiment()
    task = replace(experiment.task, external=False)
    assert tasks.query_arguments(replace(experiment, task=task)) is None
    arguments = read_arguments({"eval_tasks": ["arc_easy"]}).arguments
    assert tasks.query_arguments(replace(experiment, train=arguments)) is None
    experiment = replace(experiment, train=arguments, task=task)
    assert tasks.query_arguments(experiment) == ["arc_easy"]
    facts = python(module_replies={"tasks": {"problem": "no lm_eval", "hint": "install it"}})
    first, second = make_plan(hosts=HOSTS[:2], runner=Runner(nproc_per_node=1)).hosts
    check = tasks.check_host(experiment, first, facts)
    assert (check.ok, check.found) == (False, "no lm_eval")
    assert tasks.check_host(experiment, second, FACTS).ok
