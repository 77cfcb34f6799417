"""What a step of an experiment takes on the hosts of a plan. Nobody is asked: what devices are is
known by the ``type=`` of the hostfile, as far as an adapter knows that name."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from pathlib import Path
from typing import Any

from flagscale.accelerators.registry import accelerators
from flagscale.config.arguments.meshes import MESHES, Meshes, chosen_for_us, to_be_filled
from flagscale.config.arguments.recompute import AUTO
from flagscale.config.arguments.resolve import resolve
from flagscale.config.arguments.vocabulary import padded_vocabulary
from flagscale.config.checks import Arguments
from flagscale.config.placement import Placed
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError
from flagscale.estimate import kept, split
from flagscale.estimate.arithmetic import transformer
from flagscale.estimate.forecast import Forecast, forecast
from flagscale.estimate.memory import Memory

GIB = 2**30
_USABLE = 0.95
"""Share of a device's memory that tensors may take: contexts and fragments take the rest."""
_SHARES = {"bf16": 0.60, "fp8": 0.75}
"""Share of a device's peak in 16 bits that ``transformer_impl: compiled`` reaches, measured with
layers of Llama-3-8B on an H200 (docs/performance.md)."""

_MOST_WAYS = 3
_USUAL_MASKS = {"[MASK]", "<mask>"}
_IMPLIED = {"recompute_method", "recompute_num_layers", "sequence_parallel"}
"""Arguments that come with others: which, the reference of the configuration says."""


@dataclass(frozen=True)
class Device:
    """What is known of a stage's devices: the hostfile's ``type=``, TFLOP/s and GiB."""

    kind: str
    peak: float | None
    memory: float | None


@dataclass(frozen=True)
class Estimate:
    """``devices``: of each stage; ``vocabulary``: the padded one, 0 where it is not known."""

    args: Namespace
    vocabulary: int
    devices: tuple[Device | None, ...]

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

    @cached_property
    def seconds(self) -> tuple[float, str] | None:
        """Of a step, and what that is known by; None where nothing is known."""
        if self.args.shares is not None:
            return None  # replicas that are unlike in speed have no one time
        if (measured := self._measured()) is not None:
            return measured
        share = _SHARES["fp8"] if self.args.fp8 else _SHARES["bf16"] if self.args.bf16 else None
        peaks = {
            id(stage): device.peak if device is not None else self.args.peak_tflops
            for stage, device in zip(self.forecast.stages, self.devices, strict=True)
        }
        if share is None or not all(peaks.values()):
            return None
        seconds = self.forecast.seconds(lambda stage: share * 1e12 * (peaks[id(stage)] or 0.0))
        return seconds, f"at {share:.0%} of the devices' peak, communication hidden"

    def _measured(self) -> tuple[float, str] | None:
        """By the times of the meshes' layers that were measured once and kept on this machine."""
        meshes: Meshes | None = self.args.meshes
        if meshes is None:
            return None
        found = [
            kept.read(kept.path_of(vars(self.args), meshes, index))
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
        return problem.step(layers).seconds, text


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
    return Estimate(args, vocabulary, tuple(map(_device, types)))


def _device(kind: str | None) -> Device | None:
    if kind is None:
        return None
    every = accelerators()
    peaks = (adapter.peak_tflops(kind) for adapter in every)
    sizes = (adapter.memory_gib(kind) for adapter in every)
    peak = next((peak for peak in peaks if peak is not None), None)
    size = next((size for size in sizes if size is not None), None)
    return Device(kind, peak, size)


def _tokens(args: Any, most_bytes: int | None) -> int:
    """The vocabulary with a tokenizer of Hugging Face's that lies here; 0 where none does."""
    if not args.tokenizer_path:
        return 0
    path = Path(args.tokenizer_path) / "tokenizer.json"
    try:
        if most_bytes is not None and path.stat().st_size > most_bytes:
            return 0
        found = json.loads(path.read_bytes())
        added = {token["content"]: token["id"] for token in found.get("added_tokens", ())}
        size = max(len(found["model"]["vocab"]), *(token + 1 for token in added.values()), 0)
        vocabulary = found["model"]["vocab"]
        has_mask = any(name in added or name in vocabulary for name in _USUAL_MASKS)
        lacks = transformer(args).masks and not has_mask
        return int(size + lacks)
    except (OSError, ValueError, KeyError, TypeError):
        return 0


# --- what to say of it ---------------------------------------------------------------------------


def notes(experiment: Experiment, hosts: Sequence[Placed]) -> Iterator[str]:
    """What a plan says: of unlike meshes what each stage takes, and of all what does not fit."""
    if experiment.task.external:
        return
    try:
        made = of_experiment(experiment, hosts, most_bytes=2**20)
    except ConfigError:
        return  # the rules say what is wrong
    if made.args.meshes is not None:
        yield from _of_stages(made)
    yield from too_much(made)


def _of_stages(made: Estimate) -> Iterator[str]:
    shares = made.forecast.shares
    busiest = made.forecast.stages[shares.index(1.0)]
    for stage, share in zip(made.forecast.stages, shares, strict=True):
        work = f"{share:.2f} x the arithmetic of one of {busiest.name}"
        work = "the most arithmetic" if stage is busiest else work
        yield f"{stage.name}: a rank takes {memory_text(stage.memory)} and does {work}"
    if made.seconds is not None:
        yield f"a step takes {made.seconds[0]:.3g} s, {made.seconds[1]}"
    if chosen_for_us(made.args.hetero_pipeline_layer_split):
        yield "the layers shown are an even split; training measures first, and chooses"


def memory_text(memory: Memory) -> str:
    """Such as ``38.1 GiB (weights 4.1, gradients 8.2, …)``."""
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "for a moment": memory.moment,
    }
    listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items())
    return f"{memory.all / GIB:.1f} GiB ({listed})"


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
