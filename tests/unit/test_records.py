from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flagscale.errors import ConfigError
from flagscale.records import decode, encode


@dataclass(frozen=True)
class Inner:
    path: Path
    way: Literal["in", "out"] | None


@dataclass(frozen=True)
class Plan:
    inner: tuple[Inner, ...]
    pair: tuple[str, int]
    values: Mapping[str, str | int | bool]
    share: float = 1.0


PLAN = Plan((Inner(Path("/a b"), "in"), Inner(Path("c"), None)), ("x", 1), {"a": True, "b": "1"})


def test_plan_round_trips() -> None:
    found = decode(Plan, encode(PLAN))
    assert found == PLAN
    assert found.values["a"] is True


@given(st.dictionaries(st.text(), st.one_of(st.text(), st.integers(-9, 9), st.booleans())))
def test_any_values_round_trip(values: dict[str, Any]) -> None:
    plan = replace(PLAN, values=values)
    assert decode(Plan, encode(plan)) == plan


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"pair": ["x"]}, id="short"),
        pytest.param({"pair": ["x", 1, 2]}, id="long"),
        pytest.param({"pair": ["x", "1"]}, id="type"),
        pytest.param({"inner": [{"path": "a", "way": "up"}]}, id="literal"),
        pytest.param({"inner": [{"path": "a"}]}, id="field"),
        pytest.param({"values": {"a": [1]}}, id="value"),
        pytest.param({"values": []}, id="mapping"),
        pytest.param({"share": "1"}, id="number"),
    ],
)
def test_invalid_records_are_rejected(change: dict[str, Any]) -> None:
    text = json.dumps({**json.loads(encode(PLAN)), **change})
    with pytest.raises(ConfigError, match="is not a valid Plan"):
        decode(Plan, text)


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '"x"', "[" * 100_000])
def test_any_text_is_accepted_or_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid Plan"):
        decode(Plan, text)
