"""The real source: the registry's archive, its hash, its codemods, and a machine offline."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from flagscale.patching.sources import find_distribution
from flagscale.patching.spec import BackendLayout, load_spec

from .conftest import ROOT, run_tool

pytestmark = [pytest.mark.slow, pytest.mark.integration]

#: Places a release may gain or lose without anybody having to look.
SLACK = 0.2


def own_definition(at: Path, sha256: str | None = None) -> Path:
    """A project whose pin may be another."""
    definition = at / "backends" / "Megatron-LM"
    definition.mkdir(parents=True)
    original = ROOT / "backends" / "Megatron-LM"
    text = (original / "backend.yaml").read_text()
    pinned = next(line.split()[1] for line in text.splitlines() if "sha256:" in line)
    (definition / "backend.yaml").write_text(text.replace(pinned, sha256 or pinned))
    (definition / "codemods.yaml").write_text("rules: []\n")
    return at


def skip_offline(result: subprocess.CompletedProcess[str]) -> None:
    if "could be reached" in result.stderr:
        pytest.skip("no package registry can be reached from here")


def test_archive_contains_the_files_of_the_wheel(tmp_path: Path) -> None:
    root = own_definition(tmp_path)
    adapted = root / "third_party" / "Megatron-LM"
    installed = Path(str(find_distribution("megatron-core", "0.16.1").locate_file("")))
    for damage_cache in (False, True):
        if damage_cache:
            (archive,) = (tmp_path / "cache").rglob("*.tar.gz")
            archive.write_bytes(b"damaged")
            shutil.rmtree(adapted)
        result = run_tool("unpatch", "--root", str(root), FLAGSCALE_CACHE=str(tmp_path / "cache"))
        skip_offline(result)
        assert result.returncode == 0, result.stderr
        modules = sorted((adapted / "megatron").rglob("*.py"))
        assert len(modules) > 300
        for module in modules:
            path = module.relative_to(adapted)
            assert module.read_bytes() == (installed / path).read_bytes(), path


def test_archive_with_another_hash_is_rejected(tmp_path: Path) -> None:
    root = own_definition(tmp_path, sha256="ab" * 32)
    result = run_tool("unpatch", "--root", str(root), FLAGSCALE_CACHE=str(tmp_path / "cache"))
    skip_offline(result)
    assert result.returncode == 1
    assert f"expected sha256 {'ab' * 32}" in result.stderr
    assert "found    sha256 8652" in result.stderr
    assert not (root / "third_party" / "Megatron-LM").exists()


def test_missing_network_is_one_message(tmp_path: Path) -> None:
    root = own_definition(tmp_path)
    nowhere = {
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_FIND_LINKS": "",
        "PIP_EXTRA_INDEX_URL": "",
        "PIP_RETRIES": "0",
    }
    result = run_tool(
        "unpatch", "--root", str(root), FLAGSCALE_CACHE=str(tmp_path / "c"), **nowhere
    )
    assert result.returncode == 1
    assert "no registry that pip knows could be reached" in result.stderr
    assert "--source installed" in result.stderr
    assert "Traceback" not in result.stderr


def test_every_codemod_matches_the_pinned_source(tree: Path) -> None:
    """A new release that moves code away from a codemod must not pass unnoticed."""
    counts = json.loads((tree / ".flagscale" / "manifest.json").read_text())["codemods"]
    expected = {
        "barrier-devices": 2,
        "cuda-calls": 176,
        "device-literals": 48,
        "device-methods": 25,
        "group-backends": 2,
        "optional-imports": 1,
        "pinned-factories": 5,
        "rng-fork-warning": 1,
        "rng-state": 2,
        "tensor-types": 9,
    }
    assert counts.keys() == expected.keys()
    for name, count in expected.items():
        assert abs(counts[name] - count) <= SLACK * count, name


def test_remaining_cuda_calls_are_the_known_ones(tree: Path) -> None:
    """No call of torch.cuda that means the current device is left on the training path."""
    call = re.compile(r"(?<![\w.])torch\.cuda\.(current_device|synchronize|get_rng_state)\(")
    spec = load_spec(BackendLayout(ROOT, "Megatron-LM"))
    core = tree / "megatron" / "core"
    remaining_calls = []
    for file in sorted(core.rglob("*.py")):
        path = file.relative_to(tree).as_posix()
        if "cuda-calls" in spec.codemods_for(path):
            code = re.sub(r'""".*?"""', "", file.read_text(), flags=re.DOTALL)
            remaining_calls += [
                f"{path}: {line}" for line in code.splitlines() if call.search(line)
            ]
    assert remaining_calls == []
