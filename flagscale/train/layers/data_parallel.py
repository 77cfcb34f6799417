"""megatron.core's data parallelism for layers that run whole and add their gradients themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from flagscale.train.layers.accumulating import bind
from flagscale.train.layers.compiling import transformer_layers
from flagscale.train.state import unwrap


class LayerwiseDataParallel(DistributedDataParallel):  # type: ignore[misc]
    """Waits for the gathered parameters of a whole layer before it runs, and tells gradients that
    come through autograd from those that have been added already."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._added_already = bind(unwrap(self))

    def zero_grad_buffer(self) -> None:
        """Start a step: no gradients."""
        super().zero_grad_buffer()
        for weight in self._added_already:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]

    def enable_forward_pre_hook(self) -> None:
        """Wait for a module's parameters before it runs, for all of a layer's before the layer
        does: hooks inside of it would break its graph."""
        handles = self.remove_forward_pre_hook_handles
        assert self.use_forward_hook
        assert not handles
        wait = self._make_forward_pre_hook()
        for module, parts in self._pieces():
            handles[module] = module.register_forward_pre_hook(_for_all(wait, parts))

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Wait no more; with ``param_sync`` gather all parameters now."""
        assert self.use_forward_hook
        for handle in self.remove_forward_pre_hook_handles.values():
            handle.remove()
        self.remove_forward_pre_hook_handles.clear()
        if param_sync:
            self.start_param_sync(force_sync=True)

    def _pieces(self) -> Iterator[tuple[torch.nn.Module, list[torch.nn.Module]]]:
        layers = transformer_layers(self.module)
        inside = {part for layer in layers for part in layer.modules()}
        for layer in layers:
            yield layer, list(layer.modules())
        for module in self.module.modules():
            if module not in inside:
                yield module, [module]


def _for_all(wait: Callable[..., None], parts: list[torch.nn.Module]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for part in parts:
            wait(part)

    return hook
