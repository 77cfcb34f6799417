"""Data sets by a wrong name: the message has the name to write."""

from __future__ import annotations

import pytest

from flagscale.config.actions import Purpose
from flagscale.errors import ConfigError

from .conftest import Workspace

MEANT = {
    "beginning": ("data/ab", "but there is data/ab_text_document.bin: write data/ab_text_document"),
    "bin": ("data/ab_text_document.bin", "without .bin: write data/ab_text_document"),
    "idx": ("data/ab_text_document.idx", "without .idx: write data/ab_text_document"),
    "directory": ("sets", "no data set sets, but there is sets/one.bin: write sets/one"),
    "two": ("data/cd", "write data/cd_1 or data/cd_2"),
    "three": ("data/ef", "write data/ef_1, or one of 2 others"),
    "text": (
        "data/corpus.txt",
        "found the file data/corpus.txt: convert its text with tools/data/",
    ),
}


@pytest.fixture
def data(workspace: Workspace) -> Workspace:
    for name in ("data/ab_text_document", "data/cd_1", "data/cd_2", "sets/one"):
        workspace.write(f"{name}.bin", "")
        workspace.write(f"{name}.idx", "")
    for number in (1, 2, 3):
        workspace.write(f"data/ef_{number}.bin", "")
        workspace.write(f"data/ef_{number}.idx", "")
    workspace.write("data/corpus.txt", "text")
    workspace.write("data/half_1.idx", "")
    return workspace


@pytest.mark.parametrize("purpose", ["launch", "plan"])
@pytest.mark.parametrize(("path", "part"), MEANT.values(), ids=MEANT)
def test_name_that_is_meant_is_suggested(
    path: str, part: str, purpose: Purpose, data: Workspace
) -> None:
    with pytest.raises(ConfigError) as error:
        data.load(f"train.data.data_path={path}", purpose=purpose)
    (problem,) = error.value.problems
    assert problem.key == "train.data.data_path"
    assert part in problem.message
    assert ".bin.bin" not in problem.message


@pytest.mark.parametrize("path", ["data/zz", "data/half", "data/t", "elsewhere/ab"])
def test_unknown_name_may_be_on_other_machines(path: str, data: Workspace) -> None:
    assert data.load(f"train.data.data_path={path}", purpose="plan").train["data_path"]
    with pytest.raises(ConfigError, match="no data set"):
        data.load(f"train.data.data_path={path}", purpose="launch")


@pytest.mark.parametrize("purpose", ["launch", "plan"])
def test_name_with_a_dot_is_a_prefix_if_its_files_exist(purpose: Purpose, data: Workspace) -> None:
    data.write("data/v1.bin.bin", "")
    data.write("data/v1.bin.idx", "")
    assert data.load("train.data.data_path=data/v1.bin", purpose=purpose).train["data_path"]


def test_each_data_set_of_a_blend_is_checked(data: Workspace) -> None:
    with pytest.raises(ConfigError) as error:
        data.load("train.data.data_path=[0.5,data/text,0.5,data/ab]", purpose="plan")
    assert "write data/ab_text_document" in str(error.value)


def test_other_hosts_have_their_own_files(data: Workspace) -> None:
    overrides = ("train.data.data_path=data/ab", "experiment.runner.no_shared_fs=true")
    assert data.load(*overrides, purpose="plan").train["data_path"]
