"""Keys of the user's own: anchors for aliases, targets of interpolations, and misspelt ones."""

from __future__ import annotations

import pytest

from flagscale.config.yaml_file import read_yaml
from flagscale.errors import ConfigError

from .conftest import Workspace

BLOCK = "base: &base {nnodes: 1, nproc_per_node: 2}\n"
USE = "  runner:\n    nnodes: 1\n    nproc_per_node: 2\n"


def test_block_of_anchors_is_the_users_own(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "experiment:\n", f"{BLOCK}experiment:\n")
    workspace.replace("conf/train.yaml", USE, "  runner:\n    <<: *base\n")
    assert workspace.load().runner.nproc_per_node == 2


@pytest.mark.parametrize(
    ("block", "use"),
    [
        pytest.param("base: &b 2\n", "*b", id="value"),
        pytest.param("base:\n  deep: {ranks: &b 2}\n", "*b", id="nested"),
        pytest.param("base: [1, &b 2]\n", "*b", id="item"),
    ],
)
def test_anchor_inside_a_block_counts(block: str, use: str, workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "experiment:\n", f"{block}experiment:\n")
    workspace.replace("conf/train.yaml", "nproc_per_node: 2", f"nproc_per_node: {use}")
    assert workspace.load().runner.nproc_per_node == 2


def test_block_of_the_train_section_is_the_users_own(workspace: Workspace) -> None:
    workspace.replace("conf/train/tiny.yaml", "system:\n", "sizes: &size 64\nsystem:\n")
    workspace.replace("conf/train/tiny.yaml", "hidden_size: 64", "hidden_size: *size")
    assert workspace.load().train["hidden_size"] == 64


@pytest.mark.parametrize(
    ("block", "message"),
    [
        pytest.param("base: {nnodes: 1}\n", "base: unknown key", id="no-anchor"),
        pytest.param("base: &base {nnodes: 1}\n", "base: unknown key", id="no-alias"),
        pytest.param("experimnt: &b 2\n", "did you mean 'experiment'", id="misspelt"),
    ],
)
def test_other_blocks_are_unknown(block: str, message: str, workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "experiment:\n", f"{block}experiment:\n")
    if "&b 2" in block:
        workspace.replace("conf/train.yaml", "nproc_per_node: 2", "nproc_per_node: *b")
    with pytest.raises(ConfigError, match=message):
        workspace.load()


def test_anchored_keys_of_a_file(workspace: Workspace) -> None:
    path = workspace.write("a.yaml", "a: &a {b: &b [1]}\nc: &c 3\nd: {<<: *a, e: *b}\nf: 4\n")
    assert read_yaml(path).anchored_keys == {"a", "a.b"}


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        pytest.param(
            ("  exp_name: demo\n", "  exp_dir: ./outputs demo\n"),
            ("  exp_nam: demo\n", "  exp_dir: out/${experiment.exp_name}\n"),
            "conf/train.yaml:5 has 'exp_nam': write 'exp_name' there",
            id="key",
        ),
        pytest.param(
            ("  exp_dir: ./outputs demo\n", ""),
            ("  exp_dir: out/${experiment.exp_nam}\n", ""),
            "did you mean ${experiment.exp_name}?",
            id="reference",
        ),
        pytest.param(
            ("  exp_name: demo\n", "  exp_dir: ./outputs demo\n"),
            ("  exp_name: demo\n  my_size: 3\n", "  exp_dir: out/${experiment.my_sise}\n"),
            "did you mean ${experiment.my_size}?",
            id="own-key",
        ),
    ],
)
def test_misspelling_behind_an_interpolation_is_named(
    old: tuple[str, str], new: tuple[str, str], part: str, workspace: Workspace
) -> None:
    for before, after in zip(old, new, strict=True):
        if before:
            workspace.replace("conf/train.yaml", before, after)
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert part in str(error.value)
