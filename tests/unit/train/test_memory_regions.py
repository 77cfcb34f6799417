"""Regions of host memory: what was written is read, and what is incomplete is not used."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flagscale import memory_regions
from flagscale.train.memory_checkpoint.region import INCOMPLETE, Region

pytestmark = pytest.mark.torch


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "region"
    file.touch()
    return str(file)


def make_tensors(factor: float = 1.0) -> dict[str, torch.Tensor]:
    return {
        "weights": factor * torch.arange(1000, dtype=torch.bfloat16).view(10, 100),
        "scalar": torch.tensor(factor),
        "bits": torch.arange(7, dtype=torch.uint8),
    }


def test_another_process_reads_what_was_written(path: str) -> None:
    region, tensors = Region(path), make_tensors()
    assert region.iteration() == INCOMPLETE
    region.write(7, tensors, {"steps": [7, None]})
    other = Region(path)
    copies = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    other.read(copies)
    assert (other.iteration(), other.read_description()) == (7, {"steps": [7, None]})
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())


def test_a_region_grows_and_shrinks_with_its_copy(path: str) -> None:
    region = Region(path)
    for size in (10, 100_000, 50):
        tensors = {"weights": torch.full((size,), float(size))}
        region.write(size, tensors, None)
        copy = {"weights": torch.empty(size)}
        Region(path).read(copy)
        assert torch.equal(copy["weights"], tensors["weights"])


def test_an_interrupted_write_leaves_no_copy(path: str) -> None:
    region = Region(path)
    region.write(1, make_tensors(), None)
    with pytest.raises(NotImplementedError, match="meta"):
        region.write(2, make_tensors() | {"bits": torch.empty(3, device="meta")}, None)
    assert Region(path).iteration() == INCOMPLETE


def test_a_copy_is_received_as_it_was_sent(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("sent", "received")]
    for path in paths:
        path.touch()
    sent, received = (Region(str(path)) for path in paths)
    sent.write(3, make_tensors(2.0), "description")
    incoming = received.bytes_to_receive(sent.size())
    assert received.iteration() == INCOMPLETE
    incoming.copy_(sent.bytes_to_send())
    received.complete(sent.header())
    copies = make_tensors(0.0)
    received.read(copies)
    assert torch.equal(copies["weights"], make_tensors(2.0)["weights"])
    assert (received.iteration(), received.read_description()) == (3, "description")


def test_ranks_find_their_own_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    (variable,) = memory_regions.create_regions(2).items()
    monkeypatch.setenv(*variable)
    regions = [memory_regions.find_regions(rank) for rank in range(2)]
    paths = [path for found in regions if found is not None for pair in found for path in pair]
    assert len({Path(path).stat().st_ino for path in paths}) == 8
    assert memory_regions.find_regions(2) is None
    monkeypatch.delenv(memory_regions.VARIABLE)
    assert memory_regions.find_regions(0) is None
