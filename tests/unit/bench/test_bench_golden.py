"""The checker itself: what it computes by hand, and that it sees every kind of wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bench_lines import parse_spec

from flagscale.accelerators.device import Device
from flagscale.bench.collectives import checks, collective_calls
from flagscale.bench.collectives.checks import CHUNK, Golden, Verdict, digest, pieces
from flagscale.bench.collectives.collective_calls import Shape
from flagscale.bench.collectives.devices import RankGroup
from flagscale.bench.collectives.spec import Case

pytestmark = pytest.mark.torch

CPU = Device.of(torch.device("cpu"))


@pytest.fixture(autouse=True, scope="module")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _case(line: str) -> Case:
    return next(parse_spec(line.split()).cases(4))


def _group(index: int, size: int = 4) -> RankGroup:
    group: Any = dist.group.WORLD
    return RankGroup("gloo", tuple(range(size)), index, group)


def _golden(line: str, index: int = 0, mode: Any = "random", size: int = 4) -> Golden:
    return Golden(_case(line), _group(index, size), mode, seed=5)


def test_inputs_are_a_function_of_the_position() -> None:
    golden = _golden("allr -d fp32")
    whole = golden.inputs(1, 0, 1000)
    assert torch.equal(whole[300:400], golden.inputs(1, 300, 100))
    assert not torch.equal(whole, golden.inputs(2, 0, 1000))
    assert not torch.equal(whole, Golden(golden.case, golden.group, "random", 6).inputs(1, 0, 1000))
    assert whole.min() >= -1
    assert whole.max() < 1
    assert abs(float(whole.mean())) < 0.1


def test_integers_use_their_whole_range() -> None:
    values = _golden("allr -d uint8").inputs(0, 0, 10_000)
    assert (int(values.min()), int(values.max())) == (0, 255)
    assert len(values.unique()) == 256


@pytest.mark.parametrize("reduction", ["sum", "prod", "min", "max", "avg"])
@pytest.mark.parametrize("type_", ["fp16", "bf16", "fp32", "fp64"])
def test_any_order_of_additions_is_within_the_tolerance(reduction: str, type_: str) -> None:
    line = f"allr -d {type_} -o {reduction}"
    golden = _golden(line, size=32)
    inputs = [golden.inputs(place, 0, 4000) for place in range(32)]
    part = _part(line, 4000, golden.group)
    for order in (inputs, inputs[::-1], inputs[::2] + inputs[1::2]):
        total = order[0].clone()
        for other in order[1:]:
            if reduction in ("sum", "avg"):
                total += other
            elif reduction == "prod":
                total *= other
            else:
                total = getattr(torch, f"{reduction}imum")(total, other)
        part.output.copy_(total / 32 if reduction == "avg" else total)
        assert golden.verify(part) == Verdict()


def _part(line: str, elements: int, group: RankGroup) -> collective_calls.Part:
    return collective_calls.build(_case(line), Shape(elements, elements, elements), group, CPU)


@pytest.mark.parametrize("type_", ["uint8", "int8", "int32", "int64", "uint32", "fp16", "fp32"])
def test_one_wrong_element_is_found(type_: str) -> None:
    golden = _golden(f"allr -d {type_}")
    part = _part(f"allr -d {type_}", CHUNK + 10, golden.group)
    part.output.copy_(golden.whole(part))
    assert golden.verify(part).wrong == 0
    spoiled = part.output[CHUNK + 3].to(torch.float64) + 1
    part.output[CHUNK + 3] = spoiled.to(part.output.dtype)
    verdict = golden.verify(part)
    assert (verdict.wrong, verdict.first) == (1, CHUNK + 3)
    assert f"the first at {CHUNK + 3}" in str(verdict)


def test_not_a_number_is_wrong() -> None:
    golden = _golden("allr -d fp32")
    part = _part("allr -d fp32", 8, golden.group)
    part.output.copy_(golden.whole(part))
    part.output[2] = float("nan")
    part.output[5] = float("inf")
    assert golden.verify(part).wrong == 2


def test_a_rank_that_was_left_out_is_found() -> None:
    golden = _golden("allr -d bf16")
    part = _part("allr -d bf16", 1000, golden.group)
    part.output.copy_(sum(golden.inputs(place, 0, 1000).float() for place in range(3)))
    assert golden.verify(part).wrong > 900


def test_all_ones_sum_to_the_number_of_ranks() -> None:
    golden = _golden("allr -d fp32", mode="all_ones")
    assert golden.whole(_part("allr -d fp32", 5, golden.group)).tolist() == [4] * 5


@pytest.mark.parametrize(
    ("line", "index", "expected"),
    [
        ("allg", 2, [(0, 2, 0, 0), (2, 2, 1, 0), (4, 2, 2, 0), (6, 2, 3, 0)]),
        ("redsct", 2, [(0, 2, -1, 4)]),
        ("alltoall", 1, [(0, 2, 0, 2), (2, 2, 1, 2), (4, 2, 2, 2), (6, 2, 3, 2)]),
        ("bcast --root 3", 1, [(0, 8, 3, 0)]),
        ("scatter --root 3", 1, [(0, 2, 3, 2)]),
        ("reduce --root 3", 1, []),
        ("reduce --root 3", 3, [(0, 8, -1, 0)]),
        ("gather --root 0", 1, []),
        ("gather --root 0", 0, [(0, 2, 0, 0), (2, 2, 1, 0), (4, 2, 2, 0), (6, 2, 3, 0)]),
        ("sendrecv", 0, [(0, 8, 3, 0)]),
        ("barrier", 0, []),
    ],
)
def test_what_each_output_must_hold(line: str, index: int, expected: list[Any]) -> None:
    spec = parse_spec([*line.split(), "-b", "8", "-e", "8"])
    case, group = _case(line), _group(index)
    shape = collective_calls.shapes(case, 8, group, spec)[0][0]
    found = [(p.start, p.length, p.source, p.source_start) for p in pieces(case, shape, group)]
    assert found == expected


def test_a_failed_check_leaves_its_data(tmp_path: Path) -> None:
    line = ["allr", "-d", "fp32", "-c", "--seed", "3", "--dump-dir", str(tmp_path / "a 'dump'")]
    spec = parse_spec(line)
    case, group = next(spec.cases(1)), _group(0, size=1)
    prepared = collective_calls.prepare(case, (Shape(6, 6, 6),), group, CPU, spec)
    assert checks.check(case, prepared, CPU, spec).wrong == 0
    prepared.bodies[0].parts[0].output[4] = 9.0
    path = checks.dump(case, prepared, spec, 24, 7, 0)
    assert path.name == "rank_7.pt"
    content = torch.load(path, weights_only=True)
    assert content["output"][4] == 9
    assert content["golden"].shape == (6,)
    assert content["seed"] == 3


def test_digests_differ_by_one_bit() -> None:
    first = torch.zeros(100, dtype=torch.bfloat16)
    second = first.clone()
    second[99] = torch.finfo(torch.bfloat16).tiny
    assert digest(first) == digest(torch.zeros(100, dtype=torch.bfloat16))
    assert digest(first) != digest(second)


def test_a_measurement_needs_no_more_than_its_cpus() -> None:
    before = os.sched_getaffinity(0)
    try:
        from flagscale.bench.collectives.devices import pin

        pin(1)
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, before)
