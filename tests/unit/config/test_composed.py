"""Tests that a recorded configuration gives the same values when it is composed again."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.utils import setup_globals
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from flagscale.config.composed import escape_plain_data, fix_interpolations


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAVOUR", "a ${b} \\${c}")


def _fix(data: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    config = OmegaConf.create(data)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    return fix_interpolations(config, resolved), resolved


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        pytest.param("${lr}", "${lr}", id="reference"),
        pytest.param("${.lr}", "${.lr}", id="relative-reference"),
        pytest.param("a ${lr} ${list[0]}", "a ${lr} ${list[0]}", id="references-in-a-text"),
        pytest.param("${oc.env:FLAVOUR}", r"a \${b} \\\${c}", id="variable"),
        pytest.param("${oc.env:NONE,7}-${lr}", "7-${lr}", id="variable-and-reference"),
        pytest.param("${oc.env:FLAVOUR,${lr}}", "${oc.env:FLAVOUR,${lr}}", id="nested"),
        pytest.param("${oc.select:lr}", "${oc.select:lr}", id="select"),
        pytest.param(r"\${HOME}${lr}", r"\${HOME}${lr}", id="literal"),
        pytest.param(r"\\${lr}", r"\\${lr}", id="backslash"),
        pytest.param("${list}", "${list}", id="a-section"),
        pytest.param("$lr {a} }${lr}", "$lr {a} }${lr}", id="braces"),
        pytest.param("${oc.decode:'1e-3'}", 0.001, id="number"),
    ],
)
def test_what_stays_and_what_is_fixed(text: str, fixed: str) -> None:
    data = {"lr": 0.1, "list": [1, 2], "value": text, "nested": [{"value": "${lr}"}]}
    composed, resolved = _fix(data)
    assert composed["value"] == fixed
    assert composed["nested"] == [{"value": "${lr}"}]
    again = OmegaConf.create(composed)
    assert OmegaConf.to_container(again, resolve=True) == resolved


def test_the_time_is_the_one_of_the_configuration() -> None:
    setup_globals()  # registers ${now:}
    composed, resolved = _fix({"a": "x${now:%f}", "b": "${now:%f}"})
    assert composed == resolved
    assert composed["a"] == f"x{composed['b']}"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(alphabet="a$ {}\\:.'\"", max_size=12),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("k"), inner),
        max_leaves=5,
    )
)
def test_literal_values_survive(value: Any) -> None:
    config = OmegaConf.create({"value": escape_plain_data(value)})
    assert OmegaConf.to_container(config, resolve=True) == {"value": value}
