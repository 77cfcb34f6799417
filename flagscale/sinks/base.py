"""Base class of metrics sinks, and what they receive.

A sink is one place where the metrics of a training run are logged: TensorBoard, Weights & Biases,
MLflow, … A package adds one by an entry point, whose name ``metrics_sinks`` lists in a YAML::

    [project.entry-points."flagscale.metrics_sinks"]
    mine = "my_package.sink:MySink"

:mod:`.delivery` calls all methods that may wait (:meth:`MetricsSink.open`,
:meth:`~MetricsSink.log_batch`, :meth:`~MetricsSink.close`) from one thread per sink, never from the
thread that trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flagscale.object_storage import is_address
from flagscale.sinks.run_record import RunRecord
from flagscale.status import ATTEMPT_VARIABLE, RUN_ID_VARIABLE

Outcome = Literal["finished", "stopped", "failed"]
"""End of a training run: it has completed, was stopped before its last step, or has failed."""


@dataclass(frozen=True)
class MetricsRecord:
    """Metrics of one step."""

    step: int
    time: float
    """Time of the step in Unix seconds. A record may be delivered much later."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class TrainingRun:
    """Training run whose metrics a sink logs."""

    arguments: Mapping[str, Any]
    """Resolved arguments of the training program, by name."""
    iteration: int
    """Number of the step that training continues after; 0 for a new training."""
    environment: Mapping[str, str]
    note: Callable[[str], object]
    """Prints a line to the log of the run, from any thread."""
    _records: dict[str, RunRecord] = field(default_factory=dict, init=False)

    @property
    def id(self) -> str:
        """Id of the launched run; empty if training was started by hand."""
        return self.environment.get(RUN_ID_VARIABLE, "")

    def hyperparameters(self) -> dict[str, bool | int | float | str]:
        """Return the arguments that are scalars."""
        scalar_types = (bool, int, float, str)
        return {k: v for k, v in self.arguments.items() if isinstance(v, scalar_types)}

    def local_directory(self, name: str) -> Path:
        """Return the directory for local files of a sink: ``name`` next to the checkpoints
        (``save``) or the TensorBoard files, otherwise in the working directory.
        """
        for argument in ("save", "tensorboard_dir"):
            value = self.arguments[argument]
            if value and not is_address(value):
                return Path(value).parent / name
        return Path(name).absolute()

    def run_record(self, sink: str, **location: str | None) -> RunRecord:
        """Return the record of the run at a sink that this training continues.

        It is in ``save``, or in the local directory ``metrics`` if that is object storage.

        Further calls return the same record, with the id that was written to it.

        Args:
            sink: name of the sink.
            location: place of the run there, such as project and team. A run at another place is
                not continued.
        """
        if (known := self._records.get(sink)) is not None:
            return known
        arguments = self.arguments
        # An evaluation is no part of the training.
        is_stored = bool(arguments["save"]) and not arguments["skip_train"]
        is_restarted = self.environment.get(ATTEMPT_VARIABLE, "0") != "0"
        directory = Path(arguments["save"] or "")
        if is_address(arguments["save"] or ""):
            directory = self.local_directory("metrics")
        record = self._records[sink] = RunRecord(
            directory / f"{sink}_run.json" if is_stored else None,
            location,
            is_continued=self.iteration > 0 or is_restarted,
        )
        return record


class MetricsSink(ABC):
    """Adapter of one place where metrics are logged.

    Instances are created without arguments. Constructing and checking one must be fast and must not
    contact a server.
    """

    name: str = ""
    """Name in the registry; for a package, the name of its entry point."""
    title: str = ""
    """Display name in messages. If empty, ``name`` is used."""
    key: str = ""
    """Argument whose value enables the sink. Sinks of packages have none: ``metrics_sinks`` lists
    them."""
    package: str = ""
    """Python package that the sink imports; empty if none has to be checked."""

    @property
    def display_name(self) -> str:
        """Display name of the sink in messages."""
        return self.title or self.name

    def explain_unusable(
        self, arguments: Mapping[str, Any], environment: Mapping[str, str]
    ) -> tuple[str, str] | None:
        """Return problem and remedy if the sink cannot be used as configured; None if it can.

        Called before training, for what a user has to repair: a missing API key, a directory
        that cannot be written. A server that is down is no such problem.
        """
        del arguments, environment
        return None

    def max_waiting_records(self, arguments: Mapping[str, Any]) -> int:
        """Return the number of records that wait at most while the sink does not take any."""
        del arguments
        return 20_000

    @abstractmethod
    def open(self, run: TrainingRun) -> None:
        """Start or continue the run at this place. One training is one run there over all resumes
        and restarts (:meth:`TrainingRun.run_record`).

        It is called again after an exception of this method or of :meth:`log_batch`, and then
        continues the same run. An exception's message explains the problem to the user.
        """

    @abstractmethod
    def log_batch(self, records: Sequence[MetricsRecord]) -> None:
        """Log records, ordered by time. Return when the place has taken them.

        Raises:
            ValueError, TypeError: the records are not acceptable; they are dropped.
            Exception: they could not be logged. They are passed again, after :meth:`open`.
        """

    @abstractmethod
    def close(self, outcome: Outcome) -> None:
        """Flush, and mark the run there as ended. Called once, if the sink is open."""
