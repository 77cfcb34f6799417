"""The arguments that a checkpoint of Megatron-LM holds: nothing of them is trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.config.arguments.huggingface.models import FUNCTION, effective
from flagscale.config.arguments.huggingface.reading import MOST_PARTS, is_number
from flagscale.config.arguments.registry import arguments
from flagscale.config.arguments.spec import Argument
from flagscale.config.arguments.values import shown
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.megatron_layout import (
    ALIASES,
    EMBEDDING,
    HEAD,
    Layout,
    require_shared,
    values_of,
)
from flagscale.train.checkpoint.formats.megatron_unpickler import Unknown
from flagscale.train.checkpoint.formats.tables import Entry
from flagscale.train.checkpoint.formats.tensors import Shape

_NEEDED = ("num_layers", "hidden_size", "num_attention_heads")
_PARTS = (
    "num_layers",
    "num_attention_heads",
    "num_query_groups",
    "num_moe_experts",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
)
"""What is gone through one by one, or counts such things."""
_MOST_EXPERTS = 1 << 20
"""Of all layers together."""
_A_LAYER = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq")
"""Lists with an item for every layer."""
_RANKS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
_STEP = "make_vocab_size_divisible_by"
_SIZES = ("vocab_size", "padded_vocab_size", _STEP)
_USUAL_STEP = 128
_EITHER_WAY = ("window_size",)
"""Whose numbers may be negative."""


def values_in(args: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The arguments, written out, that say which function the model of a checkpoint is.

    Raises:
        CheckpointError: with those that no model has, or that it is none of Megatron-LM's.
    """
    _refuse(path, [*_wrong_counts(args, _SIZES), *_wrong_values(args)])
    given = values_of(args)
    _refuse(path, _wrong_sizes(given))
    values = effective(given)
    require_shared(values, path)
    return values


def layout_in(args: Mapping[str, Any], path: Path) -> Layout:
    """How many ranks a checkpoint's files are of.

    Raises:
        CheckpointError: some of it are no numbers of ranks.
    """
    _refuse(path, _wrong_counts(args, _RANKS, MOST_PARTS))
    tensor, pipeline, expert = (_count(args, name) for name in _RANKS)
    return Layout(tensor, pipeline, expert)


def require_same(args: Mapping[str, Any], others: Mapping[str, Any], path: Path) -> None:
    """
    Raises:
        CheckpointError: the arguments of a rank's file, ``others``, are of another model or layout
            than the first one's.
    """
    names = {*FUNCTION, *(name for names in ALIASES.values() for name in names), *_RANKS, *_SIZES}
    problems = [
        f"{name}: {shown(others[name])}, and {shown(args[name])} in the first rank's file"
        for name in sorted(names & args.keys() & others.keys())
        if not isinstance(args[name], Unknown)
        and not isinstance(others[name], Unknown)
        and args[name] != others[name]
    ]
    if problems:
        raise CheckpointError(
            f"{path}: its arguments (args) are of another model: {'; '.join(problems)}",
            hint="copy the files of one checkpoint anew, of all its ranks",
        )


def vocabulary_rows(args: Mapping[str, Any], tokens: int) -> Sequence[int]:
    """How many rows embedding and output layer may have, the likeliest first: those of all tokens,
    and of the padding that Megatron-LM adds."""
    ranks, step = _count(args, _RANKS[0]), _count(args, _STEP, 0)
    if not step:  # nothing says how far it is padded
        return range(-(-tokens // ranks) * ranks, tokens + _USUAL_STEP * ranks)
    return Layout(tensor=ranks, rows=step).padded(tokens), tokens


def shape_of(entry: Entry, rows: Sequence[int], found: int) -> Shape:
    """The shape that a tensor is to have, of ``found`` rows where so many are some of ``rows``."""
    if entry.name not in (EMBEDDING, HEAD):
        return entry.shape
    return (found if found in rows else rows[0], *entry.shape[1:])


def _count(args: Mapping[str, Any], name: str, missing: int = 1) -> int:
    """A number that :func:`_wrong_counts` has looked at."""
    value = args.get(name)
    return missing if value is None or isinstance(value, Unknown) else int(value)


def _refuse(path: Path, problems: Sequence[str]) -> None:
    if problems:
        raise CheckpointError(
            f"{path}: of its arguments (args): {'; '.join(problems)}",
            hint="Megatron-LM saves the arguments that it trained with: save it there again",
        )


def _wrong_counts(args: Mapping[str, Any], names: Sequence[str], most: int = 1 << 40) -> list[str]:
    """What is wrong with whole numbers that may be missing."""
    given = [(name, args.get(name)) for name in names]
    return [
        f"{name}: expected a whole number from 1 to {most:,}, found {shown(value)}"
        for name, value in given
        if value is not None
        and not isinstance(value, Unknown)
        and not (_is_whole(value) and 1 <= value <= most)
    ]


def _wrong_values(args: Mapping[str, Any]) -> list[str]:
    given = {}
    for name in FUNCTION:
        places = [one for one in (*ALIASES.get(name, ()), name) if args.get(one) is not None]
        given[name] = args[places[0]] if places else None
        if isinstance(given[name], Unknown):
            given[name] = None
    return [text for name, value in given.items() for text in _wrong(name, value)]


def _wrong(name: str, value: Any) -> Iterator[str]:
    """What is wrong with a value of one of the arguments that are read."""
    if value is None:
        if name in _NEEDED:
            yield f"{name}: expected a whole number from 1, it is missing"
        return
    argument = arguments()[name]
    items = [value]
    if argument.many and isinstance(value, (list, tuple)):
        items = list(value)
    for item in items:
        if text := _unfit(argument, item):
            yield f"{name}: expected {text}, found {shown(value)}"
            return
    if name == "moe_layer_freq" and value == 0:
        yield f"{name}: expected a whole number from 1 or a list, found {shown(value)}"
    if name == "window_size" and not (isinstance(value, (list, tuple)) and len(value) == 2):
        yield f"{name}: expected two whole numbers, found {shown(value)}"


def _unfit(argument: Argument, value: Any) -> str | None:
    """What an argument's value, or an item of it, was expected to be; None if it is."""
    if argument.kind == "bool":
        fits = isinstance(value, (bool, int)) and value in (0, 1)
        return None if fits else "true or false"
    if argument.kind == "str":
        return None if isinstance(value, str) else "a text"
    least, most = argument.minimum, argument.maximum
    if argument.kind == "int":
        least = None if argument.name in _EITHER_WAY else least or 0
        most = MOST_PARTS if argument.name in _PARTS else most
    fits = _is_whole(value) if argument.kind == "int" else is_number(value)
    if fits and (least is None or value >= least) and (most is None or value <= most):
        return None
    kind = "a whole number" if argument.kind == "int" else "a number"
    kind += "" if least is None else f" from {least:.15g}"
    return kind if most is None else f"{kind} to {most:,.15g}"


def _is_whole(value: Any) -> bool:
    return is_number(value) and value == int(value)


def _wrong_sizes(values: Mapping[str, Any]) -> list[str]:
    """What does not fit together of the values that are given."""
    layers, wrong = values["num_layers"], []
    for name in _A_LAYER:
        each = values.get(name)
        if isinstance(each, list) and len(each) != layers:
            wrong.append(f"{name}: expected an item for each of {layers} layers, has {len(each)}")
    experts = layers * int(values.get("num_moe_experts") or 0)
    if experts > _MOST_EXPERTS:
        wrong.append(f"num_experts: {experts:,} in all layers, expected {_MOST_EXPERTS:,} at most")
    heads, groups = values["num_attention_heads"], values.get("num_query_groups") or 1
    if heads % groups:
        wrong.append(f"num_query_groups: expected a divisor of {heads} heads, found {groups}")
    if values.get("kv_channels") is None and values["hidden_size"] < heads:
        wrong.append(f"num_attention_heads: {heads} of hidden_size {values['hidden_size']}")
    if not values["vocab_size"]:
        wrong.append("vocab_size: expected a whole number from 1, it is missing")
    return wrong
