"""Checkpoints on an S3 server behind a proxy that injects faults (``make test-storage``)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from integration.checkpoint.checkpoint_lab import LAYOUTS, CheckpointLab, make_case
from s3_lab import BUCKET, FaultProxy, run_fault_proxy, run_s3_server, s3_environment
from support.needs import skip_or_fail

pytestmark = [pytest.mark.integration, pytest.mark.torch]

ROOT = f"s3://{BUCKET}/runs"


@pytest.fixture(scope="module")
def proxy() -> Iterator[FaultProxy]:
    if not (find_spec("s3fs") and find_spec("moto")):
        skip_or_fail("storage", "no s3fs and moto in this environment (make test-storage)")
    with run_s3_server() as server, run_fault_proxy(server.endpoint) as proxy:
        environment = s3_environment(proxy.endpoint)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            yield proxy


@pytest.fixture(scope="module")
def results(proxy: FaultProxy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of cases on two ranks, and then of cases on one."""
    lab = CheckpointLab(tmp_path_factory.mktemp("s3"))

    def flags(name: str, more: str = "") -> str:
        return f"--save {ROOT}/{name} --save-staging-dir {lab.root / name} {more}"

    dp2, pp2 = LAYOUTS["dp2-do"], LAYOUTS["pp2-do"]
    load = f"--load {ROOT}/go-on"
    faults = {"slow_down": 0.1, "internal_error": 0.03, "cut": 0.05, "latency": 0.02}
    lab.add_stage(
        2,
        make_case("faults", "set_faults", dp2, faults=faults),
        make_case(
            "go-on", "save_and_go_on", dp2, flags("go-on", "--async-save --keep-last 1"), steps=3
        ),
        make_case("go-on-pp2", "train_and_save", pp2, load, steps=3),
        make_case("no-faults", "set_faults", dp2, faults={}),
        make_case("denied", "deny_an_upload", dp2, flags("denied", "--async-save")),
    )
    one = LAYOUTS["one-do"]
    lab.add_stage(
        1,
        make_case("before", "set_faults", one, faults={}),
        make_case("weights", "load_single_chunks", one, f"{load} --finetune"),
        make_case("after", "set_faults", one, faults={}),
    )
    return lab.run()


def test_throttling_and_errors_are_survived(results: dict[str, Any]) -> None:
    assert "go-on-pp2" in results, results["stderr"][-4000:]
    resumed, reference = results["go-on-pp2"], results["go-on"]
    assert not reference["warnings"]
    assert resumed["loss"] == pytest.approx(reference["loss"][-3:], abs=2e-4)
    counts = results["no-faults"]["counts"]
    assert counts["slow_down"] > 0 and counts["cut"] > 0


def test_a_denied_upload_costs_one_checkpoint(results: dict[str, Any]) -> None:
    for rank in results["denied"]["ranks"]:
        [warning] = rank["warnings"]
        assert "the checkpoint of iteration 2 was not saved: rank " in warning
        assert "access is denied" in warning
        assert os.environ["AWS_SECRET_ACCESS_KEY"] not in warning
        assert rank["latest"] == 3


def test_weights_are_read_without_the_optimizer(results: dict[str, Any]) -> None:
    assert "error" not in results["weights"], results["weights"]
    read = results["after"]["counts"]["bytes"] - results["before"]["counts"]["bytes"]
    stored = results["denied"]["stored_bytes"]
    # Two moments of Adam and its copy of the weights are not read.
    assert read < 0.6 * stored
