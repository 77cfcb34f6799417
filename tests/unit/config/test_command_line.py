"""Conversion of sections to a command line and back."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.arguments import flatten

from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.config.arguments.spec.registry import arguments, one_or_many
from flagscale.errors import ConfigError

TABLE = {
    "nested-sections": (
        {"a_b": 1, "c": {"d_e": True, "f": False}, "h": [1, "x y"]},
        ["--a-b", "1", "--d-e", "--h", "1", "x y"],
    ),
    "null-is-not-given": ({"a": None, "b": {"c": None}}, []),
    "deep": ({"a": {"b": {"c": {"d": 1.5}}}}, ["--d", "1.5"]),
    "small-floats-keep-digits": ({"lr": 1.0e-5, "eps": 0.1}, ["--lr", "1e-05", "--eps", "0.1"]),
    "false-of-a-default-true": ({"gradient_reduce_div_fusion": False}, None),
    "negative-number": ({"a": -1}, ["--a", "-1"]),
    "negative-float-in-list": ({"a": [-0.5, 1]}, ["--a", "-0.5", "1"]),
    "text-with-a-dash": ({"a": "-x"}, ["--a=-x"]),
    "text-like-a-flag": ({"a": "--b"}, ["--a=--b"]),
    "hostile": ({"a": "$HOME `id` \"q\" 'p'\n,é"}, ["--a", "$HOME `id` \"q\" 'p'\n,é"]),
    "empty-text": ({"a": ""}, ["--a", ""]),
    "empty-list": ({"a": []}, ["--a"]),
    "switch-as-a-text": ({"use_flash_attn": "false", "a": {"manual_gc": "True"}}, ["--manual-gc"]),
    "switch-as-a-number": ({"bf16": 1, "use_flash_attn": 0}, ["--bf16"]),
    "text-of-nobodys-switch": ({"my_switch": "false"}, ["--my-switch", "false"]),
    "no-text-of-a-switch": ({"swiglu": "maybe"}, ["--swiglu", "maybe"]),
    "empty-section": ({"a": {}}, []),
    "the-same-twice": ({"a": {"x_y": 1, "z": 2}, "b": {"x-y": 1}}, ["--x-y", "1", "--z", "2"]),
    "the-same-in-other-words": ({"a": {"lr": 0.1}, "b": {"lr": "1e-1"}}, ["--lr", "0.1"]),
    "the-same-list": ({"a": {"x": [1, 2]}, "b": {"x": [1, 2]}}, ["--x", "1", "2"]),
    "expression": ({"moe_layer_freq": "[0]+[1]*3"}, ["--moe-layer-freq", "[0]+[1]*3"]),
}


@pytest.mark.parametrize(("sections", "argv"), TABLE.values(), ids=TABLE)
def test_sections_are_flattened(sections: dict[str, Any], argv: list[str] | None) -> None:
    expected = ["--no-gradient-reduce-div-fusion"] if argv is None else argv
    assert flatten(sections) == flatten(sections, external=True) == expected


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"a": {"x": True}, "b": {"x": False}}, "false here and true as a.x"),
        ({"a": {"x_y": True}, "b": {"x-y": False}}, "given twice"),
        ({"a": [{"b": 1}]}, "list of scalars"),
        ({"a": [[1]]}, "list of scalars"),
        ({"a": [None]}, "list of scalars"),
        ({"a": ["-x"]}, "dash"),
        ({3: 1}, "is not a valid argument name"),
        ({"a b": 1}, "is not a valid argument name"),
        ({"--a": 1}, "is not a valid argument name"),
        ({"a;rm -rf": 1}, "is not a valid argument name"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value),
)
def test_invalid_section_is_rejected(sections: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        flatten(sections)


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        flatten({"a": [None], "b": {"c": [{}]}}, prefix="train.")
    assert [p.key for p in error.value.problems] == ["train.a", "train.b.c"]


def test_false_negated_switch_enables_argument() -> None:
    sections = {"no_rope_fusion": False, "disable_bias_linear": False, "no_fp8_wgrad": "false"}
    assert flatten(sections) == ["--apply-rope-fusion"]
    assert flatten(sections, external=True) == []


def test_unused_key_is_passed_to_external_parser_only() -> None:
    sections = {"a": {"log_progress": True, "use_dualpipev": False, "x": 1}}
    assert flatten(sections) == ["--x", "1"]
    assert flatten(sections, external=True) == ["--log-progress", "--x", "1"]


@pytest.mark.parametrize("name", ["exit_signal_handler", "use_mcore_models"])
def test_external_parser_gets_no_generated_negation(name: str) -> None:
    assert flatten({name: False}) == [f"--no-{name.replace('_', '-')}"]
    assert flatten({name: False}, external=True) == []


def test_argparse_reads_flattened_arguments() -> None:
    """An external training program parses its command line with argparse."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--text")
    parser.add_argument("--numbers", nargs="+", type=float)
    parser.add_argument("--on", action="store_true")
    argv = flatten({"text": "--x y", "numbers": [-1, 2.5], "on": True}, external=True)
    parsed = parser.parse_args(argv)
    assert vars(parsed) == {"text": "--x y", "numbers": [-1.0, 2.5], "on": True}


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def _argument_values(argument: Argument) -> st.SearchStrategy[Any]:
    low, high = argument.minimum, argument.maximum
    if argument.choices is not None:
        element: st.SearchStrategy[Any] = st.sampled_from(argument.choices)
    elif argument.kind == "int":
        least = 1 - 2**63 if low is None else int(low)
        element = st.integers(least, 2**63 - 1 if high is None else int(high))
    elif argument.kind == "float":
        element = st.floats(low, high, allow_nan=False, allow_infinity=False)
    elif argument.kind == "bool":
        return st.booleans()
    else:
        element = _TEXT
    if not argument.many:
        return element
    elements = st.lists(element.filter(lambda item: not str(item).startswith("-")), max_size=3)
    if argument.name in one_or_many():
        return element | elements.filter(lambda items: len(items) != 1)
    return elements


@st.composite
def _random_sections(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(arguments())), unique=True, max_size=12))
    sections: dict[str, Any] = {"system": {"deep": {}}, "model": {}}
    places = [sections, sections["system"], sections["system"]["deep"], sections["model"]]
    for name in names:
        draw(st.sampled_from(places))[name] = draw(_argument_values(arguments()[name]))
    return sections


def _collect_leaves(sections: dict[str, Any]) -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for name, value in sections.items():
        leaves.update(_collect_leaves(value) if isinstance(value, dict) else {name: value})
    return leaves


@settings(max_examples=150, deadline=None)
@given(_random_sections())
def test_parsing_restores_flattened_values(sections: dict[str, Any]) -> None:
    parsed = vars(parse_arguments(flatten(sections)))
    for name, value in _collect_leaves(sections).items():
        assert parsed[name] == value


@settings(max_examples=50, deadline=None)
@given(_random_sections())
def test_missing_argument_has_default(sections: dict[str, Any]) -> None:
    parsed = vars(parse_arguments(flatten(sections)))
    for name in parsed.keys() - _collect_leaves(sections).keys():
        default = arguments()[name].default
        assert parsed[name] == (list(default) if isinstance(default, tuple) else default)
