"""Third-party metrics sinks: one that writes lines, one that hangs, and one that raises."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from flagscale.sinks.base import MetricsRecord, MetricsSink, Outcome, TrainingRun


class Lines(MetricsSink):
    """Appends one line of JSON per step to ``metrics.jsonl``."""

    def open(self, run: TrainingRun) -> None:
        self._path = Path(run.environment["METRICS_LINES"])

    def log_batch(self, records: Sequence[MetricsRecord]) -> None:
        with self._path.open("a") as file:
            file.writelines(json.dumps({"step": r.step, **r.values}) + "\n" for r in records)

    def close(self, outcome: Outcome) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"outcome": outcome}) + "\n")


class Hanging(Lines):
    """Never returns from its first call."""

    def open(self, run: TrainingRun) -> None:
        time.sleep(3600)


class Raising(Lines):
    """Fails at each record."""

    def log_batch(self, records: Sequence[MetricsRecord]) -> None:
        raise ConnectionError(f"disk of {self.name} is broken")
