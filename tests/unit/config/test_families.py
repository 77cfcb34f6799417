"""Families of models, as the launcher knows them: without torch."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from flagscale.config.arguments import families, idle, rules
from flagscale.config.arguments.families import FAMILIES, family
from flagscale.config.arguments.registry import arguments
from flagscale.config.arguments.resolve import resolve
from flagscale.estimate import arithmetic, weights

PROJECT = Path(__file__).resolve().parents[3]
BASE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32}
BASE |= {"lr": 1e-3, "train_iters": 2, "vocab_size": 100, "mock_data": True}


def values(**given: Any) -> dict[str, Any]:
    return {a.name: a.default for a in arguments().values()} | BASE | given


@pytest.mark.parametrize("name", FAMILIES.own)
def test_a_family_is_known_without_torch(name: str) -> None:
    code = (
        "from flagscale.config.arguments.families import family, broken; import sys\n"
        f"assert family({name!r}).name == {name!r}\n"
        "loaded = {module.partition('.')[0] for module in sys.modules}\n"
        "assert loaded & {'torch', 'megatron', 'numpy'} == set()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)


def test_every_familys_arguments_are_arguments() -> None:
    assert set(families.owners()) <= set(arguments())


@pytest.mark.parametrize(
    ("given", "expected"),
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
                "eod_mask_loss: true: with family bert the end of a document is never masked, and "
                "so never in the loss; leave it out"
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
def test_what_a_family_refuses(given: dict[str, Any], expected: list[str]) -> None:
    assert [f"{name}: {message}" for name, message in rules.broken(values(**given))] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({"mask_prob": 0.3}, [(["mask_prob"], "needs family: bert")], id="masked-gpt"),
        pytest.param({"mask_prob": 0.3, "family": "bert"}, [], id="masked-bert"),
        pytest.param(
            {"reset_position_ids": True, "family": "bert"},
            [(["reset_position_ids"], "needs family: gpt")],
            id="of-gpt",
        ),
        pytest.param(
            {"mask_prob": 0.3, "family": "no such"},
            [(["mask_prob"], "needs family: bert")],
            id="unknown",
        ),
    ],
)
def test_what_another_family_would_need(
    given: dict[str, Any], expected: list[tuple[list[str], str]]
) -> None:
    assert list(idle.notes(values(**given), given)) == expected


class Other(families.Family):
    """A family that is made for nothing but data parallelism."""

    name = "other"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({"tensor_model_parallel_size": 1, "enable_hetero": False}, [], id="off"),
        *(
            pytest.param(
                {name: value}, [f"{text} with family other: {reason}; leave it out"], id=name
            )
            for (name, reason), (value, text) in zip(
                families.LAYOUTS.items(),
                [*[(2, "2")] * 4, (True, "true"), ("full", "'full'")],
                strict=True,
            )
        ),
    ],
)
def test_layouts_that_a_family_is_not_made_for(
    given: dict[str, Any], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Other()
    monkeypatch.setattr(families, "family", lambda _: other)
    assert [message for _, message in families.broken(values(**given))] == expected
    other.layouts = tuple(given)
    assert list(families.broken(values(**given))) == []


def resolved(**given: Any) -> Namespace:
    return resolve(Namespace(**values(**given)), 1)


def test_attention_to_both_sides_is_twice_the_arithmetic_and_the_head_has_a_layer() -> None:
    one, other = resolved(), resolved(family="bert")
    attention = 3 * 2 * 2 * 32 * 64  # both passes, two products, of two layers
    head = 3 * 2 * 64 * 64
    found = [arithmetic.flops_per_token(args, 128) for args in (one, other)]
    assert found[1] - found[0] == attention + head


def test_the_head_of_bert_by_hand() -> None:
    args = resolved(family="bert", tensor_model_parallel_size=1)
    assert weights.head(args, 128).all == 64 * 64 + 64 + 2 * 64 + 128
    assert weights.head(resolved(), 128).all == 0


def test_the_family_of_another_name_is_not_made_twice() -> None:
    assert family("gpt") is family("gpt")
