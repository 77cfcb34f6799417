"""Hosts in the order of meshes, and what a plan says of them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flagscale.config import placement
from flagscale.config.arguments.resolve import resolve
from flagscale.config.checks import Arguments
from flagscale.config.load import load
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError
from flagscale.hosts.hostfile import Host
from flagscale.launcher.plan_builder import hosts_of

REPOSITORY = Path(__file__).resolve().parents[3]
CONF = REPOSITORY / "examples" / "llama3" / "conf"


@dataclass(frozen=True)
class Placed:
    """A host with its ranks, as a plan has it."""

    name: str
    device_type: str | None
    ranks: range


# Pipelines of two ranks, which have the whole model each.
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


def placed(*hosts: tuple[str, str | None, int]) -> list[Placed]:
    made: list[Placed] = []
    for name, kind, count in hosts:
        first = made[-1].ranks.stop if made else 0
        made.append(Placed(name, kind, range(first, first + count)))
    return made


def test_hosts_of_the_first_mesh_come_first(hetero: Experiment) -> None:
    hosts = [Host(name, 8, kind) for name, kind in
             (("b1", "BI"), ("x", None), ("a1", "A800"), ("b2", "BI"), ("a2", "A800"))]  # fmt: skip
    ordered = placement.by_mesh(hetero, hosts)
    assert [host.name for host in ordered] == ["a1", "a2", "b1", "b2", "x"]


def test_hosts_stay_as_they_are_without_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    plain = load(CONF, "train", ["action=dryrun"]).experiment
    hosts = [Host("b", 8, "BI"), Host("a", 8, "A800")]
    assert placement.by_mesh(plain, hosts) == tuple(hosts)
    assert placement.problems(plain, placed(("b", "BI", 8))) == []
    assert list(placement.notes(plain, placed(("b", "BI", 8)))) == []


def test_the_example_fits_its_hostfile(hetero: Experiment) -> None:
    assert [host.name for host in hosts_of(hetero)] == ["node01", "node02", "node03", "node04"]
    hosts = placed(*((h.name, h.device_type, 8) for h in hosts_of(hetero)))
    assert placement.problems(hetero, hosts) == []
    assert list(placement.notes(hetero, hosts)) == [
        "2 meshes, a pipeline of 2 stages; a step is 64 micro-batches of 16 sequences",
        "stage 0: mesh 0 (A800 tp2 dp8), 18 layers + embedding, ranks 0-7 on node01, ranks 8-15 on "
        "node02, 2 sequence(s) a rank",
        "stage 1: mesh 1 (BI dp16), 14 layers + loss, ranks 16-23 on node03, ranks 24-31 on "
        "node04, 1 sequence(s) a rank",
    ]


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (
            placed(("a", "A800", 8), ("b", "BI", 24)),
            "mesh 0 (tp2 dp8) of A800: of ranks 0-15, 8-15 are on b (type=BI); hosts of type A800 "
            "have 8 ranks, 16 are wanted",
        ),
        (placed(("a", "A800", 16), ("b", None, 16)), "16-31 are on b (no type=)"),
    ],
    ids=["too-few", "untyped"],
)
def test_a_mesh_on_hosts_of_another_type(
    hetero: Experiment, hosts: list[Placed], message: str
) -> None:
    (problem,) = placement.problems(hetero, hosts)
    assert message in problem.message
    assert problem.key == "train.system.hetero.hetero_device_types"
    assert problem.where is not None
    assert "8b_hetero.yaml" in problem.where


def test_many_hosts_of_a_stage_fit_a_line(hetero: Experiment) -> None:
    hosts = placed(*((f"n{i}", "A800", 2) for i in range(8)), ("b", "BI", 16))
    stage = list(placement.notes(hetero, hosts))[1]
    assert "ranks 0-1 on n0, ranks 2-3 on n1, … 5 more hosts, ranks 14-15 on n7" in stage


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ("[3,6,2,2]", [(6, 2, "0-5"), (2, 1, "6-9")]),
        (
            "auto",
            [
                "hetero_num_microbatches: auto: until 4 steps have shown how fast each replica is, "
                "counts are as even as the batch allows",
                (5, 2, "0-5"),
                (5, 1, "6-9"),
            ],
        ),
    ],
    ids=["given", "measured"],
)
def test_replicas_that_are_pipelines_lie_one_after_another(
    monkeypatch: pytest.MonkeyPatch, counts: str, told: list[Any]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    more = f"+train.system.hetero.hetero_num_microbatches={counts}"
    experiment = load(CONF, "train_hetero", ["action=dryrun", *REPLICAS, more]).experiment
    hosts = placed(("a", "A800", 4), ("b", "A800", 2), ("c", "BI", 4))
    assert placement.problems(experiment, hosts) == []
    lines = [line if isinstance(line, str) else replicas(*line) for line in told]
    assert list(placement.notes(experiment, hosts)) == [
        "unlike replicas share the 40 sequences of a step, by tokens",
        *lines,
    ]
    (problem,) = placement.problems(experiment, placed(("a", "A800", 4), ("b", "BI", 6)))
    assert "3 replicas of A800: of ranks 0-5, 4-5 are on b (type=BI)" in problem.message


def replicas(count: int, size: int, ranks: str) -> str:
    number = "3 replicas" if size == 2 else "2 replicas"
    return (
        f"{number}, ranks {ranks}: {count} micro-batches of {size} sequence{'s' * (size > 1)} each"
    )


AUTO = ("train.system.hetero.hetero_process_meshes=auto",
        "~train.system.hetero.hetero_pipeline_layer_split")  # fmt: skip


def auto(*overrides: str) -> Experiment:
    return load(CONF, "train_hetero", ["action=dryrun", *AUTO, *overrides]).experiment


@pytest.mark.parametrize(
    ("overrides", "order"),
    [((), "a1 a2 b1"), (("~train.system.hetero.hetero_device_types",), "b1 a1 a2")],
    ids=["as-said", "as-they-come"],
)
def test_a_mesh_of_each_type(
    overrides: tuple[str, ...], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    experiment = auto(*overrides)
    listed = [Host("b1", 8, "BI"), Host("a1", 8, "A800"), Host("a2", 8, "A800")]
    ordered = placement.by_mesh(experiment, listed)
    assert " ".join(host.name for host in ordered) == order
    hosts = placed(*((host.name, host.device_type, 8) for host in ordered))
    assert placement.problems(experiment, hosts) == []
    system = placement.written_out(experiment.train.sections(), hosts)["system"]
    words = ["device_type=A800,ranks=16", "device_type=BI,ranks=8"]
    expected = words if order.startswith("a") else words[::-1]
    assert system["hetero"] == {"enable_hetero": True, "hetero_process_meshes": expected}
    (note,) = placement.notes(experiment, hosts)
    assert note == (
        f"a mesh of each type, {' and '.join(expected)}: training measures, and chooses sizes"
    )


def test_hosts_of_replicas_without_types_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    untyped = "~train.system.hetero.hetero_device_types"
    experiment = load(CONF, "train_hetero", ["action=dryrun", *REPLICAS, untyped]).experiment
    hosts = [Host("a", 8, "A800"), Host("b", 8, "BI"), Host("c", 8, "A800")]
    assert placement.by_mesh(experiment, hosts) == tuple(hosts)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (("A800", None), "auto makes a mesh of each type= of the hostfile, and h1 has none"),
        (("BI", "BI"), "auto makes a mesh of each type= of the hostfile: all are BI"),
    ],
    ids=["of-no-type", "all-alike"],
)
def test_hosts_that_make_no_meshes(
    kinds: tuple[str | None, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    hosts = placed(*((f"h{index}", kind, 8) for index, kind in enumerate(kinds)))
    (problem,) = placement.problems(auto(), hosts)
    assert problem.key == "train.system.hetero.hetero_process_meshes"
    assert message in problem.message


def test_auto_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    args = Arguments.of(auto())
    with pytest.raises(ConfigError, match="auto is written out by the launcher"):
        resolve(Namespace(**args.values()), 32)
