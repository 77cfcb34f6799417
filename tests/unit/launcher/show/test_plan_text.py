"""Tests of the plan's text: identical hosts are grouped, and every difference is shown."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.arguments import arguments_of

from flagscale.config.schema import Environments, HostOverride, Notify, Runner
from flagscale.hosts.hostfile import Host
from flagscale.launcher.layout import host_label
from flagscale.launcher.planning.model import LaunchPlan, Machine
from flagscale.launcher.planning.script import render
from flagscale.launcher.show.plan import format_plan

MakePlan = Callable[..., LaunchPlan]
UNPROBED = Machine("/opt/python", Path("/opt/fs"), Path("/work"), cpus=None, devices=None)
PROBED = replace(UNPROBED, cpus=8, devices={"cuda": 2}, interface="e0")


def hosts(count: int, **changes: str) -> tuple[Host, ...]:
    return tuple(Host(f"node{n:04}", 8, **changes) for n in range(1, count + 1))  # type: ignore[arg-type]


def headings(text: str) -> list[str]:
    return [line for line in text.splitlines() if re.match(r"# (host \d|\d+ hosts)", line)]


def scripts(text: str) -> int:
    return text.count("#!/usr/bin/env bash")


NOTIFY = Runner(nproc_per_node=8, notify=Notify("mail", "https://chat/s3cr3t"))


@pytest.mark.parametrize("runner", [Runner(nproc_per_node=8), NOTIFY], ids=["plain", "notify"])
@pytest.mark.parametrize("machine", [UNPROBED, PROBED])
def test_thousands_of_identical_hosts_take_the_space_of_one(
    make_plan: MakePlan, machine: Machine, runner: Runner
) -> None:
    plan = format_plan(make_plan(hosts=hosts(1), machine=machine, runner=runner))
    launch_plan = make_plan(hosts=hosts(4096), machine=machine, runner=runner)
    text = format_plan(launch_plan)
    assert headings(text) == ["# 4096 hosts node[0001-4096]: 8 rank(s) each, one script except for"]
    assert scripts(text) == 1
    assert render(launch_plan, launch_plan.hosts[0]) in text
    assert len(text.splitlines()) < len(plan.splitlines()) + 60
    assert max(map(len, text.splitlines())) < 200


def test_differences_between_hosts_are_shown(make_plan: MakePlan) -> None:
    named = tuple(replace(h, addr=f"10.0.0.{n}") for n, h in enumerate(hosts(6), start=1))
    lines = format_plan(make_plan(hosts=named, runner=NOTIFY)).splitlines()
    rows = [line for line in lines if re.match(r"#   \w+(\.\w+)? {2,}", line)]
    run = "20250102-030405-abcdef"
    assert [re.sub(" {2,}", " ", line[4:]) for line in rows[:9]] == [
        "name node[0001-0006]",
        "node_rank 0, 1 ... 5",
        "ranks 0-7, 8-15 ... 40-47",
        "address 10.0.0.[1-6]",
        f"run_dir /data/runs/tiny/logs/details/host_<node_rank>_<name>/{run}",
        "pid_file /data/runs/tiny/logs/pids/host_<node_rank>_<name>.pid",
        "hosts node[0001-0006] on node0001; none on node[0002-0006]",
        "master_name none on node0001; node0001 on node[0002-0006]",
        "notify_on failed,stalled,restarted on node[0001-0002]; none on node[0003-0006]",
    ]


# Attributes in which hosts of one plan may differ, in addition to their names.
PLACE = re.compile(
    r"host \d+ of|node_rank|first_rank|hosts|master_name|node\[0001-0004\]|^ *\]$|liveness_port"
)


def test_hosts_shown_as_one_have_the_same_script(make_plan: MakePlan) -> None:
    plan = make_plan(hosts=hosts(4), runner=Runner(nproc_per_node=8), machine=UNPROBED)
    assert scripts(format_plan(plan)) == 1
    first, *remaining = (
        set(
            render(plan, host)
            .replace(host_label(host.node_rank, host.name), "LABEL")
            .replace(f"on {host.name}", "on NAME")
            .replace(f"{host.name}:$", "NAME:$")
            .replace(f'"name": "{host.name}"', "NAME")
            .splitlines()
        )
        for host in plan.hosts
    )
    for script in remaining:
        assert first ^ script
        assert all(PLACE.search(line) for line in first ^ script)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({"envs": Environments(by_host={"node0002": {"A": "1"}})}, 2, id="variable"),
        pytest.param(
            {
                "envs": Environments(
                    by_host={f"node{n:04}": {"A": f"node{n:04}"} for n in (1, 2, 3)}
                )
            },
            3,
            id="names-of-their-own",
        ),
        pytest.param(
            {"by_host": {"node0002": HostOverride(before_start="true")}}, 2, id="commands"
        ),
        pytest.param(
            {"by_host": {"node0002": HostOverride(arguments=arguments_of({"a": 1}))}},
            2,
            id="arguments",
        ),
        pytest.param({"by_host": {"node0002": HostOverride(python="/p/python")}}, 2, id="python"),
        pytest.param(
            {"by_host": {"node0002": HostOverride(build_dir=Path("/b"))}}, 2, id="directory"
        ),
    ],
)
def test_host_with_its_own_settings_is_shown(
    make_plan: MakePlan, changes: dict[str, object], expected: int
) -> None:
    plan = make_plan(hosts=hosts(3), runner=Runner(nproc_per_node=8), **changes)
    text = format_plan(plan)
    assert render(plan, plan.hosts[1]) in text
    assert scripts(text) == len(headings(text)) == expected
    assert any(line.startswith("# host 1 node0002: ranks 8-15") for line in headings(text))


def test_types_and_sizes_are_apart(make_plan: MakePlan) -> None:
    mixed = (Host("a1", 2, "A"), Host("a2", 2, "A"), Host("b1", 2, "B"), Host("b2", 1, "B"))
    plan = make_plan(hosts=mixed, runner=Runner())
    assert headings(format_plan(plan)) == [
        "# 2 hosts a[1-2] (A): 2 rank(s) each, one script except for",
        "# host 2 b1 (B): ranks 4-5",
        "# host 3 b2 (B): ranks 6-6",
    ]


def test_one_host_is_shown_by_itself(make_plan: MakePlan) -> None:
    plan = make_plan(hosts=hosts(100), runner=Runner(nproc_per_node=8))
    text = format_plan(plan, [plan.hosts[41]])
    assert headings(text) == ["# host 41 node0042: ranks 328-335"]
    assert render(plan, plan.hosts[41]) in text


def test_names_without_an_order_stay_short(make_plan: MakePlan) -> None:
    named = tuple(Host(f"n{n * n}-{n % 7}x", 8) for n in range(1000))
    text = format_plan(make_plan(hosts=named, runner=Runner(nproc_per_node=8)))
    heading = text.partition("# --- ")[0]
    assert max(map(len, heading.splitlines())) < 300
    assert "n0-0x, n1-1x ... n998001-5x" in heading


def test_spares_are_a_group(make_plan: MakePlan) -> None:
    runner = Runner(nproc_per_node=8, spares=2, on_bad_host="replace")
    text = format_plan(make_plan(hosts=hosts(4), runner=runner))
    assert text.startswith("# tiny llama: 16 rank(s) on 2 host(s), and 2 spare host(s)\n")
    assert headings(text) == [
        "# 2 hosts node[0001-0002]: 8 rank(s) each, one script except for",
        "# 2 hosts node[0003-0004]: spares, one script except for",
    ]
