"""What was found out of unlike replicas' speed, as a checkpoint keeps it and a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from flagscale.config.arguments.pipeline import pipeline_of
from flagscale.config.arguments.precision import Values
from flagscale.config.arguments.shares import COUNTS, kinds_of

_SHOWN = 8


@dataclass(frozen=True)
class MeasuredShares:
    """How many micro-batches each replica takes of a step, the nanoseconds that one took it, and
    what both hold for, by its name in messages."""

    counts: tuple[int, ...]
    times: tuple[int, ...]
    conditions: Mapping[str, Any]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> MeasuredShares:
        return cls(tuple(state["counts"]), tuple(state["times"]), dict(state["conditions"]))

    def state_dict(self) -> dict[str, Any]:
        return {key: list(v) if isinstance(v, tuple) else v for key, v in asdict(self).items()}

    def other(self, conditions: Mapping[str, Any]) -> str:
        """Which conditions are not those that it holds for, as words; empty where all are."""
        return ", ".join(key for key in conditions if conditions[key] != self.conditions.get(key))

    def text(self) -> str:
        """Such as ``2 replicas (A800) take 6 of 12.1-12.3 ms each, 1 replica (BI) takes 2 of 36.0
        ms; hetero_num_microbatches: [2, 6, 1, 2] says the same``."""
        groups = list(self._groups())
        shown = groups if len(groups) <= _SHOWN else [*groups[: _SHOWN - 1], "…", groups[-1]]
        pairs = [n for count, same in groupby(self.counts) for n in (len(list(same)), count)]
        return f"{', '.join(shown)}; {COUNTS}: {pairs} says the same"

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


def conditions(values: Values, products: Sequence[str]) -> dict[str, Any]:
    """What measured counts hold for. ``values`` are resolved; ``products`` is what each replica
    computes on, which the types of the YAML name more closely."""
    kinds = kinds_of(values, len(products))
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
