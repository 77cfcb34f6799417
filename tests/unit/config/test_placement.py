"""Order of hosts by mesh, and the placement notes of a plan."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.load import load
from flagscale.config.placement import (
    check_placement,
    fill_automatic_meshes,
    order_by_mesh,
    placement_notes,
)
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import Host
from flagscale.launcher.plan_builder import select_hosts

REPOSITORY = Path(__file__).resolve().parents[3]
CONF = REPOSITORY / "examples" / "llama3" / "conf"


@dataclass(frozen=True)
class PlacedHost:
    """Host with its ranks, with the fields of a planned host."""

    name: str
    device_type: str | None
    ranks: range


# Replicas that are pipelines of two ranks each.
REPLICAS = (
    "~train.system.hetero.hetero_process_meshes",
    "~train.system.hetero.hetero_pipeline_layer_split",
    "+train.system.hetero.hetero_mode=dp",
    "+train.system.hetero.hetero_micro_batch_sizes=[3,2,2,1]",
    "train.system.sequence_parallel=false",
    "train.system.pipeline_model_parallel_size=2",
    "train.model.global_batch_size=40",
)


@pytest.fixture
def hetero(monkeypatch: pytest.MonkeyPatch) -> Experiment:
    monkeypatch.chdir(REPOSITORY)
    return load(CONF, "train_hetero", ["action=dryrun"]).experiment


def place_hosts(*hosts: tuple[str, str | None, int]) -> list[PlacedHost]:
    assigned: list[PlacedHost] = []
    for name, kind, count in hosts:
        first = assigned[-1].ranks.stop if assigned else 0
        assigned.append(PlacedHost(name, kind, range(first, first + count)))
    return assigned


def test_hosts_are_ordered_by_mesh(hetero: Experiment) -> None:
    hosts = [Host(name, 8, kind) for name, kind in
             (("b1", "BI"), ("x", None), ("a1", "A800"), ("b2", "BI"), ("a2", "A800"))]  # fmt: skip
    ordered = order_by_mesh(hetero, hosts)
    assert [host.name for host in ordered] == ["a1", "a2", "b1", "b2", "x"]


def test_hosts_keep_order_without_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    experiment = load(CONF, "train", ["action=dryrun"]).experiment
    hosts = [Host("b", 8, "BI"), Host("a", 8, "A800")]
    assert order_by_mesh(experiment, hosts) == tuple(hosts)
    assert check_placement(experiment, place_hosts(("b", "BI", 8))) == []
    assert list(placement_notes(experiment, place_hosts(("b", "BI", 8)))) == []


def test_example_matches_its_hostfile(hetero: Experiment) -> None:
    assert [host.name for host in select_hosts(hetero)] == ["node01", "node02", "node03", "node04"]
    hosts = place_hosts(*((h.name, h.device_type, 8) for h in select_hosts(hetero)))
    assert check_placement(hetero, hosts) == []
    assert list(placement_notes(hetero, hosts)) == [
        "2 meshes, a pipeline of 2 stages; a step is 64 micro-batches of 16 sequences",
        "stage 0: mesh 0 (A800 tp2 dp8), 18 layers + embedding, ranks 0-7 on node01, ranks 8-15 on "
        "node02, 2 sequence(s) per rank",
        "stage 1: mesh 1 (BI dp16), 14 layers + loss, ranks 16-23 on node03, ranks 24-31 on "
        "node04, 1 sequence(s) per rank",
    ]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (
            place_hosts(("a", "A800", 8), ("b", "BI", 24)),
            "mesh 0 (tp2 dp8) of A800: of ranks 0-15, 8-15 are on b (type=BI); hosts of type A800 "
            "have 8 ranks, 16 are required",
        ),
        (place_hosts(("a", "A800", 16), ("b", None, 16)), "16-31 are on b (no type=)"),
    ],
    ids=["too-few", "untyped"],
)
def test_mesh_on_wrong_device_type_is_rejected(
    hetero: Experiment, hosts: list[PlacedHost], message: str
) -> None:
    (problem,) = check_placement(hetero, hosts)
    assert message in problem.message
    assert problem.key == "train.system.hetero.hetero_device_types"
    assert problem.where is not None
    assert "8b_hetero.yaml" in problem.where


def test_long_host_list_is_abbreviated(hetero: Experiment) -> None:
    hosts = place_hosts(*((f"n{i}", "A800", 2) for i in range(8)), ("b", "BI", 16))
    stage = list(placement_notes(hetero, hosts))[1]
    assert "ranks 0-1 on n0, ranks 2-3 on n1, … 5 more hosts, ranks 14-15 on n7" in stage


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ("[3,6,2,2]", [(6, 2, "0-5"), (2, 1, "6-9")]),
        (
            "auto",
            [
                "hetero_num_microbatches: auto: until the replicas' speeds have been measured for "
                "4 steps, counts are as even as the batch allows",
                (5, 2, "0-5"),
                (5, 1, "6-9"),
            ],
        ),
    ],
    ids=["given", "measured"],
)
def test_pipeline_replicas_are_placed_consecutively(
    monkeypatch: pytest.MonkeyPatch, counts: str, expected: list[Any]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    override = f"+train.system.hetero.hetero_num_microbatches={counts}"
    experiment = load(CONF, "train_hetero", ["action=dryrun", *REPLICAS, override]).experiment
    hosts = place_hosts(("a", "A800", 4), ("b", "A800", 2), ("c", "BI", 4))
    assert check_placement(experiment, hosts) == []
    lines = [line if isinstance(line, str) else replica_note(*line) for line in expected]
    assert list(placement_notes(experiment, hosts)) == [
        "heterogeneous replicas split the 40 sequences of a step; gradients are weighted by tokens",
        *lines,
    ]
    (problem,) = check_placement(experiment, place_hosts(("a", "A800", 4), ("b", "BI", 6)))
    assert "3 replicas of A800: of ranks 0-5, 4-5 are on b (type=BI)" in problem.message


def replica_note(count: int, size: int, ranks: str) -> str:
    number = "3 replicas" if size == 2 else "2 replicas"
    return (
        f"{number}, ranks {ranks}: {count} micro-batches of {size} sequence{'s' * (size > 1)} each"
    )


AUTO = ("train.system.hetero.hetero_process_meshes=auto",
        "~train.system.hetero.hetero_pipeline_layer_split")  # fmt: skip


def load_automatic(*overrides: str) -> Experiment:
    return load(CONF, "train_hetero", ["action=dryrun", *AUTO, *overrides]).experiment


@pytest.mark.parametrize(
    ("overrides", "order"),
    [((), "a1 a2 b1"), (("~train.system.hetero.hetero_device_types",), "b1 a1 a2")],
    ids=["as-said", "as-they-come"],
)
def test_automatic_meshes_one_per_device_type(
    overrides: tuple[str, ...], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    experiment = load_automatic(*overrides)
    hostfile_hosts = [Host("b1", 8, "BI"), Host("a1", 8, "A800"), Host("a2", 8, "A800")]
    ordered = order_by_mesh(experiment, hostfile_hosts)
    assert " ".join(host.name for host in ordered) == order
    hosts = place_hosts(*((host.name, host.device_type, 8) for host in ordered))
    assert check_placement(experiment, hosts) == []
    train = fill_automatic_meshes(experiment.train, hosts)
    hetero = {g.name: g.value for g in train if g.key.startswith("train.system.hetero.")}
    words = ["device_type=A800,ranks=16", "device_type=BI,ranks=8"]
    expected = words if order.startswith("a") else words[::-1]
    assert hetero == {"enable_hetero": True, "hetero_process_meshes": expected}
    (note,) = placement_notes(experiment, hosts)
    assert note == (
        f"one mesh per device type, {' and '.join(expected)}: training measures the devices and "
        "chooses the parallel sizes"
    )


def test_untyped_replicas_keep_host_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    untyped = "~train.system.hetero.hetero_device_types"
    experiment = load(CONF, "train_hetero", ["action=dryrun", *REPLICAS, untyped]).experiment
    hosts = [Host("a", 8, "A800"), Host("b", 8, "BI"), Host("c", 8, "A800")]
    assert order_by_mesh(experiment, hosts) == tuple(hosts)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (("A800", None), "auto makes one mesh per type= of the hostfile, and h1 has no type"),
        (("BI", "BI"), "auto makes one mesh per type= of the hostfile, and all hosts have type=BI"),
    ],
    ids=["of-no-type", "all-alike"],
)
def test_automatic_meshes_reject_unsuitable_hosts(
    kinds: tuple[str | None, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    hosts = place_hosts(*((f"h{index}", kind, 8) for index, kind in enumerate(kinds)))
    (problem,) = check_placement(load_automatic(), hosts)
    assert problem.key == "train.system.hetero.hetero_process_meshes"
    assert message in problem.message


def test_automatic_meshes_are_resolved_by_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    args = load_automatic().train
    with pytest.raises(ConfigError, match="auto is supported only by the launcher"):
        derive_arguments(Namespace(**args.values), 32)
