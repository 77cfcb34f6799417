"""Tests of values that refer to a host's own variables: errors, notes and resulting values."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.interpolation import host_reference, split_references
from flagscale.config.schema import Environments, Experiment, Runner
from flagscale.errors import ConfigError
from flagscale.files import format_json
from flagscale.hosts.probe import fill_references
from flagscale.launcher.liveness.options import AgentOptions
from flagscale.launcher.planning.environment import EnvironmentVariable, note_unexpanded_variables
from flagscale.launcher.planning.model import HostPlan, LaunchPlan, Machine, RunnerHandle
from flagscale.launcher.planning.script import render
from flagscale.launcher.show.plan import format_plan

MakePlan = Callable[..., LaunchPlan]
PATH = host_reference("PATH")

REFUSED = {
    "dollar": ({"PATH": "/x:$PATH"}, "PATH: .*write \\${host:PATH}"),
    "braces": ({"PATH": "${PATH}:/x"}, "PATH: .*write \\${host:PATH}"),
    "beside-a-reference": ({"PATH": f"{PATH}:$PATH"}, "PATH: .*write \\${host:PATH}"),
    "half-a-secret": ({"MY_TOKEN": f"abc{PATH}"}, "MY_TOKEN: looks like a secret, which no script"),
    "a-secrets-name": (
        {"HF_TOKEN": "abc", "X": host_reference("HF_TOKEN")},
        r"X: \${host:HF_TOKEN}: the host's own value is replaced",
    ),
    "the-runs-secret": ({"X": host_reference("FLAGSCALE_RUN_SECRET")}, "X: .*is replaced"),
    "a-nul": ({"X": "a\0b"}, "X: holds a NUL character"),
}


@pytest.mark.parametrize(("values", "message"), REFUSED.values(), ids=REFUSED)
def test_invalid_references_are_rejected(
    make_plan: MakePlan, values: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"experiment.envs.{message}") as error:
        make_plan(envs=Environments(values))
    assert "abc" not in str(error.value)


def test_a_refusal_has_its_place(make_plan: MakePlan) -> None:
    envs = Environments(by_host={"localhost": {"PATH": "/x:$PATH"}})
    key = "experiment.envs.node_specific.localhost.PATH"
    with pytest.raises(ConfigError, match=rf"^t.yaml:7: {key}: \$PATH is not expanded"):
        make_plan(envs=envs, sources={key: "t.yaml:7"})


def test_unexpanded_dollars_are_noted(make_experiment: Callable[..., Experiment]) -> None:
    envs = Environments(
        {"A": "$HOME/x", "B": f"{PATH}", "C": "cost: 5$", "MY_TOKEN": "a$b"},
        {"T": {"D": "${rank}"}},
        {"h": {"E": "x$Y", "F": "plain"}},
    )
    (note,) = note_unexpanded_variables(envs)
    assert note == (
        "experiment.envs.A, experiment.envs.device_type_specific.T.D, "
        "experiment.envs.node_specific.h.E: $NAME is not expanded; ${host:NAME} is the host's own"
    )
    assert not list(note_unexpanded_variables(Environments({"B": PATH})))


def test_a_plan_shows_references_as_a_yaml_has_them(make_plan: MakePlan) -> None:
    plan = make_plan(
        envs=Environments({"PATH": f"/x:{PATH}", "TYPED": "${host:X}", "PYTHONPATH": f"/p:{PATH}"})
    )
    variables = {value["name"]: value for value in plan.hosts[0].to_json()["environment"]}
    assert variables["PATH"]["value"] == "/x:${host:PATH}"
    assert variables["PYTHONPATH"]["value"] == "/p:${host:PATH}"
    assert variables["TYPED"]["value"] == r"\${host:X}"
    assert "PATH='/x:${host:PATH}'" in format_plan(plan)
    assert "\\u0000" not in format_json(plan.to_json())
    assert "\0" not in format_plan(plan)


@pytest.mark.parametrize(
    ("environment", "ranks"),
    [({"MINE": "4,5,6"}, 3), ({}, 8)],
    ids=["this-machine", "another-of-which-nothing-is-known"],
)
def test_a_hosts_own_devices_are_counted(
    make_plan: MakePlan, machine: Machine, environment: dict[str, str], ranks: int
) -> None:
    plan = make_plan(
        envs=Environments({"CUDA_VISIBLE_DEVICES": host_reference("MINE")}),
        runner=Runner(nproc_per_node="auto"),
        machine=replace(machine, devices={"cuda": 8}, environment=environment),
    )
    assert plan.hosts[0].nproc == ranks


def test_secret_of_the_host_can_be_renamed(make_plan: MakePlan) -> None:
    """The YAML contains no secret, so the script can contain the reference."""
    plan = make_plan(envs=Environments({"MY_TOKEN": host_reference("HF_TOKEN")}))
    assert 'export MY_TOKEN="$host_HF_TOKEN"' in render(plan, plan.hosts[0])


CHARACTERS = st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))
TEXTS = st.one_of(
    st.sampled_from(["", ":", "'", '"', "$X", "$(id)", "`id`", "\n", "\\", "a,b", "é🦙", "${X}"]),
    st.text(CHARACTERS, max_size=12),
)
NAMES = st.sampled_from(
    ["PATH", "PYTHONPATH", "A", "B", "C_PATH", "host_A", "run_dir", "http_proxy"]
)
VALUES = st.lists(st.one_of(TEXTS, NAMES.map(host_reference)), max_size=6).map("".join)


@settings(max_examples=40, deadline=None)
@given(
    values=st.dictionaries(NAMES, VALUES, max_size=6),
    # Without a PATH, bash sets a default one.
    host_environment=st.dictionaries(NAMES, TEXTS).map(
        lambda python_path: {"PATH": "/bin", **python_path}
    ),
)
def test_bash_expands_any_reference(
    values: dict[str, str],
    host_environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The exports run in bash on a host with the variables ``there``. Each exported value equals
    the expansion of the host's own variables, regardless of the order of the exports.
    """
    directory = tmp_path_factory.getbasetemp()
    host = _host(directory, tuple(EnvironmentVariable(k, v, "envs") for k, v in values.items()))
    plan = LaunchPlan(
        *("r", "n", directory, None, "127.0.0.1", 1, (host,)),
        **{"external": True, "start_timeout": 1, "stop_grace": 1},
        runner=RunnerHandle("local"),
    )
    head = render(plan, host).partition("# Supervisor,")[0]
    result = subprocess.run(
        ["/bin/bash", "-c", f"{head}\nexec /usr/bin/env -0"],
        env=host_environment,
        capture_output=True,
        check=True,
        timeout=30,
    )
    decoded = dict(entry.split("=", 1) for entry in os.fsdecode(result.stdout).split("\0")[:-1])
    python_path = values.pop("PYTHONPATH", "")
    assert {k: decoded[k] for k in values} == {
        k: fill_references(split_references(k, values[k]), host_environment) for k in values
    }
    path = fill_references(
        split_references("PYTHONPATH", f"/b:/p:{python_path}" if python_path else "/b:/p"),
        host_environment,
    )
    # The host's PYTHONPATH comes last, unless the configuration places it.
    last = (
        ""
        if host_reference("PYTHONPATH") in python_path
        else host_environment.get("PYTHONPATH", "")
    )
    assert decoded["PYTHONPATH"] == (f"{path}:{last}" if last else path)


def _host(directory: Path, environment: tuple[EnvironmentVariable, ...]) -> HostPlan:
    return HostPlan(
        node_rank=0,
        name="localhost",
        device_type=None,
        address="localhost",
        nproc=1,
        first_rank=0,
        environment=environment,
        python_path=("/b", "/p"),
        workdir=directory,
        python="python3",
        agent=AgentOptions(
            max_restarts=0,
            on_failure="stop",
            lost_host_timeout=60.0,
            start_timeout=60.0,
            hang_detection_timeout=0.0,
            run_name="r",
            run_dir=directory,
            name="localhost",
            node_rank=0,
            first_rank=0,
            nproc=1,
            stop_grace=1.0,
        ),
        starter=("torchrun",),
        program=("program",),
        run_dir=directory,
        script=directory,
        output=directory,
        pid_file=directory,
    )
