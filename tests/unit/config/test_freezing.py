"""Patterns of frozen parameters: which names they select, and which are rejected."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.config.check_helpers import ADAPTERS, LLAMA, SIGMOID_ROUTER, list_problems

from flagscale.config.arguments.compat.trainer_names import replacement_of
from flagscale.config.arguments.rules.freezing import (
    compile_pattern,
    describe_freezing,
    freezing_differences,
    select_frozen,
)
from flagscale.config.arguments.spec.argument import SettingContext

NAMES = (
    "embedding.word_embeddings.weight",
    *(f"decoder.layers.{n}.mlp.linear_fc{i}.weight" for n in (0, 1, 3, 10, 12) for i in (1, 2)),
    "output_layer.weight",
)
MATCHES = {
    "embedding": ["embedding.word_embeddings.weight"],
    "embedding.*": ["embedding.word_embeddings.weight"],
    "embed": [],
    "decoder.layers.1": [NAMES[3], NAMES[4]],
    "decoder.layers.1.*": [NAMES[3], NAMES[4]],
    "decoder.layers.[1-3]": [NAMES[3], NAMES[4], NAMES[5], NAMES[6]],
    "decoder.layers.[3-10].*.linear_fc1": [NAMES[5], NAMES[7]],
    "decoder.layers.[0,12]": [NAMES[1], NAMES[2], NAMES[9], NAMES[10]],
    "decoder.layers.1?.mlp.linear_fc2.weight": [NAMES[8], NAMES[10]],
    "*fc2.weight": [NAMES[i] for i in (2, 4, 6, 8, 10)],
    "*.weight": list(NAMES),
    "decoder.layers.3.mlp.linear_fc1.weightx": [],
}


@pytest.mark.parametrize("pattern", MATCHES)
def test_pattern_matches_names_and_modules(pattern: str) -> None:
    compiled = compile_pattern(pattern)
    assert [name for name in NAMES if compiled.fullmatch(name)] == MATCHES[pattern]
    frozen = select_frozen({"freeze_parameters": [pattern]}, NAMES)
    trained = select_frozen({"trainable_parameters": [pattern]}, NAMES)
    assert frozen == set(MATCHES[pattern])
    assert trained == set(NAMES) - frozen


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "an empty pattern"),
        ("^decoder", "has the character '^', but a pattern consists of names"),
        (r"decoder\.layers", "it is no regular expression"),
        ("decoder.layers.[a-c]", "has [a-c], expected numbers such as [0-3] or [1,5]"),
        ("decoder.layers.[3-1]", "has [3-1], whose first number exceeds its last"),
        ("decoder.layers.[0-999999]", "has a number above 100,000"),
        ("decoder.layers.[0-3", "has the character '['"),
    ],
)
def test_what_is_no_pattern_is_refused(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        compile_pattern(pattern)
    assert message in str(error.value)


@given(st.text())
def test_any_text_is_a_pattern_or_refused(text: str) -> None:
    try:
        compile_pattern(text).fullmatch("decoder.layers.0.mlp")
    except ValueError as error:
        assert str(error)


MOE = {**LLAMA, "num_moe_experts": 4, "moe_router_topk": 2}
PROBLEMS: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "similar": (LLAMA, ["decoder.layer.3"], "did you mean 'decoder.layers.*'"),
    "no-such-layer": (LLAMA, ["decoder.layers.[8-9]"], "layers have the numbers 0 to 7"),
    "more-layers-than-there-are": (
        LLAMA,
        ["decoder.layers.[6-9].mlp"],
        "'decoder.layers.[6-9].mlp': there is no decoder.layers.9; layers have the numbers 0 to 7",
    ),
    "of-hugging-face": (
        LLAMA,
        ["model.layers.[0-3].self_attn.o_proj"],
        "the names of megatron.core count: 'decoder.layers.[0-3].self_attention.linear_proj'",
    ),
    "tied": (
        {**LLAMA, "untie_embeddings_and_output_weights": False},
        ["output_layer"],
        "the output layer has the weight of embedding.word_embeddings.weight (tied)",
    ),
    "nothing-alike": (LLAMA, ["xyz"], "names begin with embedding, decoder, output_layer"),
    "all": (LLAMA, ["embedding", "decoder", "output_layer"], "freezes all parameters"),
    "some-experts": (
        MOE,
        ["decoder.layers.*.mlp.experts.local_experts.[0-1]"],
        "selects some experts of decoder.layers.0.mlp.experts.local_experts.*.linear_fc1.weight",
    ),
    "expert-bias": (
        {**MOE, **SIGMOID_ROUTER},
        ["*.router.weight"],
        "their expert biases would still be updated; set moe_router_bias_update_rate: 0",
    ),
    "adapters": ({**LLAMA, **ADAPTERS}, ["embedding"], "cannot be combined with peft_type"),
    "both": (
        {**LLAMA, "trainable_parameters": ["decoder"]},
        ["embedding"],
        "cannot be combined with trainable_parameters; leave one out",
    ),
}


@pytest.mark.parametrize(("values", "patterns", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_selection_is_checked_without_the_model(
    values: dict[str, Any], patterns: list[str], message: str
) -> None:
    problems = dict(list_problems({**values, "freeze_parameters": patterns}))
    assert message in problems["freeze_parameters"]


def test_a_selection_of_nothing_is_refused() -> None:
    problems = dict(list_problems({**LLAMA, "trainable_parameters": ["*"]}))
    assert "matches all parameters, so nothing would be frozen" in problems["trainable_parameters"]
    assert list_problems({**LLAMA, "trainable_parameters": ["output_layer"]}) == []


def test_other_patterns_than_those_of_the_checkpoint() -> None:
    frozen = describe_freezing({"freeze_parameters": ("embedding",)})
    trained = describe_freezing({"trainable_parameters": ("decoder", "output_layer")})
    assert freezing_differences(frozen, frozen) is None
    assert freezing_differences(None, describe_freezing({})) is None
    assert freezing_differences(frozen, trained) == (
        "freeze_parameters: [embedding] in the checkpoint, "
        "trainable_parameters: [decoder, output_layer] in this run"
    )


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        (
            "unfrozen_parameters",
            ["lm_head"],
            "of Axolotl; write `train.model.trainable_par",
        ),
        ("freeze_modules", ["embed"], "write `train.model.freeze_parameters`; patterns of"),
        ("freeze_trainable_layers", 2, "`train.model.trainable_parameters: decoder.layers.[6-7]`"),
        ("freeze_trainable_layers", -2, "`train.model.trainable_parameters: decoder.layers.[0-1]`"),
        ("freeze_trainable_layers", 9, "write `train.model.trainable_parameters`; patterns of"),
        ("finetuning_type", "freeze", "write `train.model.trainable_parameters`; patterns of"),
    ],
)
def test_names_of_other_trainers_are_answered(name: str, value: Any, answer: str) -> None:
    assert answer in replacement_of(name, value, SettingContext({"num_layers": 8}))
