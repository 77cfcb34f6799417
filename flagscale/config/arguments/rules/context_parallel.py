"""Rules of context parallelism: the length of a sequence, and how ranks share it in attention.

``cp_comm_type`` selects the communication. ``a2a`` exchanges a part of the sequence for a part of
the heads (:mod:`flagscale.train.models.head_exchange`), ``all_gather`` gathers keys and values
(:mod:`flagscale.train.models.gathered_attention`), ``p2p`` sends them around a ring
(:mod:`flagscale.train.models.ring_attention`). ``a2a+p2p`` exchanges within groups of neighboring
ranks, with a ring across these groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from flagscale.config.arguments.rules.data import documents_are_separate
from flagscale.config.arguments.spec.argument import Values, Violation

CpCommunication = Literal["a2a", "all_gather", "p2p", "a2a+p2p"]
GROUP_SIZES = "hierarchical_context_parallel_sizes"


def select_cp_communication(values: Values) -> CpCommunication:
    """Return the communication of context parallelism.

    By default it is ``a2a`` if the context-parallel size divides the heads of a tensor-parallel
    rank, because attention is then the same as without context parallelism. Otherwise it is
    ``all_gather``.
    """
    requested = _requested_kind(values)
    if requested is None:
        return "a2a" if _why_indivisible(values) is None else "all_gather"
    if requested == "p2p" and why_no_ring(values) is not None:
        return "all_gather"
    # Any other name is a violation.
    return next((kind for kind in get_args(CpCommunication) if kind == requested), "all_gather")


def why_no_ring(values: Values) -> str | None:
    """Return why keys and values are gathered where a ring is requested; None if they are not."""
    reasons = {
        "documents are separate": documents_are_separate(values),
        "attention has dropout": values["attention_dropout"],
        "layers have sliding windows": values["window_size"],
        "scores are soft-capped": values["attn_logit_softcapping"],
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def is_ring_requested(values: Values) -> bool:
    """Return whether a ring of all context-parallel ranks is requested."""
    return values["context_parallel_size"] > 1 and _requested_kind(values) == "p2p"


def has_ring(values: Values) -> bool:
    """Return whether keys and values go around a ring."""
    return (
        values["context_parallel_size"] > 1
        and select_cp_communication(values) in ("p2p", "a2a+p2p")
        and why_no_ring(values) is None
    )


def a2a_group_size(values: Values) -> int:
    """Return the number of ranks that exchange a part of the sequence for a part of the heads. The
    context-parallel size divided by it is the number of ranks that exchange keys and values.
    """
    if values["context_parallel_size"] == 1:
        return 1
    kind = select_cp_communication(values)
    if kind in ("all_gather", "p2p"):
        return 1
    return int(values["context_parallel_size"] if kind == "a2a" else values[GROUP_SIZES][0])


def check_context_parallel(values: Values) -> Iterator[Violation]:
    """Yield a violation for each argument that context parallelism does not support."""
    cp, tp = values["context_parallel_size"], values["tensor_model_parallel_size"]
    if cp == 1:
        if values[GROUP_SIZES] is not None:
            yield GROUP_SIZES, "requires context_parallel_size above 1"
        return
    if values["attention_backend"] == "local":
        yield (
            "context_parallel_size",
            f"{cp} is not supported with attention_backend: local; use auto",
        )
    divisor = 2 * cp * (tp if values["sequence_parallel"] else 1)
    if values["seq_length"] % divisor:
        tensor_text = f" x tensor_model_parallel_size {tp}" if divisor > 2 * cp else ""
        yield (
            "seq_length",
            f"{values['seq_length']} is not divisible by 2 x context_parallel_size {cp}"
            f"{tensor_text}",
        )
    yield from _check_communication(values)


def _check_communication(values: Values) -> Iterator[Violation]:
    kinds = values["cp_comm_type"]
    requested = _requested_kind(values)
    if requested is None and kinds is not None:
        yield "cp_comm_type", "all layers must have the same communication; give one name"
    elif requested not in (None, "all_gather", "a2a", "p2p", "a2a+p2p"):
        yield "cp_comm_type", f"expected a2a, all_gather, p2p or a2a+p2p, found {requested}"
    elif requested == "a2a+p2p":
        yield from _check_sizes(values)
    elif values[GROUP_SIZES] is not None:
        yield GROUP_SIZES, "requires cp_comm_type: a2a+p2p"
    elif requested == "a2a" and (reason := _why_indivisible(values)) is not None:
        yield "cp_comm_type", f"a2a is not possible: {reason}; use all_gather"


def _check_sizes(values: Values) -> Iterator[Violation]:
    """Check the sizes of ``a2a+p2p``."""
    cp, sizes = values["context_parallel_size"], values[GROUP_SIZES]
    if values["enable_hetero"]:
        yield "cp_comm_type", "a2a+p2p is not supported with enable_hetero; use a2a or all_gather"
    elif sizes is None:
        yield (
            "cp_comm_type",
            f"a2a+p2p requires {GROUP_SIZES}: [ranks that exchange heads, groups of them], whose "
            f"product is context_parallel_size {cp}",
        )
    elif len(sizes) != 2 or sizes[0] * sizes[1] != cp:
        yield (
            GROUP_SIZES,
            f"{list(sizes)}: expected two sizes whose product is context_parallel_size {cp}",
        )
    elif (reason := _why_indivisible(values, sizes[0], GROUP_SIZES)) is not None:
        yield GROUP_SIZES, f"{list(sizes)} is not possible: {reason}"


def _requested_kind(values: Values) -> str | None:
    """Return the communication that all layers request; None if there is none."""
    kinds = values["cp_comm_type"]
    if not isinstance(kinds, (list, tuple)):
        return None if kinds is None else str(kinds)
    return str(kinds[0]) if len(set(kinds)) == 1 else None


def _why_indivisible(
    values: Values, ranks: int | None = None, argument: str = "context_parallel_size"
) -> str | None:
    """Return why the heads of a tensor-parallel rank cannot be divided, or None.

    Args:
        values: the arguments.
        ranks: number of ranks that divide them, by default all of a context-parallel group.
        argument: argument that gives this number.
    """
    cp = values["context_parallel_size"] if ranks is None else ranks
    tp = values["tensor_model_parallel_size"]
    heads, groups = values["num_attention_heads"], values["num_query_groups"]
    for name, count in (("num_attention_heads", heads), ("num_query_groups", groups)):
        is_used = name == "num_attention_heads" or not values["multi_latent_attention"]
        if is_used and count is not None and count % (tp * cp):
            tensor_text = f" x tensor_model_parallel_size {tp}" if tp > 1 else ""
            return f"{name} {count} is not divisible by {argument} {cp}{tensor_text}"
    return None
