"""Hardware check of this machine's GPUs: what NVML reports, and all measurements over NCCL.

pytest -m gpu tests/gpu/test_health_on_gpus.py
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from flagscale.accelerators.rates import COPY_FROM_HOST, COPY_TO_HOST, MATRIX_PRODUCT, MEMORY_COPY
from flagscale.health.names import ALL_REDUCE, EXCHANGE
from flagscale.health.rows import to_json
from flagscale.health.session import HealthTarget, check_health
from flagscale.hosts.connection import Endpoint
from flagscale.hosts.fan_out import Hosts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

GPUS = torch.cuda.device_count()
DEVICE_CHECKS = {MATRIX_PRODUCT, MEMORY_COPY, COPY_TO_HOST, COPY_FROM_HOST}


def check(*visible: str) -> dict[str, object]:
    """Check this machine as one host for each list of visible GPUs."""
    names = [f"part{number}" for number in range(len(visible))]
    targets = [
        HealthTarget(name, "cuda", "127.0.0.1", {"CUDA_VISIBLE_DEVICES": (gpus,)})
        for name, gpus in zip(names, visible, strict=True)
    ]
    with Hosts([Endpoint(name, "local") for name in names], {}) as hosts:
        return to_json(check_health(hosts, targets))


def test_every_gpu_is_measured() -> None:
    record = check(",".join(map(str, range(GPUS))))
    (host,) = record["hosts"]  # type: ignore[misc]
    expected = DEVICE_CHECKS | ({ALL_REDUCE} if GPUS > 1 else set())
    assert [set(device["rates"]) for device in host["devices"]] == [expected] * GPUS
    for device in host["devices"]:
        assert device["problem"] == ""
        if find_spec("pynvml") is not None:
            assert device["state"]["unread"] == ""
            assert device["state"]["widths"]["PCIe width"] > 0


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_gpus_exchange_data_as_hosts() -> None:
    record = check(*map(str, range(GPUS)))
    for host in record["hosts"]:  # type: ignore[attr-defined]
        assert host["pairs"]
        assert not any(pair["problem"] for pair in host["pairs"]), host
    checks = {comparison["check"] for comparison in record["comparisons"]}  # type: ignore[attr-defined]
    assert checks == {*DEVICE_CHECKS, EXCHANGE}
