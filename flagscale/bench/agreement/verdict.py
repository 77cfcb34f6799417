"""What two series of times come to: a row of the table, whether they agree, and a figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flagscale.report.figure import Line, write_panels
from flagscale.sample_statistics import Ratio

Verdict = Literal["agrees", "differs", "unsure"]
_EXACT = 1e-9
_SIDES = (("our_busbw", "this benchmark", "C0", "-"), ("bare_busbw", "baseline", "black", ":"))


@dataclass(frozen=True)
class Pair:
    """One operation and size: medians of times in microseconds, bandwidths in 1e9 bytes a
    second, and the ratio of our time to the baseline's."""

    operation: str
    size: int
    ours: float
    baseline: float
    our_busbw: float
    baseline_busbw: float
    ratio: Ratio

    @property
    def definition(self) -> float:
        """Our bus bandwidth over the one that nccl-tests would make of our time; 1 if both mean
        the same by it."""
        return (self.our_busbw * self.ours) / (self.baseline_busbw * self.baseline)

    def verdict(self, limit: float) -> Verdict:
        """Whether both are the same within ``limit``, a share. Beyond it, ``differs`` where the
        whole interval is, else the measurement cannot tell."""
        if abs(self.definition - 1) > _EXACT:
            return "differs"
        low, high = 1 - limit, 1 + limit
        if low <= self.ratio.value <= high:
            return "agrees"
        return "differs" if self.ratio.low > high or self.ratio.high < low else "unsure"

    def to_json(self, limit: float) -> dict[str, Any]:
        # The baseline is called bare in files, as it has been since the first that was published.
        kept = {name.replace("baseline", "bare"): value for name, value in asdict(self).items()}
        return {**kept, "definition": self.definition, "verdict": self.verdict(limit)}


def table(pairs: Sequence[Pair], limit: float) -> list[str]:
    """A line a pair under a heading."""
    heading = f"{'operation':>14}  {'size(B)':>12}  {'ours(us)':>10}  {'base(us)':>10}"
    heading += f"  {'our busbw':>10}  {'its busbw':>10}  {'time':>7}  {'95% interval':>16}  verdict"
    lines = [heading]
    for pair in pairs:
        ratio = pair.ratio
        numbers = (pair.ours, pair.baseline, pair.our_busbw, pair.baseline_busbw)
        cells = f"{pair.operation:>14}  {pair.size:>12}"
        cells += "".join(f"  {number:>10.2f}" for number in numbers) + f"  {ratio.value - 1:>+7.1%}"
        interval = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
        lines.append(f"{cells}  {interval:>16}  {pair.verdict(limit)}")
    return lines


def conclusion(pairs: Sequence[Pair], limit: float) -> tuple[str, bool]:
    """The verdict on the whole in words, and whether nothing differs."""
    found = [pair.verdict(limit) for pair in pairs]
    worst = max(pairs, key=lambda pair: abs(pair.ratio.value - 1))
    text = f"{found.count('agrees')} of {len(found)} agree within {limit:.1%}"
    for kind in ("differs", "unsure"):
        if found.count(kind):
            text += f", {found.count(kind)} {kind}"
    far = f"{worst.operation} of {worst.size} B"
    text += f"; the furthest is {far}, {worst.ratio.value - 1:+.1%} in time"
    return text, "differs" not in found


def write_figure(result: Mapping[str, Any], path: Path) -> None:
    """A panel for each operation of what ``--json`` keeps, in 1e9 bytes a second; raises as
    :func:`.figure.write_panels` does."""
    of_each: dict[str, list[Mapping[str, Any]]] = {}
    for row in result.get("rows", []):
        of_each.setdefault(row["operation"], []).append(row)
    panels = {
        operation: [
            Line(label, {row["size"]: row[side] for row in rows}, colour, style)
            for side, label, colour, style in _SIDES
        ]
        for operation, rows in of_each.items()
    }
    about = [result.get(name) for name in ("device", "library", "way", "type")]
    title = f"{result.get('ranks')} ranks, {', '.join(map(str, about))}"
    write_panels(path, title, "busbw (GB/s)", panels)
