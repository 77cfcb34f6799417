"""Tests of the registry of device kinds: built-in kinds, packages, and adapters that fail to
load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flagscale.accelerators import cuda
from flagscale.accelerators.registry import (
    choose_kind,
    explain_unusable_kind,
    get_accelerator,
    list_accelerators,
    list_device_kinds,
)
from flagscale.errors import ConfigError

PROJECT = Path(__file__).resolve().parents[3]


def test_builtin_kinds() -> None:
    assert list_device_kinds() == ["auto", "cpu", "cuda"]
    # The order in which `auto` tries them.
    assert [kind.name for kind in list_accelerators()] == ["cuda", "cpu"]
    # is_host: the device is the host's own processor, and tensors are in host memory.
    assert [kind.is_host for kind in list_accelerators()] == [False, True]


@pytest.mark.parametrize("kind", ["auto", "cpu", "cuda"])
def test_device_kind_names(kind: str) -> None:
    assert explain_unusable_kind(kind) == ""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("tpu", id="another"),
        pytest.param("CUDA", id="capitals"),
        pytest.param("cuda:0", id="one-device"),
        pytest.param("", id="empty"),
        pytest.param("$(id) \n'", id="hostile"),
    ],
)
def test_unknown_kind_lists_the_known_ones(kind: str) -> None:
    text = f"no kind of device is called {kind!r}; known: auto, cpu, cuda"
    assert explain_unusable_kind(kind) == text
    with pytest.raises(ConfigError) as error:
        get_accelerator(kind)
    assert error.value.message == text


@pytest.mark.parametrize(
    ("configured_kind", "devices", "expected"),
    [
        pytest.param("auto", {}, "cpu", id="no-device-counts"),
        pytest.param("auto", {"cuda": 0}, "cpu", id="no-gpu"),
        pytest.param("auto", {"cuda": 2}, "cuda", id="two-gpus"),
        pytest.param("auto", {"unheard": 2}, "cpu", id="of-an-unknown-kind"),
        pytest.param("cpu", {"cuda": 2}, "cpu", id="cpu-configured"),
        pytest.param("cuda", {}, "cuda", id="cuda-configured"),
    ],
)
def test_choose_kind(configured_kind: str, devices: dict[str, int], expected: str) -> None:
    assert choose_kind(configured_kind, devices) == expected


PACKAGE = """\
from flagscale.accelerators.base import Accelerator
class Good(Accelerator):
    name = "another name"
class Raises(Accelerator):
    def __init__(self): raise OSError("no driver")
class Stranger: pass
"""
ENTRIES = """\
[flagscale.accelerators]
good = chips:Good
raises = chips:Raises
stranger = chips:Stranger
absent = chips:Absent
lost = no_such_module:Chip
not-a-word = chips:Good
cpu = chips:Good
"""


def test_kinds_of_packages_and_load_errors(tmp_path: Path) -> None:
    """Runs in a new process, because installed packages are searched once."""
    dist_info = tmp_path / "chips-1.0.dist-info"
    dist_info.mkdir()
    (tmp_path / "chips.py").write_text(PACKAGE)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: chips\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text(ENTRIES)
    program = (
        "import json; from flagscale.accelerators.registry import *; from sys import modules;"
        "print(json.dumps([[k.name for k in list_accelerators()],"
        "type(get_accelerator('cpu')).__name__, list_broken_kinds(),"
        "explain_unusable_kind('raises'), list_device_kinds(), 'torch' in modules]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{PROJECT}"},
        capture_output=True,
        text=True,
        check=True,
    )
    usable, cpu, broken, broken_reason, known_kinds, torch = json.loads(result.stdout)
    # A failing adapter does not affect the others, and none replaces a built-in one.
    assert (usable, cpu, torch) == (["cuda", "good", "cpu"], "Cpu", False)
    assert broken == {
        "absent": "chips: AttributeError: module 'chips' has no attribute 'Absent'",
        "lost": "chips: ModuleNotFoundError: No module named 'no_such_module'",
        "not-a-word": "the kind 'not-a-word' of chips: expected a to z, 0 to 9, _",
        "raises": "chips: OSError: no driver",
        "stranger": "chips: chips:Stranger is no Accelerator",
    }
    assert broken_reason == broken["raises"]
    assert known_kinds == ["auto", "cpu", "cuda", *sorted([*broken, "good"])]


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15\n"
            "GCC version:  gcc version 12.3.0",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n",
            "580.65.06",
        ),
        ("NVRM version: something else\n", ""),
    ],
    ids=["proprietary", "open", "unknown"],
)
def test_driver_and_products_of_nvidia(
    text: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = get_accelerator("cuda")
    (tmp_path / "version").write_text(text)
    for number in range(2):
        (tmp_path / "gpus" / str(number)).mkdir(parents=True)
        information = "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 5\n"
        (tmp_path / "gpus" / str(number) / "information").write_text(information)
    monkeypatch.setattr(cuda, "_DRIVER_VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(cuda, "_DRIVER_DIRECTORY", tmp_path / "gpus")
    monkeypatch.setenv("PATH", "/nowhere")
    assert adapter.driver_version() == version
    assert adapter.list_products() == ["NVIDIA H100 80GB HBM3"] * 2
