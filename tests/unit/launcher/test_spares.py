"""Selection of the hosts that train and of those that wait."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.arguments import train_arguments

from flagscale.config.schema import Experiment, Runner, Task
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import Host
from flagscale.launcher.liveness.member import _replace_options
from flagscale.launcher.plan_builder import check_plan, select_hosts

MakeExperiment = Callable[..., Experiment]


def make_runner(tmp_path: Path, hosts: int, **fields: Any) -> Runner:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"h{number} slots=1\n" for number in range(hosts)))
    return Runner(type="ssh", hostfile=hostfile, on_bad_host="replace", **fields)


@pytest.mark.parametrize(
    ("hosts", "nnodes", "spares", "expected"),
    [
        pytest.param(5, 3, 1, 4, id="fewer-than-listed"),
        pytest.param(5, 3, 2, 5, id="all-listed"),
        pytest.param(3, 1, 2, 3, id="only-one-trains"),
        pytest.param(5, None, 1, 5, id="the-last-ones-of-all"),
    ],
)
def test_spares_follow_the_hosts_that_train(
    make_experiment: MakeExperiment,
    tmp_path: Path,
    hosts: int,
    nnodes: int | None,
    spares: int,
    expected: int,
) -> None:
    runner = make_runner(tmp_path, hosts, nnodes=nnodes, spares=spares)
    selected = select_hosts(make_experiment(runner=runner))
    assert [host.name for host in selected] == [f"h{number}" for number in range(expected)]


@pytest.mark.parametrize(
    ("hosts", "fields", "train", "message"),
    [
        pytest.param(
            4,
            {"nnodes": 3, "spares": 2},
            {},
            "the hostfile has 4 hosts, and 3 train: 1 left to wait, not 2",
            id="too-few",
        ),
        pytest.param(
            3,
            {"nnodes": 1, "spares": 1},
            {},
            "the only host that trains can be replaced if 2 hosts wait",
            id="one-host",
        ),
        pytest.param(
            3,
            {"spares": 1},
            {"enable_hetero": True},
            "not supported with enable_hetero",
            id="mixed",
        ),
    ],
)
def test_refused_spares(
    make_experiment: MakeExperiment,
    tmp_path: Path,
    hosts: int,
    fields: dict[str, Any],
    train: dict[str, Any],
    message: str,
) -> None:
    runner = make_runner(tmp_path, hosts, **fields)
    experiment = make_experiment(
        runner=runner, train=train_arguments(**train), task=Task(entrypoint=Path("/program.py"))
    )
    with pytest.raises(ConfigError, match=r"experiment\.runner\.spares") as error:
        select_hosts(experiment)
    assert message in str(error.value)


def test_hosts_with_other_numbers_of_ranks_cannot_replace_each_other(
    make_experiment: MakeExperiment, make_plan: Callable[..., Any]
) -> None:
    runner = Runner(type="ssh", spares=1, on_bad_host="replace")
    hosts = (Host("h0", 2), Host("h1", 2), Host("h2", 1))
    launch_plan = make_plan(hosts=hosts, runner=runner)
    with pytest.raises(ConfigError, match="any host may be replaced, but hosts have 1 and 2 rank"):
        check_plan(make_experiment(runner=runner), launch_plan)


def test_command_of_a_spare_gets_the_place() -> None:
    command = ["python", "-m", "x", "--nnodes", "2", "--node_rank", "4", "--", "a", "--lr", "1"]
    values = {"--node_rank": "1", "--first_rank": "8"}
    replaced = ["python", "-m", "x", "--nnodes", "2", "--node_rank", "1", "--", "a", "--lr", "1"]
    assert _replace_options(command, values) == replaced


@pytest.mark.parametrize(
    ("smallest", "train", "message"),
    [
        pytest.param(1, {"global_batch_size": 12}, "", id="each-number-of-hosts-fits"),
        pytest.param(3, {"global_batch_size": 12}, "", id="two-are-not-allowed"),
        pytest.param(
            2,
            {"global_batch_size": 8},
            "global_batch_size: with 3 of 4 hosts (`shrink`): 8 is not divisible by",
            id="batch",
        ),
        pytest.param(
            1,
            {"global_batch_size": 12, "tensor_model_parallel_size": 2},
            "with 3 of 4 hosts (`shrink`): 3 ranks are not divisible by",
            id="model-parallel-size",
        ),
        pytest.param(
            2, {}, "on_bad_host: `shrink` needs global_batch_size", id="default-batch-size"
        ),
        pytest.param(
            5, {"global_batch_size": 12}, "needs 5 hosts, and 4 take part", id="too-few-hosts"
        ),
    ],
)
def test_job_that_may_go_on_with_fewer_hosts(
    make_experiment: MakeExperiment,
    make_plan: Callable[..., Any],
    smallest: int,
    train: dict[str, Any],
    message: str,
) -> None:
    runner = Runner(type="ssh", on_bad_host="shrink", nnodes=4, min_nnodes=smallest)
    hosts = tuple(Host(f"h{number}", 1) for number in range(4))
    arguments = train_arguments(micro_batch_size=1, **train)
    task = Task(entrypoint=Path("/program.py"))
    experiment = make_experiment(runner=runner, train=arguments, task=task)
    launch_plan = make_plan(hosts=hosts, runner=runner, train=arguments)
    if not message:
        check_plan(experiment, launch_plan)
        return
    with pytest.raises(ConfigError) as error:
        check_plan(experiment, launch_plan)
    assert message in str(error.value)
