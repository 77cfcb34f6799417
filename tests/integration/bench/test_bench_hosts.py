"""Tests of the benchmark over SSH, on hosts without shared files, and of its failures.

The hosts of the fixture ``bed`` (tests/bed) are namespaces of this machine, each with a real sshd.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bed.host import Host
from bed.lab import Bed
from support.waiting import PATIENCE_SECONDS, wait_for

COMMAND = (sys.executable, "-m", "flagscale.cli", "bench", "collectives")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.torch,
    pytest.mark.bed(hosts=2, root="private", shared=[]),
]

_SHORT = "allr -d fp32 -b 1K -e 1K -n 2 -w 1 -c"


def list_scratch_directories(host: Host) -> list[str]:
    return [path.name for path in host.local_path("/tmp").glob("flagscale-bench-*")]


def find_ranks(bed: Bed) -> list[tuple[str, ...]]:
    return [p.argv for host in bed.hosts for p in host.find("flagscale.bench")]


def test_hosts_with_different_slots_and_result_files(bench: Any, bed: Bed, tmp_path: Path) -> None:
    hostfile, groups = tmp_path / "hostfile", tmp_path / "groups $HOME 'é.json"
    hostfile.write_text("h00 slots=2\nh01 slots=1  # the small one\n")
    groups.write_text('{"replica_groups": [[0, 2]]}')
    group_option = f"--custom-replica-group {shlex.quote(str(groups))}"
    lines = f"{_SHORT} {group_option} --json=out.json\n\n"
    lines += "barrier -n 2 --json second/out.json # same name\n"
    (tmp_path / "second").mkdir()
    (tmp_path / "batch.txt").write_text(lines)
    line = f"--batch batch.txt --hosts-file {hostfile} --mpi-log-dir logs --env FLAGCX_DEBUG=INFO"
    line += " --env h00:FLAGCX_DEBUG_SUBSYS=INIT --env h01:FLAGCX_DEBUG_SUBSYS=NET"
    completed = bench(*line.split(), environment=bed.environment(), cwd=tmp_path)
    assert completed.code == 0, completed.err
    assert "3 ranks on 2 hosts: h00 [0-1] 2 x " in completed.out
    assert "; h01 [2] 1 x " in completed.out
    assert "started by SSH" in completed.out
    record = json.loads((tmp_path / "out.json").read_text())
    assert [(row["ranks"], row["wrong"]) for row in record["results"]] == [(2, 0)]
    own_variables = {"FLAGCX_DEBUG": "INFO", "FLAGCX_DEBUG_SUBSYS": "INIT"}
    assert own_variables.items() <= record["environment"]["variables"].items()
    rows = json.loads((tmp_path / "second" / "out.json").read_text())["results"]
    assert [(row["operation"], row["ranks"]) for row in rows] == [("barrier", 3)]
    logs = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert logs == ["rank_0.log", "rank_1.log", "rank_2.log"]
    assert [list_scratch_directories(host) for host in bed.hosts] == [[], []]
    assert find_ranks(bed) == []


def test_unreachable_host_exits_with_3_before_any_rank(
    bench: Any, bed: Bed, tmp_path: Path
) -> None:
    bed["h01"].stop_sshd()
    line = f"{_SHORT} -r 2 --hosts h00 h01"
    completed = bench(*line.split(), environment=bed.environment(), cwd=tmp_path)
    assert completed.code == 3
    assert completed.err.startswith("error: nothing was measured: 1 of 2 host(s)\nh01: ")
    assert completed.out == ""
    assert find_ranks(bed) == []
    assert list_scratch_directories(bed["h00"]) == []


def test_result_files_without_sftp(bench: Any, bed: Bed, tmp_path: Path) -> None:
    for host in bed.hosts:
        host.restart_sshd(Subsystem="other internal-sftp")
    line = f"{_SHORT} -r 2 --hosts h00 h01 --json out.json --mpi-log-dir logs"
    completed = bench(*line.split(), environment=bed.environment(), cwd=tmp_path)
    assert completed.code == 0, completed.err
    assert json.loads((tmp_path / "out.json").read_text())["complete"]
    assert sorted(p.name for p in (tmp_path / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert [list_scratch_directories(host) for host in bed.hosts] == [[], []]


def _write_ssh_aliases(bed: Bed, tmp_path: Path, address: str) -> Path:
    """Write an SSH configuration with ``first`` and ``second`` as names of the hosts.

    The hosts do not know these names themselves. ``address`` is the address of the first host.
    """
    config = tmp_path / "ssh_config"
    config.write_text(
        f"Host first\n  HostName {address}\n  HostKeyAlias h00\n"
        f"Host second\n  HostName {bed['h01'].address}\n{bed.ssh_config.read_text()}"
    )
    return config


def test_ssh_aliases_rendezvous(bench: Any, bed: Bed, tmp_path: Path) -> None:
    config = _write_ssh_aliases(bed, tmp_path, bed["h00"].address)
    line = f"{_SHORT} -r 2 --hosts first second --ssh-config {config}"
    completed = bench(*line.split(), environment=bed.environment(), cwd=tmp_path)
    assert completed.code == 0, completed.err
    assert "2 ranks on 2 hosts: h00 [0] 1 x " in completed.out


def test_no_common_rendezvous_address_exits_with_3(bench: Any, bed: Bed, tmp_path: Path) -> None:
    config = _write_ssh_aliases(bed, tmp_path, bed["h00"].address)
    line = f"{_SHORT} -r 2 --hosts first second --ssh-config {config} --data-collector-host no-such"
    completed = bench(*line.split(), environment=bed.environment(), cwd=tmp_path)
    assert completed.code == 3
    assert (
        "no rendezvous address of first: no-such cannot be resolved on first,second"
        in completed.err
    )
    assert "--data-collector-host" in completed.err
    assert find_ranks(bed) == []
    assert [list_scratch_directories(host) for host in bed.hosts] == [[], []]


@contextmanager
def _long_run(bed: Bed, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a benchmark on both hosts that takes minutes, and wait for its first result."""
    line = "allr -r 2 --hosts h00 h01 -d fp32 -b 1K -e 40000 -i 4 -n 3 --json part.json"
    process = subprocess.Popen(
        [*COMMAND, *line.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=directory,
        env=bed.environment(OMP_NUM_THREADS="1"),
    )
    try:
        scratch = bed["h00"].local_path("/tmp")

        def has_result() -> bool:
            assert process.poll() is None, process.communicate()
            return any(scratch.glob("flagscale-bench-*/*/part.json"))

        wait_for(has_result, "the first result")
        yield process
    finally:
        process.kill()
        process.communicate()


def test_killed_rank_ends_the_run_and_partial_results_are_kept(bed: Bed, tmp_path: Path) -> None:
    with _long_run(bed, tmp_path) as process:
        ranks = bed["h01"].find("flagscale.bench.collectives")
        os.kill(ranks[0].pid, signal.SIGKILL)
        out, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 1
        assert "rank 1 was ended by SIGKILL" in err
        assert "algbw(GB/s)" in out
        data = json.loads((tmp_path / "part.json").read_text())
        assert not data["complete"]
        assert data["results"]
        assert find_ranks(bed) == []


def test_lost_host_exits_with_3_and_no_process_remains(bed: Bed, tmp_path: Path) -> None:
    with _long_run(bed, tmp_path) as process:
        bed["h01"].kill()
        _, err = process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == 3
        assert "error: lost during the measurement:\nh01: " in err
        # A process whose connection was closed needs time of a busy machine to end.
        wait_for(lambda: bed["h00"].find("flagscale.bench") == [], seconds=30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_no_process_or_file_remains_on_hosts(
    bed: Bed, tmp_path: Path, number: signal.Signals
) -> None:
    with _long_run(bed, tmp_path) as process:
        process.send_signal(number)
        process.wait(timeout=PATIENCE_SECONDS)
        expected = -signal.SIGKILL if number == signal.SIGKILL else 128 + number
        assert process.returncode == expected
        wait_for(lambda: not find_ranks(bed), "no rank remains", seconds=30)
        wait_for(
            lambda: not any(list_scratch_directories(host) for host in bed.hosts), "no file remains"
        )
