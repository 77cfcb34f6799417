"""Command line of ``flagscale evaluate``."""

from __future__ import annotations

import pytest

from flagscale.train.evaluation.command_options import build_parser


@pytest.mark.parametrize(
    "option",
    [
        *("--limit", "--seq-length", "--batch-size", "--nproc", "--tensor-model-parallel-size"),
        "--pipeline-model-parallel-size",
    ],
)
def test_numbers_begin_at_one(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "--tasks", "arc_easy", option]
    assert build_parser("").parse_args([*words, "1"])
    with pytest.raises(SystemExit):
        build_parser("").parse_args([*words, "0"])
    assert "expected a whole number from 1, found '0'" in capsys.readouterr().err
