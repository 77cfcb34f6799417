"""Measured speed of heterogeneous replicas, as a checkpoint stores it and as a log prints it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from flagscale.config.arguments.hetero.microbatch_split import replica_device_types
from flagscale.config.arguments.rules.parallel_layout import pipeline_of
from flagscale.config.arguments.spec.argument import Values
from flagscale.config.arguments.spec.system_arguments import SPLIT_COUNTS

_MOST_GROUPS = 8


@dataclass(frozen=True)
class MeasuredSplit:
    """Number of micro-batches of each replica per step, the nanoseconds that one took, and the
    conditions under which both hold, by the names used in messages."""

    counts: tuple[int, ...]
    times: tuple[int, ...]
    conditions: Mapping[str, Any]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MeasuredSplit:
        return cls(tuple(state["counts"]), tuple(state["times"]), dict(state["conditions"]))

    def state_dict(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    def other(self, conditions: Mapping[str, Any]) -> str:
        """Return the names of conditions that differ from those of the measurement; empty if all
        are equal."""
        return ", ".join(key for key in conditions if conditions[key] != self.conditions.get(key))

    def text(self) -> str:
        """Such as ``2 replicas (A800) take 6 of 12.1-12.3 ms each, 1 replica (BI) takes 2 of 36.0
        ms; hetero_num_microbatches: [2, 6, 1, 2] says the same``."""
        groups = list(self._groups())
        descriptions = (
            groups
            if len(groups) <= _MOST_GROUPS
            else [*groups[: _MOST_GROUPS - 1], "…", groups[-1]]
        )
        pairs = [n for count, same in groupby(self.counts) for n in (len(list(same)), count)]
        return f"{', '.join(descriptions)}; {SPLIT_COUNTS}: {pairs} says the same"

    def _groups(self) -> Iterator[str]:
        rows = zip(self.counts, self.times, self.conditions["devices"], strict=True)
        for (count, device), same in groupby(rows, key=lambda row: (row[0], row[2])):
            times = sorted(time / 1e6 for _, time, _ in same)
            low, high, many = f"{times[0]:,.1f}", f"{times[-1]:,.1f}", len(times) > 1
            span = low if low == high else f"{low}-{high}"
            yield (
                f"{len(times)} replica{'s' * many} ({device}) take{'s' * (not many)} {count}"
                f" of {span} ms{' each' * many}"
            )


def measured_conditions(values: Values, products: Sequence[str]) -> dict[str, Any]:
    """Return the conditions under which measured counts hold. ``values`` are derived arguments;
    ``products`` names the device product of each replica, more precisely than the types of the
    YAML."""
    kinds = replica_device_types(values, len(products))
    pipeline = pipeline_of(values)
    return {
        "devices": [kind or product for kind, product in zip(kinds, products, strict=True)],
        "products": list(products),
        "micro-batch sizes": [share.size for share in values["shares"]],
        "global batch size": values["global_batch_size"],
        "sequence length": values["seq_length"],
        "parallel sizes": [
            values["tensor_model_parallel_size"],
            values["context_parallel_size"],
            pipeline.stages,
            pipeline.chunks,
        ],
    }
