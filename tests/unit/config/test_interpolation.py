"""References to environment variables of a host and to other keys, and hints for wrong ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flagscale.config.checks import experiment_notes
from flagscale.config.interpolation import (
    host_reference,
    host_references,
    remove_references,
    restore_references,
    split_references,
)
from flagscale.errors import ConfigError
from flagscale.hosts.probe import fill_references

if TYPE_CHECKING:
    from conftest import Workspace

PATH = host_reference("PATH")

WRITTEN = {
    "extended": ("/opt/x/bin:${host:PATH}", f"/opt/x/bin:{PATH}"),
    "alone": ("${host:PATH}", PATH),
    "several": ("${host:A}${host:B} ${host:A}", "".join(map(host_reference, "AB")) + " \0host:A\0"),
    "another": ("${host:LD_LIBRARY_PATH}", host_reference("LD_LIBRARY_PATH")),
    "hostile": (
        '"a b\'c\\"$(id) `id`\\n,;é ${host:PATH} \\\\ $HOME"',
        f"a b'c\"$(id) `id`\n,;é {PATH} \\ $HOME",
    ),
    "literal": (r"a \${host:PATH}", "a ${host:PATH}"),
    "through-a-key": ("x ${experiment.envs.SOURCE}", "x \0host:SOURCE\0"),
    "beside-a-key": ("${experiment.exp_name}:${host:PATH}", f"demo:{PATH}"),
}


@pytest.mark.parametrize(("written", "expected"), WRITTEN.values(), ids=WRITTEN)
def test_host_reference_is_kept_in_value(workspace: Workspace, written: str, expected: str) -> None:
    section = f"  envs:\n    SOURCE: ${{host:SOURCE}}\n    X: {written}\n"
    workspace.replace("conf/train.yaml", "  envs:\n", section)
    assert workspace.load().envs.common["X"] == expected


def test_host_reference_in_override(workspace: Workspace) -> None:
    experiment = workspace.load("experiment.envs.PATH=/opt/x y,'z':${host:PATH}")
    assert experiment.envs.common["PATH"] == f"/opt/x y,'z':{PATH}"
    envs = workspace.load("+experiment.envs.node_specific.h.PATH=${host:PATH}").envs
    assert envs.by_host["h"]["PATH"] == PATH


PROBLEMS = {
    "nobody's": ("X: ${host:}", "${host:} names no variable"),
    "no-name": ("X: ${host:A-B}", "${host:A-B} names no variable"),
    "two-names": ("X: ${host:A,B}", "${host:A,B} names no variable"),
    "a-mark-by-hand": ('X: "\\0host:PATH\\0"', "X: cannot hold a NUL character"),
    "shell-braces": ("PATH: /x:${PATH}", "write ${host:PATH}"),
    "another-name": ("X: ${NAME}", "write ${host:NAME} for the host's own variable"),
    "a-slice": ("X: ${Y:0:2}", "write ${host:Y} for the host's own variable"),
}


@pytest.mark.parametrize(("written", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_invalid_reference_is_rejected(workspace: Workspace, written: str, message: str) -> None:
    workspace.replace("conf/train.yaml", "CUDA_VISIBLE_DEVICES: 0,1", written)
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert message in str(error.value)
    assert (error.value.problems[0].where or "").startswith("conf/train.yaml:")


HINTS = {
    "elsewhere": (
        "exp_name: ${host:PATH}",
        "is supported only under experiment.envs; ${oc.env:NAME} is a variable of this machine",
    ),
    "elsewhere-unknown": ("exp_name: ${HOME}", "write ${oc.env:HOME} for this machine's variable"),
    "unset": (
        "exp_name: ${oc.env:NO_SUCH_VARIABLE}",
        "this machine has no variable NO_SUCH_VARIABLE: set it, or write a default, "
        "${oc.env:NO_SUCH_VARIABLE,…}",
    ),
    "a-key": ("exp_name: ${train.model.none}", "'train.model.none' not found"),
    "commands": (
        "exp_name: a\n  cmds: {before_start: 'cd ${HOME}'}",
        r"for the shell's variable write $HOME or \${HOME}",
    ),
    "slice": (
        "exp_name: a\n  cmds: {before_start: 'echo ${HOME:0:2}'}",
        r"Unsupported interpolation type HOME; for the shell's variable write \${HOME:0:2}",
    ),
    "suffix": (
        "exp_name: a\n  cmds: {before_start: 'echo ${HOME%%/*}'}",
        r"for the shell's variable write \${HOME%%/*}",
    ),
    "placeholder": ("exp_name: ${name:??}", "it is a placeholder: replace it by a value"),
    "placeholder-without-a-colon": (
        "exp_name: ${name??}",
        "it is a placeholder: replace it by a value",
    ),
    "older-hydra": (
        "exp_name: ${env:NO_SUCH_VARIABLE}",
        "this machine has no variable NO_SUCH_VARIABLE: set it, or write a default, "
        "${oc.env:NO_SUCH_VARIABLE,…}",
    ),
    "begun": (
        "exp_name: a\n  cmds: {before_start: 'echo ${HOME'}",
        r"${ begins an interpolation; for the literal text write \${",
    ),
}


@pytest.mark.parametrize(("written", "message"), HINTS.values(), ids=HINTS)
def test_hint_shows_correct_syntax(workspace: Workspace, written: str, message: str) -> None:
    workspace.replace("conf/train.yaml", "exp_name: demo", written)
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert message in str(error.value)
    assert str(error.value).endswith(message)


def test_all_unresolved_references_are_reported_at_once(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "exp_name: demo", "exp_name: ${a${b}")
    workspace.replace("conf/train.yaml", "exp_dir: ./outputs demo", "exp_dir: ${experiment.nme}")
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", "num_layers: ${layers:??}")
    with pytest.raises(ConfigError) as error:
        workspace.load()
    assert sorted((p.where, p.key) for p in error.value.problems) == [
        ("conf/train.yaml:5", "experiment.exp_name"),
        ("conf/train.yaml:6", "experiment.exp_dir"),
        ("conf/train/tiny.yaml:6", "train.model.num_layers"),
    ]


USER_KEYS = {
    "of-the-experiment": ("  layers: 6\n", "${experiment.layers}", 6),
    "in-a-section": ("  own: {layers: [6]}\n", "${experiment.own.layers[0]}", 6),
    "at-the-top": ("layers: 6\n", "${layers}", 6),
    "relative": ("  layers: 6\n", "${...experiment.layers}", 6),
}


@pytest.mark.parametrize(("line", "reference", "value"), USER_KEYS.values(), ids=USER_KEYS)
def test_user_defined_key_can_be_referenced(
    workspace: Workspace, line: str, reference: str, value: int
) -> None:
    text = (workspace.conf / "train.yaml").read_text(encoding="utf-8")
    place = "action: run\n" if line[0] == "l" else "  exp_name: demo\n"
    (workspace.conf / "train.yaml").write_text(text.replace(place, place + line), encoding="utf-8")
    workspace.replace("conf/train/tiny.yaml", "num_layers: 4", f"num_layers: {reference}")
    experiment = workspace.load()
    assert experiment.train["num_layers"] == value
    assert not experiment.unreferenced_keys


def test_unreferenced_user_key_is_noted(workspace: Workspace) -> None:
    workspace.replace("conf/train.yaml", "  exp_name: demo\n", "  exp_name: demo\n  seed: 4\n")
    experiment = workspace.load()
    assert experiment.unreferenced_keys == ("experiment.seed",)
    assert "no key refers to it as ${experiment.seed}" in experiment_notes(experiment, 1)[0]
    with pytest.raises(ConfigError, match=r"override: experiment\.steps: unknown key"):
        workspace.load("+experiment.steps=4")


VALUES = {
    "extended": ("PATH", f"/x:{PATH}", "/x:/bin", "/x"),
    "before": ("PATH", f"{PATH}:/x", "/bin:/x", "/x"),
    "within": ("PATH", f"/a:{PATH}:/b", "/a:/bin:/b", "/a:/b"),
    "no-colon": ("PATH", f"/a{PATH}/b", "/a/bin/b", "/a/b"),
    "alone": ("PATH", PATH, "/bin", ""),
    "no-path": ("X", f"a:{PATH}:b", "a:/bin:b", "a::b"),
    "twice": ("X", f"{PATH}{PATH}", "/bin/bin", ""),
    "none": ("PATH", "a::b:", "a::b:", "a::b:"),
}


@pytest.mark.parametrize(
    ("name", "value", "expected", "expected_unset"), VALUES.values(), ids=VALUES
)
def test_unset_variable_is_empty(name: str, value: str, expected: str, expected_unset: str) -> None:
    """A path list gets no empty entry, which would mean the working directory."""
    parts = split_references(name, value)
    assert fill_references(parts, {"PATH": "/bin"}) == expected
    assert fill_references(parts, {"PATH": ""}) == fill_references(parts, {}) == expected_unset


def test_references_are_restored_to_yaml_syntax() -> None:
    value = f"a ${{host:X}}{host_reference('X')}"
    assert restore_references({"k": [value, 1, None]}) == {"k": [r"a \${host:X}${host:X}", 1, None]}
    assert (host_references(value), remove_references(value)) == (["X"], "a ${host:X}")
