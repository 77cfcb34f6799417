"""What a series of measurements shows, in a table and in words."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from flagscale.bench.collectives.statistics import median_ratio
from flagscale.bench.groups.plan import ON_ACCELERATORS, Sample, Variant

Results = Mapping[tuple[Variant, int], Sequence[Sample]]
"""The samples of each variant and number of groups, in the order they were taken."""

_COLUMNS = ("world", "create", "first", "second")
_ENOUGH = 10


def table(results: Results) -> list[str]:
    """Medians: milliseconds, and MiB of device memory."""
    lines = [
        f"{'variant':>7}  {'groups':>6}  {'runs':>4}"
        + "".join(f"  {name + ' ms':>10}" for name in _COLUMNS)
        + f"  {'GPU MiB':>8}  {'splits':>6}"
    ]
    for (variant, count), samples in results.items():
        cells = "".join(
            f"  {statistics.median(getattr(s, name) for s in samples) * 1e3:>10.1f}"
            for name in _COLUMNS
        )
        memory = statistics.median(s.memory for s in samples)
        splits = {s.splits for s in samples}
        shown = "n/a" if splits == {-1} else "/".join(str(s) for s in sorted(splits))
        lines.append(
            f"{variant:>7}  {count:>6}  {len(samples):>4}{cells}  {memory:>8.0f}  {shown:>6}"
        )
    return lines


def findings(results: Results) -> list[str]:
    """What is proved, what is only the cost of a first communicator, and what is not shown."""
    lines = []
    for count in dict.fromkeys(count for _, count in results):
        here = {variant: results[variant, count] for variant, c in results if c == count}
        lines += _of_count(here, count)
    fewest = min(len(samples) for samples in results.values())
    if fewest < _ENOUGH:
        lines.append(
            f"{fewest} runs a variant: take at least {_ENOUGH} before a ratio is relied on."
        )
    if any(variant in ON_ACCELERATORS for variant, _ in results):
        lines.append(
            "A bound default group runs unbatched sends and receives one after the other on one "
            "communicator: weigh that against the gain."
        )
    return lines


def _of_count(here: Mapping[Variant, Sequence[Sample]], count: int) -> list[str]:
    groups = f"{count} group{'s' if count > 1 else ''}"
    lines = []
    control = here.get("warm")
    for variant in ON_ACCELERATORS:
        samples = here.get(variant)
        if samples is None:
            continue
        lines.append(f"{groups}, {variant}: {_proof(samples, count)}")
        if control is not None:
            lines.append(
                f"{groups}, {variant} against the warmed control: {_against(control, samples)}"
            )
        if "cold" in here:
            lines.append(
                f"{groups}, {variant} against cold: {_against(here['cold'], samples)}; this "
                "contains the process's first communicator and is no gain of splitting"
            )
    if control is not None and "cold" in here:
        ratio = _against(here["cold"], control)
        lines.append(f"{groups}, warm against cold (the first communicator alone): {ratio}")
    return lines


def _proof(samples: Sequence[Sample], count: int) -> str:
    splits = {s.splits for s in samples}
    if splits == {-1}:
        return "the backend does not tell whether it split"
    if all(s >= count for s in splits):
        return f"proved: the backend counts {max(splits)} splits"
    return f"NOT split: the backend counts {max(splits)} splits of {count}"


def _against(slow: Sequence[Sample], fast: Sequence[Sample]) -> str:
    ratio = median_ratio([s.usable for s in slow], [s.usable for s in fast])
    saved = statistics.median(s.usable for s in slow) - statistics.median(s.usable for s in fast)
    if min(len(slow), len(fast)) < 2:
        shown = "in a single run each, which shows no difference"
    else:
        verdict = "" if ratio.clear else " (no difference shown)"
        shown = f"95 % interval {ratio.low:.2f} to {ratio.high:.2f}{verdict}"
    return f"usable {ratio.value:.2f} times as fast, {shown}; {saved * 1e3:+.1f} ms saved"
