"""Data parallelism over unlike devices: replicas that take unlike shares of a step's samples.

Every replica holds the whole model; the faster take larger micro-batches, or more of them. A step's
samples are one range of the data's order, cut at the replicas' shares, and the gradient is divided
by the tokens of all, so that the step is the one that like replicas take. Pure, and free of torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flagscale.config.arguments.precision import Broken, Values

SIZES, COUNTS = "hetero_micro_batch_sizes", "hetero_num_microbatches"


@dataclass(frozen=True)
class Share:
    """What a replica takes of a step: ``count`` micro-batches of ``size`` sequences, from the
    ``first`` of the step's on."""

    first: int
    size: int
    count: int

    @property
    def stop(self) -> int:
        return self.first + self.size * self.count

    @property
    def micro_batches(self) -> tuple[range, ...]:
        """The places of each micro-batch's sequences in the step."""
        starts = range(self.first, self.stop, self.size)
        return tuple(range(start, start + self.size) for start in starts)


def is_on(values: Values) -> bool:
    """Whether training is data parallel over unlike replicas."""
    return bool(values["enable_hetero"]) and values["hetero_mode"] == "dp"


def shares_of(values: Values, replicas: int) -> tuple[Share, ...]:
    """What each of the replicas takes of a step.

    Raises:
        ValueError: :func:`broken` says why there are none.
    """
    sizes, counts = _per_replica(values, replicas)
    made: list[Share] = []
    for size, count in zip(sizes, counts, strict=True):
        made.append(Share(made[-1].stop if made else 0, size, count))
    return tuple(made)


def broken(values: Values) -> Iterator[Broken]:
    """Rules that do not depend on the number of ranks."""
    for name, pairs in _pairs(values).items():
        if len(pairs) % 2 or min(pairs, default=0) < 1:
            yield name, "expected pairs of replicas and what each of them takes, all at least 1"
    if values[SIZES] is None:
        yield SIZES, "is needed by hetero_mode: dp: which replicas take how much?"
    types, kinds = values["hetero_device_types"], len(values[SIZES] or ()) // 2
    if types is not None and len(types) != kinds:
        yield "hetero_device_types", f"{len(types)} for the {kinds} pairs of {SIZES}"
    if values["hetero_process_meshes"] is not None:
        yield "hetero_process_meshes", "is for hetero_mode: pp; replicas are laid out alike"
    if values["pipeline_model_parallel_size"] > 1:
        yield (
            "pipeline_model_parallel_size",
            "replicas on unlike devices have one stage; stages on unlike devices are hetero_mode: "
            "pp",
        )
    if values["expert_model_parallel_size"] > 1:
        yield (
            "expert_model_parallel_size",
            "ranks that share experts must take their tokens together, which unlike replicas do "
            "not",
        )


def world(values: Values, replicas: int) -> Iterator[Broken]:
    """Rules of the number of replicas and of the batch."""
    for name, pairs in _pairs(values).items():
        said = sum(pairs[::2])
        if said != replicas:
            yield name, f"speaks of {said} replicas, and there are {replicas}"
            return
    sizes, counts = _per_replica(values, replicas)
    taken = sum(size * count for size, count in zip(sizes, counts, strict=True))
    batch = values["global_batch_size"]
    if batch is not None and taken != batch:
        how = f"do not divide into the replicas' {sum(sizes)}"
        if values[COUNTS] is not None:
            how = f"are not the replicas' {taken}"
        yield "global_batch_size", f"its {batch} sequences {how}"


def batch_of(values: Values, replicas: int) -> int:
    """Sequences of a step."""
    return shares_of(values, replicas)[-1].stop


def _pairs(values: Values) -> dict[str, list[int]]:
    return {name: list(values[name]) for name in (SIZES, COUNTS) if values[name] is not None}


def _per_replica(values: Values, replicas: int) -> tuple[list[int], list[int]]:
    sizes = _spread(values[SIZES])
    if values[COUNTS] is not None:
        return sizes, _spread(values[COUNTS])
    return sizes, [(values["global_batch_size"] or sum(sizes)) // sum(sizes)] * replicas


def _spread(pairs: list[int]) -> list[int]:
    return [what for n, what in zip(pairs[::2], pairs[1::2], strict=True) for _ in range(n)]
