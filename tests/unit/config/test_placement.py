"""Hosts in the order of meshes, and what a plan says of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from flagscale.config import placement
from flagscale.config.load import load
from flagscale.config.schema import Experiment
from flagscale.hosts.hostfile import Host
from flagscale.launch.preparing import hosts_of

REPOSITORY = Path(__file__).resolve().parents[3]
CONF = REPOSITORY / "examples" / "llama3" / "conf"


@dataclass(frozen=True)
class Placed:
    """A host with its ranks, as a plan has it."""

    name: str
    device_type: str | None
    ranks: range


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
            "mesh 0 (tp2 dp8) of A800 takes ranks 0-15, of which 8-15 are on b (type=BI): hosts of "
            "type A800 have 8 ranks, 16 are wanted",
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
