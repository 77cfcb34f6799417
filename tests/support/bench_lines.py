"""Command lines of the benchmark, for its tests."""

from __future__ import annotations

from collections.abc import Sequence

from flagscale.bench.collectives.cli import read_specs
from flagscale.bench.collectives.spec import BenchSpec


def parse_spec(words: Sequence[str], *, writes_results: bool = True) -> BenchSpec:
    """Return the spec of a command line that describes a single run."""
    (spec,) = read_specs(words, writes_results=writes_results)
    return spec
