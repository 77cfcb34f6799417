"""Data parallelism over unlike devices: replicas that take unlike shares of a step's samples.

Every replica holds the whole model; the faster take larger micro-batches, or more of them. A step's
samples are one range of the data's order, cut at the replicas' shares, and the gradient is divided
by the tokens of all, so that the step is the one that like replicas take. Pure, and free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from flagscale.config.arguments import recompute
from flagscale.config.arguments.pipeline import pipeline_of
from flagscale.config.arguments.precision import Broken, Values
from flagscale.config.arguments.share_out import share_out

SIZES, COUNTS = "hetero_micro_batch_sizes", "hetero_num_microbatches"
AUTO = "auto"
MEASURED_STEPS = 4
"""Steps that show how fast replicas are; the first, which builds and warms up, does not count."""


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


def are_measured(values: Values) -> bool:
    """Whether the numbers of micro-batches are found out by timing the first steps."""
    return is_on(values) and list(values[COUNTS] or ()) == [AUTO]


def replica_ranks(values: Values) -> int:
    """Ranks of a replica. They are numbered one after another, unlike those of like replicas: a
    replica's ranks lie on hosts of one type."""
    tp, cp = values["tensor_model_parallel_size"], values["context_parallel_size"]
    return int(tp * cp * values["pipeline_model_parallel_size"])


def kinds_of(values: Values, replicas: int) -> list[str | None]:
    """The type of the devices that each replica lies on, None where nothing is said."""
    types = values["hetero_device_types"]
    if types is None:
        return [None] * replicas
    numbers = _numbers(values, SIZES)[::2]
    return [kind for number, kind in zip(numbers, types, strict=True) for _ in range(number)]


def place_of(values: Values, ranks: range, kinds: Sequence[str | None]) -> str:
    """Which replicas these ranks are of, for messages: ``replicas 0-3 of 16 (A800)``. ``kinds`` are
    the types of all."""
    each = replica_ranks(values)
    own = range(ranks.start // each, (ranks.stop - 1) // each + 1)
    return " and ".join(
        f"{numbered('replica', same)} of {len(kinds)}" + (f" ({kind})" if kind else "")
        for kind, same in groupby(own, key=lambda replica: kinds[replica])
    )


def numbered(what: str, indices: Iterable[int]) -> str:
    """Such as ``stage 3``, ``stages 0-2``."""
    first, *others = indices
    return f"{what}s {first}-{others[-1]}" if others else f"{what} {first}"


def shares_of(values: Values, replicas: int) -> tuple[Share, ...]:
    """What each of the replicas takes of a step; where that is to be measured, until it is.

    Raises:
        ValueError: :func:`world` says why there are none.
    """
    sizes = _spread(_numbers(values, SIZES))
    return made_of(sizes, _counts(values, sizes, replicas))


def made_of(sizes: Sequence[int], counts: Sequence[int]) -> tuple[Share, ...]:
    """The shares of replicas that take so many micro-batches of such sizes."""
    made: list[Share] = []
    for size, count in zip(sizes, counts, strict=True):
        made.append(Share(made[-1].stop if made else 0, size, count))
    return tuple(made)


def broken(values: Values) -> Iterator[Broken]:
    """Rules that do not depend on the number of ranks."""
    for name in (SIZES, COUNTS):
        if not _is_pairs(values, name):
            message = "expected pairs of replicas and what each of them takes, all at least 1"
            yield name, message + (f", or {AUTO}" if name == COUNTS else "")
    if values[SIZES] is None:
        yield SIZES, "is needed by hetero_mode: dp: which replicas take how much?"
    if are_measured(values) and values["global_batch_size"] is None:
        yield "global_batch_size", f"is needed by {COUNTS}: {AUTO}: what is to be shared out?"
    types, kinds = values["hetero_device_types"], len(values[SIZES] or ()) // 2
    if types is not None and len(types) != kinds:
        yield "hetero_device_types", f"{len(types)} for the {kinds} pairs of {SIZES}"
    if values["hetero_process_meshes"] is not None:
        yield "hetero_process_meshes", "is for hetero_mode: pp; replicas are laid out alike"
    yield from _experts(values)


def _experts(values: Values) -> Iterator[Broken]:
    if values["expert_model_parallel_size"] > 1:
        yield (
            "expert_model_parallel_size",
            "ranks that share experts must take their tokens together, which unlike replicas do "
            "not",
        )
    if "global_aux_loss" in (values["moe_router_load_balancing_type"] or ()):
        yield (
            "moe_router_load_balancing_type",
            "global_aux_loss counts tokens over the micro-batches that replicas take together, "
            "which unlike replicas do not; take aux_loss or seq_aux_loss",
        )
    for name in recompute.NAMES:
        if values[name] is not None:
            yield name, "has rows for micro-batches, of which unlike replicas have unlike numbers"
    tp, experts_tp = values["tensor_model_parallel_size"], values["expert_tensor_parallel_size"]
    if not values["num_moe_experts"] or values["pipeline_model_parallel_size"] == 1:
        return
    if values["context_parallel_size"] > 1:
        yield "context_parallel_size", "replicas with experts have either this or a pipeline"
    elif experts_tp not in (None, tp):
        message = f"{experts_tp}: in replicas with a pipeline it is tensor_model_parallel_size {tp}"
        yield "expert_tensor_parallel_size", message


def world(values: Values, replicas: int) -> Iterator[Broken]:
    """Rules of the number of replicas and of the batch."""
    for name in (SIZES, COUNTS):
        said = sum(_numbers(values, name)[::2])
        if said and said != replicas:
            yield name, f"speaks of {said} replicas, and there are {replicas}"
            return
    sizes, batch = _spread(_numbers(values, SIZES)), values["global_batch_size"]
    try:
        counts = _counts(values, sizes, replicas)
    except ValueError as error:
        yield "global_batch_size", str(error)
        return
    taken = sum(size * count for size, count in zip(sizes, counts, strict=True))
    if batch is not None and taken != batch:
        how = f"do not divide into the replicas' {sum(sizes)}"
        if values[COUNTS] is not None:
            how = f"are not the replicas' {taken}"
        yield "global_batch_size", f"its {batch} sequences {how}"
    each = pipeline_of(values).round
    if wrong := next((count for count in counts if count % each), None):
        yield (
            COUNTS if values[COUNTS] is not None else "global_batch_size",
            f"gives a replica {wrong} micro-batches, which pipeline_model_parallel_size {each} "
            "with virtual stages must divide",
        )


def batch_of(values: Values, replicas: int) -> int:
    """Sequences of a step."""
    return shares_of(values, replicas)[-1].stop


def _is_pairs(values: Values, name: str) -> bool:
    """Whether an argument is not given, to be measured, or pairs of numbers."""
    if values[name] is None or (name == COUNTS and are_measured(values)):
        return True
    try:
        pairs = _numbers(values, name)
    except ValueError:
        return False
    return len(pairs) % 2 == 0 and min(pairs, default=0) >= 1


def _numbers(values: Values, name: str) -> list[int]:
    """The pairs of an argument, one after another; none where it is not given, or to be measured.

    Raises:
        ValueError: a word is no number.
    """
    if name == COUNTS and are_measured(values):
        return []
    return [int(number) for number in values[name] or ()]


def _counts(values: Values, sizes: list[int], replicas: int) -> Sequence[int]:
    """Micro-batches of each replica. Those to be measured are as even as the batch allows: shared
    out as if all replicas took equally long for one."""
    batch = values["global_batch_size"] or sum(sizes)
    if are_measured(values):
        return share_out([1] * len(sizes), sizes, batch, pipeline_of(values))
    given = _spread(_numbers(values, COUNTS))
    return given or [batch // sum(sizes)] * replicas


def _spread(pairs: list[int]) -> list[int]:
    return [what for n, what in zip(pairs[::2], pairs[1::2], strict=True) for _ in range(n)]
