"""Model families in the launcher, which does not import torch."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.arguments import rules
from flagscale.config.arguments.check import check_values
from flagscale.config.arguments.compat.unused import note_unused
from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.rules.model_family import (
    FAMILY_LAYOUTS,
    MODEL_FAMILIES,
    ModelFamily,
    check_family,
    families_by_argument,
    get_model_family,
)
from flagscale.config.arguments.spec.registry import arguments
from flagscale.estimate import arithmetic, weights

PROJECT = Path(__file__).resolve().parents[3]
BASE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
BASE |= {"lr": 1e-3, "train_iters": 2, "vocab_size": 100, "mock_data": True}


def argument_values(**changes: Any) -> dict[str, Any]:
    return {a.name: a.default for a in arguments().values()} | BASE | changes


@pytest.mark.parametrize("name", MODEL_FAMILIES.builtin)
def test_model_family_is_loaded_without_torch(name: str) -> None:
    code = (
        "from flagscale.config.arguments.rules.model_family import get_model_family; import sys\n"
        f"assert get_model_family({name!r}).name == {name!r}\n"
        "loaded = {module.partition('.')[0] for module in sys.modules}\n"
        "assert loaded & {'torch', 'megatron', 'numpy'} == set()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)


def test_arguments_of_families_exist() -> None:
    assert set(families_by_argument()) <= set(arguments())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, [], id="gpt"),
        pytest.param({"family": "bert"}, [], id="bert"),
        pytest.param(
            {"family": "bret"},
            ["family: no family of models is called 'bret'; known: gpt, bert"],
            id="unknown",
        ),
        pytest.param(
            {"family": "bert", "eod_mask_loss": True},
            [
                "eod_mask_loss: true: with family bert the end of a document is never masked, so "
                "it is never part of the loss; leave it out"
            ],
            id="other-data",
        ),
        pytest.param(
            {"family": "bert", "seq_length": 2},
            ["seq_length: 2 leaves no room for text in family bert"],
            id="no-room",
        ),
    ],
)
def test_unsupported_arguments_of_family_are_rejected(
    changes: dict[str, Any], expected: list[str]
) -> None:
    assert [
        f"{name}: {message}" for name, message in check_values(argument_values(**changes))
    ] == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"mask_prob": 0.3}, [(["mask_prob"], "requires family: bert")], id="masked-gpt"
        ),
        pytest.param({"mask_prob": 0.3, "family": "bert"}, [], id="masked-bert"),
        pytest.param(
            {"reset_position_ids": True, "family": "bert"},
            [(["reset_position_ids"], "requires family: gpt")],
            id="of-gpt",
        ),
        pytest.param(
            {"mask_prob": 0.3, "family": "no such"},
            [(["mask_prob"], "requires family: bert")],
            id="unknown",
        ),
    ],
)
def test_arguments_of_other_family_are_noted_as_unused(
    changes: dict[str, Any], expected: list[tuple[list[str], str]]
) -> None:
    assert list(note_unused(argument_values(**changes), changes)) == expected


class DataParallelFamily(ModelFamily):
    """Model family that supports data parallelism only."""

    name = "other"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"tensor_model_parallel_size": 1, "enable_hetero": False}, [], id="off"),
        *(
            pytest.param(
                {name: value},
                [f"{text} is not supported by family: other: {reason}; leave it out"],
                id=name,
            )
            for (name, reason), (value, text) in zip(
                FAMILY_LAYOUTS.items(),
                [*[(2, "2")] * 4, (True, "true"), ("full", "'full'")],
                strict=True,
            )
        ),
    ],
)
def test_unsupported_layout_of_family_is_rejected(
    changes: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = DataParallelFamily()
    monkeypatch.setattr(rules.model_family, "get_model_family", lambda _: family)
    assert [message for _, message in check_family(argument_values(**changes))] == expected
    family.layouts = tuple(changes)
    assert list(check_family(argument_values(**changes))) == []


def derive_with(**changes: Any) -> Namespace:
    return derive_arguments(Namespace(**argument_values(**changes)), 1)


def test_bert_has_more_flops_than_gpt_by_attention_and_head() -> None:
    gpt, bert = derive_with(), derive_with(family="bert")
    attention = 3 * 2 * 2 * 32 * 64  # forward and backward, two products, two layers
    head = 3 * 2 * 64 * 64
    flops = [arithmetic.flops_per_token(args, 128) for args in (gpt, bert)]
    assert flops[1] - flops[0] == attention + head


def test_bert_head_weights() -> None:
    args = derive_with(family="bert", tensor_model_parallel_size=1)
    assert weights.head_weights(args, 128).all == 64 * 64 + 64 + 2 * 64 + 128
    assert weights.head_weights(derive_with(), 128).all == 0


def test_model_family_is_cached() -> None:
    assert get_model_family("gpt") is get_model_family("gpt")
