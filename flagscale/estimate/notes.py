"""Notes of a plan about an experiment's memory and step time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flagscale.config.arguments.hetero.meshes import is_split_automatic
from flagscale.config.placement import PlacedHost
from flagscale.config.schema import Experiment
from flagscale.errors import ConfigError
from flagscale.estimate import plan, replicas, step_time
from flagscale.estimate.plan import Estimate, estimate_experiment, format_memory


def estimate_notes(experiment: Experiment, hosts: Sequence[PlacedHost]) -> Iterator[str]:
    """Yield notes: the memory and load of heterogeneous meshes and replicas, and anything that does
    not fit.
    """
    if experiment.task.external:
        return
    try:
        estimate = estimate_experiment(experiment, hosts, max_tokenizer_bytes=2**20)
    except ConfigError:
        return  # the configuration checks report the problem
    if estimate.args.meshes is not None:
        yield from _describe_stages(estimate)
    yield from replicas.describe_replicas(estimate) if estimate.replicas else ()
    yield from describe_excess(estimate)


def describe_excess(estimate: Estimate) -> Iterator[str]:
    """Describe stages or replicas that do not fit their devices, and remedies."""
    describe = replicas.describe_excess if estimate.replicas else plan.describe_excess
    yield from describe(estimate)


def explain_unknown_time(estimate: Estimate) -> str:
    """Return the reason why the duration of a step cannot be estimated."""
    kinds = [None if device is None else device.kind for device in estimate.devices]
    return step_time.explain_unknown_time(
        kinds, estimate.peaks, sixteen_bit=bool(estimate.args.bf16)
    )


def _describe_stages(estimate: Estimate) -> Iterator[str]:
    relative_flops = estimate.forecast.relative_flops
    busiest = estimate.forecast.stages[relative_flops.index(1.0)]
    for stage, flops_ratio in zip(estimate.forecast.stages, relative_flops, strict=True):
        work_text = f"{flops_ratio:.2f} x the arithmetic of one of {busiest.name}"
        work_text = "the most arithmetic" if stage is busiest else work_text
        yield f"{stage.name}: a rank takes {format_memory(stage.memory)} and does {work_text}"
    yield from step_time.describe_step_time(estimate.step_time, explain_unknown_time(estimate))
    if is_split_automatic(estimate.args.hetero_pipeline_layer_split):
        yield "the layers shown are an even split; training measures first, and chooses"
