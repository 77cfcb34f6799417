"""Measures what parts of the model cost this rank: small models of its own mesh's layout, trained
for a few micro-batches.

What a layer takes is the difference between models with more and fewer of them, which have a small
vocabulary; what embedding and head take is what a layer with the whole vocabulary takes more than
that. All ranks measure at the same time, as they will train.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_moe_layer_wise_logging_tracker,
)

from flagscale.config.arguments import recompute
from flagscale.config.arguments.meshes import SPLIT
from flagscale.config.arguments.vocabulary import vocabulary_parts
from flagscale.errors import ConfigError
from flagscale.estimate.costs import MIXTURE, Cost, Costs, least_of
from flagscale.estimate.split import kinds_of
from flagscale.train.build import build_state
from flagscale.train.device import Device
from flagscale.train.forward import ForwardStep
from flagscale.train.meshes.gradients import collection
from flagscale.train.meshes.groups import Stages
from flagscale.train.models.base import spec_of
from flagscale.train.models.config import transformer_config
from flagscale.train.state import TrainState, unwrap

_LEAST, _MOST = 5, 40
"""How often something is repeated on a host at least and at most. The first quartile counts:
whatever else it does only slows."""
_SECONDS, _BRIEFLY = 0.5, 0.2
"""How long, in between."""
_ROUNDS = 3
"""How often all of it is measured on a host, which for seconds may be slower than it usually is."""
_SETTLING = 2.0
"""Seconds of passes after which a chip's clock is what its power allows for long. Their mean counts
from then on, as it does in training."""
_MORE = 2
"""Layers by which two models differ."""
_ONE, _WHOLE = "one", "whole"
"""Models of one layer, with few tokens and with all; the others are called by the layers that they
have more."""
LAYERS = 1 + _MORE
"""Of the largest model that is measured, but for the vocabulary."""
_FEW_TOKENS = 128
"""What a small vocabulary is a multiple of, for each of the parts that it is divided in."""
_SPARED = 0.95
"""Share of a device's memory that is planned with: allocators lose some."""


def measure(args: argparse.Namespace, vocabulary: int, device: Device) -> Costs:
    """What each part costs this rank. All ranks of a job call it, laid out.

    Args:
        args: this rank's arguments, resolved.
        vocabulary: the padded vocabulary's size.
        device: where to train.

    Raises:
        ConfigError: megatron.core refuses the model's configuration.
    """
    *_, base = kinds = kinds_of(args)  # those that predict further tokens are as the last one
    room = device.accelerator.room(device.torch_device)
    few = min(_few_tokens(args), vocabulary)
    models: dict[str, tuple[list[str], int]] = {
        kind: ([*[kind] * _MORE, base], few) for kind in sorted(set(kinds))
    }
    models |= {_ONE: ([base], few), _WHOLE: ([base], vocabulary)}
    rounds = range(_ROUNDS if device.accelerator.is_host else 1)
    try:
        with _alone():
            found = [
                {name: _measured(args, *model, device) for name, model in models.items()}
                for _ in rounds
            ]
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"{SPLIT}: a model of {LAYERS} layers or of one with the whole vocabulary, by which "
            f"a layer's cost is measured, does not fit into {device.name}",
            hint=f"give the layers of each stage in {SPLIT}",
        ) from error
    least = {name: _least([each[name] for each in found]) for name in models}
    one, whole = least.pop(_ONE), least.pop(_WHOLE)
    layers = {kind: _one(one.whole, more) for kind, more in least.items()}
    limit = None if room is None else max(room * _SPARED - whole.peak, 0.0)
    ends = whole.whole.less(layers[base])
    further = _further(args, one.whole.less(layers[base]), ends, few / vocabulary)
    embedding, head = _divided(args, ends, whole.embedding, further)
    return Costs(layers, embedding, head, limit)


def _few_tokens(args: argparse.Namespace) -> int:
    """A small vocabulary with which hardly two places of a micro-batch are alike all the same: a
    chip that computes the same again and again takes less power, and so is faster than it will be
    in training."""
    least = _FEW_TOKENS * vocabulary_parts(vars(args))
    tokens: int = args.micro_batch_size * args.seq_length
    return least * math.ceil(tokens / least)


def _one(less: Cost, more: _Measured) -> Cost:
    """A layer, by which two models differ. Noise may take away all of a difference: a layer takes
    at least a quarter of its share of the larger model."""
    layer = more.whole.less(less).times(1 / _MORE)
    least = more.whole.times(0.25 / LAYERS)
    return replace(
        layer,
        forward=max(layer.forward, least.forward),
        backward=max(layer.backward, least.backward),
    )


def _further(args: argparse.Namespace, few: Cost, ends: Cost, share: float) -> Cost:
    """What layers that predict further tokens cost but for the head. ``few``, ``ends``: what all
    but the model's layers costs with a ``share`` of the vocabulary, and with the whole; what is the
    same in both is theirs."""
    if not args.mtp_num_layers or share >= 1.0:
        return Cost()
    return few.less(ends.times(share)).times(1.0 / (1.0 - share))


def _divided(
    args: argparse.Namespace, ends: Cost, embedding: Cost, further: Cost
) -> tuple[Cost, Cost]:
    """What embedding and head cost, of what they cost together, with layers that predict
    ``further`` tokens. Where they are tied, both ends of the pipeline hold the one weight that the
    small model has; where such layers read the embedding, the end holds it too."""
    untied = args.untie_embeddings_and_output_weights
    weight = ends.less(further).times(0.5 if untied else 1.0)
    last = weight.times(2 if untied and args.mtp_num_layers else 1)
    passes = ends.less(embedding)
    after, held = last.after + further.after, last.held + further.held
    return (
        Cost(embedding.forward, embedding.backward, weight.after, weight.held, embedding.kept),
        Cost(passes.forward, passes.backward, after, held, passes.kept),
    )


@contextmanager
def _alone() -> Iterator[None]:
    """A context in which megatron.core knows of no other stages than this rank's."""
    names = (
        "_PIPELINE_MODEL_PARALLEL_GROUP",
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    )
    before = {name: getattr(parallel_state, name) for name in names}
    for name, value in zip(names, (Stages(0, 1), 0, 1, None, None), strict=True):
        setattr(parallel_state, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)


def _small(args: argparse.Namespace, kinds: Sequence[str]) -> argparse.Namespace:
    """The arguments with these layers alone, in one stage."""
    out = copy.copy(args)
    out.num_layers = len(kinds)
    out.pipeline_model_parallel_size = 1
    out.pipeline_model_parallel_layout = out.virtual_pipeline_model_parallel_size = None
    out.num_virtual_stages_per_pipeline_rank = None
    out.meshes = out.stage = None
    out.overlap_grad_reduce = out.overlap_param_gather = out.align_param_gather = False
    if args.num_moe_experts:
        out.moe_layer_freq = [int(kind == MIXTURE) for kind in kinds]
    for name in recompute.NAMES:
        setattr(out, name, None)
    if args.recompute_granularity == "full":
        out.recompute_num_layers = _recomputed(args, len(kinds))
    return out


def _recomputed(args: argparse.Namespace, layers: int) -> int:
    """Units of recomputation in so few layers: of as large a share of them as of a stage's, or the
    largest that divide them."""
    wanted: int = args.recompute_num_layers
    if args.recompute_method == "block":
        share = wanted * args.pipeline_model_parallel_size / int(args.num_layers)
        return int(min(round(share * layers), layers))
    return layers if wanted >= layers else 1


@dataclass(frozen=True)
class _Measured:
    """Of a small model: what all of it costs, what its embedding does, and the bytes that are held
    for a moment beyond what is held all the time."""

    whole: Cost
    embedding: Cost
    peak: float


def _least(found: Sequence[_Measured]) -> _Measured:
    """Of what several rounds found, part by part."""
    return _Measured(
        least_of([each.whole for each in found]),
        least_of([each.embedding for each in found]),
        min(each.peak for each in found),
    )


def _measured(
    args: argparse.Namespace, kinds: Sequence[str], vocabulary: int, device: Device
) -> _Measured:
    small = _small(args, kinds)
    config = transformer_config(small, device)
    before = _held(device)
    state = build_state(small, config, vocabulary, device)
    config.grad_scale_func = state.optimizer.scale_loss
    trial = _Trial(small, vocabulary, state, device)
    dist.barrier()
    after = trial.after()
    held = _held(device) - before
    forward, backward, kept = trial.passes()
    embedding = trial.embedding()
    peak = device.accelerator.peak_memory(device.torch_device) or 0
    beyond = max(peak - before - held - kept, 0.0)
    del trial, state
    _forget_routers()
    gc.collect()
    device.accelerator.give_back()
    return _Measured(Cost(forward, backward, after, held, kept), embedding, beyond)


def _forget_routers() -> None:
    """What megatron.core keeps for the process of routers' losses: a table for as many layers as
    the first model had, and a scale of the shape of the first one that was set."""
    get_moe_layer_wise_logging_tracker().clear()
    MoEAuxLossAutoScaler.main_loss_backward_scale = None


def _held(device: Device) -> float:
    return float(device.accelerator.held_memory(device.torch_device) or 0)


class _Trial:
    """Runs a small model."""

    def __init__(
        self, args: argparse.Namespace, vocabulary: int, state: TrainState, device: Device
    ) -> None:
        self._state, self._device = state, device
        (self._chunk,) = state.chunks
        spec = spec_of(args)
        self._batch = spec.trial(args, vocabulary)
        self._forward = ForwardStep(spec, device, per_token=args.calculate_per_token_loss)

    def after(self) -> float:
        """Seconds of what a step does after its passes: reducing gradients, the optimizer."""
        self._pass()
        return self._typical(lambda: (self._timed(self._finish),), _BRIEFLY)[0]

    def passes(self) -> tuple[float, ...]:
        """Seconds of a micro-batch's forward and backward pass, and the bytes kept between."""
        self._pass()
        self._device.accelerator.forget_peak(self._device.torch_device)
        if self._device.accelerator.is_host:
            return self._typical(self._pass, _SECONDS)
        repeats = self._repeats(self._pass, _SETTLING + _SECONDS)
        found = [self._pass() for _ in range(max(repeats, _LEAST))]
        settled = found[int(len(found) * _SETTLING / (_SETTLING + _SECONDS)) :]
        return tuple(map(fmean, zip(*settled, strict=True)))

    def embedding(self) -> Cost:
        """What the embedding's passes take."""
        model: Any = unwrap(self._chunk)
        place = self._device.torch_device
        tokens, positions = (self._batch[n].to(place) for n in ("tokens", "position_ids"))
        outputs: list[torch.Tensor] = []

        def forward() -> None:
            outputs[:] = [model.embedding(input_ids=tokens, position_ids=positions)]

        def backward() -> None:
            torch.autograd.backward(outputs[0], torch.ones_like(outputs[0]))

        with self._chunk.no_sync():
            both = self._typical(lambda: (self._timed(forward), self._timed(backward)), _BRIEFLY)
        return Cost(*both)

    def _typical(self, work: Callable[[], tuple[float, ...]], seconds: float) -> tuple[float, ...]:
        """Of what ``work`` gives the first quartile, number by number."""
        repeats = min(max(self._repeats(work, seconds), _LEAST), _MOST)
        found = [work() for _ in range(repeats)]
        return tuple(sorted(each)[len(each) // 4] for each in zip(*found, strict=True))

    def _repeats(self, work: Callable[[], tuple[float, ...]], seconds: float) -> int:
        """How often the slowest rank can do ``work`` in so many seconds; all repeat it as often."""
        work()
        begin = time.perf_counter()
        work()
        took = torch.tensor([time.perf_counter() - begin], device=self._device.torch_device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        return int(seconds / took.item())

    def _pass(self) -> tuple[float, float, float]:
        found: list[torch.Tensor] = []

        def forward() -> None:
            output, loss_of = self._forward(iter([self._batch]), self._chunk)
            total, count, _ = loss_of(output)
            found[:] = [self._state.optimizer.scale_loss(total / count)]

        def backward() -> None:
            torch.autograd.backward(found.pop())

        before = _held(self._device)
        with self._chunk.no_sync():
            first = self._timed(forward)
            kept = _held(self._device) - before
            return first, self._timed(backward), kept

    def _finish(self) -> None:
        finalize_model_grads([self._chunk], None, pg_collection=collection())
        self._state.optimizer.step()
        self._chunk.zero_grad_buffer()
        self._state.optimizer.zero_grad()

    def _timed(self, work: Callable[[], None]) -> float:
        self._device.synchronize()
        begin = time.perf_counter()
        work()
        self._device.synchronize()
        return time.perf_counter() - begin
