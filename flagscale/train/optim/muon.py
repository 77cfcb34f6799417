"""Muon for matrices and Adam for all other weights, in one optimizer.

Muon's update is an orthogonalized momentum (:mod:`.matrices`), for which a rank needs the whole
matrix. The optimizer's parameters may be shards. Every rank then updates the momentum and the
weights of its shards, and each matrix is assigned to one rank, which receives the momentum of all
its parts, orthogonalizes it and returns the updates of the parts. Thus every rank sends and
receives each element of its shard once, computes its share of the orthogonalizations, and has
memory for a few matrices only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
import torch.distributed as dist

from flagscale.accelerators.device import current_device
from flagscale.train.checkpoint.gather_plan import Part, choose_owners, plan_waves
from flagscale.train.optim.adam import FusedAdam
from flagscale.train.optim.matrices import MatrixLayout, MuonSettings, compute_update
from flagscale.train.optim.owner_exchange import Wave
from flagscale.train.optim.states import MOMENTUM

USES_MUON = "uses_muon"
"""Mark of parameters, and of their groups, that Muon trains."""


@dataclass(frozen=True)
class Matrix:
    """A parameter that Muon trains.

    Attributes:
        layout: the matrices in the whole parameter.
        group: index of the parameter group.
        parameter: the optimizer's parameter: the whole one, or the flat shard of this rank; None
            if its shard contains no part.
        parts: parts of the parameter that the data-parallel ranks hold; empty if all hold it whole.
    """

    layout: MatrixLayout
    group: int
    parameter: Any
    parts: tuple[Part, ...] = ()


class Muon(FusedAdam):
    """Muon for the parameter groups that are marked with :data:`USES_MUON`, Adam for the others."""

    def __init__(self, params: Iterable[Any], *, settings: MuonSettings, **options: Any) -> None:
        """Create the optimizer. :meth:`set_matrices` has to be called before the first step.

        Args:
            params: parameter groups, as torch's optimizers take them.
            settings: options of Muon.
            options: learning rate, weight decay, and Adam's betas, eps and ``adam_w_mode``.
        """
        super().__init__(params, **options)
        self._settings = settings
        self._matrices: list[Matrix] = []
        self._waves: list[Wave] | None = None

    def set_matrices(
        self, matrices: Sequence[Matrix], ranks: dist.ProcessGroup | None = None
    ) -> None:
        """Set the parameters that Muon trains.

        Args:
            matrices: all of them, in an order that is equal on all ranks.
            ranks: ranks that hold shards of the parameters; None if every rank holds all.
        """
        self._matrices, self._waves = list(matrices), None
        if ranks is None or ranks.size() == 1:
            return
        layouts = [matrix.layout for matrix in self._matrices]
        owners = choose_owners([layout.cost() for layout in layouts], ranks.size())
        sizes = [layout.numel for layout in layouts]
        self._waves = [
            Wave({index: self._matrices[index].parts for index in indices}, owners, ranks)
            for indices in plan_waves(sizes, owners)
        ]

    def initialize_states(self) -> None:
        """Allocate the state of each parameter that has none."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if group.get(USES_MUON):
                    self._get_momentum(parameter)
                else:
                    self._get_moments(parameter)

    def _get_momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state: dict[str, torch.Tensor] = self.state[parameter]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(parameter)
        return state[MOMENTUM]

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter. Collective over the ranks that share parameters."""
        loss = super().step(closure)
        if self._waves is None:
            for index in range(len(self._matrices)):
                self._apply(index, self._compute_update(index, self._read_direction(index)))
            return loss
        for wave in self._waves:
            self._run_wave(wave)
        return loss

    def _update_group(self, group: dict[str, Any]) -> None:
        """Update what depends on single elements: of matrices the momentum and weight decay."""
        if not group.get(USES_MUON):
            super()._update_group(group)
            return
        by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
        for parameter in group["params"]:
            by_device[parameter.device].append(parameter)
        for parameters in by_device.values():
            torch._foreach_lerp_(
                [self._get_momentum(parameter) for parameter in parameters],
                [parameter.grad for parameter in parameters],  # type: ignore[misc]
                1.0 - self._settings.momentum,
            )
            torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])

    def _run_wave(self, wave: Wave) -> None:
        """Update the matrices of a wave, each orthogonalized by its owner."""
        device = current_device().torch_device
        values = wave.gather(self._read_direction, device)
        for index in wave.owned:
            values[index] = self._compute_update(index, values[index])
        wave.scatter(values, self._apply, device)

    def _read_direction(self, index: int) -> torch.Tensor:
        """Return what is orthogonalized of this rank's parameter, flat."""
        parameter = self._matrices[index].parameter
        momentum: torch.Tensor = self.state[parameter][MOMENTUM]
        if self._settings.use_nesterov:
            momentum = parameter.grad.lerp(momentum, self._settings.momentum)
        return momentum.view(-1)

    def _compute_update(self, index: int, direction: torch.Tensor) -> torch.Tensor:
        layout = self._matrices[index].layout
        return compute_update(direction.view(layout.shape), layout, self._settings).reshape(-1)

    def _apply(self, index: int, update: torch.Tensor) -> None:
        """Update this rank's parameter."""
        matrix = self._matrices[index]
        rate = self.param_groups[matrix.group]["lr"]
        matrix.parameter.detach().view(-1).add_(update, alpha=-rate)
