"""Tests of the output checker: its expected values, and the detection of wrong results."""

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
from flagscale.bench.collectives.checks import (
    CHUNK_ELEMENTS,
    Golden,
    OutputCheck,
    fingerprint_bytes,
    output_pieces,
)
from flagscale.bench.collectives.collective_calls import BufferSizes
from flagscale.bench.collectives.devices import RankGroup
from flagscale.bench.collectives.spec import Case

pytestmark = pytest.mark.torch

CPU = Device.from_torch(torch.device("cpu"))


@pytest.fixture(autouse=True, scope="module")
def _single_rank_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    file = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _case(line: str) -> Case:
    return next(parse_spec(line.split()).cases(4))


def _group(index: int, size: int = 4) -> RankGroup:
    group: Any = dist.group.WORLD
    return RankGroup("gloo", tuple(range(size)), index, group)


def _golden(
    line: str, index: int = 0, mode: Any = "random", size: int = 4, seed: int = 5
) -> Golden:
    return Golden(_case(line), _group(index, size), mode, seed)


def test_inputs_depend_on_rank_position_and_seed_only() -> None:
    golden = _golden("allr -d fp32")
    values = golden.inputs(1, 0, 1000)
    assert torch.equal(values[300:400], golden.inputs(1, 300, 100))
    assert not torch.equal(values, golden.inputs(2, 0, 1000))
    other_seed = Golden(golden.case, golden.group, "random", 6)
    assert not torch.equal(values, other_seed.inputs(1, 0, 1000))
    assert values.min() >= -1
    assert values.max() < 1
    assert abs(float(values.mean())) < 0.1


def test_integers_use_their_whole_range() -> None:
    values = _golden("allr -d uint8").inputs(0, 0, 10_000)
    assert (int(values.min()), int(values.max())) == (0, 255)
    assert len(values.unique()) == 256


@pytest.mark.parametrize("reduction", ["sum", "prod", "min", "max", "avg"])
@pytest.mark.parametrize("type_name", ["fp16", "bf16", "fp32", "fp64"])
def test_any_order_of_additions_is_within_the_tolerance(reduction: str, type_name: str) -> None:
    line = f"allr -d {type_name} -o {reduction}"
    golden = _golden(line, size=32)
    inputs = [golden.inputs(rank, 0, 4000) for rank in range(32)]
    part = _part(line, 4000, golden.group)
    for order in (inputs, inputs[::-1], inputs[::2] + inputs[1::2]):
        total = order[0].clone()
        for addend in order[1:]:
            if reduction in ("sum", "avg"):
                total += addend
            elif reduction == "prod":
                total *= addend
            else:
                total = getattr(torch, f"{reduction}imum")(total, addend)
        part.output.copy_(total / 32 if reduction == "avg" else total)
        assert golden.verify(part) == OutputCheck()


def _part(line: str, elements: int, group: RankGroup) -> collective_calls.OperationPart:
    return collective_calls.build_part(
        _case(line), BufferSizes(elements, elements, elements), group, CPU
    )


@pytest.mark.parametrize("type_name", ["uint8", "int8", "int32", "int64", "uint32", "fp16", "fp32"])
def test_one_wrong_element_is_detected(type_name: str) -> None:
    golden = _golden(f"allr -d {type_name}")
    part = _part(f"allr -d {type_name}", CHUNK_ELEMENTS + 10, golden.group)
    part.output.copy_(golden.golden_output(part))
    assert golden.verify(part).wrong_count == 0
    wrong_value = part.output[CHUNK_ELEMENTS + 3].to(torch.float64) + 1
    part.output[CHUNK_ELEMENTS + 3] = wrong_value.to(part.output.dtype)
    check = golden.verify(part)
    assert (check.wrong_count, check.first_wrong_index) == (1, CHUNK_ELEMENTS + 3)
    assert f"the first at {CHUNK_ELEMENTS + 3}" in str(check)


def test_nan_and_infinity_are_detected() -> None:
    golden = _golden("allr -d fp32")
    part = _part("allr -d fp32", 8, golden.group)
    part.output.copy_(golden.golden_output(part))
    part.output[2] = float("nan")
    part.output[5] = float("inf")
    assert golden.verify(part).wrong_count == 2


def test_missing_rank_is_detected() -> None:
    golden = _golden("allr -d bf16")
    part = _part("allr -d bf16", 1000, golden.group)
    part.output.copy_(sum(golden.inputs(rank, 0, 1000).float() for rank in range(3)))
    assert golden.verify(part).wrong_count > 900


def test_all_ones_sum_to_the_number_of_ranks() -> None:
    golden = _golden("allr -d fp32", mode="all_ones")
    assert golden.golden_output(_part("allr -d fp32", 5, golden.group)).tolist() == [4] * 5


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
def test_expected_output_pieces(line: str, index: int, expected: list[Any]) -> None:
    spec = parse_spec([*line.split(), "-b", "8", "-e", "8"])
    case, group = _case(line), _group(index)
    buffer_sizes = collective_calls.compute_buffer_sizes(case, 8, group, spec)[0][0]
    pieces = [
        (p.start, p.length, p.source, p.source_start)
        for p in output_pieces(case, buffer_sizes, group)
    ]
    assert pieces == expected


def test_failed_check_dumps_its_data(tmp_path: Path) -> None:
    line = ["allr", "-d", "fp32", "-c", "--seed", "3", "--dump-dir", str(tmp_path / "a 'dump'")]
    spec = parse_spec(line)
    case, group = next(spec.cases(1)), _group(0, size=1)
    prepared = collective_calls.prepare_buffers(case, (BufferSizes(6, 6, 6),), group, CPU, spec)
    assert checks.check_output(case, prepared, CPU, spec).wrong_count == 0
    # torch's all_reduce is in place, so the output buffer is the input buffer.
    prepared.bodies[0].parts[0].output[4] = 9.0
    path = checks.dump_buffers(case, prepared, spec, 24, 7, 0)
    assert path.name == "rank_7.pt"
    content = torch.load(path, weights_only=True)
    assert content["output"][4] == 9
    assert torch.equal(content["input"], _golden("allr -d fp32", size=1, seed=3).inputs(0, 0, 6))
    assert content["golden"].shape == (6,)
    assert content["seed"] == 3


def test_fingerprints_differ_by_one_bit() -> None:
    first = torch.zeros(100, dtype=torch.bfloat16)
    second = first.clone()
    second[99] = torch.finfo(torch.bfloat16).tiny
    assert fingerprint_bytes(first) == fingerprint_bytes(torch.zeros(100, dtype=torch.bfloat16))
    assert fingerprint_bytes(first) != fingerprint_bytes(second)


def test_pinned_measurement_uses_one_cpu() -> None:
    before = os.sched_getaffinity(0)
    try:
        from flagscale.bench.collectives.devices import pin_to_cpu

        pin_to_cpu(1)
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, before)
