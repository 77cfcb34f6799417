"""HTTP server of an agent for Prometheus: the metrics of the run, as this host knows them.

``experiment.runner.metrics_port`` enables it. Each request reads the status files of the host's
ranks, so the server shares nothing with the agent's loop: neither a slow client nor a device that
does not answer delays the supervision of the run. Metrics of the whole job (step, loss, throughput)
are those of the rank that reports, so the host of that rank serves them. Standard library only.
"""

from __future__ import annotations

import http.server
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

from flagscale.accelerators.counters import DeviceCounters
from flagscale.accelerators.registry import list_device_accelerators
from flagscale.launcher.layout import STATUS_DIRECTORY, HostFiles, latest_status_directory
from flagscale.launcher.liveness.agent_log import log_line
from flagscale.status import SECTIONS, Event, list_status_files, read_events, read_progress

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format."""
_BIND_RETRY_SECONDS = 10.0
_REQUEST_SECONDS = 5.0
_MAX_CONNECTIONS = 8
_GIB = 2.0**30


class Family(NamedTuple):
    """Metric with its type and documentation."""

    kind: str
    help: str


FAMILIES: Mapping[str, Family] = {
    "flagscale_run_info": Family("gauge", "Run of this agent; always 1."),
    "flagscale_restarts_total": Family("counter", "Restarts of the job after failures."),
    "flagscale_warnings_total": Family("counter", "Warnings of the ranks of this host."),
    "flagscale_failed_ranks": Family("gauge", "Ranks of this host that have reported a failure."),
    "flagscale_rank_step": Family("gauge", "Step that a rank of this host is in."),
    "flagscale_step": Family("gauge", "Last step that was reported."),
    "flagscale_train_steps": Family("gauge", "Steps of the whole run."),
    "flagscale_samples_total": Family("counter", "Sequences trained on."),
    "flagscale_loss": Family("gauge", "Training loss in nats per token."),
    "flagscale_gradient_norm": Family("gauge", "Norm of the gradient."),
    "flagscale_learning_rate": Family("gauge", "Learning rate."),
    "flagscale_step_seconds": Family("gauge", "Mean time of a step since the last report."),
    "flagscale_section_seconds": Family(
        "gauge", "Mean time of a step of a rank of this host by section, since its last report."
    ),
    "flagscale_straggler_cost_ratio": Family(
        "gauge", "Fraction of a step for which all ranks wait for the slowest straggler."
    ),
    "flagscale_tokens_per_second": Family("gauge", "Tokens per second of the job."),
    "flagscale_tokens_per_second_per_device": Family("gauge", "Tokens per second and device."),
    "flagscale_tflops_per_device": Family("gauge", "Model TFLOP/s of a device."),
    "flagscale_mfu_ratio": Family("gauge", "Model FLOPs utilization, 0 to 1."),
    "flagscale_peak_memory_bytes": Family(
        "gauge", "Peak memory of the rank that reports, as torch's allocator counts it."
    ),
    "flagscale_progress_timestamp_seconds": Family("gauge", "Time of the last reported step."),
    "flagscale_validation_loss": Family("gauge", "Loss of the last evaluation, by data set."),
    "flagscale_task_score": Family("gauge", "Score of the last evaluation on tasks, by name."),
    "flagscale_checkpoint_step": Family("gauge", "Step of the newest complete checkpoint."),
    "flagscale_checkpoint_seconds": Family("gauge", "Time to save the newest checkpoint."),
    "flagscale_checkpoint_timestamp_seconds": Family("gauge", "Time of the newest checkpoint."),
    "flagscale_device_utilization_ratio": Family("gauge", "Use of a device, 0 to 1."),
    "flagscale_device_memory_used_bytes": Family("gauge", "Used memory of a device."),
    "flagscale_device_memory_total_bytes": Family("gauge", "Memory of a device."),
    "flagscale_device_power_watts": Family("gauge", "Power draw of a device."),
    "flagscale_device_temperature_celsius": Family("gauge", "Temperature of a device."),
}
"""All metrics, in the order in which they are served."""
_PROGRESS_FIELDS: Mapping[str, tuple[str, float]] = {
    "flagscale_step": ("step", 1.0),
    "flagscale_train_steps": ("train_steps", 1.0),
    "flagscale_samples_total": ("samples", 1.0),
    "flagscale_loss": ("loss", 1.0),
    "flagscale_gradient_norm": ("grad_norm", 1.0),
    "flagscale_learning_rate": ("learning_rate", 1.0),
    "flagscale_step_seconds": ("step_seconds", 1.0),
    "flagscale_tokens_per_second": ("tokens_per_second", 1.0),
    "flagscale_tokens_per_second_per_device": ("tokens_per_second_per_gpu", 1.0),
    "flagscale_tflops_per_device": ("tflops_per_gpu", 1.0),
    "flagscale_mfu_ratio": ("mfu", 1.0),
    "flagscale_peak_memory_bytes": ("memory_gib", _GIB),
}
"""Metrics from the last ``progress`` event: its field, and the factor."""
_CHECKPOINT_FIELDS: Mapping[str, str] = {
    "flagscale_checkpoint_step": "step",
    "flagscale_checkpoint_seconds": "seconds",
}
_DEVICE_FIELDS: Mapping[str, str] = {
    "flagscale_device_utilization_ratio": "utilization",
    "flagscale_device_memory_used_bytes": "memory_used_bytes",
    "flagscale_device_memory_total_bytes": "memory_total_bytes",
    "flagscale_device_power_watts": "power_watts",
    "flagscale_device_temperature_celsius": "temperature_celsius",
}


class Sample(NamedTuple):
    """Value of a metric, with the labels in addition to those of the run."""

    name: str
    value: float
    labels: Mapping[str, str] = {}


@dataclass
class StatusReader:
    """Latest events of the ranks of a host, read incrementally from their status files."""

    run_dir: Path
    _directory: Path | None = None
    _offsets: dict[Path, int] = field(default_factory=dict)
    _progress: Event | None = None
    _checkpoint: Event | None = None
    _sections: dict[int, Event] = field(default_factory=dict)
    _stragglers: Event | None = None
    _evaluations: dict[str, Event] = field(default_factory=dict)
    _task_scores: dict[str, float] = field(default_factory=dict)
    _failed_ranks: set[int] = field(default_factory=set)
    _warnings: int = 0

    def read_samples(self) -> Iterator[Sample]:
        """Read what is new, and yield the metrics of the run."""
        directory = latest_status_directory(self.run_dir)
        if directory != self._directory:
            # The values of an earlier attempt stay until the new one reports its own.
            self._directory, self._offsets, self._failed_ranks = directory, {}, set()
            self._stragglers = None
        self._refresh(directory)
        number = directory.name.removeprefix(STATUS_DIRECTORY).removeprefix(".")
        yield Sample("flagscale_restarts_total", float(number or 0))
        yield Sample("flagscale_warnings_total", float(self._warnings))
        yield Sample("flagscale_failed_ranks", float(len(self._failed_ranks)))
        for path in list_status_files(directory):
            rank = path.stem.removeprefix("rank_")
            if (progress := read_progress(directory, int(rank))) is not None:
                yield Sample("flagscale_rank_step", float(progress.step), {"rank": rank})
        if self._progress is not None:
            yield Sample("flagscale_progress_timestamp_seconds", self._progress.time)
            for name, (key, factor) in _PROGRESS_FIELDS.items():
                if (value := self._progress.get_number(key)) is not None:
                    yield Sample(name, value * factor)
        yield from self._time_samples()
        for data_set, event in self._evaluations.items():
            if (loss := event.get_number("loss")) is not None:
                yield Sample("flagscale_validation_loss", float(loss), {"data": data_set})
        for name, score in self._task_scores.items():
            yield Sample("flagscale_task_score", float(score), {"score": name})
        if self._checkpoint is not None:
            yield Sample("flagscale_checkpoint_timestamp_seconds", self._checkpoint.time)
            for name, key in _CHECKPOINT_FIELDS.items():
                if (value := self._checkpoint.get_number(key)) is not None:
                    yield Sample(name, float(value))

    def _time_samples(self) -> Iterator[Sample]:
        for rank, event in self._sections.items():
            for section in SECTIONS:
                if (value := event.get_number(section)) is not None:
                    labels = {"rank": str(rank), "section": section}
                    yield Sample("flagscale_section_seconds", float(value), labels)
        if self._stragglers is not None:
            yield Sample("flagscale_straggler_cost_ratio", _straggler_cost(self._stragglers))

    def _refresh(self, directory: Path) -> None:
        for path in list_status_files(directory):
            events, self._offsets[path] = read_events(path, self._offsets.get(path, 0))
            for event in events:
                if event.event == "progress":
                    self._progress = event
                elif event.event == "checkpoint":
                    self._checkpoint = event
                elif event.event == "evaluation":
                    self._evaluations[str(event.get("data", ""))] = event
                elif event.event == "tasks":
                    self._task_scores = event.get_numbers("scores")
                elif event.event == "sections":
                    self._sections[event.rank] = event
                elif event.event == "stragglers":
                    self._stragglers = event
                elif event.event == "failed":
                    self._failed_ranks.add(event.rank)
                elif event.event == "warning":
                    self._warnings += 1


def _straggler_cost(event: Event) -> float:
    records = event.get("stragglers")
    costs = [record.get("cost") for record in records or () if isinstance(record, dict)]
    return max((float(cost) for cost in costs if isinstance(cost, (int, float))), default=0.0)


def device_samples(kind: str, counters: DeviceCounters) -> Iterator[Sample]:
    """Yield the metrics of a device."""
    labels = {
        "device": str(counters.index),
        "kind": kind,
        "uuid": counters.uuid,
        "product": counters.product,
    }
    for name, key in _DEVICE_FIELDS.items():
        if (value := getattr(counters, key)) is not None:
            yield Sample(name, float(value), labels)


def format_metrics(samples: Iterable[Sample], common_labels: Mapping[str, str]) -> str:
    """Return samples in Prometheus's text format, sorted by family."""
    lines_by_name: dict[str, list[str]] = {name: [] for name in FAMILIES}
    for sample in samples:
        labels = ",".join(
            f'{name}="{_escape(value)}"'
            for name, value in {**common_labels, **sample.labels}.items()
        )
        lines_by_name[sample.name].append(f"{sample.name}{{{labels}}} {_format(sample.value)}")
    text = []
    for name, lines in lines_by_name.items():
        if lines:
            text += [f"# HELP {name} {FAMILIES[name].help}", f"# TYPE {name} {FAMILIES[name].kind}"]
            text += lines
    return "\n".join(text) + "\n"


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _format(value: float) -> str:
    text = repr(float(value))
    return {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}.get(text, text)


class MetricsServer:
    """Server of the metrics of one host, in a thread of the agent."""

    def __init__(
        self, address: str, port: int, host: HostFiles, run_id: str, experiment: str
    ) -> None:
        self._address, self._port = address, port
        self._labels = {"experiment": experiment, "run": run_id, "host": host.name}
        self._reader = StatusReader(host.run_dir)
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start to serve in a thread, which ends with the process."""
        threading.Thread(target=self._serve, name="metrics-server", daemon=True).start()

    def render(self) -> str:
        """Return the current metrics in Prometheus's text format."""
        # Counters of devices are read without the lock: a device that hangs blocks one request.
        devices: Sequence[Sample] = [
            sample
            for adapter in list_device_accelerators()
            for counters in adapter.read_counters()
            for sample in device_samples(adapter.name, counters)
        ]
        with self._lock:
            samples = [Sample("flagscale_run_info", 1.0), *self._reader.read_samples()]
        return format_metrics([*samples, *devices], self._labels)

    def _serve(self) -> None:
        is_reported = False
        while True:
            try:
                server = _HttpServer(self._address, self._port, self)
            except OSError as error:
                if not is_reported:
                    is_reported = True
                    reason = os.strerror(error.errno) if error.errno else str(error)
                    log_line(
                        f"metrics are not served at {self._address} port {self._port}: {reason}; "
                        "tried again while the run lasts (experiment.runner.metrics_port)"
                    )
                time.sleep(_BIND_RETRY_SECONDS)
                continue
            server.serve_forever()


class _HttpServer(http.server.ThreadingHTTPServer):
    """HTTP server with a limited number of connections."""

    daemon_threads = True

    def __init__(self, address: str, port: int, metrics: MetricsServer) -> None:
        self.metrics = metrics
        self._free_slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        # The base class looks up the host's name, which may take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free_slots.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free_slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: _HttpServer

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND, "metrics are at /metrics")
            return
        body = self.server.metrics.render().encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep requests out of the output of the run."""
