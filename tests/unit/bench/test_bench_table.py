"""Tests of tables, statistics and reports, against the text of the tools' guides."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import replace

import pytest
from support.bench_lines import parse_spec

from flagscale.bench import statistics
from flagscale.bench.collectives.curves import Curve, Point, make_curves
from flagscale.bench.collectives.operations import find_data_type, find_operation
from flagscale.bench.collectives.records import ResultRow
from flagscale.bench.collectives.report import render
from flagscale.bench.collectives.table import NcclTable, make_table


def _row(
    operation_name: str, ranks: int, size: int, type_name: str, time: float, **changes: object
) -> ResultRow:
    operation, data_type = find_operation(operation_name), find_data_type(type_name)
    shard_bytes = size // ranks
    row = ResultRow(
        operation=operation.name,
        type=data_type.name,
        nccl_type=data_type.nccl,
        reduction="sum" if operation.reduces else "none",
        root=-1,
        in_place=not operation.out_of_place,
        backend="gloo",
        ranks=ranks,
        size=size,
        count=size // data_type.bytes,
        input_bytes=shard_bytes if operation.input == "part" else size,
        output_bytes=shard_bytes if operation.output == "part" else size,
        bus_factor=operation.bus_factor(ranks),
        time=time,
    )
    return replace(row, **changes)  # type: ignore[arg-type]


def _render_table(line: str, rows: list[ResultRow]) -> str:
    spec = parse_spec(line.split())
    table = make_table(spec, [t.name for t in spec.types], has_shards=True)
    lines = table.head()
    for row in rows:
        lines += table.lines([row])
    return "\n".join([*lines, *table.foot(rows)])


def _dedent_guide(text: str) -> str:
    return textwrap.dedent(text).strip("\n").replace("<TAB>", "\t")


# Times with more digits than the guide prints, chosen to reproduce its bandwidths.
_ALL_GATHER_TIMES = [(1024, 6.186), (8192, 6.547), (65536, 8.17666), (524288, 23.10782)]


def test_nccom_table_of_all_gather() -> None:
    rows = [_row("allg", 32, size, "fp32", time) for size, time in _ALL_GATHER_TIMES]
    line = "-r 32 --minbytes 1kb --maxbytes 1mb --stepfactor 8 --datatype fp32 --check allg"
    assert (
        _render_table(line, rows).splitlines()[:-1]
        == _dedent_guide(
            """
        size(B)    count(elems)    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)
           1024             256    fp32            6.19           0.17           0.16
           8192            2048    fp32            6.55           1.25           1.21
          65536           16384    fp32            8.18           8.02           7.76
         524288          131072    fp32           23.11          22.69          21.98
        """
        ).splitlines()
    )


def test_nccom_table_with_buffer_sizes() -> None:
    times = [(1024, 6.16), (8192, 6.48), (65536, 8.17), (524288, 23.16)]
    rows = [_row("allg", 32, size, "fp32", time) for size, time in times]
    line = (
        "-r 32 --minbytes 1kb --maxbytes 1mb --stepfactor 8 --datatype fp32 --check allg "
        "--show-input-output-size"
    )
    assert (
        _render_table(line, rows).splitlines()[:3]
        == _dedent_guide(
            """
size(B)    count(elems)    total_input_size(B)    total_output_size(B)    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)
   1024             256                     32                    1024    fp32            6.16           0.17           0.16
   8192            2048                    256                    8192    fp32            6.48           1.26           1.22
        """  # noqa: E501
        ).splitlines()
    )


def test_nccom_table_with_percentiles() -> None:
    times_by_size = {1024: (10.0, 10, 10, 11, 12), 524288: (14.83, 14, 15, 16, 17)}
    names = ("p25", "p50", "p90", "p99")
    rows = [
        _row(
            *("allg", 8, size, "fp32", t[0]),
            statistics={f"time:{n}(us)": float(v) for n, v in zip(names, t[1:], strict=True)},
        )
        for size, t in times_by_size.items()
    ]
    line = "-r 8 -b 1kb -e 1mb -f 8 -d fp32 --stats avg p25 p50 p90 p99 --iters 1000 allg"
    assert (
        _render_table(line, rows).splitlines()[:3]
        == _dedent_guide(
            """
size(B)    count(elems)    type    time:avg(us)    time:p25(us)    time:p50(us)    time:p90(us)    time:p99(us)    algbw(GB/s)    busbw(GB/s)
   1024             256    fp32            10.0              10              10              11              12           0.10           0.09
 524288          131072    fp32           14.83              14              15              16              17          35.35          30.93
        """  # noqa: E501
        ).splitlines()
    )


def test_nccom_table_with_algorithms() -> None:
    rows = [
        _row("allr", 16, 4, "fp32", 299.91, algorithm="mesh"),
        _row("allr", 16, 536870912, "fp32", 9689.51, algorithm="kangaring"),
    ]
    line = "-r 16 allr -b 512mb -e 512mb -d fp32 --show-algorithm"
    assert (
        _render_table(line, rows).splitlines()[:3]
        == _dedent_guide(
            """
  size(B)    count(elems)    type    time:avg(us)    algbw(GB/s)    busbw(GB/s)    algorithm
        4               1    fp32          299.91           0.00           0.00         mesh
536870912       134217728    fp32         9689.51          55.41         103.89    kangaring
        """
        ).splitlines()
    )


def test_nccom_footer_and_wide_columns() -> None:
    rows = [_row("permute", 8, 33554432, "uint8", 894.237)]
    assert _render_table("-r 8 permute", rows) == _dedent_guide(
        """
         size(B)    count(elems)     type    time:avg(us)    algbw(GB/s)    busbw(GB/s)
        33554432        33554432    uint8          894.24          37.52          37.52
        Avg bus bandwidth:<TAB>37.5230GB/s
        """
    )


def test_bandwidths_in_binary_units() -> None:
    rows = [_row("allr", 2, 33554432, "uint8", 768.0)]
    text = _render_table("-r 2 allr --bw-unit GiB", rows)
    # The guide's first example has 40.69, in units of 2**30.
    assert "algbw(GiB/s)" in text
    assert "40.69" in text
    assert text.endswith("Avg bus bandwidth:\t40.6901GiB/s")


def test_failure_replaces_the_numbers_of_a_row() -> None:
    rows = [_row("allr", 2, 33554432, "uint8", math.nan, failure="Failure on rank 1: broken")]
    lines = _render_table("-r 2 allr", rows).splitlines()
    assert lines[1] == "33554432    Failure on rank 1: broken"
    assert lines[-1] == "1 errors found - test failed"


def test_nccl_tests_layout() -> None:
    out = _row("allg", 8, 1048576, "fp32", 33.71, wrong=0)
    rows = [out, replace(out, in_place=True, time=12345.6)]
    table = NcclTable(has_shards=True)
    assert [*table.head(), *table.lines(rows), *table.foot(rows)] == [
        "#",
        "#                                                              out-of-place"
        "                       in-place          ",
        "#       size         count      type   redop    root     time   algbw   busbw #wrong"
        "     time   algbw   busbw #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)       "
        "     (us)  (GB/s)  (GB/s)       ",
        "     1048576         32768     float    none      -1    33.71   31.11   27.22      0"
        "    12346    0.08    0.07      0",
        "# Out of bounds values : 0 OK",
        f"# Avg bus bandwidth    : {(rows[0].busbw + rows[1].busbw) / 2:g} ",
        "#",
    ]


def test_nccl_tests_layout_without_out_of_place_or_check() -> None:
    row = _row("allr", 2, 1024, "bf16", 123.456)
    assert NcclTable(has_shards=False).lines([row]) == [
        "        1024           512  bfloat16     sum      -1      N/A     N/A     N/A    N/A"
        "    123.5    0.01    0.01    N/A"
    ]


def test_flagcx_layout() -> None:
    row = _row("allr", 4, 131072, "fp32", 8623.0)
    spec = parse_spec(["allr", "-r", "4", "--format", "flagcx"])
    assert make_table(spec, ["fp32"], has_shards=False).lines([row]) == [
        "Comm size: 131072 bytes; Elapsed time: 0.008623 sec; Algo bandwidth: 0.015200 GB/s; "
        "Bus bandwidth: 0.022800 GB/s"
    ]


@pytest.mark.parametrize(
    ("op", "ranks", "factor"),
    [
        ("allr", 2, 1),
        ("allr", 8, 1.75),
        ("allg", 8, 0.875),
        ("redsct", 4, 0.75),
        ("alltoall", 4, 0.75),
        ("alltoallv", 2, 0.5),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 8, 1),
        ("reduce", 8, 1),
        ("sendrecv", 8, 1),
        ("permute", 8, 1),
        ("allr", 1, 0),
    ],
)
def test_bus_factors(op: str, ranks: int, factor: float) -> None:
    assert find_operation(op).bus_factor(ranks) == factor


def test_percentiles_interpolate() -> None:
    assert statistics.percentile([4, 1, 3, 2], 50) == 2.5
    assert statistics.percentile([1], 99) == 1
    assert statistics.percentile(list(range(101)), 99) == 99


@pytest.mark.parametrize("name", ["p101", "p", "mean", "p50/", "p50/p99/p1", "", "p5 0"])
def test_unknown_statistics_are_rejected(name: str) -> None:
    assert not statistics.is_statistic(name)


def test_ratio_of_percentiles() -> None:
    statistic = statistics.Statistic("p99/p50")
    assert statistic.heading == "p99/p50"
    assert statistic.value(0, [1.0, 1.0, 3.0]) == pytest.approx(2.96)


@pytest.mark.parametrize(
    ("names", "samples", "warns"),
    [
        (["p99"], 20, True),
        (["p99"], 100, False),
        (["avg", "p50"], 5, False),
        (["p99/p50"], 9, True),
    ],
)
def test_few_samples_for_a_high_percentile_warn(
    names: list[str], samples: int, warns: bool
) -> None:
    assert (
        statistics.warn_about_few_samples(statistics.parse_statistics(names), samples) is not None
    ) is warns


def test_paired_ratio_uses_student_interval() -> None:
    ratio = statistics.paired_ratio([2, 2, 2, 2], [1, 1, 1, 1])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    assert ratio.is_significant
    noisy = statistics.paired_ratio([1.0, 1.2, 0.8, 1.1], [1.0, 1.0, 1.0, 1.0])
    assert noisy.low < 1 < noisy.high
    assert not noisy.is_significant
    # By hand: logs 0, .1823, -.2231, .0953; mean .01362; s .1741; t(3) 3.182.
    assert noisy.low == pytest.approx(math.exp(0.01362 - 3.182 * 0.17414 / 2), rel=1e-3)
    assert statistics.paired_ratio([1], [1]).high == math.inf


def test_comparison_table_separates_backends() -> None:
    spec = parse_spec(["allr", "-d", "fp32", "-b", "1K", "-e", "1K", "--compare", "gloo,fsccl"])
    table = make_table(spec, ["fp32"], has_shards=False, backend_count=2)
    good = _row("all_reduce", 2, 1024, "fp32", 1.024)
    bad = replace(good, backend="fsccl", failure="Failure on rank 1: lost")
    assert table.lines([bad])[0].endswith("    fsccl: Failure on rank 1: lost")
    assert table.foot([good, bad, replace(good, backend="fsccl", time=0.512)]) == [
        "Avg bus bandwidth gloo:\t1.0000GB/s",
        "Avg bus bandwidth fsccl:\t2.0000GB/s",
        "1 errors found - test failed",
    ]


def _render_report(rows: list[ResultRow], curves: list[Curve]) -> str:
    conditions = {
        "config": {"command": ["allr", "-J", "a <b>.json"]},
        "environment": {"date": "2026"},
    }
    return render(rows, curves, ["head <i>"], conditions)


def test_report_has_a_section_per_operation() -> None:
    rows = [_row("all_reduce", 2, size, "fp32", 2.0, peak_share=0.5) for size in (1024, 4096)] + [
        _row("all_gather", 2, 1024, "fp32", 2.0),
        _row("barrier", 2, 0, "uint8", 3.0),
    ]
    imported = Curve("other", (Point(1024, 1.0, 1.0),), imported=True)
    page = _render_report(rows, [*make_curves(rows), imported])
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["all_reduce", "all_gather", "barrier"]
    # A barrier moves no data, so it has no curve.
    assert page.count("<svg") == 4
    first = page[page.index("<h2>all_reduce") : page.index("<h2>all_gather")]
    assert "all_reduce fp32 gloo" in first
    assert "all_gather fp32 gloo" not in first
    assert len(re.findall(r"</i>other <b>", page)) == 4
    assert ">of peak</th>" in first
    assert page.count(">of peak</th>") == 1
    assert "$ flagscale bench collectives allr -J &#x27;a &lt;b&gt;.json&#x27;" in page


def test_failed_size_is_a_row_of_the_report() -> None:
    good = _row("all_reduce", 2, 1024, "fp32", 2.0, wrong=0)
    page = _render_report(
        [good, replace(good, size=4096, failure="Check <failed>")], make_curves([good])
    )
    assert '<td class="bad" colspan="4">Check &lt;failed&gt;</td></tr>' in page
