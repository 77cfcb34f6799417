"""tools/dev/mutants.py fits the sources that it puts faults into."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

DEV = Path(__file__).parents[3] / "tools" / "dev"


def test_each_has_its_line_and_its_copy_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DEV)
    mutants = importlib.import_module("mutants")
    builder = mutants.Builder(tmp_path)
    for mutant in mutants.MUTANTS:
        builder.mutate(mutant)  # ends the program where its line is not there once
    taken = re.findall(r'#include "(\.\./[^"]+)"', (builder.core / "core.cpp").read_text())
    assert taken
    assert all((builder.core / path).is_file() for path in taken)
