"""What a step of an experiment takes on the hosts of a plan. Nobody is asked: what devices are is
known by the ``type=`` of the hostfile, as far as an adapter knows that name."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import Any

from flagscale.accelerators.registry import accelerators
from flagscale.config.arguments.meshes import MESHES, Meshes, chosen_for_us, to_be_filled
from flagscale.config.arguments.recompute import AUTO
from flagscale.config.arguments.resolve import resolve
from flagscale.config.arguments.vocabulary import padded_vocabulary
from flagscale.config.checks import Arguments
from flagscale.config.placement import Placed, types_of_replicas
from flagscale.config.schema import Experiment
from flagscale.config.tokenizers import vocabulary as vocabulary_of
from flagscale.errors import ConfigError
from flagscale.estimate import cost_cache, split
from flagscale.estimate.arithmetic import transformer
from flagscale.estimate.forecast import Forecast, forecast
from flagscale.estimate.memory import Memory
from flagscale.estimate.op_times import Chip
from flagscale.estimate.step_time import Timed, peaks_of

GIB = 2**30
_USABLE = 0.95
"""Share of a device's memory that tensors may take: contexts and fragments take the rest."""
_MOST_WAYS = 3
_USUAL_MASKS = {"[MASK]", "<mask>"}
_IMPLIED = {"recompute_method", "recompute_num_layers", "sequence_parallel"}
"""Arguments that come with others: which, the reference of the configuration says."""


@dataclass(frozen=True)
class Device:
    """What is known of a stage's devices: the hostfile's ``type=``, TFLOP/s, GiB, and 1e9 bytes
    that their memory moves in a second."""

    kind: str
    peak: float | None
    memory: float | None
    bandwidth: float | None


@dataclass(frozen=True)
class Estimate:
    """``devices``: of each stage; ``vocabulary``: the padded one, 0 where it is not known;
    ``replicas``: the devices of each of unlike replicas."""

    args: Namespace
    vocabulary: int
    devices: tuple[Device | None, ...]
    replicas: tuple[Device | None, ...] = ()

    @cached_property
    def forecast(self) -> Forecast:
        given = self.args.recompute_memory_gib
        room = [given * GIB] * len(self.devices) if given else self._room
        return forecast(self.args, self.vocabulary, room)

    @cached_property
    def _room(self) -> tuple[float, ...]:
        """Bytes that tensors may take of each stage's device; no limit is known of some."""
        return tuple(
            math.inf if device is None or device.memory is None else _USABLE * device.memory * GIB
            for device in self.devices
        )

    @cached_property
    def over(self) -> tuple[float, ...]:
        """Bytes that a rank of each stage takes beyond its device's memory."""
        return tuple(
            max(stage.memory.all - room, 0.0)
            for stage, room in zip(self.forecast.stages, self._room, strict=True)
        )

    @property
    def seconds(self) -> tuple[float, str] | None:
        """Of a step, and what that is known by; None where nothing is known."""
        return None if self.timed is None else (self.timed.seconds, self.timed.by)

    @property
    def peaks(self) -> list[float | None]:
        """TFLOP/s of each stage's devices."""
        known = [None if device is None else device.peak for device in self.devices]
        return peaks_of(known, self.args.peak_tflops, alike=len(set(self.devices)) == 1)

    @cached_property
    def timed(self) -> Timed | None:
        """A step, where something is known."""
        if self.args.shares is not None:
            return None  # replicas that are unlike in speed have no one time
        if (measured := self._measured()) is not None:
            return measured
        chips = self._chips()
        if not self.args.bf16 or chips is None:
            return None
        played = self.forecast.played(chips)
        return Timed(
            played.seconds, played.busy, "as layers do on an H200, other communication hidden"
        )

    def _chips(self) -> list[Chip] | None:
        """Each stage's devices; None where a peak is not known."""
        found = []
        for device, peak in zip(self.devices, self.peaks, strict=True):
            if not peak:
                return None
            moved = None if device is None or device.bandwidth is None else 1e9 * device.bandwidth
            found.append(Chip(1e12 * peak, moved))
        return found

    def _measured(self) -> Timed | None:
        """By the times of the meshes' layers that were measured once and kept on this machine."""
        meshes: Meshes | None = self.args.meshes
        if meshes is None:
            return None
        found = [
            cost_cache.read(cost_cache.path_of(vars(self.args), meshes, index))
            for index in range(len(meshes.meshes))
        ]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        problem = split.Problem(
            meshes,
            tuple(one.costs for one in known),
            split.kinds_of(self.args),
            self.args.num_microbatches,
            self.args.standalone_embedding_stage,
        )
        layers = tuple(stage.layers for stage in meshes.stages)
        if chosen_for_us(self.args.hetero_pipeline_layer_split):
            layers = split.best(problem)
        text = f"layers {'+'.join(map(str, layers))}, by times measured on {known[0].date}"
        step = problem.step(layers)
        return Timed(step.seconds, step.busy, text)


def of_experiment(
    experiment: Experiment, hosts: Sequence[Placed], *, most_bytes: int | None = None
) -> Estimate:
    """The estimate of an experiment of our own training program.

    Args:
        experiment: as loaded.
        hosts: with their ranks.
        most_bytes: a tokenizer's file that is larger is not read for its vocabulary.

    Raises:
        ConfigError: the arguments do not fit each other or the ranks, are of another training
            program, leave the meshes' sizes open, or are of a family that is not described.
    """
    if experiment.task.external:
        name = experiment.task.program
        raise ConfigError(f"{name} is not this project's training program: what it takes, it knows")
    world = sum(len(host.ranks) for host in hosts)
    values = Arguments.of(experiment).values()
    args = None if to_be_filled(values) else resolve(Namespace(**values), world)
    if args is None or (args.meshes is not None and args.meshes.open):
        raise ConfigError(f"{MESHES}: sizes are chosen by measuring when training starts")
    transformer(args)
    size = max(args.vocab_size or 0, _tokens(args, most_bytes))
    vocabulary = padded_vocabulary(size, vars(args)) if size else 0
    kinds = {host.device_type for host in hosts}
    same = kinds.pop() if len(kinds) == 1 else None
    meshes: Meshes | None = args.meshes
    if meshes is None:
        types = [same] * args.pipeline_model_parallel_size
    else:
        types = [stage.mesh.device_type or same for stage in meshes.stages]
    replicas = [device_of(kind) for kind in types_of_replicas(vars(args), hosts)]
    return Estimate(args, vocabulary, tuple(map(device_of, types)), tuple(replicas))


def device_of(kind: str | None) -> Device | None:
    if kind is None:
        return None
    every = accelerators()
    facts = ("peak_tflops", "memory_gib", "bandwidth_gb")
    return Device(kind, *(_first(getattr(one, fact)(kind) for one in every) for fact in facts))


def _first(values: Iterable[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _tokens(args: Any, most_bytes: int | None) -> int:
    """The vocabulary with a tokenizer whose files lie here; 0 where they do not tell."""
    kind, path, separate = args.tokenizer_type, args.tokenizer_path, bool(args.merge_file)
    found = vocabulary_of(kind, path, separate=separate, most_bytes=most_bytes)
    if found is None:
        return 0
    lacks = transformer(args).masks and not _USUAL_MASKS & found.names
    return found.size + lacks


# --- what to say of it ---------------------------------------------------------------------------


def memory_text(memory: Memory) -> str:
    """Such as ``38.1 GiB (weights 4.1, gradients 8.2, …)``, of a small model in MiB."""
    unit, name_of_unit = (GIB, "GiB") if memory.all >= GIB else (2**20, "MiB")
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "for a moment": memory.moment,
    }
    listed = ", ".join(f"{name} {size / unit:.1f}" for name, size in parts.items())
    return f"{memory.all / unit:.1f} {name_of_unit} ({listed})"


def too_much(made: Estimate) -> Iterator[str]:
    """A sentence of each stage that does not fit its devices, and what would."""
    for stage, device, over in zip(made.forecast.stages, made.devices, made.over, strict=True):
        if over and device is not None:
            yield (
                f"{stage.name} does not fit: {memory_text(stage.memory)} a rank, a {device.kind} "
                f"has {device.memory:.0f} GiB"
            )
    if not any(made.over):
        return
    if ways := list(islice(_ways_to_fit(made), _MOST_WAYS)):
        yield f"what would fit: {', or '.join(ways)}"
    else:
        yield (
            "no change of micro-batch, recomputation, sharding or tensor parallelism would fit: "
            "that takes more ranks, or a smaller model"
        )


def _ways_to_fit(made: Estimate) -> Iterator[str]:
    """Changes of the arguments after which every stage fits, few before many, and none that holds
    another."""
    found: list[dict[str, Any]] = []
    for changes in sorted(_changes(made.args), key=lambda one: len(one.keys() - _IMPLIED)):
        # What holds all of a smaller change is none of its own; more tensor parallelism neither.
        if not changes or any(other.keys() <= changes.keys() for other in found):
            continue
        args = copy(made.args)
        vars(args).update(changes)
        args.data_parallel_size //= args.tensor_model_parallel_size
        args.data_parallel_size *= made.args.tensor_model_parallel_size
        if not any(Estimate(args, made.vocabulary, made.devices).over):
            found.append(changes)
            said = {n: v for n, v in changes.items() if n not in _IMPLIED}
            yield " and ".join(f"{name}: {_yaml(value)}" for name, value in said.items())


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _changes(args: Namespace) -> Iterator[dict[str, Any]]:
    """What could be changed; of unlike meshes not their sizes."""
    tp, alike = args.tensor_model_parallel_size, args.meshes is None
    heads = args.num_query_groups or args.num_attention_heads
    sharded: list[dict[str, Any]] = [{}, {"use_distributed_optimizer": True}]
    smaller: list[dict[str, Any]] = [{}, {"micro_batch_size": 1}]
    recomputed: list[dict[str, Any]] = [
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ]
    split = [
        {"tensor_model_parallel_size": tp * more, "sequence_parallel": True}
        for more in (2, 4, 8)
        if args.data_parallel_size % more == 0 and heads % (tp * more) == 0
    ]
    for several in product(
        sharded if not args.use_distributed_optimizer else [{}],
        smaller if alike and args.micro_batch_size > 1 else [{}],
        recomputed if args.recompute_granularity not in ("full", AUTO) else [{}],
        [{}, *(split if alike else ())],
    ):
        yield {name: value for one in several for name, value in one.items()}
