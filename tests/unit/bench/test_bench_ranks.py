"""Tests of a rank's preparations: its backend, unsupported operations, notes and CPU pinning."""

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


class _UnloadableBackend(Gloo):
    name = "broken"

    @contextmanager
    def creation_context(self) -> Iterator[None]:
        raise ImportError("libbroken.so.1: cannot open shared object file")
        yield


class _GlooOnGpu(Gloo):
    """gloo that is available on GPUs, too."""

    def explain_unavailable(self, device: registry.DeviceType) -> str | None:
        return None


def test_unloadable_backend_is_reported() -> None:
    with pytest.raises(ConfigError, match="broken cannot be loaded: libbroken"):
        worker._load_backend(_UnloadableBackend())


def test_unsupported_operations_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._BUILTIN, "gloo", _GlooOnGpu())
    spec = parse_spec(["allr,sendrecv,permute", "--backend", "gloo"])
    assert worker._without_unsupported(spec, "cpu") == spec
    supported = worker._without_unsupported(spec, "cuda")
    assert [op.name for op in supported.operations] == ["all_reduce"]
    assert supported.notes == (
        "sendrecv: left out, gloo cannot do it on cuda",
        "permute: left out, gloo cannot do it on cuda",
    )
    with pytest.raises(ConfigError, match="it cannot do permute on GPU memory"):
        worker._without_unsupported(parse_spec(["permute", "--backend", "gloo"]), "cuda")


def test_flags_without_effect_on_a_cpu_produce_notes() -> None:
    spec = parse_spec(["allr", "--sb2sb", "--timing", "events", "-z", "1", "-C"])
    cpu, gpu = (Device.from_torch(torch.device(kind)) for kind in ("cpu", "cuda"))
    assert [note.partition(":")[0] for note in worker._list_notes(spec, cpu)] == [
        *("-R", "--timing events", "-z", "-C")
    ]
    assert list(worker._list_notes(spec, gpu)) == []
    assert list(worker._list_notes(parse_spec(["allr"]), cpu)) == []


def test_pinned_rank_uses_one_cpu() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        for local_rank in range(2 * len(allowed)):
            devices.pin_to_cpu(local_rank)
            assert os.sched_getaffinity(0) == {sorted(allowed)[local_rank % len(allowed)]}
            os.sched_setaffinity(0, allowed)
    finally:
        os.sched_setaffinity(0, allowed)
