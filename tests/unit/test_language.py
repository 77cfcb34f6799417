"""How the project's text reads: figures that may not get worse (tools/dev/language.py)."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).resolve().parents[2]


def _load(path: Path) -> ModuleType:
    import sys

    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


language = _load(PROJECT / "tools" / "dev" / "language.py")


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    values: dict[str, float] = language.measure().figures()
    return values


@pytest.mark.parametrize("figure", language.LIMITS)
def test_figure_is_within_its_limit(figure: str, figures: dict[str, float]) -> None:
    assert figures[figure] <= language.LIMITS[figure]


def test_deviations_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""What a module is."""\n\n\ndef look() -> None:\n'
        '    """Tell what it holds."""\n    found = 1\n'
    )
    tally = language.Tally()
    tally.read_python(path)
    assert (tally.docstrings, tally.openings, tally.clauses, tally.sayings) == (2, 1, 2, 1)
    assert (tally.assignments, tally.vague, tally.functions, tally.one_word) == (1, 1, 1, 1)
    assert len(tally.places) == 3


def test_sentences_are_those_of_prose() -> None:
    page = "# A heading. Or two.\n\n```\ncode. More.\n```\n\n| a. | b. |\n\n"
    page += "One [link](x.md). Two!\n\n- item\n"
    assert list(language.sentences(page)) == ["One [link].", "Two!", "item"]


@pytest.mark.parametrize(
    ("page", "words"), [("README.md", 1500), ("docs/design/architecture.md", 1500)]
)
def test_page_is_short(page: str, words: int) -> None:
    assert len((PROJECT / page).read_text(encoding="utf-8").split()) <= words
