"""Activations of layers in host memory between their forward and backward pass.

What autograd keeps of an offloaded layer is copied to the host on a side stream when the layer's
forward pass ends, while the next layers compute. It is copied back before its backward pass, while
the layers behind it run theirs. Copies are spread over the pass: a chunk of L layers of which the
first N are offloaded gives the copy of layer i the time of L/N layers.

On a CPU the same code makes plain copies.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch


class Transfers:
    """Copies between the memory of a device and pinned memory of its host, on side streams.

    Host buffers are reused by later copies of the same size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._to_host = self._module.Stream(device)
            self._to_device = self._module.Stream(device)
        self._free_buffers: dict[int, list[tuple[torch.Tensor, Any]]] = defaultdict(list)

    def copy_to_host(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Start to copy flat tensors of bytes. Return the buffers, and an event of the end."""
        buffers = [self._take_buffer(tensor.numel()) for tensor in tensors]
        if self._module is None:
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor)
            return buffers, None
        self._to_host.wait_stream(self._module.current_stream())
        with self._module.stream(self._to_host):
            for buffer, tensor in zip(buffers, tensors, strict=True):
                buffer.copy_(tensor, non_blocking=True)
        return buffers, self._to_host.record_event()

    def copy_to_device(self, buffers: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Any]:
        """Start to copy buffers back. Return new flat tensors, and an event of the end."""
        # Allocated for the current stream, which uses and frees them.
        tensors = [torch.empty_like(buffer, device=self._device) for buffer in buffers]
        if self._module is None:
            for tensor, buffer in zip(tensors, buffers, strict=True):
                tensor.copy_(buffer)
            return tensors, None
        self._to_device.wait_stream(self._module.current_stream())
        with self._module.stream(self._to_device):
            for tensor, buffer in zip(tensors, buffers, strict=True):
                tensor.copy_(buffer, non_blocking=True)
        return tensors, self._to_device.record_event()

    def wait(self, event: Any) -> None:
        """Let the current stream wait for the end of a copy."""
        if event is not None:
            self._module.current_stream().wait_event(event)

    def recycle(self, buffer: torch.Tensor, event: Any) -> None:
        """Return a host buffer that the copy of ``event`` may still read."""
        self._free_buffers[buffer.numel()].append((buffer, event))

    def _take_buffer(self, size: int) -> torch.Tensor:
        if free := self._free_buffers[size]:
            buffer, event = free.pop()
            if event is not None:
                self._to_host.wait_event(event)
            return buffer
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._module is not None)


class _Memory:
    """Memory of one or more saved tensors: on the device, on the host, or being copied."""

    def __init__(self, storage: torch.UntypedStorage, transfers: Transfers) -> None:
        self._transfers = transfers
        self.device_bytes: torch.Tensor | None = _flat_bytes(storage)
        self._buffer: torch.Tensor | None = None
        self._pending: Any = None  # event of the newest copy that the device has not waited for
        self._last_read: Any = None  # event of the newest copy that reads the buffer

    def set_copied(self, buffer: torch.Tensor, event: Any) -> None:
        self._buffer, self._pending = buffer, event

    def release(self) -> None:
        """Free the device memory after the copy to the host."""
        if self._buffer is not None:
            self._wait()
            self.device_bytes = None

    def buffer_to_fetch(self) -> torch.Tensor | None:
        """Return the buffer to copy back, or None if the memory is on the device."""
        return None if self.device_bytes is not None else self._buffer

    def set_fetched(self, tensor: torch.Tensor, event: Any) -> None:
        self.device_bytes, self._pending, self._last_read = tensor, event, event

    def get_storage(self) -> torch.UntypedStorage:
        """Return the memory on the device, for use on the current stream."""
        if (buffer := self.buffer_to_fetch()) is not None:
            (tensor,), event = self._transfers.copy_to_device([buffer])
            self.set_fetched(tensor, event)
        if self._last_read is not None:
            self._wait()
        assert self.device_bytes is not None
        return self.device_bytes.untyped_storage()

    def _wait(self) -> None:
        self._transfers.wait(self._pending)
        self._pending = None

    def __del__(self) -> None:
        # Device memory must not be reused while a side stream copies it.
        if self._buffer is not None:
            self._wait()
            self._transfers.recycle(self._buffer, self._last_read)


def _flat_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage)


class _SavedView(NamedTuple):
    """Saved tensor as a view of memory."""

    memory: _Memory
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def restore(self) -> torch.Tensor:
        storage = self.memory.get_storage()
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)


class _LayerPass:
    """Forward pass of a layer in one micro-batch, with the memory that it has saved."""

    def __init__(
        self, transfers: Transfers, find_excluded: Callable[[], set[int]], smallest: int
    ) -> None:
        self._transfers, self._smallest = transfers, smallest
        self._find_excluded = find_excluded
        self._excluded: set[int] | None = None
        self._saved: dict[int, _Memory] = {}
        self._copied: list[weakref.ref[_Memory]] = []
        self.is_active = True

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _SavedView:
        if not self.is_active or type(tensor) is not torch.Tensor:
            return tensor
        if tensor.numel() < self._smallest or tensor.layout != torch.strided:
            return tensor
        if self._excluded is None:
            self._excluded = self._find_excluded()
        storage = tensor.untyped_storage()
        # A small part of a larger buffer would take the whole buffer with it.
        key = storage._cdata  # addresses of data are reused within a layer
        if key in self._excluded or 2 * tensor.nbytes < storage.nbytes():
            return tensor
        memory = self._saved.get(key)
        if memory is None:
            memory = self._saved[key] = _Memory(storage, self._transfers)
        return _SavedView(
            memory, tensor.dtype, int(tensor.storage_offset()), tensor.size(), tensor.stride()
        )

    def unpack(self, saved: torch.Tensor | _SavedView) -> torch.Tensor:
        return saved.restore() if isinstance(saved, _SavedView) else saved

    def start_copy(self) -> None:
        """Copy the saved memory to the host, at the end of the forward pass."""
        # Selective recomputation may have discarded some of it.
        memories = [m for m in self._saved.values() if m.get_storage().nbytes()]
        self._saved.clear()
        sources = [_flat_bytes(memory.get_storage()) for memory in memories]
        buffers, event = self._transfers.copy_to_host(sources)
        for memory, buffer in zip(memories, buffers, strict=True):
            memory.set_copied(buffer, event)
        self._copied = [weakref.ref(memory) for memory in memories]

    def release(self) -> None:
        """Free the device memory of what has been copied; the current stream waits for it."""
        for memory in self._live_memories():
            memory.release()

    def start_fetch(self) -> None:
        """Copy the memory back to the device, before the backward pass."""
        fetched = [
            (memory, buffer)
            for memory in self._live_memories()
            if (buffer := memory.buffer_to_fetch()) is not None
        ]
        tensors, event = self._transfers.copy_to_device([buffer for _, buffer in fetched])
        for (memory, _), tensor in zip(fetched, tensors, strict=True):
            memory.set_fetched(tensor, event)

    def _live_memories(self) -> Iterator[_Memory]:
        return (memory for ref in self._copied if (memory := ref()) is not None)


def copy_deadlines(layers: int, offloaded: int) -> list[int]:
    """Return for each of the first ``offloaded`` layers the layer at whose end its copy must be
    complete, and at the beginning of whose backward pass it is copied back.

    The copies are spread evenly over the ``layers`` of a chunk.
    """
    return [min((index + 1) * layers // offloaded, layers - 1) for index in range(offloaded)]


class LayerOffload:
    """Offload of the activations of a chunk's first layers."""

    def __init__(
        self,
        layers: Sequence[Any],
        count: int,
        transfers: Transfers,
        *,
        smallest: int,
        modules: Collection[str] | None = None,
    ) -> None:
        """Register the hooks.

        Args:
            layers: transformer layers of a chunk, in order.
            count: number of layers to offload. The last layer is never offloaded, because its
                backward pass is the first one.
            transfers: copies of the device.
            smallest: elements of the smallest tensor to offload.
            modules: names in ``offload_modules``: only tensors that these modules save are
                offloaded. None: all of the layer.
        """
        self._transfers, self._smallest = transfers, smallest
        self._whole_layers = modules is None
        count = min(count, len(layers) - 1)
        self._deadlines = copy_deadlines(len(layers), count)
        self._passes: dict[int, _LayerPass] = {}
        self._contexts: dict[int, Any] = {}
        for index, layer in enumerate(layers if count > 0 else ()):
            layer.register_forward_pre_hook(partial(self._enter_layer, index), with_kwargs=True)
            layer.register_forward_hook(partial(self._leave_layer, index), always_call=True)
            if modules is not None and index < count:
                self._register_modules(index, layer, modules)

    def _register_modules(self, index: int, layer: Any, names: Collection[str]) -> None:
        for module in find_offloaded_modules(layer, names):
            module.register_forward_pre_hook(lambda *_: self._set_active(index, True))
            module.register_forward_hook(
                lambda *_: self._set_active(index, False), always_call=True
            )
        if "moe_act" in names and hasattr(layer.mlp, "experts"):
            layer.mlp.experts.activation_context = partial(self._activate, index)

    def _set_active(self, index: int, active: bool) -> None:
        if (layer_pass := self._passes.get(index)) is not None:
            layer_pass.is_active = active

    @contextlib.contextmanager
    def _activate(self, index: int) -> Iterator[None]:
        self._set_active(index, True)
        try:
            yield
        finally:
            self._set_active(index, False)

    def _enter_layer(self, index: int, layer: Any, args: Any, options: dict[str, Any]) -> None:
        if index == 0:
            self._passes = {}
        is_offloaded = index < len(self._deadlines)
        if not (is_offloaded and layer.training and torch.is_grad_enabled()):
            return
        inputs = [value for name, value in options.items() if name != "hidden_states"]
        find_excluded = partial(_permanent_memory, layer, [*args[1:], *inputs])
        layer_pass = _LayerPass(self._transfers, find_excluded, self._smallest)
        layer_pass.is_active = self._whole_layers
        self._passes[index] = layer_pass
        context = torch.autograd.graph.saved_tensors_hooks(layer_pass.pack, layer_pass.unpack)
        context.__enter__()
        self._contexts[index] = context

    def _leave_layer(self, index: int, layer: Any, _: Any, output: Any) -> None:
        if (context := self._contexts.pop(index, None)) is not None:
            context.__exit__()
        if output is None or not self._passes:
            return  # the layer has failed, or nothing is offloaded in this pass
        if index in self._passes:
            self._passes[index].start_copy()
        due_passes = [
            self._passes[number]
            for number, deadline in enumerate(self._deadlines)
            if deadline == index and number in self._passes
        ]
        for layer_pass in due_passes:
            layer_pass.release()
        hidden = output[0] if isinstance(output, tuple) else output
        if due_passes and hidden.requires_grad:
            hidden.register_hook(partial(_fetch_passes, due_passes))


def _fetch_passes(passes: Sequence[_LayerPass], _: torch.Tensor) -> None:
    for layer_pass in passes:
        layer_pass.start_fetch()


def _permanent_memory(layer: torch.nn.Module, inputs: Sequence[Any]) -> set[int]:
    """Return the storages, by identity, that a layer uses and that stay allocated anyway: weights,
    accumulated gradients, 8-bit copies of weights, and ``inputs`` that all layers share.
    """
    tensors = [*layer.parameters(), *layer.buffers()]
    tensors += [p.main_grad for p in layer.parameters() if hasattr(p, "main_grad")]
    for module in layer.modules():
        tensors += getattr(module, "fp8_weight", None) or ()
    for value in inputs:
        tensors += value if isinstance(value, (tuple, list)) else [value]
    return {
        tensor.untyped_storage()._cdata for tensor in tensors if isinstance(tensor, torch.Tensor)
    }


def find_offloaded_modules(layer: Any, names: Collection[str]) -> list[Any]:
    """Return the modules of a layer that ``offload_modules`` names, except for ``moe_act``."""
    attention, experts = layer.self_attention, getattr(layer.mlp, "experts", None)
    projections = ("linear_qkv", "linear_q_down_proj", "linear_q_proj", "linear_kv_down_proj")
    modules = {
        "attn_norm": [layer.input_layernorm],
        "qkv_linear": [getattr(attention, name, None) for name in projections],
        "core_attn": [attention.core_attention],
        "attn_proj": [attention.linear_proj],
        "mlp_norm": [layer.pre_mlp_layernorm],
        "expert_fc1": [getattr(experts, "linear_fc1", None)],
    }
    return [module for name in names for module in modules.get(name, ()) if module is not None]
