"""Estimate of an experiment on the hosts of a plan.

No host is contacted: devices are identified by ``type=`` in the hostfile, as far as an adapter
has data of that product.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from flagscale.accelerators.registry import list_device_accelerators
from flagscale.config.arguments.derive import derive_arguments
from flagscale.config.arguments.hetero.meshes import Meshes, are_automatic, is_split_automatic
from flagscale.config.arguments.layout import pad_vocabulary
from flagscale.config.arguments.spec.system_arguments import MESHES
from flagscale.config.model_files import read_vocabulary as vocabulary_of
from flagscale.config.placement import PlacedHost, device_types_of_replicas
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError
from flagscale.estimate import cost_cache, split
from flagscale.estimate.arithmetic import get_transformer
from flagscale.estimate.changes import (
    change_arguments,
    explicit_arguments,
    format_change,
    possible_changes,
)
from flagscale.estimate.forecast import Forecast, forecast_step
from flagscale.estimate.memory import (
    MemoryEstimate,
    ModelSize,
    count_model_weights,
    usable_bytes,
)
from flagscale.estimate.op_times import DevicePeaks
from flagscale.estimate.step_time import StepTime, select_peaks

GIB = 2**30
_MAX_SUGGESTIONS = 3
_MASK_TOKENS = {"[MASK]", "<mask>"}


@dataclass(frozen=True)
class DeviceSpec:
    """Known properties of a stage's devices: ``type=`` in the hostfile, TFLOP/s, memory in GiB, and
    memory bandwidth in 1e9 bytes per second.
    """

    kind: str
    peak: float | None
    memory: float | None
    bandwidth: float | None


@dataclass(frozen=True)
class Estimate:
    """Estimate of an experiment.

    ``devices`` are those of each stage. ``vocabulary_size`` is the padded size, 0 if unknown.
    ``replicas`` are the devices of heterogeneous replicas.
    """

    args: Namespace
    vocabulary_size: int
    devices: tuple[DeviceSpec | None, ...]
    replicas: tuple[DeviceSpec | None, ...] = ()

    @cached_property
    def forecast(self) -> Forecast:
        configured_gib = self.args.recompute_memory_gib
        limits = (
            [configured_gib * GIB] * len(self.devices) if configured_gib else self._memory_limits
        )
        return forecast_step(self.args, self.vocabulary_size, limits)

    @cached_property
    def _memory_limits(self) -> tuple[float, ...]:
        """Bytes that tensors may use on each stage's device; infinite if unknown."""
        return tuple(
            math.inf
            if device is None or device.memory is None
            else usable_bytes(device.memory * GIB)
            for device in self.devices
        )

    @cached_property
    def excess_bytes(self) -> tuple[float, ...]:
        """Bytes by which a rank of each stage exceeds its device's memory."""
        return tuple(
            max(stage.memory.total - limit_bytes, 0.0)
            for stage, limit_bytes in zip(self.forecast.stages, self._memory_limits, strict=True)
        )

    @cached_property
    def model_size(self) -> ModelSize:
        """Number of weights of the whole model."""
        return count_model_weights(self.args, self.vocabulary_size)

    @property
    def seconds(self) -> tuple[float, str] | None:
        """Duration of a step and the basis of this estimate; None if unknown."""
        return None if self.step_time is None else (self.step_time.seconds, self.step_time.basis)

    @property
    def peaks(self) -> list[float | None]:
        """Peak TFLOP/s of each stage's devices."""
        known_peaks = [None if device is None else device.peak for device in self.devices]
        return select_peaks(
            known_peaks, self.args.peak_tflops, is_homogeneous=len(set(self.devices)) == 1
        )

    @cached_property
    def step_time(self) -> StepTime | None:
        """Duration of a step, if it can be estimated."""
        if self.args.shares is not None:
            return None  # replicas of different speeds have no common duration
        if (measured := self._measured_step_time()) is not None:
            return measured
        device_peaks = self._device_peaks()
        if not self.args.bf16 or device_peaks is None:
            return None
        simulated = self.forecast.simulate(device_peaks)
        return StepTime(
            simulated.seconds,
            simulated.busy_seconds,
            "as layers do on an H200, other communication hidden",
        )

    def _device_peaks(self) -> list[DevicePeaks] | None:
        """Return the peaks of each stage's devices; None if one is unknown."""
        device_peaks = []
        for device, peak in zip(self.devices, self.peaks, strict=True):
            if not peak:
                return None
            bytes_per_second = (
                None if device is None or device.bandwidth is None else 1e9 * device.bandwidth
            )
            device_peaks.append(DevicePeaks(1e12 * peak, bytes_per_second))
        return device_peaks

    def _measured_step_time(self) -> StepTime | None:
        """Estimate the duration from cached measurements of the meshes' layers on this machine."""
        meshes: Meshes | None = self.args.meshes
        if meshes is None:
            return None
        cached_costs = [
            cost_cache.read_costs(cost_cache.mesh_cost_path(vars(self.args), meshes, index))
            for index in range(len(meshes.meshes))
        ]
        known_costs = [cached for cached in cached_costs if cached is not None]
        if len(known_costs) < len(cached_costs):
            return None
        problem = split.SplitProblem(
            meshes,
            tuple(cached.costs for cached in known_costs),
            split.layer_kinds(self.args),
            self.args.num_microbatches,
            self.args.standalone_embedding_stage,
        )
        layers = tuple(stage.layers for stage in meshes.stages)
        if is_split_automatic(self.args.hetero_pipeline_layer_split):
            layers = split.find_best_split(problem)
        text = f"layers {'+'.join(map(str, layers))}, by times measured on {known_costs[0].date}"
        step = problem.simulate_step(layers)
        return StepTime(step.seconds, step.busy_seconds, text)


def estimate_experiment(
    experiment: Experiment, hosts: Sequence[PlacedHost], *, max_tokenizer_bytes: int | None = None
) -> Estimate:
    """Return the estimate of an experiment that uses this project's training program.

    Args:
        experiment: the loaded experiment.
        hosts: hosts with their ranks.
        max_tokenizer_bytes: larger tokenizer files are not read for the vocabulary size.

    Raises:
        ConfigError: the arguments are inconsistent, do not fit the ranks, are of another training
            program, leave the meshes' sizes open, or are of a family that is not described.
    """
    if experiment.task.external:
        name = experiment.task.program
        raise ConfigError(
            f"{name} is not this project's training program, so it cannot be estimated"
        )
    world = sum(len(host.ranks) for host in hosts)
    values = experiment.train.values
    args = None if are_automatic(values) else derive_arguments(Namespace(**values), world)
    if args is None or (args.meshes is not None and args.meshes.open):
        raise ConfigError(f"{MESHES}: sizes are chosen by measuring when training starts")
    get_transformer(args)
    vocabulary_size = find_padded_vocabulary(args, max_tokenizer_bytes)
    kinds = {host.device_type for host in hosts}
    common_type = kinds.pop() if len(kinds) == 1 else None
    meshes: Meshes | None = args.meshes
    if meshes is None:
        types = [common_type] * args.pipeline_model_parallel_size
    else:
        types = [stage.mesh.device_type or common_type for stage in meshes.stages]
    replicas = [get_device_spec(kind) for kind in device_types_of_replicas(vars(args), hosts)]
    return Estimate(args, vocabulary_size, tuple(map(get_device_spec, types)), tuple(replicas))


def get_device_spec(kind: str | None) -> DeviceSpec | None:
    """Return the known properties of devices of this ``type=``; None without a type."""
    if kind is None:
        return None
    adapters = list_device_accelerators()
    properties = ("peak_tflops", "memory_gib", "memory_gb_per_second")
    return DeviceSpec(
        kind,
        *(
            _first_not_none(getattr(adapter, name)(kind) for adapter in adapters)
            for name in properties
        ),
    )


def _first_not_none(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def find_padded_vocabulary(args: Namespace, max_tokenizer_bytes: int | None = None) -> int:
    """Return the padded vocabulary size from the arguments and the tokenizer's files; 0 if it is
    unknown. Larger files than ``max_tokenizer_bytes`` are not read.
    """
    size = max(args.vocab_size or 0, _tokenizer_vocabulary(args, max_tokenizer_bytes))
    return pad_vocabulary(size, vars(args)) if size else 0


def _tokenizer_vocabulary(args: Any, max_tokenizer_bytes: int | None) -> int:
    """Return the vocabulary size of a local tokenizer; 0 if it is unknown."""
    kind, path, separate = args.tokenizer_type, args.tokenizer_path, bool(args.merge_file)
    tokenizer = vocabulary_of(kind, path, has_merge_file=separate, max_bytes=max_tokenizer_bytes)
    if tokenizer is None:
        return 0
    needs_mask = get_transformer(args).masks and not _MASK_TOKENS & tokenizer.names
    return tokenizer.size + needs_mask


# --- messages -----------------------------------------------------------------------------------


def format_memory(memory: MemoryEstimate) -> str:
    """Format memory, such as ``38.1 GiB (weights 4.1, …)``; in MiB for small models."""
    unit, name_of_unit = (GIB, "GiB") if memory.total >= GIB else (2**20, "MiB")
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "transient": memory.transient,
    }
    details = ", ".join(f"{name} {size / unit:.1f}" for name, size in parts.items())
    return f"{memory.total / unit:.1f} {name_of_unit} ({details})"


def describe_device_memory(device: DeviceSpec) -> str:
    """Return the memory of a device and its usable part, such as ``a H100 has 79 GiB, 69 …``."""
    memory_gib = device.memory or 0.0
    usable_gib = usable_bytes(memory_gib * GIB) / GIB
    return f"a {device.kind} has {memory_gib:.0f} GiB, {usable_gib:.0f} of them for tensors"


def describe_excess(estimate: Estimate) -> Iterator[str]:
    """Describe each stage that does not fit its devices, and changes that make it fit."""
    for stage, device, excess_bytes in zip(
        estimate.forecast.stages, estimate.devices, estimate.excess_bytes, strict=True
    ):
        if excess_bytes and device is not None:
            yield (
                f"{stage.name} does not fit: {format_memory(stage.memory)} a rank, "
                f"{describe_device_memory(device)}"
            )
    if not any(estimate.excess_bytes):
        return
    if suggestions := list(islice(_suggest_changes(estimate), _MAX_SUGGESTIONS)):
        yield f"what would fit: {', or '.join(suggestions)}"
    else:
        yield (
            "no change of micro-batch, recomputation, sharding or tensor parallelism would fit: "
            "that takes more ranks, or a smaller model"
        )


def _suggest_changes(estimate: Estimate) -> Iterator[str]:
    """Yield minimal changes of arguments with which every stage fits, fewest arguments first."""
    working_changes: list[dict[str, Any]] = []  # explicit arguments alone
    for changes in sorted(
        possible_changes(estimate.args), key=lambda changes: len(explicit_arguments(changes))
    ):
        # A superset of a working change is not listed, and neither are a higher tensor parallel
        # size and more recomputation.
        explicit = explicit_arguments(changes)
        if not explicit or any(smaller.keys() <= explicit.keys() for smaller in working_changes):
            continue
        args = change_arguments(estimate.args, changes)
        if not any(Estimate(args, estimate.vocabulary_size, estimate.devices).excess_bytes):
            working_changes.append(explicit)
            yield format_change(changes)
