"""How the stages of one pipeline share out layers and time: its schedule's rounds, and how long a
step is."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flagscale.config.arguments.precision import Values

_TIMES = re.compile(r"\(([^()]+)\)\*(\d+)|(\w)\*(\d+)")


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline, and the model chunks that each holds (the interleaved
    schedule's)."""

    stages: int = 1
    chunks: int = 1

    @property
    def round(self) -> int:
        """What the number of micro-batches of a step must be a multiple of."""
        return self.stages if self.chunks > 1 else 1

    def passes(self, count: int) -> int:
        """How long a step of ``count`` micro-batches is, in the time that a chunk takes for one of
        them, forward and backward: until the pipeline is full and while it drains stages wait."""
        return self.chunks * count + self.stages - 1

    def most(self, passes: int) -> int:
        """The most micro-batches, a multiple of the round, that are done in so many passes."""
        count = max(passes - self.stages + 1, 0) // self.chunks
        return count - count % self.round


ONE_STAGE = Pipeline()


def pipeline_of(values: Values) -> Pipeline:
    """The pipeline that arguments describe, by name."""
    return Pipeline(values["pipeline_model_parallel_size"], virtual_chunks(values) or 1)


def virtual_chunks(values: Values) -> int | None:
    """Model chunks a pipeline rank holds, whichever of three arguments says so; None: one."""
    pp = values["pipeline_model_parallel_size"]
    layers = values["num_layers_per_virtual_pipeline_stage"]
    chunks = values["num_virtual_stages_per_pipeline_rank"]
    if layers is not None:
        chunks = values["num_layers"] // (pp * layers)
    chunks = chunks or values["virtual_pipeline_model_parallel_size"]
    return None if chunks in (None, 1) else int(chunks)


def layers_of_stages(values: Values) -> list[tuple[int, ...]]:
    """Of each stage of like ranks how many layers each of its model chunks has."""
    stages, chunks = values["pipeline_model_parallel_size"], virtual_chunks(values) or 1
    if values["pipeline_model_parallel_layout"] is not None:
        parts = layout_of_chunks(values)
        counts = [part.count("t") for part in parts]
        return [tuple(counts[index::stages]) for index in range(stages)]
    first = int(values["account_for_embedding_in_pipeline_split"])
    last = int(values["account_for_loss_in_pipeline_split"])
    ends = {
        0: values["num_layers_in_first_pipeline_stage"],
        stages - 1: values["num_layers_in_last_pipeline_stage"],
    }
    said = {index: count for index, count in ends.items() if count is not None}
    left = values["num_layers"] + first + last - sum(said.values())
    each = left // max(stages - len(said), 1)
    found = [[said.get(index, each) // chunks] * chunks for index in range(stages)]
    found[0][0] -= first
    found[-1][-1] -= last
    return [tuple(counts) for counts in found]


def layout_of_chunks(values: Values) -> list[str]:
    """Of a layout by hand the letters of each chunk, in the order of the model's layers."""
    return _written_out(str(values["pipeline_model_parallel_layout"])).split("|")


def _written_out(layout: str) -> str:
    """megatron.core's layout without its abbreviations: ``Et*2|(tt|)*2`` is ``Ett|tt|tt|``."""
    text, before = layout.replace(",", ""), ""
    while text != before:
        before = text
        text = _TIMES.sub(lambda found: (found[1] or found[3]) * int(found[2] or found[4]), text)
    return text
