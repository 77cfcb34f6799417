"""What a YAML may write as maps or lists of lists and the training program takes as words.

``comm`` is a map of the communication backend's options, ``hetero_process_meshes`` may be a list of
maps, each a mesh, as ``data_phases`` is of mixtures, and what is recomputed by stage and
micro-batch is a list of lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flagscale.config.arguments import meshes, phases, recompute
from flagscale.config.arguments.values import word

NAME = "comm"
_LISTED: Mapping[str, Callable[[Sequence[Any]], list[Any]]] = {
    meshes.MESHES: meshes.as_words,
    phases.NAME: phases.as_words,
    **dict.fromkeys(recompute.NAMES, recompute.as_words),
}


def as_words(section: Mapping[Any, Any]) -> dict[Any, Any]:
    """A section of arguments in which such maps are the words that their arguments take; of
    options null takes one away.

    A map that holds more than plain values stays, to be refused with the place of the value.
    """
    made = {
        key: as_words(value) if isinstance(value, Mapping) and key != NAME else value
        for key, value in section.items()
    }
    for name, worded in _LISTED.items():
        if isinstance(listed := made.get(name), (list, tuple)):
            made[name] = worded(listed)
    options = made.get(NAME)
    if not isinstance(options, Mapping):
        return made
    if any(isinstance(value, (Mapping, list, tuple)) for value in options.values()):
        return made
    words = [f"{key}={word(value)}" for key, value in options.items() if value is not None]
    return {**made, NAME: words or None}
