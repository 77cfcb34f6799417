"""Rules of mixtures of experts: routing, load balancing, capacity and dispatch of tokens.

megatron.core applies some of them to models without experts, too. The placement of experts on ranks
is in :mod:`.parallel_layout`. Pure, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.model_arguments import SINKHORN
from flagscale.config.arguments.spec.values import format_value

_BALANCING, _COEFFICIENTS = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
_GROUPS, _CHOSEN_GROUPS = "moe_router_num_groups", "moe_router_group_topk"
_CAPACITY, _PADDED = "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity"
_DISPATCHER, _SHARED_WIDTH = "moe_token_dispatcher_type", "moe_shared_expert_intermediate_size"


def check_moe(values: Values) -> Iterator[Violation]:
    """Check experts and their routers."""
    yield from _check_topk(values)
    yield from _check_groups(values)
    yield from _check_balancing(values)
    yield from _check_capacity(values)
    yield from _check_dispatch(values)
    if values["moe_ffn_hidden_size"] and not values["num_moe_experts"]:
        message = f"{values['moe_ffn_hidden_size']} needs num_moe_experts; leave it out"
        yield "moe_ffn_hidden_size", message


def _check_topk(values: Values) -> Iterator[Violation]:
    experts, topk = values["num_moe_experts"], values["moe_router_topk"]
    scores = values["moe_router_score_function"]
    if experts and topk > experts:
        yield "moe_router_topk", f"{topk} of {experts} experts (num_moe_experts); take fewer"
    alone = topk == 1 and scores == "softmax" and values[_BALANCING] != SINKHORN
    if alone and not values["moe_router_pre_softmax"]:
        without = "" if experts else "; without num_moe_experts leave it out"
        yield "moe_router_topk", f"1 needs moe_router_pre_softmax: true{without}"
    if values["moe_router_enable_expert_bias"] and scores != "sigmoid":
        message = f"true needs moe_router_score_function: sigmoid, found {scores}"
        yield "moe_router_enable_expert_bias", message


def _check_groups(values: Values) -> Iterator[Violation]:
    """Groups of experts, of which a token goes to some."""
    experts, topk = values["num_moe_experts"], values["moe_router_topk"]
    groups, chosen = values[_GROUPS], values[_CHOSEN_GROUPS]
    if chosen and not groups:
        yield _CHOSEN_GROUPS, f"{chosen} needs {_GROUPS}: how many groups there are"
    elif groups and not chosen:
        yield _GROUPS, f"{groups} needs {_CHOSEN_GROUPS}: how many of them a token goes to"
    if not (groups and chosen):
        return
    if not experts:
        yield _CHOSEN_GROUPS, f"{chosen} needs num_moe_experts; leave it out"
    elif experts % groups:
        yield _GROUPS, f"{groups} does not divide num_moe_experts {experts}"
    elif chosen > groups:
        yield _CHOSEN_GROUPS, f"{chosen} of {groups} groups ({_GROUPS}); take fewer"
    elif chosen > topk:
        message = f"{chosen} groups for {topk} experts of a token (moe_router_topk); take fewer"
        yield _CHOSEN_GROUPS, message
    elif topk > (there := experts // groups * chosen):
        actual = f"{topk}, but {chosen} of {groups} groups ({_CHOSEN_GROUPS}) have {there} experts"
        yield "moe_router_topk", actual


def _check_balancing(values: Values) -> Iterator[Violation]:
    kinds, coefficients = _as_list(values[_BALANCING]), _as_list(values[_COEFFICIENTS])
    if len(kinds) != len(coefficients):
        yield (
            _COEFFICIENTS,
            f"{format_value(values[_COEFFICIENTS])}: expected a number for each of {_BALANCING} "
            f"{format_value(values[_BALANCING])}",
        )
    if len(set(kinds)) < len(kinds):
        yield _BALANCING, f"{format_value(kinds)}: each can be named once"
    if SINKHORN not in kinds:
        return
    if len(kinds) > 1:
        yield (
            _BALANCING,
            f"{format_value(kinds)}: {SINKHORN} is no loss that others can be added to",
        )
    elif any(coefficients):
        message = (
            f"{format_value(values[_COEFFICIENTS])} with {_BALANCING} {SINKHORN}, which is no loss"
        )
        yield _COEFFICIENTS, f"{message}; leave it out"
    if values[_CAPACITY] is not None:
        message = (
            f"{format_value(values[_CAPACITY])} with {_BALANCING} {SINKHORN}: no token is dropped "
        )
        yield _CAPACITY, f"{message}there; take aux_loss"


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _check_capacity(values: Values) -> Iterator[Violation]:
    factor = values[_CAPACITY]
    if factor is not None and factor <= 0:
        message = (
            f"{format_value(factor)}: expected more than 0, how many times its even share "
            "of tokens "
        )
        yield _CAPACITY, message + "an expert takes; leave it out to drop none"
    if not values[_PADDED]:
        return
    if factor is None:
        yield _PADDED, f"true needs {_CAPACITY}: how much is padded to?"
    backends = (values["moe_enable_deepep"], values["moe_flex_dispatcher_backend"] == "deepep")
    if values[_DISPATCHER] == "flex" and any(backends):
        yield _PADDED, f"true with {_DISPATCHER} flex, which does not pad; take alltoall"


def _check_dispatch(values: Values) -> Iterator[Violation]:
    """Check features that only some token dispatchers support."""
    dispatcher = values[_DISPATCHER]
    if values["moe_enable_deepep"] and dispatcher != "flex":
        yield "moe_enable_deepep", f"true needs {_DISPATCHER}: flex, found {dispatcher}"
    elif values["moe_enable_deepep"] and values["moe_flex_dispatcher_backend"] != "deepep":
        backend = values["moe_flex_dispatcher_backend"]
        yield "moe_enable_deepep", f"true with moe_flex_dispatcher_backend {backend}; leave one out"
    if values["variable_seq_lengths"] and dispatcher == "allgather":
        yield "variable_seq_lengths", f"true needs {_DISPATCHER}: alltoall, found {dispatcher}"
    overlaps = values["moe_shared_expert_overlap"] and values[_SHARED_WIDTH]
    if overlaps and dispatcher != "alltoall":
        message = f"true needs {_DISPATCHER}: alltoall, found {dispatcher}"
        yield "moe_shared_expert_overlap", message
