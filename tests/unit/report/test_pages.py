"""Tests of the page of a run, with complete, missing and hostile records."""

from __future__ import annotations

import json
import math
import os
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.report_lab import ParsedPage, StoredRun, progress_events, store_run
from support.waiting import wait_for

from flagscale.hosts import processes
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.runs import Outcome, RunEntry
from flagscale.report.pages import render_runs, write_page
from flagscale.report.run import collect_run
from flagscale.status import RUN_ID_VARIABLE

ARGUMENTS = (
    *("train_gpt.py", "--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "2"),
    *("--global-batch-size", "8", "--train-iters", "100", "--bf16"),
)
CONFIG = {"experiment": {"exp_name": "tiny"}, "train": {"model": {"num_layers": 8}}}


@pytest.fixture(autouse=True)
def _registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))


def _render(*runs: StoredRun) -> ParsedPage:
    page = ParsedPage(render_runs([collect_run(run.state) for run in runs]))
    assert page.open_tags == [], "every element is closed"
    return page


def _store_complete_run(tmp_path: Path, **changes: Any) -> StoredRun:
    stored_run = store_run(tmp_path, hosts=("a", "b"), nproc=4, **changes)
    for rank in range(8):
        up = {"event": "started", "device": "cuda:0"}
        stored_run.append_events(up, {"event": "joined", "backend": "nccl"}, rank=rank)
    stored_run.append_events(
        *progress_events(
            60,
            tokens_per_second=1000.0,
            mfu=0.4,
            memory_gib=70.0,
            learning_rate=0.1,
            step_seconds=0.5,
        )
    )
    stored_run.write_launcher_files(
        CONFIG,
        *ARGUMENTS,
        "--tensor-model-parallel-size",
        "2",
        "--pipeline-model-parallel-size",
        "2",
    )
    stored_run.write_exit_records()
    return stored_run


def test_completed_run(tmp_path: Path) -> None:
    page = _render(_store_complete_run(tmp_path))
    for fact in (
        "completed", "gpt, 8 layers, hidden size 64, 4 heads, sequences of 128, bf16",
        "tp2 dp2 pp2", "8 sequences a step, 1,024 tokens; micro-batches of 2",
        "8 ranks on 2 hosts: a,b", "4 x cuda", "nccl", "60 of 100", "num_layers: 8", "train=8b",
        "stage 0 of 2, replicas 0-1 of 2", "stage 1 of 2, replicas 0-1 of 2",
    ):  # fmt: skip
        assert fact in page.text, fact
    titles = ["Loss", "Gradient norm", "Throughput", "MFU", "Memory", "Learning rate"]
    plots = [a["aria-label"] or "" for a in page.find_elements("svg")]
    assert [label.partition(".")[0].partition(",")[0] for label in plots] == [
        *titles,
        "step seconds",
    ]
    assert "highest 40 at 1" in plots[3], "MFU in percent"
    assert "What failed" not in page.text
    assert "may have gone on since" not in page.text


def test_sections_of_a_step_and_stragglers(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path, hosts=("a", "b"), nproc=1)
    for rank, forward in enumerate((0.25, 0.5)):
        for step, factor in ((1, 9), (10, 1)):
            sections = {"forward": factor * forward, "waiting": 0.6 - forward}
            record = {"event": "sections", "step": step, "steps": 1, **sections}
            stored_run.append_events(record, rank=rank)
    sentence = "straggler: rank 1 (b) works longer"
    stored_run.append_events({"event": "stragglers", "step": 10, "messages": [sentence]})
    page = _render(stored_run)
    assert sentence in page.text
    assert "around step 10" in page.text
    assert "median of the ranks0.0375.00.00.0225.00.0375.0" in page.text
    assert "1b0.0500.00.00.0100.00.0500.0" in page.text


def test_each_validation_set_has_a_curve(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    stored_run.append_events(*progress_events(9))
    for step, name, loss in ((3, "law", 5.0), (3, "code", 4.0), (6, "law", 4.5), (6, "code", 3.5)):
        stored_run.append_events({"event": "evaluation", "step": step, "loss": loss, "data": name})
    stored_run.write_exit_records()
    description = _render(stored_run).find_elements("svg")[0]["aria-label"] or ""
    assert "validation law: 5 at step 3, 4.5 at 6" in description
    assert "validation code: 4 at step 3, 3.5 at 6" in description


def test_each_metric_of_tasks_has_a_plot(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    stored_run.append_events(*progress_events(9))
    for step, accuracy in ((3, 0.25), (6, 0.5)):
        scores = {"arc/acc": accuracy, "piqa/acc": 0.75, "arc/f1": 0.125}
        stored_run.append_events({"event": "tasks", "step": step, "scores": scores})
    stored_run.write_exit_records()
    page = _render(stored_run)
    descriptions = [svg["aria-label"] or "" for svg in page.find_elements("svg")]
    (accuracy_plot,) = (text for text in descriptions if "piqa" in text)
    assert "arc: 0.25 at step 3, 0.5 at 6" in accuracy_plot
    assert "Tasks: f1" in page.text
    assert "tasks: arc/acc 0.5000, piqa/acc 0.7500, arc/f1 0.1250" in page.text


def test_run_without_metrics_is_stated(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    stored_run.write_exit_records()
    assert "There are no metrics: no rank has reported a step so far." in _render(stored_run).text
    external_run = stored_run.replace_state(external=True)
    assert "a program of another project may report none" in _render(external_run).text


def test_metric_that_no_device_reports_is_explained(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    stored_run.append_events(*progress_events(3))
    stored_run.write_exit_records()
    page = _render(stored_run)
    assert "MFU: not known: a share of a peak" in page.text
    assert "Memory: not counted on this device." in page.text


def test_page_of_a_live_run_states_its_time(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    stored_run.append_events(
        {"event": "started", "device": "cpu"}, {"event": "joined"}, *progress_events(3)
    )
    environment = {**os.environ, RUN_ID_VARIABLE: stored_run.state.run_id}
    with subprocess.Popen(["sleep", "600"], env=environment) as script:
        # A new program is visible a moment before its environment can be read.
        wait_for(lambda: processes.read_environment(script.pid))
        identity = processes.identify_process(script.pid)
        assert identity is not None
        boot_id = processes.read_boot_id()
        host = replace(stored_run.state.hosts[0], **vars(identity), boot_id=boot_id)
        page = _render(stored_run.replace_state(hosts=(host,)))
        script.kill()
    assert ": tiny may have gone on since." in page.text
    for fact in ("running", "lasted so far", "3 of 100"):
        assert fact in page.text, fact


def test_unreachable_hosts_are_listed(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    stored_run.append_events(*progress_events(3))
    # The runner is not installed.
    page = _render(stored_run.replace_state(runner=RunnerHandle("none-such")))
    assert "unreachable" in page.text
    assert "no runner is called 'none-such'" in page.text
    assert len(page.find_elements("figure")) == 2


TRACE = 'Traceback:\n  File "x", line 1\nE: </pre><script>alert(1)</script> api_key=hunter2'
FAILED = {"host": "node", "rank": 0, "exit_code": 1, "traceback": TRACE, "log": "/l/stderr.log"}


def test_first_failure_has_a_traceback(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    stored_run.append_events(*progress_events(5))
    failure = {**FAILED, "reason": "raised ValueError: https://me:hunter2@host"}
    restart = {"attempt": 0, "failure": {**failure, "reason": "raised OSError: first"}}
    stored_run.write_job_summary(failure=failure, attempt=2, attempts=2, restarts=[restart])
    stored_run.write_exit_records(1, failure=failure)
    page = _render(stored_run)
    assert "The first failure" in page.text
    assert "</pre><script>alert(1)</script>" in page.text
    assert "attempt 1: node: rank 0 raised OSError: first" in page.text
    assert "hunter2" not in "".join(page.texts + [data for _, data in page.scripts])
    assert len(page.find_elements("span", class_="mark failure")) == 2, "on every plot"


HOSTILE = (
    '</script><script>alert("1")</script>', "<img src=x onerror=alert(1)>", "' \" ` ${x} {{y}}",
    "-->]]></style></title>", "東京 \u202eabc", "a\x00b\x1b[31m", "\ud800", "x" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("hostile_text", HOSTILE, ids=range(len(HOSTILE)))
def test_text_of_a_run_is_escaped(tmp_path: Path, hostile_text: str) -> None:
    # Names that are not text occur only in the ranks' files, not in the launcher's.
    name = hostile_text.encode("utf-8", "replace").decode()
    stored_run = store_run(tmp_path, name, hosts=(name,))
    stored_run.append_events(
        {"event": "started", "device": hostile_text}, {"event": "joined", "backend": hostile_text}
    )
    values = [
        math.nan,
        math.inf,
        -math.inf,
        1e308,
        -1e308,
        0.0,
        -0.0,
        5e-324,
        hostile_text,
        None,
        [1],
        10**400,
    ]
    metrics = [
        {hostile_text: i, "loss": value, "grad_norm": value} for i, value in enumerate(values)
    ]
    stored_run.append_events(
        *({"event": "progress", "step": i, **fields} for i, fields in enumerate(metrics))
    )
    stored_run.append_events(
        {"event": "warning", "message": hostile_text},
        {"event": "evaluation", "step": 3, "loss": hostile_text},
        {"event": "sections", "step": hostile_text, "data": 10**400, "forward": hostile_text},
        {"event": "stragglers", "messages": [hostile_text], "stragglers": hostile_text},
    )
    stored_run.append_events(
        {"event": "checkpoint", "step": 3, "path": hostile_text, "seconds": hostile_text}
    )
    for time in (math.nan, math.inf, 1e300, -1e300):
        stored_run.append_events(
            {"event": "joined", "time": time}, *progress_events(2, first=20, time=time)
        )
    failure = {**FAILED, "host": name, "reason": f"raised {name}", "traceback": name, "log": name}
    stored_run.write_job_summary(failure=failure)
    stored_run.write_exit_records(1, failure=failure)
    stored_run.write_launcher_files({name[:100]: {"x": [name]}}, "program", notes=[name])
    output = write_page([stored_run.state, stored_run.state], tmp_path / "page.html")
    page = output.read_text(encoding="utf-8")
    plain_page, parsed_page = _render(store_run(tmp_path, run_id="plain")), ParsedPage(page)
    assert parsed_page.open_tags == []
    allowed = {tag for tag, _ in plain_page.elements} | {"figure", "svg", "path", "ul", "li", "i"}
    allowed |= {"small", "b", "output", "h3", "pre", "strong", "figcaption", "code", "script"}
    assert {tag for tag, _ in parsed_page.elements} <= allowed
    assert not [
        a for _, attributes in parsed_page.elements for a in attributes if a.startswith("on")
    ]
    kinds = [kind for kind, _ in parsed_page.scripts]
    assert kinds.count("") == 1, "the page's own script is the only one that runs"
    assert all(json.loads(data) for kind, data in parsed_page.scripts if kind)
    assert hostile_text[:3] in parsed_page.text or not hostile_text.isprintable()


SECRETS = {
    "envs": {"WANDB_API_KEY": "hunter2", "URL": "https://me:hunter2@host/x"},
    "notify": {"webhook": "https://hooks/hunter2"},
}


def test_secrets_are_redacted(tmp_path: Path) -> None:
    """Secrets are hidden although the launcher has hidden them before."""
    first = store_run(tmp_path, "one", run_id="one")
    second = store_run(tmp_path, "two", run_id="two")
    for stored_run in (first, second):
        stored_run.write_launcher_files({"experiment": SECRETS}, "program")
        stored_run.write_exit_records()
    second.write_launcher_files(
        {"experiment": {**SECRETS, "API_TOKEN": "hunter2", "x": 1}}, "program"
    )
    page = render_runs([collect_run(stored_run.state) for stored_run in (first, second)])
    assert "hunter2" not in page
    assert "&lt;hidden&gt;" in page


def test_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    first_run, second_run = (
        _store_complete_run(tmp_path, name="same", run_id=run_id) for run_id in ("first", "second")
    )
    changed_config = {"experiment": {"exp_name": "tiny"}, "train": {"model": {"num_layers": 9}}}
    second_run.write_launcher_files(changed_config, *ARGUMENTS)
    page = _render(first_run, second_run)
    assert len(page.find_elements("article")) == 2
    assert "same first and same second" in page.text, "names that are the same get their ids"
    assert (page.text.count("train.model.num_layers"), "experiment.exp_name" in page.text) == (
        1,
        False,
    )
    curves = {
        a["class"] for a in page.find_elements("path") if (a["class"] or "").startswith("line")
    }
    assert {"line c0", "line c1"} <= curves


def test_files_overwritten_by_a_later_run_are_not_attributed_to_this_run(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    stored_run.write_launcher_files({"secretly": "other"}, *ARGUMENTS, run_id="a-later-one")
    stored_run.write_exit_records()
    page = _render(stored_run)
    assert "run a-later-one was started in the same directory since" in page.text
    assert "secretly" not in page.text


def test_run_with_a_deleted_directory(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    state = replace(stored_run.state, exp_dir=tmp_path / "gone", hosts=())
    RunEntry(
        state, "/conf/x.yaml", "", Outcome("failed", 5.0, "7/9", [(1, "rank 0: <b> no")])
    ).save()
    page = _render(StoredRun(state))
    for text in ("failed", "attempt 1: rank 0: <b> no", "/conf/x.yaml", "directory is gone"):
        assert text in page.text


def test_many_events_and_hosts_are_abridged(tmp_path: Path) -> None:
    names = tuple(f"node{number}" for number in range(300))
    stored_run = store_run(tmp_path, hosts=names)
    saved = ({"event": "checkpoint", "step": s, "path": "/c", "seconds": s} for s in range(1, 2001))
    stored_run.append_events(*progress_events(2), *saved)
    stored_run.write_exit_records()
    page = _render(stored_run)
    assert "1,602 more are left out here." in page.text
    assert "and 44 more hosts" in page.text
    assert "checkpoint saved in 2000 s" in page.text, "the last ones stay"


def test_file_is_written_atomically_and_private(tmp_path: Path) -> None:
    stored_run = _store_complete_run(tmp_path)
    output = tmp_path / "page.html"
    output.write_text("old")
    output.chmod(0o666)
    assert write_page([stored_run.state], output) == output
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert output.read_text().endswith("</body></html>\n")
    with pytest.raises(OSError, match="No such file"):
        write_page([stored_run.state], tmp_path / "none" / "page.html")
    assert [path.name for path in tmp_path.iterdir() if "page" in path.name] == ["page.html"]


def test_100_000_steps_yield_a_small_page_with_all_extremes(tmp_path: Path) -> None:
    stored_run = store_run(tmp_path)
    losses = {54_321: 77.0}
    stored_run.append_events(
        *progress_events(
            100_000,
            loss=lambda step: losses.get(step, 2.0 + step % 7 / 10),
            mfu=0.4,
            tokens_per_second=5.0,
            memory_gib=7.0,
            learning_rate=0.1,
        )
    )
    stored_run.write_exit_records()
    page = render_runs([collect_run(stored_run.state)])
    assert len(page) <= 3_000_000
    parsed_page = ParsedPage(page)
    assert "highest 77 at 54,321" in (parsed_page.find_elements("svg")[0]["aria-label"] or "")
    assert "step 54321: loss spike: 77" in " ".join(
        str(a.get("title")) for _, a in parsed_page.elements
    )
    assert "Curves are of the 100,000 steps" in parsed_page.text
