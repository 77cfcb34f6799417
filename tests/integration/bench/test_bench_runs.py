"""Tests of the benchmark with real ranks: launchers, comparisons, result files and failures."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.needs import require_program
from support.waiting import PATIENCE_SECONDS, wait_for

COMMAND = (sys.executable, "-m", "flagscale.cli", "bench", "collectives")

pytestmark = [pytest.mark.integration, pytest.mark.torch]

_NCCOM_GUIDE_ARGUMENTS = "all_reduce -b 128K -e 256K -f 2 -p 1 -n 2 -w 1 -c"


def _mpirun_command(name: str) -> list[str]:
    program = require_program("mpi", name)
    if "openmpi" in name:
        return [program, "--allow-run-as-root", "--oversubscribe"]
    return [program]


@pytest.mark.parametrize(
    ("name", "launcher"), [("mpirun.openmpi", "OpenMPI"), ("mpirun.mpich", "MPICH")]
)
def test_nccom_guide_command_under_mpirun(bench: Any, name: str, launcher: str) -> None:
    completed = bench(
        *_NCCOM_GUIDE_ARGUMENTS.split(), launcher=[*_mpirun_command(name), "-np", "2"]
    )
    assert completed.code == 0, completed.err
    assert "2 ranks on 1 host" in completed.out
    assert f"started by {launcher}" in completed.out
    assert completed.out.count("Avg bus bandwidth:") == 1
    assert " 131072 " in completed.out
    assert " 262144 " in completed.out


def test_wrong_number_of_ranks_is_reported_once(bench: Any) -> None:
    completed = bench("allr", "-r", "3", launcher=[*_mpirun_command("mpirun.mpich"), "-np", "2"])
    assert completed.code == 2
    assert completed.err.count("-r 3: MPICH has started 2 ranks") == 1


def test_under_torchrun_in_nccl_tests_format(bench: Any) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    # With port 0 the agent chooses a free port. torchrun itself starts the interpreter.
    command = [*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", *COMMAND[1:]]
    line = "allg -d fp32 -b 1K -e 1K -n 2 -c --format nccl-tests"
    completed = subprocess.run(
        [*command, *line.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    row = next(
        line.split() for line in completed.stdout.splitlines() if line.startswith("        1024")
    )
    assert row[:5] == ["1024", "128", "float", "none", "-1"]
    assert (row[8], row[12]) == ("0", "0")
    assert "# Out of bounds values : 0 OK" in completed.stdout


def test_comparison_writes_json_plots_and_report(bench: Any, tmp_path: Path) -> None:
    imported = tmp_path / "other <&> tool.txt"
    imported.write_text(
        "Comm size: 1024 bytes; Elapsed time: 0.000015 sec; Algo bandwidth: 8.7 GB/s; "
        "Bus bandwidth: 8.7 GB/s\n"
    )
    arguments = shlex.split("allr -d fp32 -b 1K -e 4K -f 4 -n 20 -w 2")
    outputs = ["--plot", "c.svg", "--plot", "c.png", "--report", "r.html", "--import", imported]
    (tmp_path / "batch.txt").write_text(
        "--compare gloo,gloo --compare-rounds 4 --probe --peak 100 --json ab.json\n"
        "--json a.json --show-input-output-size\n"
    )
    completed = bench("--batch", "batch.txt", "-r", "2", *arguments, *outputs, cwd=tmp_path)
    assert completed.code == 2, "the operation must be in the lines of the batch"
    lines = (tmp_path / "batch.txt").read_text().splitlines()
    (tmp_path / "batch.txt").write_text(
        "".join(f"{' '.join(arguments)} {line}\n" for line in lines)
    )
    completed = bench("--batch", "batch.txt", "-r", "2", *outputs, cwd=tmp_path)
    assert completed.code == 0, completed.err
    rows = json.loads((tmp_path / "ab.json").read_text())["results"]
    assert [row["backend"] for row in rows] == ["gloo#1", "gloo#2"] * 2
    ratio = rows[1]["time_ratio"]
    assert 0 < ratio["low"] <= ratio["value"] <= ratio["high"]
    assert rows[0]["peak_share"] > 0
    assert rows[0]["probe_share"] > 0
    assert "time ratio" in completed.out
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert "all_reduce fp32 gloo" in (tmp_path / "c.svg").read_text()
    assert "# note: peak 100 GB/s, the nominal limit; probe " in completed.out
    page = (tmp_path / "r.html").read_text()
    assert "other &lt;&amp;&gt; tool: FlagCX" in page
    assert page.count("<svg") == 2
    assert "<h2>all_reduce</h2>" in page
    assert "&quot;variables&quot;" in page
    assert "src=" not in page
    assert 'href="http' not in page


def test_slower_than_the_baseline_exits_with_4(bench: Any, tmp_path: Path) -> None:
    for name, microseconds in (("slow", 1e9), ("fast", 0.001)):
        row = {
            **{"operation": "all_reduce", "type": "fp32", "reduction": "sum", "root": -1},
            **{"in_place": True, "backend": "gloo", "ranks": 2, "size(B)": 1024},
            **{"time:avg(us)": microseconds, "failure": None},
        }
        (tmp_path / f"{name}.json").write_text(json.dumps({"results": [row]}))
    line = "allr -d fp32 -b 1K -e 1K -n 5 --tolerance 10% --baseline"
    (tmp_path / "batch.txt").write_text(f"{line} slow.json\n{line} fast.json\n")
    completed = bench("--batch", "batch.txt", "-r", "2", cwd=tmp_path)
    assert completed.code == 4
    assert "# baseline: 1 compared, 0 worse" in completed.out
    assert "# baseline: 1 compared, 1 worse" in completed.out
    assert completed.err.count("worse: all_reduce fp32 1024 B on gloo") == 1


def test_lines_of_a_batch_share_a_file(bench: Any, tmp_path: Path) -> None:
    options = "-d fp32 -b 1K -e 1K -n 2 -w 1"
    (tmp_path / "batch.txt").write_text(
        f"allr {options}\nallg {options} --json own.json\nbcast {options}"
    )
    outputs = ["--json", "all.json", "--report", "all.html", "--plot", "all.svg"]
    completed = bench("--batch", "batch.txt", "-r", "2", *outputs, "--no-header", cwd=tmp_path)
    assert completed.code == 0, completed.err
    record = json.loads((tmp_path / "all.json").read_text())
    assert record["complete"]
    assert [row["operation"] for row in record["results"]] == ["all_reduce", "broadcast"]
    (row,) = json.loads((tmp_path / "own.json").read_text())["results"]
    assert row["operation"] == "all_gather"
    page = (tmp_path / "all.html").read_text()
    assert "$ flagscale bench collectives --batch batch.txt -r 2 " in page
    for name in ("all_reduce", "all_gather", "broadcast"):
        assert f"<h2>{name}</h2>" in page
        assert f"{name} fp32" in (tmp_path / "all.svg").read_text()


_WRONG_BACKEND = '''
import torch
import torch.distributed as dist
from contextlib import contextmanager
from flagscale.comm.base import CommBackend


class Work(dist.Work):
    def wait(self, timeout=None):
        return True


class Group(dist.ProcessGroup):
    """Fills every tensor with the number of its rank instead of the sum."""

    def __init__(self, rank, size):
        super().__init__(rank, size)

    def allreduce(self, tensors, options=None):
        for tensor in tensors:
            tensor.fill_(self.rank())
        return Work()

    def getBackendName(self):
        return "wrong"


def create(store, rank, size, timeout):
    return Group(rank, size)


class Wrong(CommBackend):
    name, summary, devices = "wrong", "a library with a bug", ("cpu",)

    def explain_unavailable(self, device):
        return None

    @contextmanager
    def creation_context(self):
        if "wrong" not in dist.Backend.backend_list:
            dist.Backend.register_backend("wrong", create, devices=["cpu"])
        yield
'''


def test_wrong_results_of_a_backend_are_found(bench: Any, tmp_path: Path) -> None:
    (tmp_path / "wronglib.py").write_text(_WRONG_BACKEND)
    info = tmp_path / "wronglib-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wronglib\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[flagscale.comm_backends]\nwrong = wronglib:Wrong\n")
    line = "allr -r 2 --backend wrong -d fp32 -b 64 -e 64 -c -n 2 --dump-dir dump --json x.json"
    completed = bench(*line.split(), cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)})
    assert completed.code == 1, completed.err
    assert "Check failed on 2 of 2 ranks: 64 wrong elements in total; " in completed.out
    assert "1 errors found - test failed" in completed.out
    files = sorted((tmp_path / "dump").rglob("*.pt"))
    assert [file.name for file in files] == ["rank_0.pt", "rank_1.pt"]
    assert json.loads((tmp_path / "x.json").read_text())["results"][0]["wrong"] == 64


def test_invalid_all_to_all_v_metadata_is_reported(bench: Any, tmp_path: Path) -> None:
    line = "all_to_all_v -r 2 -b 1K -e 1K --alltoallv-metadata bad.json"
    (tmp_path / "bad.json").write_text('{"alltoallv_metadata": [{"send_counts": [1]}]}')
    completed = bench(*line.split(), cwd=tmp_path)
    assert completed.code == 2
    assert completed.err.startswith("error: --alltoallv-metadata: bad.json")


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "rank 1 was ended by SIGKILL"),
        (signal.SIGSTOP, "no progress for 5 s: rank 1 (host"),
    ],
    ids=["dies", "hangs"],
)
def test_dead_or_stuck_rank_is_named(tmp_path: Path, number: signal.Signals, message: str) -> None:
    result = tmp_path / "part.json"
    # Longer than a busy machine delays a rank, which would be named instead.
    line = f"allr -r 2 -d fp32 -b 1K -e 30000 -i 4 -n 3 -T 5 --json {result}"
    process = subprocess.Popen(
        [*COMMAND, *line.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wait_for(result.exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[1]), number)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert message in err
    assert f"process {children[1]}" in err
    data = json.loads(result.read_text())
    assert not data["complete"]
    assert data["results"]
    assert "algbw(GB/s)" in out
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_terminated_run_ends_its_ranks(tmp_path: Path, number: signal.Signals) -> None:
    result, scratch = tmp_path / "part.json", tmp_path / "scratch"
    scratch.mkdir()
    line = f"allr -r 2 -d fp32 -b 1K -e 30000 -i 4 -n 3 --json {result}"
    process = subprocess.Popen(
        [*COMMAND, *line.split()],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(scratch)},
    )
    wait_for(result.exists)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    expected = -signal.SIGKILL if number == signal.SIGKILL else 128 + number
    assert process.wait(timeout=PATIENCE_SECONDS) == expected
    wait_for(lambda: not any(is_running(child) for child in children), seconds=60)
    assert list(scratch.glob("flagscale-bench-*")) == []


def is_running(pid: str) -> bool:
    """Return whether a process runs; a zombie, which PID 1 may never collect, does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
