"""The page of a run, whatever the run says of itself."""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.report_lab import ParsedPage, StoredRun, steps, store_run

from flagscale.hosts import processes
from flagscale.launcher.planning.model import RunnerHandle
from flagscale.launcher.runs import Entry, Outcome
from flagscale.report.pages import render_runs, write_page
from flagscale.report.run import collect_run

ARGUMENTS = (
    *("train_gpt.py", "--num-layers", "8", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--max-position-embeddings", "128", "--micro-batch-size", "2"),
    *("--global-batch-size", "8", "--train-iters", "100", "--bf16"),
)
CONFIG = {"experiment": {"exp_name": "tiny"}, "train": {"model": {"num_layers": 8}}}


@pytest.fixture(autouse=True)
def _registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))


def _page(*runs: StoredRun) -> ParsedPage:
    read = ParsedPage(render_runs([collect_run(run.state) for run in runs]))
    assert read.open == [], "every element is closed"
    return read


def _whole(tmp_path: Path, **changes: Any) -> StoredRun:
    laid = store_run(tmp_path, hosts=("a", "b"), nproc=4, **changes)
    for rank in range(8):
        up = {"event": "started", "device": "cuda:0"}
        laid.report(up, {"event": "joined", "backend": "nccl"}, rank=rank)
    laid.report(*steps(60, tokens_per_second=1000.0, mfu=0.4, memory_gib=70.0, learning_rate=0.1,
                       step_seconds=0.5))  # fmt: skip
    laid.keep(CONFIG, *ARGUMENTS, "--tensor-model-parallel-size", "2",
              "--pipeline-model-parallel-size", "2")  # fmt: skip
    laid.end()
    return laid


def test_completed_run(tmp_path: Path) -> None:
    read = _page(_whole(tmp_path))
    for fact in (
        "completed", "gpt, 8 layers, hidden size 64, 4 heads, sequences of 128, bf16",
        "tp2 dp2 pp2", "8 sequences a step, 1,024 tokens; micro-batches of 2",
        "8 ranks on 2 hosts: a,b", "4 x cuda", "nccl", "60 of 100", "num_layers: 8", "train=8b",
        "stage 0 of 2, replicas 0-1 of 2", "stage 1 of 2, replicas 0-1 of 2",
    ):  # fmt: skip
        assert fact in read.text, fact
    titles = ["Loss", "Gradient norm", "Throughput", "MFU", "Memory", "Learning rate"]
    plots = [a["aria-label"] or "" for a in read.of("svg")]
    assert [label.partition(".")[0].partition(",")[0] for label in plots] == [
        *titles,
        "step seconds",
    ]
    assert "highest 40 at 1" in plots[3], "MFU in percent"
    assert "What failed" not in read.text
    assert "may have gone on since" not in read.text


def test_each_validation_set_has_a_curve(tmp_path: Path) -> None:
    laid = store_run(tmp_path)
    laid.report(*steps(9))
    for step, name, loss in ((3, "law", 5.0), (3, "code", 4.0), (6, "law", 4.5), (6, "code", 3.5)):
        laid.report({"event": "evaluation", "step": step, "loss": loss, "data": name})
    laid.end()
    told = _page(laid).of("svg")[0]["aria-label"] or ""
    assert "validation law: 5 at step 3, 4.5 at 6" in told
    assert "validation code: 4 at step 3, 3.5 at 6" in told


def test_run_without_metrics_is_stated(tmp_path: Path) -> None:
    laid = store_run(tmp_path)
    laid.end()
    assert "There are no metrics: no rank has reported a step so far." in _page(laid).text
    other = laid.change(external=True)
    assert "a program of another project may report none" in _page(other).text


def test_metric_that_no_device_reports_is_explained(tmp_path: Path) -> None:
    laid = store_run(tmp_path)
    laid.report(*steps(3))
    laid.end()
    read = _page(laid)
    assert "MFU: not known: a share of a peak" in read.text
    assert "Memory: not counted on this device." in read.text


def test_page_of_a_live_run_states_its_time(tmp_path: Path) -> None:
    """Here one whose script is this very process."""
    laid = store_run(tmp_path)
    laid.report({"event": "started", "device": "cpu"}, {"event": "joined"}, *steps(3))
    own = processes.identify_process(os.getpid())
    assert own is not None
    host = replace(laid.state.hosts[0], **vars(own), boot_id=processes.read_boot_id())
    read = _page(laid.change(hosts=(host,)))
    assert ": tiny may have gone on since." in read.text
    for fact in ("running", "lasted so far", "3 of 100"):
        assert fact in read.text, fact


def test_unreachable_hosts_are_listed(tmp_path: Path) -> None:
    laid = store_run(tmp_path)
    laid.report(*steps(3))
    # Of a runner that nobody has installed.
    read = _page(laid.change(runner=RunnerHandle("none-such")))
    assert "unreachable" in read.text
    assert "no runner is called 'none-such'" in read.text
    assert len(read.of("figure")) == 2


TRACE = 'Traceback:\n  File "x", line 1\nE: </pre><script>alert(1)</script> api_key=hunter2'
FAILED = {"host": "node", "rank": 0, "exit_code": 1, "traceback": TRACE, "log": "/l/stderr.log"}


def test_first_failure_has_a_traceback(tmp_path: Path) -> None:
    laid = store_run(tmp_path)
    laid.report(*steps(5))
    failure = {**FAILED, "reason": "raised ValueError: https://me:hunter2@host"}
    before = {"attempt": 0, "failure": {**failure, "reason": "raised OSError: first"}}
    laid.agree(failure=failure, attempt=2, attempts=2, restarts=[before])
    laid.end(1, failure=failure)
    read = _page(laid)
    assert "The first failure" in read.text
    assert "</pre><script>alert(1)</script>" in read.text
    assert "attempt 1: node: rank 0 raised OSError: first" in read.text
    assert "hunter2" not in "".join(read.texts + [data for _, data in read.scripts])
    assert len(read.of("span", class_="mark failure")) == 2, "on every plot"


HOSTILE = (
    '</script><script>alert("1")</script>', "<img src=x onerror=alert(1)>", "' \" ` ${x} {{y}}",
    "-->]]></style></title>", "東京 \u202eabc", "a\x00b\x1b[31m", "\ud800", "x" * 5000,
)  # fmt: skip


@pytest.mark.parametrize("odd", HOSTILE, ids=range(len(HOSTILE)))
def test_text_of_a_run_is_escaped(tmp_path: Path, odd: str) -> None:
    # A name that is no text reaches no file of a launcher's, only what ranks say.
    name = odd.encode("utf-8", "replace").decode()
    laid = store_run(tmp_path, name, hosts=(name,))
    laid.report({"event": "started", "device": odd}, {"event": "joined", "backend": odd})
    values = [
        math.nan,
        math.inf,
        -math.inf,
        1e308,
        -1e308,
        0.0,
        -0.0,
        5e-324,
        odd,
        None,
        [1],
        10**400,
    ]
    told = [{odd: i, "loss": value, "grad_norm": value} for i, value in enumerate(values)]
    laid.report(*({"event": "progress", "step": i, **one} for i, one in enumerate(told)))
    laid.report(
        {"event": "warning", "message": odd}, {"event": "evaluation", "step": 3, "loss": odd}
    )
    laid.report({"event": "checkpoint", "step": 3, "path": odd, "seconds": odd})
    for time in (math.nan, math.inf, 1e300, -1e300):
        laid.report({"event": "joined", "time": time}, *steps(2, first=20, time=time))
    failure = {**FAILED, "host": name, "reason": f"raised {name}", "traceback": name, "log": name}
    laid.agree(failure=failure)
    laid.end(1, failure=failure)
    laid.keep({name[:100]: {"x": [name]}}, "program", notes=[name])
    output = write_page([laid.state, laid.state], tmp_path / "page.html")
    page = output.read_text(encoding="utf-8")
    plain, read = _page(store_run(tmp_path, run_id="plain")), ParsedPage(page)
    assert read.open == []
    allowed = {tag for tag, _ in plain.elements} | {"figure", "svg", "path", "ul", "li", "i"}
    allowed |= {"small", "b", "output", "h3", "pre", "strong", "figcaption", "code", "script"}
    assert {tag for tag, _ in read.elements} <= allowed
    assert not [a for _, attributes in read.elements for a in attributes if a.startswith("on")]
    kinds = [kind for kind, _ in read.scripts]
    assert kinds.count("") == 1, "the page's own script is the only one that runs"
    assert all(json.loads(data) for kind, data in read.scripts if kind)
    assert odd[:3] in read.text or not odd.isprintable()


SECRETS = {
    "envs": {"WANDB_API_KEY": "hunter2", "URL": "https://me:hunter2@host/x"},
    "notify": {"webhook": "https://hooks/hunter2"},
}


def test_secrets_are_redacted(tmp_path: Path) -> None:
    """Though a launcher has left them out before."""
    first = store_run(tmp_path, "one", run_id="one")
    second = store_run(tmp_path, "two", run_id="two")
    for laid in (first, second):
        laid.keep({"experiment": SECRETS}, "program")
        laid.end()
    second.keep({"experiment": {**SECRETS, "API_TOKEN": "hunter2", "x": 1}}, "program")
    page = render_runs([collect_run(laid.state) for laid in (first, second)])
    assert "hunter2" not in page
    assert "&lt;hidden&gt;" in page


def test_runs_side_by_side(tmp_path: Path) -> None:
    one, two = (_whole(tmp_path, name="same", run_id=run_id) for run_id in ("first", "second"))
    changed = {"experiment": {"exp_name": "tiny"}, "train": {"model": {"num_layers": 9}}}
    two.keep(changed, *ARGUMENTS)
    read = _page(one, two)
    assert len(read.of("article")) == 2
    assert "same first and same second" in read.text, "names that are the same get their ids"
    assert (read.text.count("train.model.num_layers"), "experiment.exp_name" in read.text) == (
        1,
        False,
    )
    curves = {a["class"] for a in read.of("path") if (a["class"] or "").startswith("line")}
    assert {"line c0", "line c1"} <= curves


def test_files_overwritten_by_a_later_run_are_not_attributed_to_this_run(tmp_path: Path) -> None:
    laid = store_run(tmp_path)
    laid.keep({"secretly": "other"}, *ARGUMENTS, run_id="a-later-one")
    laid.end()
    read = _page(laid)
    assert "run a-later-one was started in the same directory since" in read.text
    assert "secretly" not in read.text


def test_run_with_a_deleted_directory(tmp_path: Path) -> None:
    laid = store_run(tmp_path)
    state = replace(laid.state, exp_dir=tmp_path / "gone", hosts=())
    Entry(state, "/conf/x.yaml", "", Outcome("failed", 5.0, "7/9", [(1, "rank 0: <b> no")])).save()
    read = _page(StoredRun(state))
    for told in ("failed", "attempt 1: rank 0: <b> no", "/conf/x.yaml", "directory is gone"):
        assert told in read.text


def test_many_events_and_hosts_are_abridged(tmp_path: Path) -> None:
    names = tuple(f"node{number}" for number in range(300))
    laid = store_run(tmp_path, hosts=names)
    saved = ({"event": "checkpoint", "step": s, "path": "/c", "seconds": s} for s in range(1, 2001))
    laid.report(*steps(2), *saved)
    laid.end()
    read = _page(laid)
    assert "1,602 more are left out here." in read.text
    assert "and 44 more hosts" in read.text
    assert "checkpoint saved in 2000 s" in read.text, "the last ones stay"


def test_file_is_written_atomically_and_private(tmp_path: Path) -> None:
    laid = _whole(tmp_path)
    output = tmp_path / "page.html"
    output.write_text("old")
    output.chmod(0o666)
    assert write_page([laid.state], output) == output
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    assert output.read_text().endswith("</body></html>\n")
    with pytest.raises(OSError, match="No such file"):
        write_page([laid.state], tmp_path / "none" / "page.html")
    assert [path.name for path in tmp_path.iterdir() if "page" in path.name] == ["page.html"]


def test_100_000_steps_yield_a_small_page_with_all_extremes(tmp_path: Path) -> None:
    laid = store_run(tmp_path)
    losses = {54_321: 77.0}
    laid.report(*steps(100_000, loss=lambda step: losses.get(step, 2.0 + step % 7 / 10), mfu=0.4,
                       tokens_per_second=5.0, memory_gib=7.0, learning_rate=0.1))  # fmt: skip
    laid.end()
    page = render_runs([collect_run(laid.state)])
    assert len(page) <= 3_000_000
    read = ParsedPage(page)
    assert "highest 77 at 54,321" in (read.of("svg")[0]["aria-label"] or "")
    assert "step 54321: loss spike: 77" in " ".join(str(a.get("title")) for _, a in read.elements)
    assert "Curves are of the 100,000 steps" in read.text
