"""Check before training that checkpoints can be written."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from flagscale.config.arguments.spec.parser import parse_arguments
from flagscale.errors import CheckpointError

pytestmark = pytest.mark.torch


def arguments(save: Path | None) -> Namespace:
    return Namespace(**{**vars(parse_arguments([])), "save": save and str(save)})


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("save", "is_new"),
    [
        pytest.param("new/checkpoints", True, id="new"),
        pytest.param("there", False, id="there"),
        pytest.param(None, False, id="nothing-is-saved"),
    ],
)
def test_checkpoint_directory_is_created_and_empty(
    tmp_path: Path, save: str | None, is_new: bool
) -> None:
    from flagscale.train.checkpoint import Checkpointer

    (tmp_path / "there").mkdir()
    path = None if save is None else tmp_path / save
    assert Checkpointer(arguments(path)).check_writable() is is_new
    assert path is None or list(path.iterdir()) == []


@pytest.mark.usefixtures("one_rank")
def test_unwritable_directory_is_one_error(tmp_path: Path) -> None:
    from flagscale.train.checkpoint import Checkpointer

    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="save: no checkpoint can be written in") as error:
        Checkpointer(arguments(tmp_path / "file" / "x")).check_writable()
    assert "Not a directory" in error.value.message
    assert "to null to save none" in (error.value.hint or "")
