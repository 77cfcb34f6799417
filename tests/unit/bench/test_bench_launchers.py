"""Tests of launcher detection, and of the command lines that start ranks on other hosts."""

from __future__ import annotations

import base64
import io
import tarfile
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.bench_lines import parse_spec

from flagscale.bench.collectives.cli import CollectivesCommand, main, read_specs
from flagscale.bench.collectives.spec import Batch
from flagscale.bench.files import UnreadableFileError
from flagscale.bench.starters import mpirun, slurm, ssh
from flagscale.bench.starters.host import HostTask, PreparedHost, resolve_addresses
from flagscale.bench.starters.local import RankRange
from flagscale.bench.world import BenchWorld, detect_world
from flagscale.errors import ConfigError, UnreachableError
from flagscale.hosts.workers.task import TASK_VARIABLE, WorkerTask
from flagscale.records import decode, encode

_OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "685768705",
    "PMIX_SERVER_URI2": "685768704.0;tcp4://127.0.0.1:53613",
}
_PMI = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "8", "MPI_LOCALRANKID": "1"}
_SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05]",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ("torchrun", 1, 2, 0)),
        (_OMPI, ("OpenMPI", 1, 2, 1)),
        ({**_PMI, "MPI_LOCALNRANKS": "2"}, ("MPICH", 1, 4, 1)),
        (_SLURM, ("Slurm", 3, 4, 1)),
        ({**_SLURM, **_OMPI}, ("OpenMPI", 1, 2, 1)),
        ({**_OMPI, "RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 1, 0)),
    ],
    ids=["none", "batch-script", "torchrun", "openmpi", "mpich", "srun", "mpi-in-slurm", "inner"],
)
def test_launcher_is_detected_by_its_variables(
    environment: dict[str, str], expected: tuple[Any, ...] | None
) -> None:
    world = detect_world(environment)
    detected = world and (world.launcher, world.rank, world.size, world.local_rank)
    assert detected == expected


def test_rendezvous_name_is_unique_to_a_job() -> None:
    world = detect_world(_OMPI)
    assert world is not None
    assert world.rendezvous == "openmpi-685768705-685768704_0_tcp4_127_0_0_1_53613"
    step = detect_world(_SLURM)
    assert step is not None
    assert (step.address, step.port) == ("gpu03", 20_000 + 77 * 31)
    assert step.rendezvous is None


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK='x'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "is not a rank of WORLD_SIZE=2"),
        ({**_OMPI, "MASTER_ADDR": "a"}, "MASTER_PORT=None is not a port"),
    ],
)
def test_inconsistent_variables_are_rejected(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_world(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a", "a"), ("a,b", "a"), ("n[03-05,9],x", "n03"), ("n[7]-ib,x", "n7-ib"), ("", None)],
)
def test_first_host_of_a_step_is_the_rendezvous(nodes: str, first: str | None) -> None:
    world = detect_world({**_SLURM, "SLURM_STEP_NODELIST": nodes})
    assert world is not None
    assert world.address == first


def _parse_placement(line: str) -> Any:
    return parse_spec(line.split()).placement


def _task(*words: str) -> WorkerTask:
    return WorkerTask.create(
        CollectivesCommand.rank_entry_point, Batch(tuple(read_specs(words or ["allr"])))
    )


def test_mpirun_command_lines() -> None:
    placement = _parse_placement("allr -r 4 --hosts a b --mpi-log-dir /logs")
    program = ["python", "x"]
    assert mpirun.mpirun_argv(placement, program, open_mpi=True, names=["A", "B"]) == (
        [
            "mpirun",
            "-np",
            "4",
            "--host",
            "a:2,b:2",
            "-x",
            "A",
            "-x",
            "B",
            "--output-filename",
            "/logs",
            "python",
            "x",
        ]
    )
    assert mpirun.mpirun_argv(placement, program, open_mpi=False, names=["A", "B"]) == [
        "mpirun",
        "-np",
        "4",
        "-hosts",
        "a:2,b:2",
        "-genvlist",
        "A,B",
        "-outfile-pattern",
        "/logs/rank_%r.log",
        "python",
        "x",
    ]


def test_srun_command_lines(tmp_path: Path) -> None:
    shape = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=4"]
    placement = _parse_placement("allr -r 4 -N 2 -S -u 8 --slurm-wait 90 --mpi-log-dir /logs")
    assert slurm.salloc_argv(placement) == [
        *("salloc", "--no-shell", "--job-name=flagscale-bench", "--immediate=90"),
        *shape,
    ]
    assert slurm.srun_argv(placement, "9", ["x", "y z"]) == [
        *("srun", "--jobid=9", "--overlap", *shape, "--kill-on-bad-exit=0", "--wait=30"),
        *("--output=/logs/rank_%t.log", "x", "y z"),
    ]
    script = tmp_path / "set up $HOME;'.sh"
    script.write_text("")
    options = ["allr", "-r", "4", "-N", "2", "-S", "--slurm-setup-script", str(script)]
    line = slurm.setup_argv(parse_spec(options).placement, "9", "echo 'a b'; exit 3")
    assert line[-4:] == ["bash", "-c", "echo 'a b'; exit 3", str(script)]
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1"} < set(line)


def test_slurm_requires_a_short_setup_script_and_its_programs(tmp_path: Path) -> None:
    script = tmp_path / "setup.sh"
    script.write_text("#" * 200_000)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "salloc", "squeue", "scancel"):
        (programs / name).touch(mode=0o755)
    options = ["allr", "-r", "2", "-S", "--slurm-setup-script", str(script)]
    path = {"PATH": str(programs)}
    with pytest.raises(ConfigError, match="longer than 102400 bytes"):
        slurm.run_in_slurm(parse_spec(options).placement, _task(), path)
    with pytest.raises(UnreachableError, match="srun, salloc, squeue, scancel is not installed"):
        slurm.run_in_slurm(_parse_placement("allr -S -r 2"), _task(), {"PATH": "/nowhere"})


def test_slurm_requires_a_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["allr", "-S"]) == 2
    assert "error: the number of ranks is missing" in capsys.readouterr().err


def test_missing_mpirun_is_reported() -> None:
    words = ["allr", "-r", "2", "--hosts", "a"]
    with pytest.raises(UnreachableError, match="mpirun is not installed") as error:
        mpirun.build_starter(parse_spec(words).placement, _task(*words), {"PATH": "/nowhere"})
    assert error.value.exit_code == 3


def test_world_of_one_host_is_detected() -> None:
    assert BenchWorld("local", 0, 2, 0, 2).one_host
    assert not BenchWorld("MPICH", 0, 4, 0, 2).one_host


def test_hosts_from_flags_and_files(tmp_path: Path) -> None:
    placement = _parse_placement("allr -r 4 --hosts n[1-3] x")
    assert [host.name for host in placement.hosts] == ["n1", "n2", "n3", "x"]
    assert placement.per_host == (1, 1, 1, 1)
    assert placement.starter == "ssh"
    assert [host.name for host in _parse_placement("allr -r 2 --hosts a,b").hosts] == ["a", "b"]
    assert [host.name for host in _parse_placement("-r 2 --hosts a b allr").hosts] == ["a", "b"]
    several = _parse_placement("-r 3 -s n[1,3] --hosts x allr,allg -n 1").hosts
    assert [host.name for host in several] == ["n1", "n3", "x"]
    plain, slots = tmp_path / "plain", tmp_path / "slots"
    plain.write_text("# two\na\n\n b # the other\n")
    slots.write_text("a slots=3 user=me port=2222\nb slots=1 addr=10.0.0.2\n")
    assert _parse_placement(f"allr -r 2 --hosts-file {plain}").per_host == (1, 1)
    unequal = _parse_placement(f"allr --hosts-file {slots}")
    assert (unequal.ranks, unequal.nodes, unequal.per_host) == (4, 2, (3, 1))
    assert (unequal.hosts[0].user, unequal.hosts[0].port) == ("me", 2222)
    assert _parse_placement(f"allr -r 2 --hosts-file {slots}").per_host == (1, 1)
    # In the syntax of mpirun's -hosts.
    counted = _parse_placement("allr -np 4 -hosts 10.0.0.1:1,10.0.0.2:3")
    assert [host.name for host in counted.hosts] == ["10.0.0.1", "10.0.0.2"]
    assert counted.per_host == (1, 3)
    # Without slots of every host, slots are limits.
    assert _parse_placement("allr -r 2 --hosts a:2 b").per_host == (1, 1)
    assert [host.name for host in _parse_placement("allr -r 1 --hosts fe80::1").hosts] == [
        "fe80::1"
    ]


def test_environment_variables_can_be_set_per_host() -> None:
    words = (
        "--env b:CUDA_VISIBLE_DEVICES=3 --env CUDA_VISIBLE_DEVICES=1 --env LD_LIBRARY_PATH=/a:/b"
    )
    placement = _parse_placement(f"allr -r 2 --hosts a b {words}")
    common = {"CUDA_VISIBLE_DEVICES": "1", "LD_LIBRARY_PATH": "/a:/b"}
    assert ssh.host_variables(placement, 0) == common
    assert ssh.host_variables(placement, 1) == {**common, "CUDA_VISIBLE_DEVICES": "3"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--hosts a b", "--hosts: the number of ranks is missing"),
        ("--hosts a:2 b", "--hosts: the number of ranks is missing"),
        ("-r 2 --hosts a:2,b:1 c", "-r 2: the ranks cannot be divided equally among 3 hosts"),
        ("-r 3 --hosts a b", "-r 3: the ranks cannot be divided equally among 2 hosts"),
        ("-r 2 --hosts a a", "--hosts: host 'a' is named twice"),
        ("-r 2 --hosts a[1-", "--hosts: 'a\\[1-': a bracket without its other half"),
        ("-r 1 --hosts=-oProxyCommand=x", "--hosts: '-oProxyCommand=x' is not a host name"),
        ("-r 1 --hosts a --hosts-file {file}", "--hosts and --hosts-file exclude each other"),
        ("-r 6 --hosts-file {file}", "-r 6: 3 ranks on b, which has slots=1"),
        ("-r 4 -hosts a:1,b:1", "-r 4: 2 ranks on a, which has slots=1"),
        ("-r 2 --hosts a b --env c:X=1", "--env 'c:X=1': 'c' is not one of the hosts"),
        ("-r 2 --hosts a b --env 1X=1", "--env '1X=1'; expected NAME=VALUE or HOST:NAME=VALUE"),
        ("-r 2 --hosts a b --env X", "--env 'X'; expected NAME=VALUE"),
        ("-r 2 --env X=1", "--env 'X=1' needs --hosts"),
        ("-r 1 --data-collector-port 70000", "--data-collector-port 70000; expected 1 to 65535"),
        ("-r 1 --hosts a --starter mpi", "--starter: invalid choice: 'mpi'"),
        ("-r 1 --hosts-file {empty}", "empty: no host in it; expected one per line"),
        ("-r 1 --hosts", "--hosts: expected at least one argument"),
    ],
)
def test_invalid_hosts_are_rejected(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "hostfile"
    file.write_text("a slots=3\nb slots=1\n")
    empty = tmp_path / "empty"
    empty.write_text("\n# nobody\n")
    with pytest.raises(ConfigError, match=message):
        _parse_placement(f"allr {line.format(file=file, empty=empty)}")


def test_task_contains_the_parsed_command_line(tmp_path: Path) -> None:
    """Ranks receive the parsed options, and do not parse the command line again."""
    pairs, counts = tmp_path / "pairs.json", tmp_path / "counts.json"
    pairs.write_text('{"src_target_pairs": [[[0, 1]]]}')
    counts.write_text(
        '[{"send_counts": [1], "send_displs": [0], "recv_counts": [1], "recv_displs": [0]}]'
    )
    earlier = tmp_path / "earlier.json"
    earlier.write_text(
        '{"results": [{"operation": "all_reduce", "type": "fp32", "reduction": "sum", "root": -1, '
        '"in_place": true, "backend": "gloo", "ranks": 2, "size(B)": 8, "time:avg(us)": 3.0, '
        '"busbw(GB/s)": 1.0, "failure": null}]}'
    )
    batch = tmp_path / "batch.txt"
    batch.write_text(
        f"permute --custom-src-target-pairs {pairs} --json 'my $HOME.json' --places\n".replace(
            "--places", "--out-of-place"
        )
        + f"a2av --alltoallv-metadata {counts} -t avg p99/p50\n"
        + f"allr -d fp32 --baseline {earlier} --import {earlier} --tolerance 3% --peak 9\n"
    )
    line = ["--batch", str(batch), "-r", "2", "--comm", "socket_ifname=é\n'", "--seed", "7"]
    line += ["--hosts", "n[1-2]", "-T", "1e9"]
    plan = decode(Batch, _task(*line).argument)
    assert plan == Batch(tuple(read_specs(line)))
    assert plan.specs[0].groups.pairs == ((0, 1),)
    assert plan.specs[2].comparison.baseline is not None
    assert [curve.label for curve in plan.specs[2].output.imported_curves] == [
        "earlier: all_reduce fp32 gloo"
    ]


def test_output_files_are_relocated_on_hosts(tmp_path: Path) -> None:
    batch = tmp_path / "b.txt"
    batch.write_text("allr -J 'my $HOME.json' # said\n\npermute --dump-dir bad --json out.json\n")
    plan = Batch(tuple(read_specs(["--batch", str(batch), "-r", "2", "--json", "out.json"])))
    moved, files = ssh.relocate_plan(plan, "/d")
    here = Path.cwd()
    assert files == {
        "1/bench-failures": here / "bench-failures",
        "2/my $HOME.json": here / "my $HOME.json",
        "3/bad": here / "bad",
        "4/out.json": here / "out.json",
    }
    assert [spec.output.json for spec in moved.specs] == [
        Path("/d/2/my $HOME.json"),
        Path("/d/4/out.json"),
    ]
    # Messages show the user's directory of dumps.
    assert moved.specs[1].check.dump == Path("/d/3/bad")
    assert moved.specs[1].check.dump_shown == here / "bad"
    assert moved.specs[1].placement == plan.specs[1].placement


def test_only_requested_files_are_unpacked(tmp_path: Path) -> None:
    archive = io.BytesIO()
    names = ("./1/x.json", "2/dumps/case/rank_0.pt", "1/.x.json.abc", "2/dumps/../../../evil")
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in (*names, "/1/x.json"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
        link = tarfile.TarInfo("2/dumps/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    archive.seek(0)
    json_file, dumps = tmp_path / "own" / "kept.json", tmp_path / "own" / "dumps"
    json_file.parent.mkdir()
    json_file.write_text("old")
    ssh.unpack(archive, {"1/x.json": json_file, "2/dumps": dumps})
    files = {
        str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert files == {
        "own/kept.json": "./1/x.json",
        "own/dumps/case/rank_0.pt": "2/dumps/case/rank_0.pt",
    }


def test_task_fits_an_environment_variable() -> None:
    task = _task("allr", "-d", "fp32")
    (packed,) = task.to_environment().values()
    assert list(task.to_environment()) == [TASK_VARIABLE]
    assert packed.isascii()
    assert decode(WorkerTask, zlib.decompress(base64.b64decode(packed))) == task
    many = replace(
        task, argument="".join(chr(97 + i * i % 7919 % 26) + str(i * i) for i in range(90000))
    )
    with pytest.raises(ConfigError, match="and mpirun and Slurm hand on"):
        many.to_environment()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"specs": 3}', '{"specs": [{"no_such": 1}]}', '{"specs": [[1]]}']
)
def test_task_of_another_version_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid Batch"):
        decode(Batch, text)


def test_file_missing_on_a_host_raises_unreadable_file_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError):
        parse_spec(["permute", "--custom-src-target-pairs", str(tmp_path / "x.json")])
    line = ["allr", "--baseline", "/no.json", "--json", "/no/x", "--import", "/no.txt"]
    with pytest.raises(ConfigError):
        parse_spec(line)
    # Ranks that write no results do not need the files.
    assert parse_spec(line, writes_results=False).output.json is None


def test_ssh_ranks_have_the_rendezvous_address() -> None:
    environment = {"FLAGSCALE_BENCH_STARTER": "SSH", "RANK": "2", "WORLD_SIZE": "3"}
    rank_variables = {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "7",
    }
    world = detect_world({**environment, **rank_variables})
    assert world == BenchWorld("SSH", 2, 3, 0, 1, address="a", port=7)


def test_host_task_round_trips_through_json() -> None:
    ranks = RankRange(3, 5, "a", 7)
    host_task = HostTask(_task(), 2, ranks, {"NCCL_A": "é\n'"}, "/d", "/s", ("1/x",), logs=True)
    assert decode(HostTask, encode(host_task)) == host_task


_CONFIG = "Host alias\n  HostName 10.0.0.7\n"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--hosts alias b", ("alias", "10.0.0.7")),
        ("--hosts b alias", ("b",)),
        ("--hosts alias b --data-collector-host c", ("c",)),
        ("--hosts alias", ("127.0.0.1",)),
        ("--hosts-file {hosts}", ("10.1.1.1",)),
    ],
    ids=["alias", "name", "given", "alone", "addr"],
)
def test_rendezvous_candidates(tmp_path: Path, line: str, expected: tuple[str, ...]) -> None:
    config, hosts = tmp_path / "config", tmp_path / "hosts"
    config.write_text(_CONFIG)
    hosts.write_text("alias slots=1 addr=10.1.1.1\nb slots=1\n")
    ranks = "" if "-file" in line else "-r 2"
    placement = _parse_placement(f"allr {ranks} --ssh-config {config} {line.format(hosts=hosts)}")
    assert ssh.rendezvous_candidates(placement) == expected


def _prepared_host(machine: str, **addresses: bool) -> PreparedHost:
    return PreparedHost(1, "/tmp/x", machine, 1, addresses)


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ([_prepared_host("x", a=True, b=True), _prepared_host("y", a=True, b=True)], "a"),
        ([_prepared_host("x", b=True), _prepared_host("y", a=True, b=True)], "b"),
        ([_prepared_host("x", a=False), _prepared_host("y", a=True)], "a"),
        ([_prepared_host("x", a=False), _prepared_host("x", a=False)], "a"),
    ],
    ids=["first", "alias", "own-name-is-loopback", "one-machine-twice"],
)
def test_rendezvous_address_resolves_on_every_host(
    hosts: list[PreparedHost], expected: str
) -> None:
    assert ssh.choose_address(("a", "b"), hosts, ["h1", "h2"]) == expected


def test_missing_common_address_is_reported() -> None:
    hosts = [
        _prepared_host("x", b=False),
        _prepared_host("y", b=False),
        _prepared_host("z", a=True),
    ]
    with pytest.raises(UnreachableError) as error_info:
        ssh.choose_address(("a", "b"), hosts, ["h1", "h2", "h3"])
    assert error_info.value.message == (
        "nothing was measured: no rendezvous address of h1: a cannot be resolved on h[1-2]; "
        "b cannot be resolved on h3; b is a loopback address on h2"
    )
    assert "--data-collector-host" in (error_info.value.hint or "")


def test_resolved_addresses_are_marked_as_loopback_or_not() -> None:
    names = ("no-such-name.invalid", "", "127.0.0.1", "::1", "192.0.2.1", "a" * 300)
    assert resolve_addresses(names[2:5]) == {"127.0.0.1": False, "::1": False, "192.0.2.1": True}
    assert not {names[0], names[5]} & {*resolve_addresses(names)}


def test_mpirun_receives_a_resolvable_address() -> None:
    assert ssh.first_resolvable(("no-such-name.invalid", "192.0.2.1")) == "192.0.2.1"
    assert ssh.first_resolvable(("no-such-name.invalid",)) == "no-such-name.invalid"
