"""Tests of the command that measures pipelined schedules: table, parameters, usage errors."""

from __future__ import annotations

import pytest

from flagscale.bench.collectives.operations import find_data_type
from flagscale.bench.pipeline.cli import (
    PipelinePlan,
    PipelineRow,
    Schedule,
    format_heading,
    format_row,
    main,
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "FSCCL_ONE_SHOT_BYTES"):
        monkeypatch.delenv(name, raising=False)


def make_plan(schedule: Schedule, unit: str) -> PipelinePlan:
    return PipelinePlan((schedule,), (1 << 30,), find_data_type("fp32"), 10, 10, 50, "cpu", unit)


def test_table_has_the_published_format() -> None:
    """Check against times and bandwidths that the authors of the schedules published for 8 A100."""
    schedule = Schedule("all_gather", 4, 262144)
    row = PipelineRow("all_gather", 4, 262144, 1073741824, 4376.92, 3999.74)
    assert [*format_heading(schedule, make_plan(schedule, "GiB"), 8), format_row(row, "GiB")] == [
        "############################################ Allgather "
        "############################################",
        "nranks=8",
        "k=4, nelem_per_send=262144, scratch_size=8388608, dtype=fp32",
        "check_iters=10, warmup_iters=10, iters=50",
        "",
        "             size(B)        avg_time(us)        min_time(us)    avg_algbw(GiB/s)"
        "    max_algbw(GiB/s)",
        "          1073741824             4376.92             3999.74              228.47"
        "              250.02",
    ]
    assert format_row(row, "GB").split()[3:] == ["245.32", "268.45"]


@pytest.mark.parametrize(
    ("operation", "factor"), [("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_reduce", 1.5)]
)
def test_bus_bandwidth(operation: str, factor: float) -> None:
    assert PipelineRow(operation, 1, 1, 10**9, 1e6, 1e6).busbw(4) == pytest.approx(factor)


def test_heading_without_pipeline_omits_parameters() -> None:
    schedule = Schedule("all_reduce", 0, 32768)
    assert "k=" not in "".join(format_heading(schedule, make_plan(schedule, "GB"), 2))
    assert schedule.label == "all_reduce without a pipeline"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the number of ranks is missing"),
        (["-r", "1"], "-r 1; expected at least 2"),
        (["-r", "2", "--ops", "all_gahter"], "did you mean 'all_gather'?"),
        (["-r", "2", "--ops", "all_gather,"], "expected values with commas between them"),
        (["-r", "2", "-k", "65"], "-k '65'; expected a whole number from 0 to 64"),
        (["-r", "2", "-k", "two"], "-k 'two'; expected a whole number"),
        (["-r", "2", "-k", "-1"], "-k"),
        (["-r", "2", "--nelem", "0"], "--nelem-per-send '0'; expected a whole number from 1"),
        (["-r", "2", "--nelem", "1e6"], "--nelem-per-send '1e6'"),
        (["-r", "2", "--sizes", "1X"], "'1X' is not a size"),
        (["-r", "2", "--sizes", "64M,32K"], "--sizes 32K: buffers up to 32K go in one step"),
        (["-r", "2", "-b", "2M", "-e", "1M"], "is above -e/--maxbytes 1M"),
        (["-r", "2", "-b", "1M", "-e", "2M", "-f", "1"], "would never reach the end"),
        (["-r", "2", "-d", "fp31"], "did you mean"),
        (["-r", "2", "--iters", "0"], "--iters of at least 1"),
        (["-r", "2", "--check-iters", "-1"], "at least 0"),
        (["-r", "2", "--plot", "a plot.pdf"], "--plot a plot.pdf: expected a file that ends in"),
        (["-r", "2", "--bw-unit", "MB"], "invalid choice: 'MB'"),
        (["-r", "2", "--nelem-per-sned", "4"], "did you mean --nelem-per-send?"),
        (["-r", "2", "all_reduce"], "unexpected argument all_reduce"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else None,
)
def test_usage_errors_name_the_flag(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err


def test_invalid_variable_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FSCCL_ONE_SHOT_BYTES", "32K")
    assert main(["-r", "2"]) == 2
    assert "FSCCL_ONE_SHOT_BYTES '32K'; expected a whole number" in capsys.readouterr().err


def test_help_has_examples_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--help"])
    help_text = capsys.readouterr().out
    assert exit_info.value.code == 0
    assert "in sends of nelem_per_send elements" in help_text
    assert "flagscale bench pipeline -r 8 --sizes 1G --bw-unit GiB" in help_text
    assert "exit codes: 0 ok, 1 a result is wrong" in help_text
