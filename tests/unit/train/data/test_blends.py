"""Parsing of data_path and split."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.errors import DataError
from flagscale.train.data.blends import Blend, parse_blend, parse_split

DATASET_NAMES = st.text(
    alphabet=st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=12
).filter(lambda name: not name.endswith((".bin", ".idx")) and not _is_number(name))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(["a"], Blend(("a",)), id="one"),
        pytest.param("a", Blend(("a",)), id="string"),
        pytest.param(["a", "b"], Blend(("a", "b")), id="two-without-weights"),
        pytest.param(["a", "b", "c"], Blend(("a", "b", "c")), id="three-without-weights"),
        pytest.param(["0.3", "a", "0.7", "b"], Blend(("a", "b"), (0.3, 0.7)), id="weights"),
        pytest.param([30, "a", 70, "b"], Blend(("a", "b"), (30.0, 70.0)), id="numbers"),
        pytest.param(["0.3 a 0.7 b"], Blend(("a", "b"), (0.3, 0.7)), id="one-string"),
        pytest.param("1e-1 a\t9 b\n", Blend(("a", "b"), (0.1, 9.0)), id="any-space"),
        pytest.param(["1", "a"], Blend(("a",)), id="lone-weight"),
        pytest.param(["/d/a.bin", "b.idx"], Blend(("/d/a", "b")), id="suffixes"),
    ],
)
def test_parse_blend(values: list[str] | str, expected: Blend) -> None:
    assert parse_blend(values) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        pytest.param([], "data_path: expected the prefix of a data set, found an em", id="nothing"),
        pytest.param(" ", "data_path: expected the prefix of a data set, found an em", id="blank"),
        pytest.param(["0.3", "a", "b"], "for none; b has none", id="some-weights"),
        pytest.param(["a", "0.3"], "after the weight 0.3, found the end", id="weight-at-end"),
        pytest.param(["1", "2", "a"], "after the weight 1, found '2'", id="two-weights"),
        pytest.param(["-1", "a"], "expected a positive weight, found -1", id="negative"),
        pytest.param(["0", "a", "1", "b"], "expected a positive weight, found 0", id="zero"),
        pytest.param(["nan", "a"], "expected a positive weight, found nan", id="nan"),
    ],
)
def test_invalid_blend_is_refused(values: list[str], message: str) -> None:
    with pytest.raises(DataError) as caught:
        parse_blend(values)
    assert message in str(caught.value)


def test_a_data_set_may_be_named_by_a_number_or_with_spaces(tmp_path: Path) -> None:
    for name in ("2024", "my data $x"):
        (tmp_path / f"{name}.idx").touch()
    numbered, spaced = str(tmp_path / "2024"), str(tmp_path / "my data $x")
    assert parse_blend([spaced + ".bin"]) == Blend((spaced,))
    assert parse_blend([numbered, spaced]) == Blend((numbered, spaced))


@given(st.lists(st.tuples(st.floats(1e-3, 1e3), DATASET_NAMES), min_size=2, max_size=6))
def test_weighted_blends_survive_being_written_as_one_string(
    items: list[tuple[float, str]],
) -> None:
    text = " ".join(f"{weight!r} {name}" for weight, name in items)
    blend = parse_blend(text)
    assert blend.prefixes == tuple(name for _, name in items)
    assert blend.weights == tuple(weight for weight, _ in items)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("99,1", (0.99, 0.01, 0.0)),
        ("1", (1.0, 0.0, 0.0)),
        (" 8 / 1 / 1 ", (0.8, 0.1, 0.1)),
        ("0,1,0", (0.0, 1.0, 0.0)),
    ],
)
def test_split_is_parsed_into_fractions(text: str, expected: tuple[float, float, float]) -> None:
    assert parse_split(text) == pytest.approx(expected)


@pytest.mark.parametrize("text", ["", "0,0,0", "1,2,3,4", "a,b", "-1,2", "nan", "inf,1"])
def test_invalid_split_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="expected up to three numbers"):
        parse_split(text)


def test_blend_longer_than_any_file_name_is_parsed() -> None:
    """The system raises an error for a file name of that length instead of reporting it as
    missing.
    """
    blend = parse_blend(" ".join(f"1 {'a' * 40}{number}" for number in range(20)))
    assert len(blend.prefixes) == 20
