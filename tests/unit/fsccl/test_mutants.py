"""Tests of tools/dev/mutants.py: its mutants match the current sources of the core."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

DEV_TOOLS = Path(__file__).parents[3] / "tools" / "dev"


def test_every_mutant_applies_to_a_complete_copy_of_the_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DEV_TOOLS)
    mutants = importlib.import_module("mutants")
    builder = mutants.Builder(tmp_path)
    for mutant in mutants.MUTANTS:
        builder.apply_mutant(mutant)  # exits if the line does not occur exactly once
    core_source = (builder.core / "core.cpp").read_text()
    included_paths = re.findall(r'#include "(\.\./[^"]+)"', core_source)
    assert included_paths
    assert all((builder.core / path).is_file() for path in included_paths)
