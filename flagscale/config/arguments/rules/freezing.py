"""Rules of freezing parameters by their names (``freeze_parameters``, ``trainable_parameters``).

No torch. The launcher checks patterns against the names that follow from the arguments; the ranks
check them against the parameters of the model, and freeze those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from flagscale.config.arguments.parameters import EMBEDDING, EXPERT_PATH, list_parameter_names
from flagscale.config.arguments.spec.argument import Values, Violation
from flagscale.config.arguments.spec.values import nearest_names

FREEZE, TRAIN = "freeze_parameters", "trainable_parameters"
_TOKEN = re.compile(r"(?P<numbers>\[[^\]]*\])|(?P<any>\*)|(?P<one>\?)|(?P<text>[A-Za-z0-9_.]+)")
_NUMBERS = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_NUMBER_LIST = re.compile(r"\[[^\]]*\]")
_MAX_NUMBER = 100_000
_HUGGING_FACE_NAMES: tuple[tuple[str, str], ...] = (
    (r"\bmodel\.embed_tokens\b|\btransformer\.wte\b|\bembed_tokens\b", "embedding.word_embeddings"),
    (r"\bmodel\.layers\b|\btransformer\.h\b", "decoder.layers"),
    (r"\bmodel\.norm\b", "decoder.final_layernorm"),
    (r"\blm_head\b", "output_layer"),
    (r"\bself_attn\b", "self_attention"),
    (r"\b[qkv]_proj\b", "linear_qkv"),
    (r"\bo_proj\b", "linear_proj"),
    (r"\b(gate|up|gate_up)_proj\b", "linear_fc1"),
    (r"\bdown_proj\b", "linear_fc2"),
    (r"\bpost_attention_layernorm\b", "pre_mlp_layernorm"),
)
"""Names of transformers' modules, as regular expressions, with those of this project."""


def compile_pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern: ``*`` is any text, ``?`` any character, and
    ``[0-3,7]`` one of these numbers. A pattern matches whole names, and all names below a module.

    Raises:
        ValueError: the text is no pattern; the message states the reason.
    """
    parts, position = [], 0
    while position < len(text):
        token = _TOKEN.match(text, position)
        if token is None:
            raise ValueError(
                f"{text!r} has the character {text[position]!r}, but a pattern consists of names, "
                "`*` (any text), `?` (a character) and numbers such as `[0-3,7]`; it is no regular "
                "expression"
            )
        parts.append(_translate(text, token))
        position = token.end()
    if not parts:
        raise ValueError("an empty pattern matches nothing")
    return re.compile(f"{''.join(parts)}(\\..+)?")


def _translate(text: str, token: re.Match[str]) -> str:
    if token["any"]:
        return ".*"
    if token["one"]:
        return "."
    if token["text"]:
        return re.escape(token["text"])
    ranges = token["numbers"][1:-1].replace(" ", "")
    if not _NUMBERS.fullmatch(ranges):
        found = token["numbers"]
        raise ValueError(f"{text!r} has {found}, expected numbers such as [0-3] or [1,5]")
    numbers: list[int] = []
    for item in ranges.split(","):
        first, _, last = item.partition("-")
        if int(last or first) > _MAX_NUMBER:
            raise ValueError(f"{text!r} has a number above {_MAX_NUMBER:,}")
        numbers += range(int(first), int(last or first) + 1)
    if not numbers:
        raise ValueError(f"{text!r} has {token['numbers']}, whose first number exceeds its last")
    return f"(?:{'|'.join(map(str, numbers))})(?![0-9])"


def freezing_argument(values: Values) -> str | None:
    """Return the argument that selects frozen parameters; None if all are trained."""
    return next((name for name in (FREEZE, TRAIN) if values.get(name)), None)


def describe_freezing(values: Values) -> dict[str, list[str]] | None:
    """Return the patterns for a checkpoint; None if all parameters are trained."""
    argument = freezing_argument(values)
    return None if argument is None else {argument: list(values[argument])}


def select_frozen(values: Values, names: Collection[str]) -> frozenset[str]:
    """Return the names of frozen parameters; patterns are assumed to be valid."""
    return frozenset(filter(frozen_predicate(values), names))


def frozen_predicate(values: Values) -> Callable[[str], bool]:
    """Return the function that tells by its name whether a parameter is frozen."""
    argument = freezing_argument(values)
    if argument is None:
        return lambda _: False
    patterns = [compile_pattern(text) for text in values[argument]]
    freezes_matches = argument == FREEZE
    return lambda name: any(p.fullmatch(name) for p in patterns) == freezes_matches


def check_freezing(values: Values) -> Iterator[Violation]:
    """Check the patterns, as far as possible without the model."""
    argument = freezing_argument(values)
    if argument is None:
        return
    if values[FREEZE] and values[TRAIN]:
        yield FREEZE, f"cannot be combined with {TRAIN}; leave one out"
        return
    if values["peft_type"]:
        yield argument, "cannot be combined with peft_type, which trains adapters only"
        return
    names = list_parameter_names(values)
    yield from check_patterns(values, names)


def check_patterns(values: Values, names: Sequence[str] | None) -> Iterator[Violation]:
    """Check the syntax of patterns and, if the names of all parameters are known, the selection."""
    argument = freezing_argument(values)
    if argument is None:
        return
    patterns: dict[str, re.Pattern[str]] = {}
    for text in values[argument]:
        try:
            patterns[text] = compile_pattern(text)
        except ValueError as error:
            yield argument, str(error)
    if names is None or len(patterns) < len(values[argument]):
        return
    unmatched = [t for t, p in patterns.items() if not any(map(p.fullmatch, names))]
    for text in unmatched:
        yield argument, f"{text!r} matches no parameter{_suggest(text, names, values)}"
    matched = [text for text in patterns if text not in unmatched]
    missing = {text: start for text in matched if (start := _find_missing_number(text, names))}
    for text, start in missing.items():
        yield argument, f"{text!r}: there is no {start}{_explain_number(start, names)}"
    if not unmatched and not missing:
        yield from _check_selection(argument, values, names)


def _find_missing_number(text: str, names: Sequence[str]) -> str | None:
    """Return the beginning of a pattern with a number that no layer or expert has; None if each
    list ends with a number that exists.
    """
    for numbers in _NUMBER_LIST.finditer(text):
        largest = max(map(int, re.findall(r"\d+", numbers[0])))
        start = f"{text[: numbers.start()]}{largest}"
        if not any(map(compile_pattern(start).fullmatch, names)):
            return start
    return None


def _check_selection(argument: str, values: Values, names: Sequence[str]) -> Iterator[Violation]:
    frozen = select_frozen(values, names)
    if len(frozen) == len(set(names)):
        yield argument, "freezes all parameters, so nothing would be trained"
    elif not frozen:
        yield argument, "matches all parameters, so nothing would be frozen; leave it out"
    partly_frozen = {
        _EXPERT_NUMBER.sub("*", name) for name in names if name in frozen and EXPERT_PATH in name
    } & {
        _EXPERT_NUMBER.sub("*", name)
        for name in names
        if name not in frozen and EXPERT_PATH in name
    }
    if partly_frozen:
        yield (
            argument,
            f"selects some experts of {min(partly_frozen)} only, but the experts of a layer are "
            "frozen together; write `*` for their number",
        )
    has_bias = values["moe_router_enable_expert_bias"] and values["moe_router_bias_update_rate"]
    if has_bias and any(name.endswith(".router.weight") for name in frozen):
        yield (
            argument,
            "freezes routers, but their expert biases would still be updated; set "
            "moe_router_bias_update_rate: 0",
        )


_EXPERT_NUMBER = re.compile(rf"(?<={re.escape(EXPERT_PATH)})\d+")
_ANY_NUMBER = re.compile(r"(?<=\.)(\d+|\[[^\]]*\]|\*)(?=\.|$)")


def _suggest(text: str, names: Sequence[str], values: Values) -> str:
    """Return the end of a message about a pattern that matches nothing: similar names."""
    translated = text
    for theirs, ours in _HUGGING_FACE_NAMES:
        translated = re.sub(theirs, ours, translated)
    if translated != text and any(map(compile_pattern(translated).fullmatch, names)):
        return f"; the names of megatron.core count: {translated!r}"
    is_tied = not values["untie_embeddings_and_output_weights"]
    if is_tied and translated.startswith("output_layer"):
        return f"; the output layer has the weight of {EMBEDDING} (tied)"
    general = list(dict.fromkeys(_ANY_NUMBER.sub("*", name) for name in names))
    modules = list(dict.fromkeys(module for name in general for module in _list_modules(name)))
    near = nearest_names(_ANY_NUMBER.sub("*", translated), [*general, *modules], least=0.5)
    layers = _explain_number(text, names)
    if near and not layers:
        return f"; did you mean {' or '.join(map(repr, near))}?"
    heads = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
    return layers or f"; names begin with {heads}"


def _list_modules(name: str) -> Iterator[str]:
    """Yield the modules that contain a parameter, such as ``decoder`` and ``decoder.layers``."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        yield ".".join(parts[:count])


def _explain_number(text: str, names: Sequence[str]) -> str:
    """Return the numbers of layers, if a pattern would match with another number."""
    general = _ANY_NUMBER.sub("*", text)
    if general == text or not any(map(compile_pattern(general).fullmatch, names)):
        return ""
    numbers = [int(m[1]) for name in names if (m := re.search(r"\.layers\.(\d+)\.", name))]
    return f"; layers have the numbers 0 to {max(numbers)}" if numbers else ""


def freezing_differences(
    saved: Mapping[str, Any] | None, current: Mapping[str, Any] | None
) -> str | None:
    """Return a description of patterns that differ from those of a checkpoint; None if equal."""
    if saved == current:
        return None
    return f"{_format(saved)} in the checkpoint, {_format(current)} in this run"


def _format(patterns: Mapping[str, Any] | None) -> str:
    if not patterns:
        return "all parameters trained"
    return "; ".join(f"{name}: [{', '.join(texts)}]" for name, texts in patterns.items())
