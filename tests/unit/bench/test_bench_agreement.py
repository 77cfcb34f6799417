"""Tests of the comparison with nccl-tests: definitions, verdicts, table and figure."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flagscale.bench.agreement import definitions, nccl
from flagscale.bench.agreement.cli import main
from flagscale.bench.agreement.nccl import DATA_TYPES
from flagscale.bench.agreement.verdict import TimePair, conclude, make_table
from flagscale.bench.collectives.operations import DATA_TYPES as BENCH_DATA_TYPES
from flagscale.bench.collectives.operations import OPERATIONS
from flagscale.bench.collectives.sizes import round_to_parts
from flagscale.bench.statistics import Ratio
from flagscale.errors import ConfigError

# Output of nccl-tests on eight GPUs: operation, size, microseconds, algbw, busbw.
_PUBLISHED = [
    ("all_reduce", 1073741824, 5248.3, 204.59, 358.03),
    ("all_gather", 1073741824, 2755.6, 389.66, 340.95),
    ("broadcast", 1048576, 20.0, 52.43, 52.43),
]


@pytest.mark.parametrize(("name", "size", "time", "algbw", "busbw"), _PUBLISHED)
def test_definitions_reproduce_published_output(
    name: str, size: int, time: float, algbw: float, busbw: float
) -> None:
    count = definitions.count_elements(name, 8, size, 4).count
    bandwidths = definitions.compute_bandwidths(name, 8, count, 4, time / 1e6)
    assert bandwidths == pytest.approx((algbw, busbw), rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", definitions.OPERATIONS)
def test_bandwidths_match_nccl_tests(name: str, ranks: int) -> None:
    operation = OPERATIONS[name]
    size = round_to_parts(1_000_000, 4, ranks if operation.has_shards else 1)
    counts = definitions.count_elements(name, ranks, size, 4)
    algbw, busbw = definitions.compute_bandwidths(name, ranks, counts.count, 4, 0.001)
    assert algbw == pytest.approx(size / 1e9 / 0.001)
    assert busbw == pytest.approx(algbw * operation.bus_factor(ranks))
    # A size is the larger of the two buffers.
    assert max(counts.send, counts.receive) * 4 == size


def test_operations_without_nccl_test_are_rejected() -> None:
    with pytest.raises(ConfigError, match="no test of permute"):
        definitions.count_elements("permute", 2, 8, 4)
    with pytest.raises(ConfigError, match="no test of barrier"):
        definitions.compute_bandwidths("barrier", 2, 8, 4, 1.0)


def test_nccl_types_match() -> None:
    assert set(DATA_TYPES) == set(BENCH_DATA_TYPES) - {"int16", "uint16"}


def test_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LIBRARIES", ("libnothing.so.7",))
    with pytest.raises(ConfigError, match=r"none of libnothing\.so\.7 can be loaded"):
        nccl.NcclLibrary()


def _pair(value: float, low: float, high: float) -> TimePair:
    ours, baseline = 100 * value, 100.0
    return TimePair(
        "all_reduce", 1024, ours, baseline, 1 / ours, 1 / baseline, Ratio(value, low, high)
    )


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [
        (_pair(1.02, 0.9, 1.2), "agrees"),
        (_pair(0.98, 0.97, 0.99), "agrees"),
        (_pair(1.05, 1.02, 1.08), "unsure"),
        (_pair(1.05, 1.04, 1.06), "differs"),
        (_pair(0.9, 0.85, 0.95), "differs"),
        # Equal times, but another definition of the bus bandwidth.
        (replace(_pair(1.0, 1.0, 1.0), our_busbw=0.011), "differs"),
    ],
)
def test_verdict_depends_on_the_interval(pair: TimePair, verdict: str) -> None:
    assert pair.verdict(0.03) == verdict
    record = pair.to_json_record(0.03)
    assert record["verdict"] == verdict
    assert {"ours", "bare", "our_busbw", "bare_busbw"} < record.keys()


def test_table_and_conclusion() -> None:
    pairs = [_pair(1.01, 1.0, 1.02), _pair(1.1, 1.0, 1.2), replace(_pair(0.8, 0.7, 0.9), size=4096)]
    lines = make_table(pairs, 0.03)
    assert [line.split()[-1] for line in lines] == ["verdict", "agrees", "unsure", "differs"]
    assert len({len(line.rstrip()) - len(line.split()[-1]) for line in lines}) == 1
    text, all_agree = conclude(pairs, 0.03)
    assert text == (
        "1 of 3 agree within 3.0%, 1 differs, 1 unsure; "
        "the furthest is all_reduce of 4096 B, -20.0% in time"
    )
    assert not all_agree
    assert conclude(pairs[:2], 0.03)[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the number of ranks is missing"),
        ("-r 1", "a single rank sends nothing"),
        ("-r 2 --operations permute", "nccl-tests has all_reduce"),
        ("-r 2 --operations allrduce", "did you mean 'allreduce'"),
        ("-r 2 -d fp32,bf16", "one type at a time"),
        ("-r 2 --rounds 1", "--rounds must be at least 2"),
        ("-r 2 --limit 0", "--limit above 0"),
        ("-r 2 --limt 3", "did you mean --limit?"),
    ],
)
def test_usage_errors_are_reported(
    line: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_stored_result_is_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pair = TimePair("all_reduce", 1024, 10.0, 10.1, 0.1, 0.1, Ratio(1.0, 0.99, 1.01))
    rows = [replace(pair, operation=name, size=size).to_json_record(0.03)
            for name in ("all_reduce", "gather") for size in (1024, 4096)]  # fmt: skip
    result = {"ranks": 2, "device": "NVIDIA H200", "library": "NCCL 2.28.9", "way": "graphs"}
    (tmp_path / "a.json").write_text(json.dumps({**result, "type": "bf16", "rows": rows}))
    assert main(["--import", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]) == 0
    svg = (tmp_path / "a.svg").read_text()
    for words in ("2 ranks, NVIDIA H200, NCCL 2.28.9, graphs, bf16", "gather", "baseline"):
        assert words in svg


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        pytest.param('{"rows": []}', "--plot a.svg", "nothing was measured", id="no-rows"),
        pytest.param("{", "--plot a.svg", "a.json: cannot be read", id="no-json"),
        pytest.param("[]", "--plot a.svg", "expected a result of --json of this", id="another"),
        pytest.param('{"rows": []}', "--plot a.pdf", "ends in .svg or .png", id="ending"),
        pytest.param('{"rows": []}', "", "--plot FILE is missing", id="no-figure"),
    ],
)
def test_invalid_result_is_not_plotted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    line: str,
    message: str,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(text)
    assert main(["--import", "a.json", *line.split()]) == 2
    assert message in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
