"""megatron.core's DDP for compiled layers that accumulate their own weight gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel

from flagscale.train.layers.layer_compilation import find_transformer_layers
from flagscale.train.layers.wgrad_accumulation import bind_accumulators
from flagscale.train.state import unwrap_model


class LayerwiseDataParallel(DistributedDataParallel):  # type: ignore[misc]
    """DDP that waits for all parameters of a layer before the layer runs.

    megatron.core's waits before each module inside the layer. This class also marks the
    weights whose gradients are accumulated without autograd.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._accumulated_weights = bind_accumulators(unwrap_model(self))

    def zero_grad_buffer(self) -> None:
        """Zero the gradients at the start of a step."""
        super().zero_grad_buffer()
        for weight in self._accumulated_weights:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]

    def enable_forward_pre_hook(self) -> None:
        """Register hooks that wait for the parameters of a layer before the layer runs.

        Modules outside layers have hooks of their own.

        Hooks inside a layer would break its graph.
        """
        handles = self.remove_forward_pre_hook_handles
        assert self.use_forward_hook
        assert not handles
        wait = self._make_forward_pre_hook()
        for module, awaited_modules in self._iter_hooked_modules():
            handles[module] = module.register_forward_pre_hook(
                _wait_for_modules(wait, awaited_modules)
            )

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Remove the hooks. With ``param_sync``, gather all parameters now."""
        assert self.use_forward_hook
        for handle in self.remove_forward_pre_hook_handles.values():
            handle.remove()
        self.remove_forward_pre_hook_handles.clear()
        if param_sync:
            self.start_param_sync(force_sync=True)

    def _iter_hooked_modules(self) -> Iterator[tuple[torch.nn.Module, list[torch.nn.Module]]]:
        """Yield each module with a hook, and the modules whose parameters the hook waits for."""
        layers = find_transformer_layers(self.module)
        layer_modules = {module for layer in layers for module in layer.modules()}
        for layer in layers:
            yield layer, list(layer.modules())
        for module in self.module.modules():
            if module not in layer_modules:
                yield module, [module]


def _wait_for_modules(
    wait: Callable[..., None], modules: list[torch.nn.Module]
) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for module in modules:
            wait(module)

    return hook
