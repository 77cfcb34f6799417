"""Tests of the metrics that an agent serves for Prometheus, and of their dashboard."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.launch_lab import PROJECT
from support.waiting import PATIENCE_SECONDS, wait_for

from flagscale.accelerators.base import Accelerator
from flagscale.accelerators.counters import DeviceCounters
from flagscale.free_port import free_port
from flagscale.launcher import metrics_server
from flagscale.launcher.layout import HostFiles
from flagscale.launcher.metrics_server import FAMILIES, MetricsServer
from flagscale.status import StatusWriter

MONITORING = PROJECT / "examples" / "monitoring"
HOSTILE = 'a "quoted" \\ name\nof two lines'
COUNTERS = DeviceCounters(0, "GPU-1", "NVIDIA H100", 0.5, 1 << 30, 80 << 30, 700.5, 60.0)


class _Device(Accelerator):
    name = "cuda"

    def read_counters(self) -> list[DeviceCounters]:
        return [COUNTERS, DeviceCounters(1, "GPU-2", "NVIDIA H100")]


@pytest.fixture(autouse=True)
def devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "list_device_accelerators", lambda: (_Device(),))


def _server(run_dir: Path, port: int = 0, address: str = "127.0.0.1") -> MetricsServer:
    host = HostFiles("node01", 0, 2, run_dir, run_dir / "output")
    return MetricsServer(address, port, host, "20261127-1", HOSTILE)


def _parse(text: str) -> dict[tuple[str, str], float]:
    """Return values by name and distinguishing label, as Prometheus's own parser reads them."""
    samples = {}
    for family in text_string_to_metric_families(text):
        assert family.type in ("gauge", "counter")
        assert family.documentation
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("experiment") == HOSTILE
            assert (labels.pop("run"), labels.pop("host")) == ("20261127-1", "node01")
            names = ("device", "section", "rank", "data", "score")
            distinguishing = next((labels[name] for name in names if name in labels), "")
            samples[sample.name, distinguishing] = sample.value
    return samples


def _write_attempt(directory: Path, first_step: int) -> None:
    first, second = StatusWriter(directory, 0), StatusWriter(directory, 1)
    first.write("joined", backend="gloo", seconds=1.0)
    for step in (first_step, first_step + 1):
        first.write_progress(step)
        second.write_progress(step - 1)
        first.write(
            "progress",
            **{"step": step, "train_steps": 100, "samples": 4 * step, "loss": 2.5},
            **{"grad_norm": float("nan"), "learning_rate": 1e-4, "step_seconds": 0.5},
            **{"tokens_per_second": 1000.0, "tokens_per_second_per_gpu": 500.0},
            **{"tflops_per_gpu": 400.0, "mfu": 0.4, "memory_gib": 2.0},
        )
    first.write("evaluation", step=first_step, loss=3.0)
    first.write("evaluation", step=first_step, loss=3.5, data="code")
    first.write("tasks", step=first_step, seconds=1.0, scores={"arc/acc": 0.25})
    first.write("checkpoint", step=first_step, path="/x", seconds=1.5)
    first.write("warning", message="careful")
    second.write("sections", step=first_step, steps=1, forward=0.25, waiting=0.125)
    first.write("stragglers", stragglers=[{"rank": 1, "cost": 0.2}, {"rank": 2, "cost": 0.1}])
    second.write("failed", kind="X", message="m", traceback="")


def test_every_metric_is_served_with_its_value(tmp_path: Path) -> None:
    server = _server(tmp_path)
    assert _parse(server.render())["flagscale_run_info", ""] == 1
    _write_attempt(tmp_path / "status", 7)
    before = time.time()
    samples = _parse(server.render())
    assert {name for name, _ in samples} == FAMILIES.keys()
    expected = {
        ("flagscale_step", ""): 8,
        ("flagscale_train_steps", ""): 100,
        ("flagscale_samples_total", ""): 32,
        ("flagscale_loss", ""): 2.5,
        ("flagscale_mfu_ratio", ""): 0.4,
        ("flagscale_peak_memory_bytes", ""): 2 * 2**30,
        ("flagscale_tokens_per_second", ""): 1000,
        ("flagscale_validation_loss", ""): 3.0,
        ("flagscale_validation_loss", "code"): 3.5,
        ("flagscale_task_score", "arc/acc"): 0.25,
        ("flagscale_checkpoint_step", ""): 7,
        ("flagscale_checkpoint_seconds", ""): 1.5,
        ("flagscale_rank_step", "0"): 8,
        ("flagscale_rank_step", "1"): 7,
        ("flagscale_restarts_total", ""): 0,
        ("flagscale_warnings_total", ""): 1,
        ("flagscale_failed_ranks", ""): 1,
        ("flagscale_section_seconds", "forward"): 0.25,
        ("flagscale_section_seconds", "waiting"): 0.125,
        ("flagscale_straggler_cost_ratio", ""): 0.2,
        ("flagscale_device_utilization_ratio", "0"): 0.5,
        ("flagscale_device_memory_total_bytes", "0"): 80 * 2**30,
        ("flagscale_device_power_watts", "0"): 700.5,
    }
    assert {key: samples[key] for key in expected} == expected
    assert samples["flagscale_gradient_norm", ""] != samples["flagscale_gradient_norm", ""]
    assert abs(samples["flagscale_progress_timestamp_seconds", ""] - before) < 60
    assert ("flagscale_device_power_watts", "1") not in samples, "not reported by the device"


def test_a_restart_counts_and_begins_with_the_earlier_values(tmp_path: Path) -> None:
    server = _server(tmp_path)
    _write_attempt(tmp_path / "status", 7)
    server.render()
    (tmp_path / "status.1").mkdir()
    samples = _parse(server.render())
    assert samples["flagscale_restarts_total", ""] == 1
    assert samples["flagscale_failed_ranks", ""] == 0
    assert samples["flagscale_step", ""] == 8
    _write_attempt(tmp_path / "status.1", 5)
    samples = _parse(server.render())
    assert samples["flagscale_step", ""] == 6
    assert samples["flagscale_warnings_total", ""] == 2


def _get(port: int, path: str = "/metrics", seconds: float = PATIENCE_SECONDS) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=seconds) as reply:
        assert reply.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return str(reply.read().decode())


def _get_eventually(port: int) -> str:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return _get(port, seconds=10)
        except (OSError, AssertionError):
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_the_server_waits_for_its_port_and_survives_its_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics_server, "_BIND_RETRY_SECONDS", 0.05)
    port = free_port()
    output = ""

    def is_reported() -> bool:
        nonlocal output
        output += "".join(capfd.readouterr())
        return "metrics are not served" in output

    with socket.create_server(("127.0.0.1", port)):
        _server(tmp_path, port).start()
        wait_for(is_reported)
        time.sleep(0.2)  # for further attempts
    assert _parse(_get_eventually(port))
    output += "".join(capfd.readouterr())
    assert output.count("metrics are not served at 127.0.0.1 port") == 1
    with pytest.raises(urllib.error.HTTPError, match="404"):
        _get(port, "/etc/passwd")
    # Clients that connect and say nothing take all slots for a while, but none for ever.
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for client in silent:
        client.close()
    assert _parse(_get_eventually(port))
    assert threading.active_count() < 30


def test_the_dashboard_shows_metrics_that_are_served() -> None:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 10
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    queries = [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    text = "\n".join((*expressions, *queries))
    assert set(re.findall(r"\bflagscale_\w+", text)) == FAMILIES.keys()
    labels = {"experiment", "run", "host", "rank", "section", "data", "score", "device", "kind"}
    legends = " ".join(target["legendFormat"] for panel in panels for target in panel["targets"])
    assert set(re.findall(r"\{\{(\w+)\}\}", legends)) <= labels
    for expression in expressions:
        assert expression.count("(") == expression.count(")")
        assert set(re.findall(r"(\w+)=~", expression)) == {"experiment", "run"}
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) <= variables


def test_the_example_scrapes_the_documented_port() -> None:
    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:9480"]}]
    assert "metrics_port: 9480" in (PROJECT / "docs" / "guides" / "watch.md").read_text()
