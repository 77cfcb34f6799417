"""Check before training that checkpoints can be written."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.errors import CheckpointError

pytestmark = pytest.mark.torch


def create_arguments(save: Path | None) -> Namespace:
    return Namespace(**{**vars(parse_arguments([])), "save": save and str(save)})


@pytest.mark.usefixtures("single_process_group")
@pytest.mark.parametrize(
    ("save", "is_new"),
    [
        pytest.param("new/checkpoints", True, id="new"),
        pytest.param("existing", False, id="existing"),
        pytest.param(None, False, id="no-save"),
    ],
)
def test_check_creates_the_directory_and_leaves_no_files(
    tmp_path: Path, save: str | None, is_new: bool
) -> None:
    from flagscale.train.checkpoint import Checkpointer

    (tmp_path / "existing").mkdir()
    path = None if save is None else tmp_path / save
    assert Checkpointer(create_arguments(path)).check_writable() is is_new
    assert path is None or list(path.iterdir()) == []


@pytest.mark.usefixtures("single_process_group")
def test_unwritable_directory_is_an_error(tmp_path: Path) -> None:
    from flagscale.train.checkpoint import Checkpointer

    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="save: no checkpoint can be written in") as error:
        Checkpointer(create_arguments(tmp_path / "file" / "x")).check_writable()
    assert "Not a directory" in error.value.message
    assert "to null to save none" in (error.value.hint or "")
