"""Comparison of the times of ``flagscale bench collectives`` (*ours*) with the baseline's: table
rows, verdicts, and a figure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from flagscale.bench.statistics import Ratio
from flagscale.report.figure import PanelLine, write_panels

AgreementVerdict = Literal["agrees", "differs", "unsure"]
_DEFINITION_TOLERANCE = 1e-9
_SIDES = (
    ("our_busbw", "flagscale bench collectives", "C0", "-"),
    ("bare_busbw", "baseline", "black", ":"),
)


@dataclass(frozen=True)
class TimePair:
    """One operation and size: median times in microseconds, bandwidths in 1e9 bytes per second,
    and the ratio of our time to the baseline's.
    """

    operation: str
    size: int
    our_us: float
    baseline_us: float
    our_busbw: float
    baseline_busbw: float
    ratio: Ratio

    @property
    def definition(self) -> float:
        """Our bus bandwidth relative to the one that nccl-tests would derive from our time; 1 if
        both define the bus bandwidth in the same way.
        """
        return (self.our_busbw * self.our_us) / (self.baseline_busbw * self.baseline_us)

    def verdict(self, limit: float) -> AgreementVerdict:
        """Compare both sides. Beyond ``limit``, a fraction, they differ if the whole interval is
        beyond it; otherwise the measurement is inconclusive.
        """
        if abs(self.definition - 1) > _DEFINITION_TOLERANCE:
            return "differs"
        low, high = 1 - limit, 1 + limit
        if low <= self.ratio.value <= high:
            return "agrees"
        return "differs" if self.ratio.low > high or self.ratio.high < low else "unsure"

    def to_json_record(self, limit: float) -> dict[str, Any]:
        # Names of the first published results, which call the baseline "bare".
        record = {
            name.replace("baseline", "bare").replace("our_us", "ours").removesuffix("_us"): value
            for name, value in asdict(self).items()
        }
        return {**record, "definition": self.definition, "verdict": self.verdict(limit)}


def make_table(pairs: Sequence[TimePair], limit: float) -> list[str]:
    """Return one line per comparison below a heading."""
    heading = f"{'operation':>14}  {'size(B)':>12}  {'ours(us)':>10}  {'base(us)':>10}"
    heading += f"  {'our busbw':>10}  {'its busbw':>10}  {'time':>7}  {'95% interval':>16}  verdict"
    lines = [heading]
    for pair in pairs:
        ratio = pair.ratio
        numbers = (pair.our_us, pair.baseline_us, pair.our_busbw, pair.baseline_busbw)
        cells = f"{pair.operation:>14}  {pair.size:>12}"
        cells += "".join(f"  {number:>10.2f}" for number in numbers) + f"  {ratio.value - 1:>+7.1%}"
        interval = f"{ratio.low - 1:+.1%} to {ratio.high - 1:+.1%}"
        lines.append(f"{cells}  {interval:>16}  {pair.verdict(limit)}")
    return lines


def conclude(pairs: Sequence[TimePair], limit: float) -> tuple[str, bool]:
    """Return the overall verdict in words, and whether nothing differs."""
    verdicts = [pair.verdict(limit) for pair in pairs]
    largest_difference = max(pairs, key=lambda pair: abs(pair.ratio.value - 1))
    text = f"{verdicts.count('agrees')} of {len(verdicts)} agree within {limit:.1%}"
    for verdict in ("differs", "unsure"):
        if verdicts.count(verdict):
            text += f", {verdicts.count(verdict)} {verdict}"
    size_text = f"{largest_difference.operation} of {largest_difference.size} B"
    text += f"; the furthest is {size_text}, {largest_difference.ratio.value - 1:+.1%} in time"
    return text, "differs" not in verdicts


def write_figure(result: Mapping[str, Any], path: Path) -> None:
    """Write a figure with a panel for each operation of a stored result, in 1e9 bytes per
    second. Raises the errors of :func:`.figure.write_panels`.
    """
    rows_by_operation: dict[str, list[Mapping[str, Any]]] = {}
    for row in result.get("rows", []):
        rows_by_operation.setdefault(row["operation"], []).append(row)
    panels = {
        operation: [
            PanelLine(label, {row["size"]: row[side] for row in rows}, colour, style)
            for side, label, colour, style in _SIDES
        ]
        for operation, rows in rows_by_operation.items()
    }
    conditions = [result.get(name) for name in ("device", "library", "way", "type")]
    title = f"{result.get('ranks')} ranks, {', '.join(map(str, conditions))}"
    write_panels(path, title, "busbw (GB/s)", panels)
