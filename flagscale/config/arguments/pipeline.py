"""How the stages of one pipeline share out layers and time: its schedule's rounds, and how long a
step is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from flagscale.config.arguments.precision import Broken, Values

_LAYOUT = "pipeline_model_parallel_layout"
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
_COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
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


def broken(values: Values) -> Iterator[Broken]:
    """Ways to share out layers that exclude each other, a layout by hand that is none, and what
    only stages of several chunks can exchange."""
    apart = values["overlap_p2p_comm"] and not values["batch_p2p_comm"]
    if values["overlap_p2p_comm_warmup_flush"] and not (apart or virtual_chunks(values)):
        message = "true needs overlap_p2p_comm, and batch_p2p_comm: false; leave it out"
        yield "overlap_p2p_comm_warmup_flush", message
    ends = [name for name in _ENDS if values[name] is not None]
    counted = [name for name in _COUNTED if values[name]]
    if values[_LAYOUT] is not None:
        for name in (*ends, *counted):
            yield name, f"{values[name]} with {_LAYOUT}, which names the layers of every stage"
        yield from _by_hand(values)
        return
    if ends and counted:
        message = f"true with {ends[0]} {values[ends[0]]}: leave one of them out"
        yield counted[0], message
    chunks = virtual_chunks(values) or 1
    for name in ends:
        if values[name] % chunks:
            yield name, f"{values[name]} does not divide into {chunks} virtual stages"


def _by_hand(values: Values) -> Iterator[Broken]:
    parts, layout = layout_of_chunks(values), values[_LAYOUT]
    stages, chunks = values["pipeline_model_parallel_size"], virtual_chunks(values) or 1
    letters = "".join(parts)
    if set(letters) - set("EtmL") or not re.fullmatch("E[^EL]*L", letters):
        yield (
            _LAYOUT,
            f"{layout}: expected E (the embedding) first, t (a layer) or m (of mtp_num_layers), L "
            "(the loss) last, and | between stages, such as Et*3|t*4|t*3L",
        )
    elif len(parts) != stages * chunks:
        wanted = f"pipeline_model_parallel_size {stages}" + (
            f" x {chunks} virtual stages" if chunks > 1 else ""
        )
        yield _LAYOUT, f"{layout} has {len(parts)} stages, expected {wanted}"
    elif letters.count("t") != values["num_layers"]:
        message = f"{layout} has {letters.count('t')} t, but num_layers is {values['num_layers']}"
        yield _LAYOUT, message
