"""Tests of the commands' output and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from flagscale.patching.cli import main_patch, main_status, main_unpatch

from .conftest import Project, write_file

Run = Callable[..., int]


@pytest.fixture
def options(project: Project) -> list[str]:
    return ["--backend", "tiny", "--root", str(project.layout.root)]


def test_unpatch_edit_collect_and_status(
    project: Project, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_status(options) == 0
    assert "not adapted" in capsys.readouterr().out
    assert main_unpatch([*options, "--path", str(project.source)]) == 0
    out = capsys.readouterr().out
    assert "tiny 1.2.3" in out
    assert "1 places in 1 files" in out
    assert main_unpatch(options) == 0
    assert "nothing to do" in capsys.readouterr().out
    write_file(project.tree / "README.md", "mine [bold]not markup[/bold]\n")
    assert main_unpatch([*options, "--status"]) == 0
    assert "modified: README.md" in capsys.readouterr().out
    assert main_patch([*options, "--name", "Mine"]) == 0
    assert "README.md.patch" in capsys.readouterr().out
    assert main_patch(options) == 0
    assert "nothing to do, 1 patch(es)" in capsys.readouterr().out


def test_status_for_programs(
    project: Project, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_status([*options, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapted"] is False
    project.unpatch()
    write_file(project.tree / "README.md", "mine\n")
    assert main_status([*options, "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["version"] == "1.2.3"
    assert status["edits"]["modified"] == ["README.md"]


def test_quiet_prints_nothing(
    project: Project, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_unpatch([*options, "--path", str(project.source), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_error_is_one_message_and_exit_1(
    options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main_unpatch([*options, "--path", "/no/such [red]place"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: --path /no/such [red]place: no such file or directory")
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--path", "x", "--url", "y"],
        ["--path", "x", "--source", "git"],
        ["--commit", "x", "--source", "registry"],
        ["--source", "nowhere"],
        ["--forse"],
    ],
)
def test_contradicting_options_exit_2(options: list[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main_unpatch([*options, *arguments])
    assert error.value.code == 2


@pytest.mark.parametrize("command", [main_unpatch, main_patch, main_status])
def test_help_has_examples(command: Run, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        command(["--help"])
    assert error.value.code == 0
    assert "third_party/<backend>" in capsys.readouterr().out
