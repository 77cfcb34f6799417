"""The benchmark's definitions against nccl-tests', and what two series of times come to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from flagscale.bench.agreement import definitions, nccl
from flagscale.bench.agreement.cli import main
from flagscale.bench.agreement.nccl import DATA_TYPES
from flagscale.bench.agreement.verdict import Pair, conclusion, table
from flagscale.bench.collectives.operations import DATA_TYPES as OURS
from flagscale.bench.collectives.operations import OPERATIONS
from flagscale.bench.collectives.sizes import fit
from flagscale.errors import ConfigError
from flagscale.sample_statistics import Ratio

# What nccl-tests printed on eight GPUs: operation, size, microseconds, algbw, busbw.
_PRINTED = [
    ("all_reduce", 1073741824, 5248.3, 204.59, 358.03),
    ("all_gather", 1073741824, 2755.6, 389.66, 340.95),
    ("broadcast", 1048576, 20.0, 52.43, 52.43),
]


@pytest.mark.parametrize(("name", "size", "time", "algbw", "busbw"), _PRINTED)
def test_printed_figures_follow(
    name: str, size: int, time: float, algbw: float, busbw: float
) -> None:
    count = definitions.counts(name, 8, size, 4).count
    found = definitions.bandwidths(name, 8, count, 4, time / 1e6)
    assert found == pytest.approx((algbw, busbw), rel=1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("name", definitions.OPERATIONS)
def test_our_bandwidths_are_nccl_tests(name: str, ranks: int) -> None:
    operation = OPERATIONS[name]
    size = fit(1_000_000, 4, ranks if operation.parts else 1)
    n = definitions.counts(name, ranks, size, 4)
    algbw, busbw = definitions.bandwidths(name, ranks, n.count, 4, 0.001)
    assert algbw == pytest.approx(size / 1e9 / 0.001)
    assert busbw == pytest.approx(algbw * operation.bus_factor(ranks))
    # A size is the larger of the two buffers.
    assert max(n.send, n.receive) * 4 == size


def test_what_nccl_tests_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="no test of permute"):
        definitions.counts("permute", 2, 8, 4)
    with pytest.raises(ConfigError, match="no test of barrier"):
        definitions.bandwidths("barrier", 2, 8, 4, 1.0)


def test_types_that_nccl_knows_are_ours() -> None:
    assert set(DATA_TYPES) == set(OURS) - {"int16", "uint16"}


def test_an_absent_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "LIBRARIES", ("libnothing.so.7",))
    with pytest.raises(ConfigError, match=r"none of libnothing\.so\.7 can be loaded"):
        nccl.Nccl()


def _pair(value: float, low: float, high: float) -> Pair:
    ours, bare = 100 * value, 100.0
    return Pair("all_reduce", 1024, ours, bare, 1 / ours, 1 / bare, Ratio(value, low, high))


@pytest.mark.parametrize(
    ("pair", "verdict"),
    [
        (_pair(1.02, 0.9, 1.2), "agrees"),
        (_pair(0.98, 0.97, 0.99), "agrees"),
        (_pair(1.05, 1.02, 1.08), "unsure"),
        (_pair(1.05, 1.04, 1.06), "differs"),
        (_pair(0.9, 0.85, 0.95), "differs"),
        # Equal times, another idea of what a bus bandwidth is.
        (replace(_pair(1.0, 1.0, 1.0), our_busbw=0.011), "differs"),
    ],
)
def test_verdicts(pair: Pair, verdict: str) -> None:
    assert pair.verdict(0.03) == verdict
    assert pair.to_json(0.03)["verdict"] == verdict


def test_the_table_and_its_conclusion() -> None:
    pairs = [_pair(1.01, 1.0, 1.02), _pair(1.1, 1.0, 1.2), replace(_pair(0.8, 0.7, 0.9), size=4096)]
    lines = table(pairs, 0.03)
    assert [line.split()[-1] for line in lines] == ["verdict", "agrees", "unsure", "differs"]
    assert len({len(line.rstrip()) - len(line.split()[-1]) for line in lines}) == 1
    text, fine = conclusion(pairs, 0.03)
    assert text == (
        "1 of 3 agree within 3.0%, 1 differs, 1 unsure; "
        "the furthest is all_reduce of 4096 B, -20.0% in time"
    )
    assert not fine
    assert conclusion(pairs[:2], 0.03)[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the number of ranks is missing"),
        ("-r 1", "one rank moves nothing"),
        ("-r 2 --operations permute", "nccl-tests has all_reduce"),
        ("-r 2 --operations allrduce", "did you mean 'allreduce'"),
        ("-r 2 -d fp32,bf16", "one type at a time"),
        ("-r 2 --rounds 1", "--rounds must be at least 2"),
        ("-r 2 --limit 0", "--limit above 0"),
        ("-r 2 --limt 3", "did you mean --limit?"),
    ],
)
def test_mistakes(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err


def test_what_was_kept_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pair = Pair("all_reduce", 1024, 10.0, 10.1, 0.1, 0.1, Ratio(1.0, 0.99, 1.01))
    rows = [replace(pair, operation=name, size=size).to_json(0.03)
            for name in ("all_reduce", "gather") for size in (1024, 4096)]  # fmt: skip
    kept = {"ranks": 2, "device": "NVIDIA H200", "library": "NCCL 2.28.9", "way": "graphs"}
    (tmp_path / "a.json").write_text(json.dumps({**kept, "type": "bf16", "rows": rows}))
    assert main(["--import", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]) == 0
    drawn = (tmp_path / "a.svg").read_text()
    for words in ("2 ranks, NVIDIA H200, NCCL 2.28.9, graphs, bf16", "gather", "baseline"):
        assert words in drawn


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        pytest.param('{"rows": []}', "--plot a.svg", "nothing was measured", id="no-rows"),
        pytest.param("{", "--plot a.svg", "a.json: cannot be read", id="no-json"),
        pytest.param("[]", "--plot a.svg", "expected what --json of this command", id="another"),
        pytest.param('{"rows": []}', "--plot a.pdf", "ends in .svg or .png", id="ending"),
        pytest.param('{"rows": []}', "", "--plot FILE is missing", id="no-figure"),
    ],
)
def test_what_cannot_be_drawn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    text: str,
    line: str,
    said: str,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("a.json").write_text(text)
    assert main(["--import", "a.json", *line.split()]) == 2
    assert said in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
