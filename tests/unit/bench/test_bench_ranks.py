"""What a rank makes of its backend before it measures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from support.bench_lines import parse_spec

from flagscale.accelerators.device import Device
from flagscale.bench.collectives import devices, worker
from flagscale.comm import registry
from flagscale.comm.registry import Gloo
from flagscale.errors import ConfigError

pytestmark = pytest.mark.torch


class _Broken(Gloo):
    name = "broken"

    @contextmanager
    def creating(self) -> Iterator[None]:
        raise ImportError("libbroken.so.1: cannot open shared object file")
        yield


class _WithGpu(Gloo):
    """gloo where there is a GPU."""

    def unavailable(self, device: registry.DeviceType) -> str | None:
        return None


def test_a_plug_in_that_does_not_load_is_a_message() -> None:
    with pytest.raises(ConfigError, match="broken cannot be loaded: libbroken"):
        worker._load(_Broken())


def test_operations_that_a_backend_lacks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._OWN, "gloo", _WithGpu())
    spec = parse_spec(["allr,sendrecv,permute", "--backend", "gloo"])
    assert worker._possible(spec, "cpu") == spec
    kept = worker._possible(spec, "cuda")
    assert [op.name for op in kept.operations] == ["all_reduce"]
    assert kept.notes == (
        "sendrecv: left out, gloo cannot do it on cuda",
        "permute: left out, gloo cannot do it on cuda",
    )
    with pytest.raises(ConfigError, match="it cannot do permute on GPU memory"):
        worker._possible(parse_spec(["permute", "--backend", "gloo"]), "cuda")


def test_flags_without_meaning_on_a_cpu_are_told() -> None:
    spec = parse_spec(["allr", "--sb2sb", "--timing", "events", "-z", "1", "-C"])
    cpu, gpu = (Device.of(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert [note.partition(":")[0] for note in worker._notes(spec, cpu)] == [
        *("-R", "--timing events", "-z", "-C")
    ]
    assert list(worker._notes(spec, gpu)) == []
    assert list(worker._notes(parse_spec(["allr"]), cpu)) == []


def test_a_pinned_rank_stays_on_one_cpu() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        for local_rank in range(2 * len(allowed)):
            devices.pin(local_rank)
            assert os.sched_getaffinity(0) == {sorted(allowed)[local_rank % len(allowed)]}
            os.sched_setaffinity(0, allowed)
    finally:
        os.sched_setaffinity(0, allowed)
