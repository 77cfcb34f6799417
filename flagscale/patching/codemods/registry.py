"""Codemods by the names used in ``codemods.yaml``."""

from __future__ import annotations

from collections.abc import Mapping

from flagscale.patching.codemods.base import Codemod
from flagscale.patching.codemods.cuda_calls import BarrierDevices, CudaCalls
from flagscale.patching.codemods.demands import CudaDemands
from flagscale.patching.codemods.literals import (
    DeviceLiterals,
    GroupBackends,
    PinnedFactories,
    TensorTypes,
)
from flagscale.patching.codemods.methods import DeviceMethods
from flagscale.patching.codemods.optional_imports import OptionalImports
from flagscale.patching.codemods.rng import RngForkWarning, RngState

CODEMODS: Mapping[str, Codemod] = {
    codemod.name: codemod
    for codemod in (
        BarrierDevices(),
        CudaCalls(),
        CudaDemands(),
        DeviceLiterals(),
        DeviceMethods(),
        GroupBackends(),
        OptionalImports(),
        PinnedFactories(),
        RngForkWarning(),
        RngState(),
        TensorTypes(),
    )
}
