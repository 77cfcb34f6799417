"""Results of lm-evaluation-harness, and options of its requests."""

from __future__ import annotations

from typing import Any

import pytest

from flagscale.train.evaluation.generation_options import parse_generation_options
from flagscale.train.evaluation.scores import read_results


def test_scores_are_named_by_task_metric_and_filter() -> None:
    results = {
        "results": {
            "arc": {
                **{"alias": "arc", "sample_len": 3, "acc,none": 0.25, "acc_stderr,none": 0.1},
                **{"acc_norm,none": 0.5, "acc_norm_stderr,none": "N/A"},
            },
            "gsm8k": {"exact_match,strict-match": 1, "exact_match,flexible-extract": 0.5},
        },
        "groups": {"both": {"alias": "both", "acc,none": 0.375}},
    }
    scores = read_results(results, 1.5)
    assert scores.values == {
        "arc/acc": 0.25,
        "arc/acc_norm": 0.5,
        "gsm8k/exact_match.strict-match": 1.0,
        "gsm8k/exact_match.flexible-extract": 0.5,
        "both/acc": 0.375,
    }
    assert (scores.errors, scores.seconds) == ({"arc/acc": 0.1}, 1.5)


@pytest.mark.parametrize(
    ("options", "stops", "max_tokens"),
    [
        ({}, (), 256),
        ({"until": "\n", "max_gen_toks": 8}, ("\n",), 8),
        ({"until": ["a", ""], "max_new_tokens": 4, "do_sample": False}, ("a",), 4),
        ({"temperature": 0.0, "max_tokens": 3, "max_gen_toks": None}, (), 3),
    ],
)
def test_options_of_greedy_generation(
    options: dict[str, Any], stops: tuple[str, ...], max_tokens: int
) -> None:
    assert parse_generation_options(options) == (stops, max_tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True}, "do_sample: true is not supported"),
        ({"temperature": 0.7}, "a temperature is not supported"),
        ({"until": ["a"], "num_beams": 4}, "num_beams is not supported in generation_kwargs"),
    ],
)
def test_unsupported_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_generation_options(options)
