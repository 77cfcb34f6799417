"""Predicted memory and time of a layout, by cause.

Computation is that of :mod:`flagscale.estimate`, which assumes that communication other than
tensor parallelism's is hidden. A search compares layouts that differ in communication, so here
it counts, as volume over bandwidth plus latency. The fractions that remain exposed are
assumptions; measurements of some layouts correct them for all (:mod:`.belief`).

``args`` are resolved arguments of a homogeneous job throughout.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from flagscale.config.arguments.rules.sharding import shards_gradients, shards_weights
from flagscale.estimate import attention, memory
from flagscale.estimate.arithmetic import expert_tp, list_layer_kinds
from flagscale.estimate.forecast import (
    StageLoads,
    find_distinct_stages,
    forecast_loads,
    forecast_memory,
)
from flagscale.estimate.memory import usable_bytes
from flagscale.estimate.op_times import PassLoads, Workload, layer_load
from flagscale.estimate.plan import GIB
from flagscale.tune.machine import Machine

CAUSES: Mapping[str, str] = {
    "compute": "matrix products and attention",
    "memory": "memory traffic",
    "kernels": "start of kernels",
    "launch": "launches by the host",
    "host": "copies to and from the host",
    "tensor": "communication of tensor parallelism",
    "context": "communication of context parallelism",
    "expert": "communication of experts",
    "pipeline": "pipeline bubble and transfers",
    "data": "reduction of gradients",
    "optimizer": "optimizer",
    "cores": "ranks that share cores",
}
"""Causes of a step's time, in the order of the table."""

_WAITING = frozenset({"pipeline", "cores"})
"""Causes of time in which a rank waits for passes of others. It is proportional to these."""
_ONCE_PER_STEP = frozenset({"data", "optimizer"})

_EXPOSED_WITH_OVERLAP = 0.25
"""Part of the reduction of gradients that overlapped communication leaves exposed."""
_EXPOSED_CONTEXT = 0.5
"""Part of the exchange of keys and values that attention does not hide."""
_TENSOR_COLLECTIVES = 8
"""Collectives of a layer's two passes with tensor parallelism."""
_CONTEXT_COLLECTIVES = 3
_EXPERT_COLLECTIVES = 4
_GRADIENT_BYTES = 4
_NAMED_SHARE = 0.02
"""Share of a step's time from which a cause counts as measured."""


class PredictedMemory(NamedTuple):
    """Predicted bytes of the fullest rank, the part beyond its device's memory, and the bytes of
    the host for a rank.
    """

    bytes: float
    excess_bytes: float
    host_bytes: float


class Corrected(NamedTuple):
    """Time of a step with corrected causes. ``shares`` are the relative changes of the time per
    relative change of each factor.
    """

    seconds: float
    shares: Mapping[str, float]


@dataclass(frozen=True)
class Prediction:
    """Predicted memory and time of a step. ``seconds_by_cause`` adds up to ``seconds``."""

    memory: PredictedMemory
    seconds_by_cause: Mapping[str, float]

    @cached_property
    def seconds(self) -> float:
        return sum(self.seconds_by_cause.values())

    @property
    def main_causes(self) -> set[str]:
        """Causes of so much of the time that a measurement of the whole also measures them."""
        least_seconds = _NAMED_SHARE * self.seconds
        return {cause for cause, s in self.seconds_by_cause.items() if s >= least_seconds}

    def correct(self, factors: Mapping[str, float]) -> Corrected:
        """Return the time if each cause takes a multiple of what is predicted.

        Slower passes also prolong the time in which other ranks wait for them.
        """
        predicted, passes, waiting, at_end = 0.0, 0.0, 0.0, 0.0
        parts = {}
        for cause, seconds in self.seconds_by_cause.items():
            parts[cause] = corrected = seconds * factors[cause]
            if cause in _WAITING:
                waiting += corrected
            elif cause in _ONCE_PER_STEP:
                at_end += corrected
            else:
                predicted += seconds
                passes += corrected
        per_pass = 1 + waiting / predicted if predicted else 1.0
        total = at_end + passes * per_pass if predicted else at_end + waiting
        slower = passes / predicted if predicted else 1.0
        for cause, seconds in parts.items():
            if cause in _WAITING:
                parts[cause] = seconds * slower / total
            elif cause in _ONCE_PER_STEP:
                parts[cause] = seconds / total
            else:
                parts[cause] = seconds * per_pass / total
        return Corrected(total, parts)


def predict_memory(args: Namespace, vocabulary_size: int, machine: Machine) -> PredictedMemory:
    """Return the predicted memory of a layout."""
    estimates = forecast_memory(args, vocabulary_size, list(find_distinct_stages(args)))
    full = max(estimate.total for estimate in estimates)
    host = max(estimate.host for estimate in estimates)
    if machine.memory_gib is None:
        return PredictedMemory(full, 0.0, host)
    usable = usable_bytes(machine.memory_gib * GIB)
    return PredictedMemory(full, max(full - usable, 0.0), host)


def predict_seconds(args: Namespace, vocabulary_size: int, machine: Machine) -> dict[str, float]:
    """Return the predicted seconds of a step by cause.

    A pipeline takes as long as its slowest stage, and once through the others; with several model
    chunks, once through one chunk of the others.
    """
    counts = find_distinct_stages(args)
    stages = forecast_loads(args, vocabulary_size, list(counts))
    micro_batches = args.num_microbatches
    extra = [_pass_communication(args, stage, machine) for stage in stages]
    loads = [sum(stage.passes, PassLoads()) for stage in stages]
    parts = [
        (load.forward.split_duration(machine.peaks), load.backward.split_duration(machine.peaks))
        for load in loads
    ]
    pass_seconds = [
        sum(map(sum, both)) + sum(communication.values())
        for both, communication in zip(parts, extra, strict=True)
    ]
    slowest = max(range(len(stages)), key=pass_seconds.__getitem__)
    seconds = {
        cause: micro_batches * sum(getattr(part, attribute) for part in parts[slowest])
        for cause, attribute in _CAUSES_OF_PASSES.items()
    }
    for cause, communication_seconds in extra[slowest].items():
        seconds[cause] = seconds.get(cause, 0.0) + micro_batches * communication_seconds
    seconds["pipeline"] = _pipeline_seconds(
        args, list(zip(pass_seconds, counts.values(), strict=True)), machine
    )
    seconds["data"] = max(_reduction_seconds(args, stage, machine) for stage in stages)
    optimizer = [stage.optimizer_load.duration(machine.peaks) for stage in stages]
    seconds["optimizer"] = max(optimizer)
    if machine.cores is not None and machine.ranks_per_host > machine.cores:
        # While ranks wait for each other, others use their cores.
        busy_seconds = sum(
            stage.ranks * count * (micro_batches * of_pass + end)
            for stage, count, of_pass, end in zip(
                stages, counts.values(), pass_seconds, optimizer, strict=True
            )
        )
        total = busy_seconds / (machine.cores * machine.hosts)
        seconds["cores"] = max(total - sum(seconds.values()), 0.0)
    return {cause: seconds[cause] for cause in CAUSES if seconds.get(cause)}


def predict_layer_seconds(args: Namespace, machine: Machine) -> float:
    """Return the predicted seconds of both passes of a micro-batch in all layers of the model.

    They depend on the tensor, context and expert parallel sizes and on the micro-batch only.
    """
    load = PassLoads()
    for kind, count in Counter(list_layer_kinds(args)).items():
        load += layer_load(args, kind).scale(count)
    layers = StageLoads(args.num_layers, 1, (), (load,), Workload(), 0)
    return (
        load.forward.duration(machine.peaks)
        + load.backward.duration(machine.peaks)
        + sum(_pass_communication(args, layers, machine).values())
    )


_CAUSES_OF_PASSES = {
    "compute": "compute",
    "memory": "memory",
    "kernels": "kernels",
    "launch": "launch",
    "host": "host",
    "tensor": "exchange",
}
"""Causes of the time of passes, with the attribute of :class:`.LoadSeconds`."""


def _pipeline_seconds(args: Any, stages: Sequence[tuple[float, int]], machine: Machine) -> float:
    """Return the seconds in which a pipeline fills and drains, with its transfers.

    ``stages`` has the seconds of a micro-batch in each distinct stage, and the number of these.
    """
    chunks = args.virtual_pipeline_model_parallel_size or 1
    count = args.pipeline_model_parallel_size
    if count == 1:
        return 0.0
    others = sum(seconds * number for seconds, number in stages) - max(stages)[0]
    # Overlapped transfers of the interleaved schedule count only while the pipeline fills.
    transfers = 2 * (count - 1) + (0 if chunks > 1 else 2 * args.num_microbatches)
    return float(others / chunks + transfers * _transfer_seconds(args, machine))


def _pass_communication(args: Any, stage: StageLoads, machine: Machine) -> dict[str, float]:
    """Return the exposed seconds of communication in both passes of a micro-batch, in addition to
    the bytes that tensor-parallel ranks exchange within a host.
    """
    tp, cp, ep = (
        args.tensor_model_parallel_size,
        args.context_parallel_size,
        args.expert_model_parallel_size,
    )
    seconds: dict[str, float] = {}
    if tp > 1:
        bandwidth, latency = machine.link(tp)
        load = sum(stage.passes, PassLoads())
        exchanged = load.forward.exchanged_bytes + load.backward.exchanged_bytes
        slower = 1 / bandwidth - 1 / machine.peaks.link_bytes_per_second
        seconds["tensor"] = exchanged * slower + _TENSOR_COLLECTIVES * stage.layers * latency
    if cp > 1:
        bandwidth, latency = machine.link(cp, tp)
        size = 3 * _kv_bytes(args) * (cp - 1)
        seconds["context"] = stage.layers * (
            _EXPOSED_CONTEXT * size / bandwidth + _CONTEXT_COLLECTIVES * latency
        )
    if ep > 1:
        bandwidth, latency = machine.link(ep, expert_tp(args))
        tokens = memory.count_microbatch_tokens(args) / tp
        size = tokens * args.hidden_size * memory.element_bytes(args) * args.moe_router_topk
        seconds["expert"] = (
            _EXPERT_COLLECTIVES * stage.layers * (size * (ep - 1) / ep / bandwidth + latency)
        )
    return seconds


def _kv_bytes(args: Any) -> float:
    """Return the bytes of a rank's own keys and values in a layer."""
    width = attention.kv_width(args) / args.tensor_model_parallel_size
    return float(memory.count_microbatch_tokens(args) * width * memory.element_bytes(args))


def _transfer_seconds(args: Any, machine: Machine) -> float:
    """Return the time to send the activations of a micro-batch to the next stage."""
    stride = machine.ranks // args.pipeline_model_parallel_size
    bandwidth, latency = machine.link(2, stride)
    divisor = args.tensor_model_parallel_size if args.sequence_parallel else 1
    size = memory.count_microbatch_tokens(args) * args.hidden_size * memory.element_bytes(args)
    return float(size / divisor / bandwidth + latency)


def _reduction_seconds(args: Any, stage: StageLoads, machine: Machine) -> float:
    """Return the exposed seconds in which gradients are reduced and weights gathered."""
    instances = args.num_distributed_optimizer_instances
    shards, _ = memory.count_shards(args)
    if shards * instances == 1:
        return 0.0
    bandwidth, latency = machine.link(shards, args.tensor_model_parallel_size)
    volume = stage.trained * (shards - 1) / shards
    gradients, weights = _GRADIENT_BYTES * volume, memory.element_bytes(args) * volume
    if not args.use_distributed_optimizer:
        weights = gradients  # an all-reduce gathers the gradients
    if shards_gradients(vars(args)):
        gradients *= args.num_microbatches
    if shards_weights(vars(args)):  # each pass of a micro-batch gathers them
        weights *= 2 * args.num_microbatches
    exposed = [
        size * (_EXPOSED_WITH_OVERLAP if is_overlapped else 1.0)
        for size, is_overlapped in (
            (gradients, args.overlap_grad_reduce),
            (weights, args.overlap_param_gather or not args.use_distributed_optimizer),
        )
    ]
    seconds = float(sum(exposed) / bandwidth + 4 * latency)
    if instances == 1:
        return seconds
    # An all-reduce of the gradients' shards between the instances, once per step.
    bandwidth, latency = machine.link(instances, args.tensor_model_parallel_size * shards)
    size = 2 * _GRADIENT_BYTES * stage.trained / shards * (instances - 1) / instances
    is_overlapped = args.overlap_grad_reduce or shards_gradients(vars(args))
    return seconds + float(
        size * (_EXPOSED_WITH_OVERLAP if is_overlapped else 1.0) / bandwidth + 2 * latency
    )
