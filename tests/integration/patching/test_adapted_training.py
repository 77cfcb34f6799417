"""Tests of training with the adapted Megatron on a CPU, and of its random states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from .conftest import run_python

pytestmark = [pytest.mark.integration, pytest.mark.torch]
Train = Callable[..., dict[str, Any]]


def assert_learns(run: dict[str, Any]) -> None:
    first, last = run["losses"][0], run["losses"][-1]
    assert sum(last) < sum(first)
    assert all(norm > 0 for norm in run["norms"])


def test_one_rank(train: Train) -> None:
    names = ("plain", "again", "recompute", "bf16", "experts", "experts-alltoall")
    result = train(1, *names)
    runs = result["runs"]
    for name in names:
        assert_learns(runs[name])
    assert runs["plain"] == runs["again"], "dropout is reproducible"
    assert runs["plain"]["losses"][0][0] != runs["plain"]["losses"][0][1], "dropout is on"
    assert runs["recompute"] == runs["plain"], "recomputation draws the same dropout"
    assert result["warned"] == []


def test_two_ranks(train: Train) -> None:
    names = ("tp2", "tp2-recompute", "pp2", "dp2-sharded", "ep2")
    result = train(2, *names)
    runs = result["runs"]
    for name in names:
        assert_learns(runs[name])
    assert runs["tp2-recompute"] == runs["tp2"]
    assert result["warned"] == []


PROGRAM = dedent("""
    import os

    import torch
    from megatron.core import device
    from megatron.core.tensor_parallel import random

    random.initialize_rng_tracker()
    tracker = random.get_cuda_rng_tracker()
    tracker.add("side", 5)
    device.manual_seed(1)
    whole = torch.rand(4)
    side = torch.rand(4, generator=torch.Generator().manual_seed(5))
    device.manual_seed(1)
    parts, inside = [], []
    for _ in range(2):
        parts.append(torch.rand(2))
        with tracker.fork("side"):
            inside.append(torch.rand(2))
    assert torch.equal(torch.cat(parts), whole), "a fork restores the stream it left"
    assert torch.equal(torch.cat(inside), side), "a fork goes on where the last one stopped"

    states = random._get_all_rng_states()
    before = torch.rand(3)
    with random._fork_rng():
        torch.rand(7)
    random._set_all_rng_states(*states)
    assert torch.equal(torch.rand(3), before)
    assert not torch.cuda.is_initialized()
    assert (device.device_type(), device.current_device()) == ("cpu", torch.device("cpu"))
    stream = device.Stream()
    with device.stream(stream):
        stream.wait_stream(device.current_stream())
        stream.record_event().synchronize()
    assert device.memory_stats()["allocated_bytes.all.current"] == 0
    from megatron.core.datasets import helpers_cpp
    assert callable(helpers_cpp.build_sample_idx_int32)

    for wanted in ("cuda", "tpu"):
        os.environ["FLAGSCALE_DEVICE"], device._type = wanted, ""
        try:
            device.has_device()
        except RuntimeError as error:
            print(error)
""")


def test_random_state_streams_and_choice_of_device(tree: Path) -> None:
    result = run_python(tree, "-c", PROGRAM, CUDA_VISIBLE_DEVICES="", FLAGSCALE_DEVICE="")
    assert result.returncode == 0, result.stderr
    no_cuda, no_tpu = result.stdout.splitlines()
    assert no_cuda.startswith("FLAGSCALE_DEVICE=cuda, but torch")
    assert no_tpu.startswith("FLAGSCALE_DEVICE='tpu': no kind of device is called 'tpu'; known: ")


def test_bridge_between_meshes_runs_without_nccl(tree: Path) -> None:
    program = str(Path(__file__).with_name("bridge_program.py"))
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    result = run_python(tree, *launcher, program)
    assert result.returncode == 0, result.stderr[-4000:]
