"""Options of ``generate_until`` requests (``generation_kwargs`` of a task). No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

_DEFAULT_ANSWER_TOKENS = 256
_LENGTH_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the option that limits an answer, by precedence."""


class GenerationOptions(NamedTuple):
    """Options of a ``generate_until`` request that this trainer supports."""

    stops: tuple[str, ...]
    max_tokens: int


def parse_generation_options(options: Mapping[str, Any]) -> GenerationOptions:
    """Parse the ``generation_kwargs`` of a task.

    Raises:
        ValueError: an option is not supported; the message names it.
    """
    remaining = dict(options)
    until = remaining.pop("until", None) or ()
    lengths = [remaining.pop(name, None) for name in _LENGTH_OPTIONS]
    length = next((value for value in lengths if value is not None), _DEFAULT_ANSWER_TOKENS)
    if remaining.pop("do_sample", None):
        raise ValueError("do_sample: true is not supported, because answers are generated greedily")
    if remaining.pop("temperature", None):
        raise ValueError("a temperature is not supported, because answers are generated greedily")
    if remaining:
        raise ValueError(f"{next(iter(remaining))} is not supported in generation_kwargs")
    stops = (until,) if isinstance(until, str) else tuple(until)
    return GenerationOptions(tuple(filter(None, stops)), int(length))
