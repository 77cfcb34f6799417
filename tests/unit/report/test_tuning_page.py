"""Tests of the page of a search for a layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.tuning_answers import answer_record, record_answer

from flagscale.errors import RunStateError
from flagscale.report.tuning_page import find_answer, render_tuning, write_tuning_page


def test_page_has_what_was_measured_failed_and_expected() -> None:
    page = render_tuning(answer_record())
    for text in (
        "★ best",
        "train.model.micro_batch_size=2",
        "start of kernels +0.5 s",
        "rank 0 ran out",
        "tp8 &lt;b&gt;",
        "1.25 times as long",
        "tp4 pp1 mbs1",
        "Pareto front",
    ):
        assert text in page
    assert "<b>tp8" not in page


def test_search_is_named_by_its_directory(tmp_path: Path) -> None:
    directory = record_answer(tmp_path / "exp")
    assert find_answer(str(directory)) == directory / "answer.json"
    assert find_answer(str(tmp_path / "exp")) is None
    page = write_tuning_page(directory / "answer.json", tmp_path / "page.html")
    assert "Predicted and measured" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("text", ["{", "{}", '{"trials": []}'])
def test_damaged_answer_is_refused(tmp_path: Path, text: str) -> None:
    directory = record_answer(tmp_path / "exp")
    (directory / "answer.json").write_text(text, encoding="utf-8")
    with pytest.raises(RunStateError, match="is damaged"):
        write_tuning_page(directory / "answer.json", tmp_path / "page.html")
