"""The documentation: links lead somewhere, commands are accepted, YAML keys exist."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagscale import cli
from flagscale.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[3]
DOCS = PROJECT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *PROJECT.glob("*.md")])
GUIDES = sorted([*(DOCS / "guides").glob("*.md"), PROJECT / "README.md"])
PLANNED = ("run", "test", "dryrun", "check", "estimate")
"""Actions whose configuration a dry run can judge."""
WITHOUT_KEYS = ("comm", "envs", "extra", "device_type_specific", "node_specific", "mounts")
"""Sections whose keys are not fixed names."""


def _relative_path(path: Path) -> str:
    return str(path.relative_to(PROJECT))


def _heading_anchors(page: str) -> set[str]:
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^ *```.*?^ *```", "", page, flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=_relative_path)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        anchors = (
            _heading_anchors(file.read_text(encoding="utf-8"))
            if anchor and file.exists()
            else set()
        )
        if not file.exists() or (anchor and anchor not in anchors):
            broken.append(target)
    assert broken == []


def _code_blocks(page: Path, language: str) -> Iterator[str]:
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^ *```", text, re.M | re.S):
        if match[2] == language:
            yield "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines())


def _commands(page: Path, language: str = "bash") -> Iterator[list[str]]:
    for block in _code_blocks(page, language):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            argv = shlex.split(line, comments=True)
            if argv:
                yield argv


COMMANDS = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")
    for page in GUIDES
    for words in _commands(page)
    if words[0] == "flagscale" or words[:2] == ["python", "run.py"]
]


@pytest.fixture(scope="module")
def guide_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files that the guides' commands name."""
    root = tmp_path_factory.mktemp("docs")
    shutil.copytree(PROJECT / "examples", root / "examples")
    for name in ("conf", "my_conf"):
        shutil.copytree(PROJECT / "examples" / "llama3" / "conf", root / name)
    (root / "train.py").touch()
    (root / "hostfile").write_text("node[01-04] slots=8\n", encoding="utf-8")
    shutil.copy(
        PROJECT / "examples" / "command" / "conf" / "preprocess.yaml", root / "evaluate.yaml"
    )
    return root


def _run_flagscale(argv: list[str]) -> str:
    """Run a command line in this process and return what it printed."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), pytest.raises(SystemExit) as exit_error:
        cli.main(argv)
    assert exit_error.value.code == 0, f"{shlex.join(argv)}\n{output.getvalue()}"
    return output.getvalue()


@functools.cache
def _help_text(command: tuple[str, ...]) -> str:
    return _run_flagscale([*command, "--help"])


def _as_dry_run(argv: list[str]) -> list[str]:
    """Return the dry run of a command that would start processes."""
    if argv[0] == "python":
        options = dict(zip(argv[2:6:2], argv[3:6:2], strict=True))
        config = Path(options["--config-path"], options["--config-name"] + ".yaml")
        overrides = [argument for argument in argv[6:] if not argument.startswith("action=")]
        return ["dryrun", str(config), *overrides]
    return ["dryrun", *argv[2:]]


@pytest.mark.parametrize("argv", COMMANDS)
def test_command_is_accepted(
    argv: list[str], guide_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    if "…" in argv:
        pytest.skip("a schematic command")
    if "./examples/qwen3/conf" in argv:
        pytest.skip("run by tests/integration/launcher/test_finetuning_example.py")
    monkeypatch.chdir(guide_directory)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    if argv[0] == "python" or argv[1] in PLANNED:
        _run_flagscale(_as_dry_run(argv))
        return
    groups = ("comm", "bench")
    command = tuple(argv[1:3] if argv[1] in groups else argv[1:2])
    if command == ("convert",):
        pytest.skip("its options are tested where it is")
    known_options = set(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", _help_text(command)))
    options = {word.partition("=")[0] for word in argv[2:] if re.match(r"--?[a-z]", word)}
    assert options <= known_options


def test_example_program_has_a_help(tmp_path: Path) -> None:
    program = [sys.executable, str(PROJECT / "examples/qwen3/tiny_model.py"), "--help"]
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: tiny_model.py")
    assert list(tmp_path.iterdir()) == []


def test_convert_knows_the_options_of_its_guide() -> None:
    program = [sys.executable, "-m", "flagscale.train.checkpoint.formats.convert", "--help"]
    text = subprocess.run(program, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    page = (DOCS / "guides" / "convert-checkpoints.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`(--[a-z-]+)", page)) <= set(re.findall(r"--[a-z-]+", text))


def _leaf_paths(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict) and node and not (path and path[-1] in WITHOUT_KEYS):
        for key, value in node.items():
            yield from _leaf_paths(value, (*path, str(key)))
    else:
        yield path


YAML_BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in GUIDES
    for number, block in enumerate(_code_blocks(page, "yaml"))
]


@pytest.mark.parametrize("block", YAML_BLOCKS)
def test_yaml_keys_exist(block: str) -> None:
    from flagscale.config.explain import explain

    unknown = []
    for path in _leaf_paths(yaml.safe_load(block)):
        if path[0] in ("defaults", *WITHOUT_KEYS) or path[-1] in WITHOUT_KEYS:
            continue
        if any(part in WITHOUT_KEYS for part in path):
            continue
        key = ".".join(path) if path[0] == "experiment" else path[-1]
        if path[0] in ("slurm", "container"):
            key = ".".join(("experiment", "runner", *path))
        try:
            text = explain(key)
        except ConfigError:
            unknown.append(key)
            continue
        if "Cannot be given" in text:
            unknown.append(key)
    assert unknown == []


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse's help differs by version")
def test_reference_of_commands_is_current() -> None:
    program = PROJECT / "tools" / "config" / "commands.py"
    subprocess.run([sys.executable, str(program), "--check"], check=True)
