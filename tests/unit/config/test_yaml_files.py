"""YAML files: an error is one clear message with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.config.yaml_file import parse_item_texts, read_yaml
from flagscale.errors import ConfigError

INVALID = {
    "tab": ("a:\n\tb: 1\n", 2, "tab"),
    "tab-after-spaces": ("a:\n  b: 1\n  \tc: 1\n", 3, "tab"),
    "duplicate": ("a: 1\nb: 2\na: 3\n", 3, "a: duplicate key, first given in line 1"),
    "duplicate-nested": ("x:\n  y:\n    a: 1\n    a: 1\n", 4, "x.y.a: duplicate"),
    "duplicate-in-list": ("x:\n  - a: 1\n    a: 2\n", 3, "duplicate"),
    "duplicate-quoted": ("a: 1\n'a': 2\n", 2, "duplicate"),
    "anchor-cycle": ("a: &x\n  b: *x\n", 1, "alias of itself"),
    "anchor-cycle-list": ("a: &x [1, *x]\n", 1, "alias of itself"),
    "unclosed": ("a: [1, 2\nb: 3\n", 2, "not valid YAML"),
    "colon": ("a: b: c\n", 1, "not valid YAML"),
    "unknown-alias": ("a: *nowhere\n", 1, "not valid YAML"),
    "top-list": ("- a: 1\n- b\n", 1, "expected keys with values, found a list"),
    "top-word": ("\nhello\n", 2, "expected keys with values, found only 'hello'"),
    "deep-list": (f"a:\n  {'[' * 3000}{']' * 3000}\n", 2, "nests deeper than 32 levels"),
    "deep-map": (f"a: {'{b: ' * 40}1{'}' * 40}\n", 1, "nests deeper than 32 levels"),
    "very-deep": (f"a: {'[' * 200_000}", 1, "nests deeper than 32 levels"),
    "deep-blocks": ("".join(f"{' ' * n}a:\n" for n in range(40)), 33, "nests deeper than 32"),
    "two-documents": ("a: 1\n---\nb: 1\n", 2, "not valid YAML"),
}


@pytest.mark.parametrize(("text", "line", "message"), INVALID.values(), ids=INVALID)
def test_invalid_yaml_is_rejected_with_line(
    tmp_path: Path, text: str, line: int, message: str
) -> None:
    path = tmp_path / "a b.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert f"a b.yaml:{line}: " in str(error.value)
    assert message in str(error.value)
    assert len(error.value.problems) == 1


def test_all_duplicate_keys_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\na: 1\nb:\n  c: 1\n  c: 1\n")
    with pytest.raises(ConfigError) as error:
        read_yaml(path)
    assert sorted(p.key for p in error.value.problems) == ["a", "b.c"]


def test_non_utf8_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"a: 1\nb: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"x\.yaml:2: not UTF-8"):
        read_yaml(path)


def test_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / "none.yaml")


def test_aliases_are_expanded(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("base: &b\n  p: 1\none:\n  <<: *b\n  q: 010\ntwo: *b\n")
    leaves = read_yaml(path).leaves
    assert leaves["one.p"].line == 2
    assert (leaves["one.q"].line, leaves["one.q"].text) == (5, "010")
    assert leaves["two.p"].text == "1"


def test_exponential_aliases_are_rejected(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    path = tmp_path / "x.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="more than"):
        read_yaml(path)


def test_deeply_nested_aliases_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 99)))
    with pytest.raises(ConfigError, match="nests deeper than 32 levels") as error:
        read_yaml(path)
    assert len(error.value.problems) == 1


def test_text_that_nests_without_end_has_no_items() -> None:
    """A list of this depth ends the process if libyaml composes it."""
    assert parse_item_texts("[" * 60_000) == ()


def test_too_many_values_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"a: [{', '.join(['1'] * 200_001)}]\n")
    with pytest.raises(
        ConfigError, match="more than 200000 values, counting the values of an alias"
    ):
        read_yaml(path)


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("# @package _global_\na: 1\n", "_global_"),
        ("# hello\n# @package foo.bar\na: 1\n", "foo.bar"),
        ("a: 1\n# @package foo\n", None),
    ],
)
def test_package_header_is_read(tmp_path: Path, text: str, package: str | None) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert read_yaml(path).package == package


def test_empty_file_has_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("# nothing\n")
    assert read_yaml(path).leaves == {}
    assert read_yaml(path).defaults == []
