"""Validation of the arguments in a Megatron-LM checkpoint, which are untrusted input.

The readers :mod:`.megatron_torch` and :mod:`.megatron_dist` call it with the ``args`` that
Megatron-LM saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flagscale.config.arguments.compat.huggingface.config_reader import MAX_LAYERS, is_number
from flagscale.config.arguments.compat.huggingface.models import MODEL_FUNCTION, effective
from flagscale.config.arguments.spec.argument import Argument
from flagscale.config.arguments.spec.registry import arguments
from flagscale.config.arguments.spec.values import format_value
from flagscale.errors import CheckpointError
from flagscale.train.checkpoint.formats.lazy_tensors import Shape
from flagscale.train.checkpoint.formats.megatron_layout import (
    ARGUMENT_ALIASES,
    EMBEDDING,
    OUTPUT_LAYER,
    MegatronLayout,
    extract_values,
    require_megatron_support,
)
from flagscale.train.checkpoint.formats.megatron_unpickler import UnknownObject
from flagscale.train.checkpoint.formats.weight_mappings import WeightSpec

_REQUIRED_ARGUMENTS = ("num_layers", "hidden_size", "num_attention_heads")
"""Arguments without which the model is undefined."""
_COUNT_ARGUMENTS = (
    "num_layers",
    "num_attention_heads",
    "num_query_groups",
    "num_moe_experts",
    "moe_router_topk",
    "moe_router_num_groups",
    "moe_router_group_topk",
)
"""Arguments that are iterated over, or that count such things, and are therefore bounded."""
_MAX_EXPERTS = 1 << 20
"""Maximum number of experts of all layers together."""
_PER_LAYER_ARGUMENTS = ("moe_layer_freq", "window_attn_skip_freq", "no_rope_freq")
"""Lists with one item per layer."""
_PARALLEL_SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
_VOCABULARY_MULTIPLE = "make_vocab_size_divisible_by"
_VOCABULARY_SIZES = ("vocab_size", "padded_vocab_size", _VOCABULARY_MULTIPLE)
_DEFAULT_VOCABULARY_MULTIPLE = 128
_SIGNED_ARGUMENTS = ("window_size",)
"""Arguments whose numbers may be negative."""


def resolve_arguments(args: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the fully resolved arguments that determine the function of a checkpoint's model.

    Raises:
        CheckpointError: names the invalid arguments, or the features that Megatron-LM does not
            have.
    """
    _raise_if_invalid(path, [*_check_counts(args, _VOCABULARY_SIZES), *_check_values(args)])
    saved_values = extract_values(args)
    _raise_if_invalid(path, _check_consistency(saved_values))
    values = effective(saved_values)
    require_megatron_support(values, path)
    return values


def read_layout(args: Mapping[str, Any], path: Path) -> MegatronLayout:
    """Return the parallel layout of a checkpoint's files.

    Raises:
        CheckpointError: a parallel size is invalid.
    """
    _raise_if_invalid(path, _check_counts(args, _PARALLEL_SIZES, MAX_LAYERS))
    tensor, pipeline, expert = (_get_count(args, name) for name in _PARALLEL_SIZES)
    return MegatronLayout(tensor, pipeline, expert)


def require_same_model(args: Mapping[str, Any], other_args: Mapping[str, Any], path: Path) -> None:
    """Check that the arguments in a rank's file match those of the first rank.

    Args:
        args: arguments in the first rank's file.
        other_args: arguments in another rank's file.
        path: the other rank's file.

    Raises:
        CheckpointError: the arguments are of another model or layout.
    """
    names = {
        *MODEL_FUNCTION,
        *(name for names in ARGUMENT_ALIASES.values() for name in names),
        *_PARALLEL_SIZES,
        *_VOCABULARY_SIZES,
    }
    problems = [
        f"{name}: {format_value(other_args[name])}, and {format_value(args[name])} in the "
        "first rank's file"
        for name in sorted(names & args.keys() & other_args.keys())
        if not isinstance(args[name], UnknownObject)
        and not isinstance(other_args[name], UnknownObject)
        and args[name] != other_args[name]
    ]
    if problems:
        raise CheckpointError(
            f"{path}: its arguments (args) are of another model: {'; '.join(problems)}",
            hint="copy the files of one checkpoint anew, of all its ranks",
        )


def possible_vocabulary_rows(args: Mapping[str, Any], token_count: int) -> Sequence[int]:
    """Return the possible numbers of rows of embedding and output layer, the likeliest first.

    These are the number of tokens, and the next multiples to which Megatron-LM pads it.

    Args:
        args: arguments of the checkpoint.
        token_count: number of tokens in the vocabulary.
    """
    rank_count = _get_count(args, _PARALLEL_SIZES[0])
    multiple_per_rank = _get_count(args, _VOCABULARY_MULTIPLE, 0)
    if not multiple_per_rank:  # the padding is not recorded
        return range(
            -(-token_count // rank_count) * rank_count,
            token_count + _DEFAULT_VOCABULARY_MULTIPLE * rank_count,
        )
    layout = MegatronLayout(tensor_parallel=rank_count, vocabulary_multiple=multiple_per_rank)
    return layout.pad_vocabulary(token_count), token_count


def expected_shape(spec: WeightSpec, possible_rows: Sequence[int], stored_rows: int) -> Shape:
    """Return the expected shape of a tensor.

    Args:
        spec: the tensor.
        possible_rows: possible numbers of rows of the vocabulary.
        stored_rows: number of rows of the stored tensor, accepted if it is a possible one.
    """
    if spec.name not in (EMBEDDING, OUTPUT_LAYER):
        return spec.shape
    return (stored_rows if stored_rows in possible_rows else possible_rows[0], *spec.shape[1:])


def _get_count(args: Mapping[str, Any], name: str, default: int = 1) -> int:
    """Return an argument that :func:`_check_counts` has validated."""
    value = args.get(name)
    return default if value is None or isinstance(value, UnknownObject) else int(value)


def _raise_if_invalid(path: Path, problems: Sequence[str]) -> None:
    """Raise an error that lists the problems of the arguments, if there are any."""
    if problems:
        raise CheckpointError(
            f"{path}: of its arguments (args): {'; '.join(problems)}",
            hint="Megatron-LM saves the arguments that it trained with: save it there again",
        )


def _check_counts(
    args: Mapping[str, Any], names: Sequence[str], maximum: int = 1 << 40
) -> list[str]:
    """Describe invalid whole numbers; each may be missing."""
    values = [(name, args.get(name)) for name in names]
    return [
        f"{name}: expected a whole number from 1 to {maximum:,}, found {format_value(value)}"
        for name, value in values
        if value is not None
        and not isinstance(value, UnknownObject)
        and not (_is_whole_number(value) and 1 <= value <= maximum)
    ]


def _check_values(args: Mapping[str, Any]) -> list[str]:
    """Describe the invalid values of the arguments that determine the model's function."""
    values = {}
    for name in MODEL_FUNCTION:
        names = [
            alias
            for alias in (*ARGUMENT_ALIASES.get(name, ()), name)
            if args.get(alias) is not None
        ]
        values[name] = args[names[0]] if names else None
        if isinstance(values[name], UnknownObject):
            values[name] = None
    return [text for name, value in values.items() for text in _check_value(name, value)]


def _check_value(name: str, value: Any) -> Iterator[str]:
    """Describe an invalid value of a known argument."""
    if value is None:
        if name in _REQUIRED_ARGUMENTS:
            yield f"{name}: expected a whole number from 1, it is missing"
        return
    argument = arguments()[name]
    items = [value]
    if argument.many and isinstance(value, (list, tuple)):
        items = list(value)
    for item in items:
        if text := _describe_expected(argument, item):
            yield f"{name}: expected {text}, found {format_value(value)}"
            return
    if name == "moe_layer_freq" and value == 0:
        yield f"{name}: expected a whole number from 1 or a list, found {format_value(value)}"
    if name == "window_size" and not (isinstance(value, (list, tuple)) and len(value) == 2):
        yield f"{name}: expected two whole numbers, found {format_value(value)}"


def _describe_expected(argument: Argument, value: Any) -> str | None:
    """Return a description of an argument's valid values if ``value`` is not one, else None."""
    if argument.kind == "bool":
        is_valid = isinstance(value, (bool, int)) and value in (0, 1)
        return None if is_valid else "true or false"
    if argument.kind == "str":
        return None if isinstance(value, str) else "a text"
    minimum, maximum = argument.minimum, argument.maximum
    if argument.kind == "int":
        minimum = None if argument.name in _SIGNED_ARGUMENTS else minimum or 0
        maximum = MAX_LAYERS if argument.name in _COUNT_ARGUMENTS else maximum
    is_valid = _is_whole_number(value) if argument.kind == "int" else is_number(value)
    if is_valid and (minimum is None or value >= minimum) and (maximum is None or value <= maximum):
        return None
    description = "a whole number" if argument.kind == "int" else "a number"
    description += "" if minimum is None else f" from {minimum:.15g}"
    return description if maximum is None else f"{description} to {maximum:,.15g}"


def _is_whole_number(value: Any) -> bool:
    return is_number(value) and value == int(value)


def _check_consistency(values: Mapping[str, Any]) -> list[str]:
    """Describe arguments that contradict each other."""
    layers, problems = values["num_layers"], []
    for name in _PER_LAYER_ARGUMENTS:
        items = values.get(name)
        if isinstance(items, list) and len(items) != layers:
            problems.append(
                f"{name}: expected an item for each of {layers} layers, has {len(items)}"
            )
    experts = layers * int(values.get("num_moe_experts") or 0)
    if experts > _MAX_EXPERTS:
        problems.append(
            f"num_experts: {experts:,} in all layers, expected {_MAX_EXPERTS:,} at most"
        )
    heads, groups = values["num_attention_heads"], values.get("num_query_groups") or 1
    if heads % groups:
        problems.append(f"num_query_groups: expected a divisor of {heads} heads, found {groups}")
    if values.get("kv_channels") is None and values["hidden_size"] < heads:
        problems.append(f"num_attention_heads: {heads} of hidden_size {values['hidden_size']}")
    if not values["vocab_size"]:
        problems.append("vocab_size: expected a whole number from 1, it is missing")
    return problems
