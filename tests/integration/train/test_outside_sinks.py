"""Training with metrics sinks of an installed package, two of which do not work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from integration.train.test_train_gpt import PATCHED_MEGATRON, ROOT, TrainingProcess

from flagscale.config.arguments.spec.command_line import parse_arguments
from flagscale.sinks import delivery
from flagscale.sinks.registry import check_sink_names

pytestmark = [pytest.mark.integration, pytest.mark.torch]

SINKS = ROOT / "tests" / "outside" / "metrics_sinks.py"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Directory in which the package is installed like by pip."""
    directory = tmp_path / "site"
    about = directory / "sinks-1.0.dist-info"
    about.mkdir(parents=True)
    (directory / "metrics_sinks.py").write_text(SINKS.read_text())
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sinks\nVersion: 1.0\n")
    names = ("lines", "hanging", "raising")
    lines = [f"{name} = metrics_sinks:{name.title()}" for name in names]
    text = "\n".join(("[flagscale.metrics_sinks]", *lines))
    (about / "entry_points.txt").write_text(text + "\n")
    # Time for the other sinks to take the last records, on a busy machine.
    variable = f"dict.fromkeys({list(delivery.CLOSE_SECONDS)}, 12.0)"
    code = f"import flagscale.sinks.delivery as d\nd.CLOSE_SECONDS = {variable}\n"
    (directory / "sitecustomize.py").write_text(code)
    return directory


def test_sinks_that_hang_or_raise_do_not_change_training(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_directory, directory = tmp_path / "plain", tmp_path / "sinks"
    for path in (plain_directory, directory):
        path.mkdir()
    lines = directory / "metrics.jsonl"
    plain = TrainingProcess(plain_directory, "--train-iters 5")
    assert plain.wait() == 0, plain.errors
    training = TrainingProcess(
        directory,
        "--train-iters 5 --tensorboard-dir board --metrics-sinks hanging raising lines",
        python_path=(site, ROOT, PATCHED_MEGATRON),
        METRICS_LINES=str(lines),
    )
    assert training.wait() == 0, training.errors
    assert training.losses() == plain.losses()
    *steps, end = map(json.loads, lines.read_text().splitlines())
    assert [record["step"] for record in steps if "train/loss" in record] == [1, 2, 3, 4, 5]
    assert end == {"outcome": "finished"}
    warnings = [event.get("message") for event in training.events("warning")]
    assert any("raising: disk of raising is broken; its metrics wait" in w for w in warnings)
    undelivered = f"hanging: does not answer at the end of the run; {len(steps)} rec"
    assert any(undelivered in warning for warning in warnings)
    assert sum("raising" in warning for warning in warnings) == 2, "failure and loss, once each"
    assert [event.get("reason") for event in training.events("finished")] == ["completed"]


def test_unknown_sinks_are_compared_with_the_installed_ones(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flagscale import registry

    monkeypatch.syspath_prepend(str(site))
    registry._load_entry_points.cache_clear()
    values = vars(parse_arguments(["--metrics-sinks", "lines", "other"]))
    [(key, problem)] = check_sink_names(values)
    registry._load_entry_points.cache_clear()
    assert key == "metrics_sinks"
    assert "'other'; installed: hanging, lines, raising" in problem
