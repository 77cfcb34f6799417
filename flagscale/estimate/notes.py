"""What a plan tells of an experiment's memory and time, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flagscale.config.arguments.meshes import chosen_for_us
from flagscale.config.placement import Placed
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError
from flagscale.estimate import replicas, step_time
from flagscale.estimate.plan import Estimate, memory_text, of_experiment, too_much


def notes(experiment: Experiment, hosts: Sequence[Placed]) -> Iterator[str]:
    """Of unlike meshes and replicas what each takes, and of all what does not fit."""
    if experiment.task.external:
        return
    try:
        made = of_experiment(experiment, hosts, most_bytes=2**20)
    except ConfigError:
        return  # the rules say what is wrong
    if made.args.meshes is not None:
        yield from _of_stages(made)
    yield from replicas.sentences(made) if made.replicas else ()
    yield from does_not_fit(made)


def does_not_fit(made: Estimate) -> Iterator[str]:
    """What does not fit its devices, and what would."""
    yield from replicas.too_much(made) if made.replicas else too_much(made)


def unknown(made: Estimate) -> str:
    """Why nobody can tell how long a step takes."""
    kinds = [None if device is None else device.kind for device in made.devices]
    return step_time.unknown(kinds, made.peaks, sixteen_bit=bool(made.args.bf16))


def _of_stages(made: Estimate) -> Iterator[str]:
    shares = made.forecast.shares
    busiest = made.forecast.stages[shares.index(1.0)]
    for stage, share in zip(made.forecast.stages, shares, strict=True):
        work = f"{share:.2f} x the arithmetic of one of {busiest.name}"
        work = "the most arithmetic" if stage is busiest else work
        yield f"{stage.name}: a rank takes {memory_text(stage.memory)} and does {work}"
    yield from step_time.sentences(made.timed, unknown(made))
    if chosen_for_us(made.args.hetero_pipeline_layer_split):
        yield "the layers shown are an even split; training measures first, and chooses"
