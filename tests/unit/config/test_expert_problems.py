"""Rejected arguments of mixture-of-experts models."""

from __future__ import annotations

from typing import Any

import pytest
from unit.config.check_helpers import Problems, build_experiment, list_problems

from flagscale.config.checks import check_arguments

_TWO_LOSSES = ["aux_loss", "seq_aux_loss"]
_BALANCING, _COEFFICIENT = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
_GROUPS, _CHOSEN = "moe_router_num_groups", "moe_router_group_topk"
_CAPACITY, _PADDED = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
_SHARED = {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_overlap": True}

VALID: dict[str, dict[str, Any]] = {
    "all": {"moe_router_topk": 4},
    "groups": {_GROUPS: 2, _CHOSEN: 1},
    "no-groups": {_GROUPS: 0, _CHOSEN: 0},
    "sinkhorn": {_BALANCING: "sinkhorn", "moe_router_topk": 1},
    "one-by-sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "two-losses": {_BALANCING: _TWO_LOSSES, _COEFFICIENT: [0.1, 0.2]},
    "a-list-of-one": {_BALANCING: ["aux_loss"], _COEFFICIENT: 0.1},
    "padded": {_CAPACITY: 1.5, _PADDED: True},
    "shared": {**_SHARED, "moe_token_dispatcher_type": "alltoall"},
    "biases": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_tensor_parallel_size": 1,
    },
}


@pytest.mark.parametrize("values", VALID.values(), ids=VALID)
def test_valid_moe_arguments_are_accepted(values: dict[str, Any]) -> None:
    assert check_arguments(build_experiment({"num_experts": 4, **values})) == []


PROBLEMS: Problems = {
    "more-than-there-are": (
        {"moe_router_topk": 9},
        "moe_router_topk",
        "9 exceeds num_moe_experts 4",
    ),
    "one-of-none": (
        {"num_experts": None, "moe_router_topk": 1},
        "moe_router_topk",
        "1 requires moe_router_pre_softmax: true; without num_moe_experts",
    ),
    "bias-of-softmax": (
        {"moe_router_enable_expert_bias": True},
        "moe_router_enable_expert_bias",
        "requires moe_router_score_function: sigmoid, found softmax",
    ),
    "latent": ({"moe_latent_size": 16}, "moe_latent_size", "16 is not supported by this trainer"),
    "groups-alone": ({_GROUPS: 2}, _GROUPS, f"requires {_CHOSEN}, the number of groups"),
    "chosen-alone": ({_CHOSEN: 2}, _CHOSEN, f"requires {_GROUPS}, the number of groups"),
    "groups-of-none": (
        {"num_experts": None, _GROUPS: 2, _CHOSEN: 1},
        _CHOSEN,
        "requires num_moe_experts; leave it out",
    ),
    "unlike-groups": ({_GROUPS: 3, _CHOSEN: 1}, _GROUPS, "3 does not divide num_moe_experts 4"),
    "too-many-groups": ({_GROUPS: 2, _CHOSEN: 3}, _CHOSEN, f"3 exceeds {_GROUPS} 2"),
    "groups-for-nobody": (
        {_GROUPS: 4, _CHOSEN: 3},
        _CHOSEN,
        "3 exceeds moe_router_topk 2",
    ),
    "groups-too-small": (
        {_GROUPS: 2, _CHOSEN: 1, "moe_router_topk": 3},
        "moe_router_topk",
        f"3 exceeds the 2 experts in 1 of 2 groups ({_CHOSEN})",
    ),
    "one-coefficient-of-two": (
        {_BALANCING: _TWO_LOSSES, _COEFFICIENT: [0.1]},
        _COEFFICIENT,
        f"expected one coefficient per entry of {_BALANCING} {_TWO_LOSSES}, found [0.1]",
    ),
    "no-list": ({_BALANCING: _TWO_LOSSES}, _COEFFICIENT, "aux_loss', 'seq_aux_loss'], found 0.0"),
    "two-coefficients-of-one": (
        {_COEFFICIENT: [0.1, 0.2]},
        _COEFFICIENT,
        "moe_router_load_balancing_type 'aux_loss', found [0.1, 0.2]",
    ),
    "twice": (
        {_BALANCING: ["aux_loss", "aux_loss"], _COEFFICIENT: [0.1, 0.1]},
        _BALANCING,
        "expected distinct entries,",
    ),
    "sinkhorn-and-others": (
        {_BALANCING: ["sinkhorn", "aux_loss"], _COEFFICIENT: [0.0, 0.1]},
        _BALANCING,
        "sinkhorn is not a loss and cannot be combined with others",
    ),
    "sinkhorn-as-a-loss": (
        {_BALANCING: "sinkhorn", _COEFFICIENT: 0.1},
        _COEFFICIENT,
        f"is not supported with {_BALANCING}: sinkhorn, which has no loss; leave it out",
    ),
    "sinkhorn-that-drops": (
        {_BALANCING: "sinkhorn", _CAPACITY: 1.0},
        _CAPACITY,
        f"is not supported with {_BALANCING}: sinkhorn, which drops no tokens",
    ),
    **{
        f"capacity-{factor}": ({_CAPACITY: factor}, _CAPACITY, "must be greater than 0")
        for factor in (-2.0, 0)
    },
    "padded-to-nothing": ({_PADDED: True}, _PADDED, f"requires {_CAPACITY}, the capacity"),
    "padded-by-flex": (
        {
            **{_CAPACITY: 1.0, _PADDED: True, "moe_token_dispatcher_type": "flex"},
            "expert_model_parallel_size": 2,
        },
        _PADDED,
        "not supported by moe_token_dispatcher_type: flex; use alltoall",
    ),
    "shared-gathered": (
        _SHARED,
        "moe_shared_expert_overlap",
        "requires moe_token_dispatcher_type: alltoall, found allgather",
    ),
    "deepep": (
        {"moe_enable_deepep": True},
        "moe_enable_deepep",
        "requires moe_token_dispatcher_type: flex, found allgather",
    ),
    "two-backends": (
        {
            **{"moe_enable_deepep": True, "moe_flex_dispatcher_backend": "hybridep"},
            **{"moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 2},
        },
        "moe_enable_deepep",
        "combined with moe_flex_dispatcher_backend: hybridep; leave one out",
    ),
    "lengths": (
        {"variable_seq_lengths": True},
        "variable_seq_lengths",
        "requires moe_token_dispatcher_type: alltoall, found allgather",
    ),
    "width-of-none": (
        {"num_experts": None, "moe_ffn_hidden_size": 32},
        "moe_ffn_hidden_size",
        "requires num_moe_experts; leave it out",
    ),
    "biases": (
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        "add_bias_linear",
        "2 tensor-parallel ranks; set disable_bias_linear: true, or expert_tensor_parallel_size",
    ),
}


@pytest.mark.parametrize(("values", "name", "message"), PROBLEMS.values(), ids=PROBLEMS)
def test_invalid_moe_argument_is_rejected(values: dict[str, Any], name: str, message: str) -> None:
    ((argument, text),) = list_problems({"num_experts": 4, **values})
    assert message in text
    assert argument == name
