"""Tests of the collectives benchmark's command line, stored results and reports of delays."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.bench_lines import parse_spec

from flagscale.bench.collectives import curves, records
from flagscale.bench.collectives.cli import CollectivesCommand, read_specs
from flagscale.bench.collectives.records import ResultRow, write_csv
from flagscale.bench.collectives.spec import Batch, BenchSpec
from flagscale.bench.collectives.watch import RankHeartbeat, explain_delay
from flagscale.bench.placement import require_local_address
from flagscale.bench.statistics import Ratio
from flagscale.bench.world import usable_cores
from flagscale.errors import ConfigError


@pytest.mark.parametrize(
    "line",
    [
        "-r 2 allr",
        "-r 2 --minbytes 1kb --maxbytes 1gb --stepfactor 4 --datatype fp32 allr",
        "-r 32 --minbytes 1kb --maxbytes 1mb --stepfactor 8 --datatype fp32 --check allg",
        "-r 8 -b 1kb -e 1mb -f 8 --datatype fp32 --stats avg p25 p50 p90 p99 --iters 1000 allg",
        "-r 16 allr -b 4 -e 1gb -f 16 -d fp32 --show-algorithm",
        "-r 64 -N 2 -b 8 -e 1GB -f 2 -n 50 -w 5 -d fp32 allr --hosts 127.0.0.1 10.1.4.138",
        "-r 64 -N 2 allr --slurm-mode --slurm-job-id 12345",
        "all_reduce -b 128K -e 4G -f 2 -p 1",
        "all_reduce -b 128K -e 4G -f 2 -w 5 -n 100 -p 1",
        "all_reduce -b 8 -e 128M -f 2 -g 1 -c 1 -G 10 -m 2 -a 3 -z 1 -C 1 -R 2 -o max",
        "allr -n 15 -w 5 -I 10 -W 5 --unique-buff --coalesced-cc-size-ratio [1,2,1]",
        "allr --sb2sb --input-shape [1,1][2,2] --cc-dim 1 -t p50 p99/p50",
    ],
)
def test_command_lines_of_other_tools_parse(line: str) -> None:
    assert parse_spec(line.split()).operations


def test_flags_reach_the_specification() -> None:
    spec = parse_spec(
        [
            "allr,allg",
            "-d",
            "float,half",
            "-o",
            "max,min",
            "-n",
            "7",
            "-w",
            "2",
            "-I",
            "3",
            "-W",
            "1",
            "-c",
            "all_ones",
        ]
    )
    assert [op.name for op in spec.operations] == ["all_reduce", "all_gather"]
    assert [t.name for t in spec.types] == ["fp32", "fp16"]
    assert spec.reductions == ("max", "min")
    iterations = spec.iterations
    assert (
        iterations.measured,
        iterations.warmup,
        iterations.replays,
        iterations.replay_warmup,
    ) == (7, 2, 3, 1)
    assert spec.check.mode == "all_ones"
    labels = [case.label for case in spec.cases(4)]
    assert labels[0] == "all_reduce fp32 max"
    assert len(labels) == 2 * 2 + 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the operation is missing"),
        ("allrduce", "did you mean 'allreduce'?"),
        ("allr extra", "unexpected argument extra"),
        ("allr --stepfacto 2", "did you mean --stepfactor?"),
        ("allr -n", "expected one argument"),
        ("allr -n x", "invalid int value: 'x'"),
        ("allr -n 0", "-n/--iters 0; expected at least 1"),
        ("allr -w -1", "-w/--warmup_iters -1"),
        ("allr -W 2", "needs -I"),
        ("allr -b 12Q", "'12Q' is not a size"),
        ("allr -b 2 -e 1", "is above"),
        ("allr -b 0 -e 8 -i 4", "no data would be moved"),
        ("allr -b 1 -e 9 -i 1 -f 2", "exclude each other"),
        ("allr -b 1 -e 9 -f 1", "never reach the end"),
        ("allr -b 1 -e 9 -f nan", "not finite"),
        ("allr -d fp33", "did you mean 'fp32'?"),
        ("allr -o add", "expected sum, prod"),
        ("allr -c maybe", "unexpected argument maybe"),
        ("allr --check=maybe", "-c/--check 'maybe'"),
        ("allr -t p50 p999", "unexpected argument p999"),
        ("allr -t p999", "'p999' is not known"),
        ("allr -t", "needs at least one"),
        ("allr --root x", "is not a rank"),
        ("allr --root -2", "is not a rank"),
        ("allr -r 0", "-r/--nworkers 0"),
        ("allr -r 5 -N 2", "cannot be divided equally"),
        ("allr -g 2", "each rank uses one GPU"),
        ("allr -T 0", "-T/--timeout 0"),
        ("allr -a 4", "expected 0, 1, 2 or 3"),
        ("allr -z 2", "expected 0 or 1"),
        ("allr --backend ncll", "--backend: 'ncll' is not a known backend; did you mean 'nccl'?"),
        ("allr --backend ncll --comm a=1", "--backend: 'ncll' is not a known backend"),
        ("allr --compare gloo", "expected two backends"),
        ("allr --compare gloo,nope", "--compare: 'nope' is not a known backend"),
        ("allr --tolerance lots", "expected a share"),
        ("allr --baseline /nowhere.json", "--baseline /nowhere.json: cannot be read: No such file"),
        ("allr --import /nowhere.txt", "--import /nowhere.txt: cannot be read: No such file"),
        ("allr --plot curve.gif", "expected a file that ends in .svg or .png"),
        ("allr --report /nowhere/x.html", "its directory does not exist"),
        ("allr --json /", "--report-to-json-file /: this is a directory; expected a file"),
        ("allr --json /proc/x.json", "--report-to-json-file /proc/x.json: cannot be written: No"),
        ("allr --baseline /", "--baseline /: cannot be read: Is a directory"),
        ("allr --baseline /dev/null", "--baseline /dev/null: not a result of"),
        ("allr --import /dev/null", "--import /dev/null: no results in it"),
        ("allr --coalesced-cc-size-ratio [1,0]", "expected such as [1,2,1]"),
        ("allr --coalesced-cc-size-ratio []", "expected such as [1,2,1]"),
        ("allr --shared-output-buff", "needs --unique-buff"),
        ("allr --in-place --out-of-place", "not allowed with"),
        ("allr --hosts a --slurm-mode", "exclude each other"),
        ("allr -S --slurm-job-id 7x", "--slurm-job-id '7x'; expected a number"),
        ("allr -S --slurm-wait 0", "--slurm-wait 0; expected seconds above 0"),
        ("allr --hosts-file /nowhere", "No such file"),
        ("permute --custom-src-target-pairs /nowhere", "No such file"),
        ("allr --csv /nowhere/x.csv", "--csv /nowhere/x.csv: its directory does not exist"),
        ("allr --seed -1", "expected 0 to"),
        ("allr --data-parallel-dimension 0", "expected at least 1"),
    ],
)
def test_usage_errors_name_the_flag(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_spec(line.split())
    assert message in str(error.value)
    assert "distributed_backend" not in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bcast --root 4", "--root 4: a group has only 4 ranks"),
        ("allr -d int16", "torch has no sum of int16"),
        ("allr -d fp32 --out-of-place", "does not support it for these types"),
        ("alltoall --in-place", "does not support it for these types"),
        ("allr -d int32 -o avg", "torch has no avg of int32"),
        ("allr -d uint64 -o max", "torch has no max of uint64"),
    ],
)
def test_unsupported_cases_are_rejected(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(parse_spec(line.split()).cases(4))


@pytest.mark.parametrize(
    ("line", "notes"),
    [
        ("allr -d uint16,fp32", ["omitted, because torch does not support it: sum of uint16"]),
        (
            "allr,allg -d uint32 -o min,sum",
            ["omitted, because torch does not support it: min of uint32"],
        ),
        ("allg -d uint16,fp32", []),
        ("allr -d all", []),
        ("allr -d fp32,int32", []),
        (
            "allr --custom-src-target-pairs {file}",
            ["--custom-src-target-pairs: has no effect without permute"],
        ),
        ("permute,allr --custom-src-target-pairs {file}", []),
        ("allr --root 1", ["--root: has no effect without a rooted operation"]),
        ("allr,bcast --root 1", []),
        ("allr -k 4", ["--kernel-num: has no meaning on this device"]),
        (
            "allr -S --slurm-setup-script default",
            ["--slurm-setup-script default: has no effect; nothing needs to be installed"],
        ),
    ],
)
def test_flags_without_effect_produce_notes(tmp_path: Path, line: str, notes: list[str]) -> None:
    file = tmp_path / "pairs.json"
    file.write_text('{"src_target_pairs": [[0, 1]]}')
    assert list(parse_spec(line.format(file=file).split()).notes) == notes


def test_many_more_ranks_than_cores_require_oversubscribe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[int] = []
    monkeypatch.setattr(
        CollectivesCommand, "start_here", lambda _, plan, ranks: started.append(ranks) or 0
    )
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert CollectivesCommand().main(["allr", "-r", "100000"]) == 2
    error_output = capsys.readouterr().err
    assert (
        f"100000 ranks on this machine, which has {usable_cores()} cores; at most " in error_output
    )
    assert "--oversubscribe" in error_output
    assert CollectivesCommand().main(["allr", "-r", "32"]) == 0
    assert CollectivesCommand().main(["allr", "-r", "100000", "--oversubscribe"]) == 0
    assert started == [32, 100_000]


def test_every_root_and_both_buffer_placements() -> None:
    spec = parse_spec(["bcast,allg", "--root", "-1", "--both-places"])
    labels = [case.label for case in spec.cases(2)]
    assert labels == [
        "broadcast uint8 root 0",
        "broadcast uint8 root 1",
        "all_gather uint8",
        "all_gather uint8 in place",
    ]


def test_batch_reads_all_lines_and_reports_the_invalid_line(tmp_path: Path) -> None:
    file = tmp_path / "a 'batch'.txt"
    file.write_text("# a comment\n\nallr -d fp32 # four bytes\nallg -b 1K -e 1K\n")
    specs = read_specs(["--batch", str(file), "-r", "3"])
    assert [spec.placement.ranks for spec in specs] == [3, 3]
    file.write_text("allr\nallr -d x\n")
    with pytest.raises(ConfigError, match=r":2: .*datatype 'x'"):
        read_specs(["--batch", str(file)])
    file.write_text("# nothing\n")
    with pytest.raises(ConfigError, match="no command line in it"):
        read_specs(["--batch", str(file)])
    file.write_text("allr\nallr 'x\n")
    with pytest.raises(ConfigError, match=":2: No closing quotation"):
        read_specs(["--batch", str(file)])
    file.write_text("allr --batch other.txt\n")
    with pytest.raises(ConfigError, match=r":1: --batch other\.txt: not supported in a batch"):
        read_specs(["--batch", str(file)])


def _row(**changes: Any) -> ResultRow:
    values: dict[str, Any] = {
        "operation": "all_reduce",
        "type": "fp32",
        "nccl_type": "float",
        "reduction": "sum",
        "root": -1,
        "in_place": True,
        "backend": "gloo",
        "ranks": 2,
        "size": 1024,
        "count": 256,
        "input_bytes": 1024,
        "output_bytes": 1024,
        "bus_factor": 1.0,
        "time": 10.0,
    }
    return ResultRow(**{**values, **changes})


def test_only_slower_rows_fail_the_baseline(tmp_path: Path) -> None:
    path = tmp_path / "base.json"
    records.write_json(path, [_row(), _row(size=2048)], {"config": {}}, complete=True)
    baseline = records.read_baseline(path)
    assert records.compare_with_baseline([_row(time=10.4)], baseline, 0.05) == (1, [])
    assert records.compare_with_baseline([_row(time=1.0)], baseline, 0.05) == (1, [])
    compared, worse = records.compare_with_baseline(
        [_row(time=11.0), _row(size=4096, time=99.0)], baseline, 0.05
    )
    assert compared == 1
    assert "11.00 us, 10.00 us before (+10.0%, tolerance 5.0%)" in worse[0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"results": [{}]}', '{"results": 3}'])
def test_invalid_baseline_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "base.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a result"):
        records.read_baseline(path)


def test_csv_has_a_line_per_result(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    write_csv(path, [_row(time=2.0), _row(time=1.0, ratio=Ratio(0.5, 0.4, 0.6), spread=(0.9, 1.1))])
    with path.open(newline="") as file:
        first, second = csv.DictReader(file)
    assert (first["time:avg(us)"], first["time_ratio:value"]) == ("2.0", "")
    assert (second["time_ratio:value"], second["time:p75(us)"]) == ("0.5", "1.1")
    assert first["operation"] == second["operation"] == "all_reduce"


@pytest.mark.parametrize(
    ("ratio", "words"),
    [
        (Ratio(0.005, 0.004, 0.00625), "200 times as fast (160 to 250)"),
        (Ratio(0.5, 0.0, math.inf), "2 times as fast (0 to inf)"),
        (Ratio(1.25, 1.0, 1.5), "1.25 times as long (1 to 1.5)"),
    ],
)
def test_ratio_description(ratio: Ratio, words: str) -> None:
    assert ratio.description == words


@pytest.mark.parametrize(
    ("line", "environment", "message"),
    [
        ("--comm clusters=9,9", "", "clusters=9,9: the sizes add up to 18, and there are 2"),
        ("", "1", "clusters=1: the sizes add up to 1, and there are 2 rank"),
        ("--comm clusters=1,1", "", ""),
        ("--comm clusters=1,1", "9,9", ""),
        ("", "", ""),
    ],
)
def test_clusters_must_fit_the_ranks(
    monkeypatch: pytest.MonkeyPatch, line: str, environment: str, message: str
) -> None:
    monkeypatch.setenv("FSCCL_CLUSTERS", environment)
    batch = Batch((parse_spec(f"allr --backend fsccl {line}".split()),))
    if not message:
        batch.check(2)
        return
    with pytest.raises(ConfigError, match=message):
        batch.check(2)


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        (None, True),
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("192.0.2.1", False),
        ("no such", False),
    ],
)
def test_local_ranks_need_a_local_rendezvous_address(address: str | None, is_local: bool) -> None:
    if is_local:
        require_local_address(address)
        return
    with pytest.raises(ConfigError, match=f"host {address}: not an address of this machine"):
        require_local_address(address)


def test_json_has_the_keys_of_nccom_test(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    records.write_json(path, [_row()], {"config": {"a": 1}}, complete=False)
    data = json.loads(path.read_text())
    assert list(data["results"][0])[:6] == [
        *("size(B)", "count(elems)", "type", "algbw(GB/s)", "busbw(GB/s)", "time:avg(us)"),
    ]
    assert data["complete"] is False
    assert data["config"] == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_only_allowed_variables_are_stored() -> None:
    environment = {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
        "NCCL_API_KEY": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "WANDB_API_KEY": "secret",
        "HOME": "/home/me",
        "PATH": "/bin",
    }
    assert records.select_variables(environment) == {
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "1",
    }


_NCCL_TEXT = """\
# nThread 1 nGpus 8 minBytes 1024 maxBytes 2048 step: 2(factor) warmup iters: 5 iters: 20
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
        1024           256     float     sum      -1    13.00    0.08    0.14      0    12.00    0.09    0.15      0
        2048           512     float     sum      -1      N/A     N/A     N/A    N/A    14.00    0.15    0.26    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 0.18
"""  # noqa: E501
_OLD_NCCOM = """\
   size(B)    count(elems)    type    time(us)    algbw(GB/s)    busbw(GB/s)
      1024             256    fp32          58           1.00           1.00
Avg bus bandwidth:\t1.0000GB/s
"""
_FLAGCX = (
    "Comm size: 131072 bytes; Elapsed time: 0.000015 sec; Algo bandwidth: 8.731905 GB/s; "
    "Bus bandwidth: 8.731905 GB/s\n"
)
_NCCL_JSON = json.dumps(
    {"results": [{"size": 8, "out_of_place": {"time": 3.0, "alg_bw": 1.0, "bus_bw": 2.0}}]}
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            _NCCL_TEXT,
            {
                "other: out of place": [(1024, 13.0, 0.14)],
                "other: in place": [(1024, 12.0, 0.15), (2048, 14.0, 0.26)],
            },
        ),
        (_OLD_NCCOM, {"other: nccom-test": [(1024, 58.0, 1.073741824)]}),
        (
            _OLD_NCCOM.replace("time(us)", "time:avg(us)"),
            {"other: nccom-test": [(1024, 58.0, 1.0)]},
        ),
        (_FLAGCX, {"other: FlagCX": [(131072, 15.0, 8.731905)]}),
        (_NCCL_JSON, {"other: out of place": [(8, 3.0, 2.0)]}),
    ],
    ids=["nccl-tests", "nccom-test-binary", "nccom-test", "flagcx", "nccl-tests-json"],
)
def test_output_of_other_tools_is_imported(
    tmp_path: Path, text: str, expected: dict[str, Any]
) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text)
    points = {
        c.label: [(p.size, pytest.approx(p.time), pytest.approx(p.busbw)) for p in c.points]
        for c in curves.read_results(path)
    }
    assert points == expected


@pytest.mark.parametrize(
    "text", ["", "hello\n", "[1]", '{"results": []}', '{"results": [{"x": 1}]}']
)
def test_file_without_results_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--import"):
        curves.read_results(path)


def _heartbeats(*beats: RankHeartbeat) -> dict[int, RankHeartbeat | None]:
    return {beat.rank: beat for beat in beats}


def test_silent_slow_and_absent_ranks_are_reported() -> None:
    waiting = RankHeartbeat(0, "h", 1, 100.0, "all_reduce", 3, 7)
    silent = RankHeartbeat(1, "h", 2, 90.0, "all_reduce", 3, 7)
    explanation = explain_delay(_heartbeats(waiting, silent), 100.0)
    assert explanation.startswith("rank 1 (host h, process 2) has been silent for 10 s")
    behind = RankHeartbeat(1, "h", 2, 100.0, "all_gather", 2, 9)
    assert explain_delay(_heartbeats(waiting, behind), 100.0) == (
        "rank 1 (host h, process 2) is behind: all_gather, iteration 9"
    )
    assert explain_delay({0: waiting, 1: None}, 100.0) == "rank 1 was never heard"
    assert "all ranks wait in all_reduce" in explain_delay(
        _heartbeats(waiting, RankHeartbeat(1, "h", 2, 100.0, "all_reduce", 3, 7)), 100.0
    )


def test_equal_command_lines_give_equal_specs() -> None:
    first, second = (parse_spec(["allr", "--seed", "1"]) for _ in range(2))
    assert isinstance(first, BenchSpec)
    assert first == second
    assert hash(first) == hash(second)
