"""The documentation: links lead somewhere, and YAML keys exist."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from flagscale.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[3]
DOCS = PROJECT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *PROJECT.glob("*.md")])
GUIDES = sorted([*(DOCS / "guides").glob("*.md"), PROJECT / "README.md"])
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


def test_example_program_has_a_help(tmp_path: Path) -> None:
    program = [sys.executable, str(PROJECT / "examples/qwen3/tiny_model.py"), "--help"]
    result = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: tiny_model.py")
    assert list(tmp_path.iterdir()) == []


def _leaf_paths(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict) and node and not (path and path[-1] in WITHOUT_KEYS):
        for key, value in node.items():
            yield from _leaf_paths(value, (*path, str(key)))
    else:
        yield path


MANIFEST = "apiVersion:"
"""Beginning of a YAML for Kubernetes."""
YAML_BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in GUIDES
    for number, block in enumerate(_code_blocks(page, "yaml"))
    if not block.startswith(MANIFEST)
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


def test_kubernetes_manifests_set_variables_that_are_read() -> None:
    from flagscale.launcher.liveness.secret import SECRET_VARIABLE
    from flagscale.launcher.runners.cloud import position

    read = {SECRET_VARIABLE, *position.COUNT_VARIABLES, *position.ADDRESS_VARIABLES}
    page = DOCS / "guides" / "kubernetes.md"
    manifests = [b for b in _code_blocks(page, "yaml") if b.startswith(MANIFEST)]
    assert len(manifests) == 2
    for manifest in manifests:
        yaml.safe_load(manifest)
        names = re.findall(r"name: ([A-Z_]{3,})", manifest)
        assert SECRET_VARIABLE in names and set(names) <= read
        assert "command: [flagscale, test, " in manifest


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse's help differs by version")
def test_reference_of_commands_is_current() -> None:
    program = PROJECT / "tools" / "config" / "commands.py"
    subprocess.run([sys.executable, str(program), "--check"], check=True)
