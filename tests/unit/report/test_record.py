"""Tests of the record of runs in reports, and of what differs between runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.report_lab import StoredRun, progress_events, store_run

from flagscale.cli import main
from flagscale.launcher.layout import HOST_RECORD_FILE, Layout
from flagscale.launcher.runs import RunEntry
from flagscale.report.pages import render_runs
from flagscale.report.record import RunRecord, describe_record_changes, find_differences
from flagscale.report.run import collect_run

IDS = ("19710101-000000-aaaaaa", "19710102-000000-bbbbbb")
Report = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Report:
    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["report", *map(str, words)])
        return (end.value.code if isinstance(end.value.code, int) else 0, *capsys.readouterr())

    return call


def _store(tmp_path: Path, run_id: str, *hosts: Mapping[str, Any], **launch: Any) -> StoredRun:
    """Store a run whose hosts have these records; a run of none has no record."""
    names = tuple(f"node{number}" for number in range(1, max(1, len(hosts)) + 1))
    stored_run = store_run(tmp_path, run_id=run_id, hosts=names)
    stored_run.append_events(
        {"event": "joined", "libraries": {"torch": "2.13.0", "nccl": "2.28.3"}},
        *progress_events(3),
    )
    for state, host in zip(stored_run.state.hosts, hosts, strict=False):
        (state.run_dir / "status").mkdir(exist_ok=True)
        parts: dict[str, Any] = {"host": {"host": state.name, **host}, "inputs": host["inputs"]}
        lines = [{"kind": kind, **part} for kind, part in parts.items()]
        lines += [{"kind": "file", **file} for file in host["files"]]
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (state.run_dir / "status" / HOST_RECORD_FILE).write_text(text)
    if hosts:
        stored_run.write_own_files({"experiment": {"exp_name": "x"}}, "a" * 40, **launch)
    stored_run.write_exit_records()
    RunEntry(stored_run.state).save()
    return stored_run


def _host(torch: str = "2.13.0", idx: str = "1" * 64, **fields: Any) -> dict[str, Any]:
    file = {"argument": "data_path", "path": "/d/a.idx", "size": 1234, "sha256": idx}
    return {
        "python": "3.11.7",
        "os": "Debian",
        "drivers": {"cuda": "580.1"},
        "devices": {"NVIDIA H100": 8},
        "packages": {"torch": torch, "numpy": "2.0"},
        "torch": {"cuda": "13.0", "git_version": "abc"},
        "inputs": {"mixtures": {"data_path": ["/d/a"]}, "sizes": "s"},
        "files": [file],
        **fields,
    }


def test_record_of_a_run(tmp_path: Path) -> None:
    """Reports of ranks take precedence; values that differ between hosts name them."""
    other = _host(drivers={"cuda": "550.1"}, files=[], inputs={"mixtures": {}, "sizes": "t"})
    stored_run = _store(tmp_path, IDS[0], _host(), _host(files=[]), other)
    sections = collect_run(stored_run.state).record.sections
    assert sections["software"] == {
        "python": "3.11.7",
        "torch": "2.13.0",
        "CUDA": "13.0",
        "NCCL": "2.28.3 (node1); (none) (node[2-3])",
        "driver (cuda)": "580.1 (node[1-2]); 550.1 (node3)",
        "os": "Debian",
    }
    assert sections["hardware"]["devices"] == "8 x NVIDIA H100"
    assert sections["data"] == {
        "data_path": "/d/a",
        "/d/a.idx": "1,234 bytes, sha256 111111111111",
        "sizes of the files differ between hosts": "s (node[1-2]); t (node3)",
    }
    assert sections["code"]["/src/code"] == "a" * 12


def test_page_has_the_record_and_the_changes(tmp_path: Path) -> None:
    code = {"checkout": "/src/code", "commit": "a" * 40, "changes": "123", "file_count": 3}
    stored_run = _store(tmp_path, IDS[0], _host(), code=[{**code, "files": ["<train>.py", "b.py"]}])
    files = Layout(stored_run.state.exp_dir).run_files(IDS[0])
    files.changes.write_text("+x = '<b>'\n")
    page = render_runs([collect_run(stored_run.state)])
    assert "<h2>Code, software and data</h2>" in page
    for text in ("aaaaaaaaaaaa with uncommitted changes (123)", "NVIDIA H100", "1,234 bytes"):
        assert text in page
    assert "<li>code: &lt;train&gt;.py</li><li>code: b.py</li><li>and 1 more</li>" in page
    assert "+x = &#x27;&lt;b&gt;&#x27;" in page


def test_differences_are_printed(tmp_path: Path, report: Report) -> None:
    _store(tmp_path, IDS[0], _host())
    _store(tmp_path, IDS[1], _host(torch="2.12.0", idx="2" * 64, python="3.12.1"))
    code, out, err = report(*IDS)
    assert (code, err) == (0, "")
    assert out.splitlines()[1:] == [
        "these differ:",
        "  software.python: 3.11.7 | 3.12.1",
        "  data./d/a.idx: 1,234 bytes, sha256 111111111111 | 1,234 bytes, sha256 222222222222",
        "  packages.torch: 2.13.0 | 2.12.0",
    ]
    assert "<caption>these differ</caption>" in Path(f"report_{'_'.join(IDS)}.html").read_text()


def test_equal_and_missing_records(tmp_path: Path, report: Report) -> None:
    _store(tmp_path, IDS[0], _host())
    _store(tmp_path, IDS[1], _host())
    assert "nothing that was recorded of all differs" in report(*IDS)[1]
    old_id = "19710103-000000-cccccc"
    _store(tmp_path, old_id)
    out = report(IDS[0], old_id)[1]
    assert f"note: run {old_id} has no record of its code and software" in out


def test_records_as_json(tmp_path: Path, report: Report) -> None:
    _store(tmp_path, IDS[0], _host(), rerun_of="x")
    _store(tmp_path, IDS[1], _host(torch="2.12.0"))
    code, out, err = report("--json", *IDS)
    record = json.loads(out)
    assert (code, err) == (0, "")
    assert record["differences"] == {"packages.torch": ["2.13.0", "2.12.0"]}
    first = record["runs"][0]
    assert (first["run_id"], first["rerun_of"]) == (IDS[0], "x")
    assert first["software"]["NCCL"] == "2.28.3"
    assert not list(Path().iterdir()), "no page is written"


@pytest.mark.parametrize(
    ("values", "differ"),
    [
        pytest.param(["5 bytes, sha256 a", "5 bytes, sha256 b"], True, id="checksum"),
        pytest.param(["5 bytes, sha256 a", "5 bytes"], False, id="one-without-checksum"),
        pytest.param(["5 bytes, sha256 a", "6 bytes"], True, id="size"),
        pytest.param(["5 bytes, sha256 a", None], False, id="not-reached"),
        pytest.param(["2.0", None], True, id="package"),
    ],
)
def test_a_record_that_was_cut_off_is_no_difference(values: list[str | None], differ: bool) -> None:
    records = [{} if value is None else {"data.x": value} for value in values]
    assert bool(find_differences(records)) == differ


def test_changes_from_run_to_run() -> None:
    packages = {f"p{number}": "1" for number in range(9)}
    before = RunRecord({"software": {"torch": "2.12"}, "packages": packages})
    after = RunRecord({"software": {"torch": "2.13"}, "packages": dict.fromkeys(packages, "2")})
    changes = [*describe_record_changes(before, after)]
    assert changes[0] == "torch 2.12 → 2.13"
    assert changes[-1] == "6 more differences of software and data"
    assert [*describe_record_changes(RunRecord(), after)] == []
