"""Measure what metrics sinks that are down, slow or failing cost a step.

    make test-sinks   # creates the environment
    .venv-sinks/bin/python tools/bench/sinks.py --output docs/results/sinks-cpu.json

A step computes for about 100 ms and logs 40 metrics by the client of MLflow, whose server does not
listen, takes 30 s for each answer, or answers each request with the status 500. Each is measured in
turn with steps that log nothing. Requires the extra ``sinks``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import BaseRequestHandler, ThreadingTCPServer

import numpy as np

from flagscale.free_port import free_port

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from flagscale.bench import machine
from flagscale.bench.statistics import median_ratio
from flagscale.config.arguments.spec.registry import arguments
from flagscale.files import write_json
from flagscale.sinks import delivery
from flagscale.sinks.delivery import MetricsDelivery
from flagscale.sinks.registry import create_sinks

_METRICS = {f"train/metric-{number}": float(number) for number in range(40)}
_ANSWER_SECONDS = 30.0
_STEP_SECONDS = 0.1


class _FailingHandler(BaseRequestHandler):
    """Handler that answers a request with the status 500, and closes the connection."""

    seconds = 0.0

    def handle(self) -> None:
        """Answer a request."""
        with suppress(OSError):  # the client has closed the connection
            self.request.recv(1 << 16)
            time.sleep(self.seconds)
            self.request.sendall(b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\n\r\n")


class _SlowHandler(_FailingHandler):
    """Handler that takes half a minute for each answer."""

    seconds = _ANSWER_SECONDS


_HANDLERS: dict[str, type[_FailingHandler] | None] = {
    "down": None,
    "slow": _SlowHandler,
    "failing": _FailingHandler,
}


@contextmanager
def serve(handler: type[_FailingHandler] | None) -> Iterator[str]:
    """Return the address of a server, or one at which nothing listens."""
    if handler is None:
        yield f"http://127.0.0.1:{free_port()}"
        return
    server = ThreadingTCPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.socket.close()  # and leave connections alone, whose threads may sleep


class Step:
    """Work of a step."""

    def __init__(self) -> None:
        """Choose the amount of work."""
        self._matrix = np.ones((512, 512), dtype=np.float32)
        self._products = 1
        begin = time.perf_counter()
        for _ in range(20):
            self._multiply()
        self._products = max(1, round(20 * _STEP_SECONDS / (time.perf_counter() - begin)))

    def _multiply(self) -> None:
        for _ in range(self._products):
            self._matrix @ self._matrix

    def measure(self, count: int, metrics: MetricsDelivery | None) -> float:
        """Return the median seconds of some steps, which log if ``metrics`` is given."""
        seconds = []
        for step in range(count):
            begin = time.perf_counter()
            self._multiply()
            if metrics is not None:
                metrics.log(step, _METRICS)
                metrics.pop_messages()
            seconds.append(time.perf_counter() - begin)
        return statistics.median(seconds)


def measure(address: str, directory: Path, step: Step, count: int) -> float:
    """Return the median seconds of steps that log to a server at an address."""
    values = {argument.name: argument.default for argument in arguments().values()}
    values |= {"save": str(directory / "checkpoints"), "lr": 1e-3}
    values |= {"mlflow_experiment": "bench", "mlflow_tracking_uri": address}
    metrics = MetricsDelivery(create_sinks(values, os.environ), values)
    metrics.start(0, os.environ)
    try:
        return step.measure(count, metrics)
    finally:
        metrics.close("failed")


def main() -> int:
    """Measure and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    options = parser.parse_args()
    delivery.CLOSE_SECONDS = dict.fromkeys(delivery.CLOSE_SECONDS, 0.1)
    step = Step()
    result = machine.describe_machine("flagscale", "mlflow")
    result |= {"steps": options.steps, "rounds": options.rounds, "metrics": len(_METRICS)}
    with tempfile.TemporaryDirectory() as scratch:
        for name, handler in _HANDLERS.items():
            seconds, seconds_alone = [], []
            for number in range(options.rounds):
                with serve(handler) as address:
                    directory = Path(scratch, f"{name}-{number}")
                    seconds_alone.append(step.measure(options.steps, None))
                    seconds.append(measure(address, directory, step, options.steps))
            ratio = median_ratio(seconds, seconds_alone)
            result[name] = {
                "step_seconds": round(statistics.median(seconds), 5),
                "step_seconds_alone": round(statistics.median(seconds_alone), 5),
                "ratio": [round(value, 4) for value in (ratio.value, ratio.low, ratio.high)],
            }
    print(json.dumps(result, indent=1))
    if options.output:
        write_json(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
