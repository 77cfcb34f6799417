"""The codemods' names, readable without loading a parser of Python."""

from __future__ import annotations

#: What ``codemods.yaml`` may name; :data:`flagscale.patching.codemods.CODEMODS` holds the rest.
CODEMOD_NAMES = (
    "barrier-devices",
    "cuda-calls",
    "cuda-demands",
    "device-literals",
    "device-methods",
    "group-backends",
    "optional-imports",
    "pinned-factories",
    "rng-fork-warning",
    "rng-state",
    "tensor-types",
)
