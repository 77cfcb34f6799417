"""Tensors of a checkpoint: their values, and verification of their checksums."""

from __future__ import annotations

import io
import zipfile
from typing import Any

import pytest

pytestmark = pytest.mark.torch


def save(tensor: Any) -> memoryview:
    """Return what ``torch.save`` writes, in writable memory."""
    import torch

    file = io.BytesIO()
    torch.save(tensor, file)
    return memoryview(bytearray(file.getvalue()))


def tensors() -> dict[str, Any]:
    import torch

    matrix = torch.arange(12, dtype=torch.float32).view(3, 4)
    return {
        "matrix": matrix,
        "transposed": matrix.T,
        "part": matrix[1:, 1:3],
        "bf16": matrix.bfloat16(),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(matrix),
        "bool": matrix > 3,
    }


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    "name", ["matrix", "transposed", "part", "bf16", "scalar", "empty", "parameter", "bool"]
)
def test_a_tensor_is_what_was_saved(name: str, verify: bool) -> None:
    import torch

    from flagscale.train.checkpoint.tensor_archive import open_tensor

    tensor = tensors()[name]
    opened = open_tensor(save(tensor), verify=verify)
    assert opened.dtype == tensor.dtype and opened.shape == tensor.shape
    assert torch.equal(opened, tensor)


def test_a_tensor_shares_the_memory_of_its_archive() -> None:
    import torch

    from flagscale.train.checkpoint.tensor_archive import open_tensor

    content = save(torch.ones(1000))
    tensor = open_tensor(content, verify=True)
    content[len(content) // 2] ^= 4
    assert not torch.equal(tensor, torch.ones(1000))


def test_a_flipped_bit_is_detected() -> None:
    import torch

    from flagscale.train.checkpoint.tensor_archive import open_tensor

    content = save(torch.arange(1000))
    content[len(content) // 2] ^= 4
    assert not torch.equal(open_tensor(content, verify=False), torch.arange(1000))
    with pytest.raises(zipfile.BadZipFile, match="Bad CRC-32"):
        open_tensor(content, verify=True)


@pytest.mark.parametrize("size", [0, 10, 600, -10])
def test_a_truncated_archive_is_reported(size: int) -> None:
    import torch

    from flagscale.train.checkpoint.tensor_archive import open_tensor

    content = save(torch.arange(1000))[:size]
    with pytest.raises(zipfile.BadZipFile):
        open_tensor(content, verify=True)


def test_archives_without_checksums_are_opened() -> None:
    """The first versions of ``flagscale convert`` wrote none."""
    import torch
    from torch.serialization import set_crc32_options

    from flagscale.train.checkpoint.tensor_archive import open_tensor

    set_crc32_options(False)
    try:
        content = save(torch.arange(1000))
    finally:
        set_crc32_options(True)
    assert torch.equal(open_tensor(content, verify=True), torch.arange(1000))
