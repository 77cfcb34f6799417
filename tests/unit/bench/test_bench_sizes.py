"""Tests of sizes and sweeps of the benchmark."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.bench.collectives.sizes import parse_size, round_to_parts, sweep_sizes
from flagscale.errors import ConfigError
from flagscale.report.scale import format_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8", 8),
        ("0", 0),
        ("2kb", 2048),
        ("128K", 131072),
        ("1MB", 2**20),
        ("1MiB", 2**20),
        ("1.5k", 1536),
        ("4G", 2**32),
        ("1GB", 2**30),
        ("2 T", 2**41),
    ],
)
def test_sizes_are_binary(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "12Q", "1 2", "1e3", "0.3", "1M\n2", "\u0661M", "$(1)"]
)
def test_invalid_sizes_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a (size|whole number)"):
        parse_size(text)


@given(st.integers(0, 2**50))
def test_formatted_size_parses_back(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("minimum", "maximum", "step", "factor", "expected"),
    [
        (8, 16, 4, None, (8, 12, 16)),
        (8, 32, None, 2, (8, 16, 32)),
        (1024, 2**20, None, 8, (1024, 8192, 65536, 524288)),
        (32, 32, None, None, (32,)),
        (32, 32, 4, None, (32,)),
        (0, 100, None, None, tuple(range(0, 101, 10))),
        (8, 13, None, None, (8, 9, 10, 11, 12, 13)),
        (1, 4, None, 1.1, (1, 2, 3, 4)),
        (100, 160, None, 1.25, (100, 125, 156)),
    ],
)
def test_sweep_sizes(
    minimum: int, maximum: int, step: int | None, factor: float | None, expected: tuple[int, ...]
) -> None:
    assert sweep_sizes(minimum, maximum, step=step, factor=factor) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"minimum": 2, "maximum": 1}, "is above"),
        ({"minimum": 1, "maximum": 2, "factor": 1}, "never reach the end"),
        ({"minimum": 1, "maximum": 2, "factor": 0.5}, "never reach the end"),
        ({"minimum": 1, "maximum": 2, "step": 0}, "never reach the end"),
        ({"minimum": 1, "maximum": 2, "step": 1, "factor": 2}, "exclude each other"),
        ({"minimum": 0, "maximum": 2, "factor": 2}, "cannot be multiplied"),
        ({"minimum": 0, "maximum": 2**40, "step": 1}, "at most"),
    ],
)
def test_invalid_sweeps_are_rejected(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sweep_sizes(**arguments)


@given(st.integers(1, 2**30), st.integers(2, 2**20), st.floats(1.0001, 100))
def test_sweep_is_finite_and_increasing(minimum: int, extra: int, factor: float) -> None:
    sizes = sweep_sizes(minimum, minimum + extra, factor=factor) if factor > 1.05 else (minimum,)
    assert sizes[0] == minimum
    assert sizes[-1] <= minimum + extra
    assert list(sizes) == sorted(set(sizes))


@given(st.integers(0, 2**40), st.sampled_from([1, 2, 4, 8]), st.integers(1, 600))
def test_rounded_size_divides_into_parts(size: int, element: int, parts: int) -> None:
    rounded = round_to_parts(size, element, parts)
    assert rounded % (element * parts) == 0
    assert rounded > 0
    assert rounded <= max(size, element * parts)
