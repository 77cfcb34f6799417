"""Tests of the built-in metrics sinks with their real clients, offline and with a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.needs import skip_or_fail
from support.waiting import PATIENCE_SECONDS

from flagscale.config.arguments.spec.registry import arguments
from flagscale.free_port import free_port
from flagscale.sinks import delivery
from flagscale.sinks.base import MetricsRecord, TrainingRun
from flagscale.sinks.delivery import MetricsDelivery
from flagscale.sinks.registry import create_sinks

pytestmark = pytest.mark.integration


def require_client(package: str) -> None:
    """Skip the running test if a package of the extra ``sinks`` is not installed."""
    if find_spec(package) is None:
        skip_or_fail("sinks", f"no {package} in this environment (make test-sinks)")


DEFAULTS = {argument.name: argument.default for argument in arguments().values()}


@pytest.fixture(autouse=True)
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the clients from the user's configuration, and from asking for keys."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)
    for name in ("COMET_API_KEY", "WANDB_API_KEY", "SWANLAB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)


def _values(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return DEFAULTS | {"save": str(tmp_path / "exp" / "checkpoints"), "lr": 1e-3} | changes


def _log(values: Mapping[str, Any], steps: range, iteration: int = 0) -> list[str]:
    """Run a training of ``steps`` with the sinks that ``values`` enable; return its messages."""
    sinks = create_sinks(values, os.environ)
    started = MetricsDelivery(sinks, values)
    started.start(iteration, os.environ)
    for step in steps:
        started.log(step, {"train/loss": 10.0 - step, "train/grad-norm": 1.0})
    started.close("finished")
    return [message.text for message in started.pop_messages() if message.is_warning]


def _read_tensorboard(directory: Path) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory))
    accumulator.Reload()
    return {event.step: event.value for event in accumulator.Scalars("train/loss")}


def test_tensorboard_reads_the_event_files(tmp_path: Path) -> None:
    require_client("tensorboard")
    values = _values(tmp_path, tensorboard_dir=str(tmp_path / "board"))
    assert not _log(values, range(1, 4))
    assert not _log(values, range(3, 6), iteration=2)
    assert _read_tensorboard(tmp_path / "board") == {step: 10.0 - step for step in range(1, 6)}


def test_mlflow_continues_its_run_in_a_database(tmp_path: Path) -> None:
    require_client("mlflow")
    import mlflow

    values = _values(tmp_path, mlflow_experiment="tiny", mlflow_run_name="first")
    assert not _log(values, range(1, 1203))
    assert not _log(values | {"lr": 2e-3}, range(1203, 1206), iteration=1202)
    assert not _log(values, range(1, 2))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/exp/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("tiny")
    begun_anew, run = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == list(range(1, 1206))
    assert {metric.step: metric.value for metric in history}[3] == 7.0
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params["lr"] == "0.001"
    assert begun_anew.info.run_id != run.info.run_id
    client.delete_run(begun_anew.info.run_id)
    assert not _log(values, range(2, 3), iteration=1)
    newest, *_ = client.search_runs([experiment.experiment_id])
    assert newest.data.metrics["train/loss"] == 8.0


def test_several_sinks_at_once_and_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("wandb", "comet_ml", "swanlab", "tensorboard"):
        require_client(package)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    values = _values(
        tmp_path,
        tensorboard_dir=str(tmp_path / "board"),
        wandb_project="tiny",
        wandb_save_dir=str(tmp_path),
        comet_project="tiny",
        swanlab_project="tiny",
    )
    assert not _log(values, range(1, 4))
    assert not _log(values, range(4, 6), iteration=3)
    assert sorted(_read_tensorboard(tmp_path / "board")) == [1, 2, 3, 4, 5]

    ids = {
        name: json.loads((tmp_path / "exp" / "checkpoints" / f"{name}_run.json").read_text())["id"]
        for name in ("wandb", "comet", "swanlab")
    }
    wandb_runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert [path.name.rpartition("-")[2] for path in wandb_runs] == [ids["wandb"]] * 2
    archives = sorted((tmp_path / "exp" / "comet").glob("*.zip"), key=lambda p: p.stat().st_mtime)
    assert [path.stem.partition("-")[0] for path in archives] == [ids["comet"]] * 2
    assert [step for path in archives for step in _read_comet_steps(path)] == [1, 2, 3, 4, 5]
    modes = [
        json.loads(_read_archive(path, "experiment.json"))["resume_strategy"] for path in archives
    ]
    assert modes == ["create", "get"]
    swanlab_runs = list((tmp_path / "exp" / "swanlab").glob("run-*"))
    assert [path.name.rpartition("-")[2] for path in swanlab_runs] == [ids["swanlab"]] * 2


def _read_archive(path: Path, name: str) -> str:
    with zipfile.ZipFile(path) as archive:
        return archive.read(name).decode()


def _read_comet_steps(path: Path) -> list[int]:
    messages = map(json.loads, _read_archive(path, "messages.json").splitlines())
    payloads = [m["payload"] for m in messages if m["type"] == "metric_msg"]
    steps = [p["metric"]["step"] for p in payloads if p["metric"]["metricName"] == "train/loss"]
    return sorted(steps)


@pytest.fixture
def mlflow_server(tmp_path: Path) -> Iterator[tuple[str, Callable[[], subprocess.Popen[bytes]]]]:
    """Address of an MLflow server, and a function that starts it."""
    require_client("flask")
    require_client("mlflow")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        store = f"sqlite:///{tmp_path}/server.db"
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store]
        command += ["--port", str(port), "--workers", "1", "--no-serve-artifacts"]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (tmp_path / "server.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=environment
            )
        started.append(process)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            with suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=2):
                return process
            assert process.poll() is None, (tmp_path / "server.log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.2)

    yield address, start
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_an_mlflow_server_that_fails_gets_everything_later(
    tmp_path: Path,
    mlflow_server: tuple[str, Callable[[], subprocess.Popen[bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server is down at the start, stops answering, and is killed."""
    import mlflow

    monkeypatch.setattr(delivery, "FIRST_RETRY_SECONDS", 0.1)
    monkeypatch.setattr(delivery, "MAX_RETRY_SECONDS", 0.2)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address, start_server = mlflow_server
    values = _values(tmp_path, mlflow_experiment="tiny", mlflow_tracking_uri=address)
    started = MetricsDelivery(create_sinks(values, {}), values)
    started.start(0, {})
    texts: list[str] = []

    def log(steps: range) -> None:
        begin = time.monotonic()
        for step in steps:
            started.log(step, {"train/loss": float(step)})
        assert time.monotonic() - begin < 0.5

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not any(text in line for line in texts):
            texts.extend(message.text for message in started.pop_messages())
            assert time.monotonic() < deadline, texts
            time.sleep(0.05)

    log(range(10))
    wait_for("its metrics wait")
    server = start_server()
    wait_for("takes metrics again, from step 0 on")
    texts.clear()
    os.killpg(server.pid, signal.SIGSTOP)
    log(range(10, 20))
    wait_for("its metrics wait")
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()
    log(range(20, 30))
    start_server()
    wait_for("takes metrics again, from step 10 on")
    log(range(30, 40))
    started.close("stopped")
    assert len(texts) == 2, texts
    client = mlflow.MlflowClient(address)
    (run,) = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert {metric.step for metric in history} == set(range(40))
    assert run.info.status == "KILLED"


def test_comet_needs_a_key_or_the_offline_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_client("comet_ml")
    from flagscale.errors import ConfigError

    with pytest.raises(ConfigError, match="comet_project: is set, but COMET_API_KEY is not"):
        create_sinks(_values(tmp_path, comet_project="p"), {})
    assert create_sinks(_values(tmp_path, comet_project="p"), {"COMET_START_ONLINE": "false"})


def test_a_run_at_weights_and_biases_keeps_its_later_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """W&B only appends: what it has already is not logged again."""
    require_client("wandb")
    from flagscale.sinks.wandb_sink import WandbSink

    monkeypatch.setenv("WANDB_MODE", "offline")
    values = _values(tmp_path, wandb_project="tiny", wandb_save_dir=str(tmp_path))
    sink, logged = WandbSink(), []
    sink.open(TrainingRun(values, 0, {}, print))
    sink._first_step = 5
    monkeypatch.setattr(sink._run, "log", lambda _values, step: logged.append(step))
    sink.log_batch([MetricsRecord(step, 0.0, {"a": 1.0}) for step in (4, 5, 6)])
    sink.close("failed")
    assert logged == [5, 6]
