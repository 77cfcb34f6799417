"""Names of the codemods, available without loading libcst."""

from __future__ import annotations

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
"""Names that ``codemods.yaml`` may contain; :data:`.registry.CODEMODS` has the codemods."""
