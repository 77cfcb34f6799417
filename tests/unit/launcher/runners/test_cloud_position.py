"""Position of a host among those that Kubernetes or a cloud's job service has started."""

from __future__ import annotations

from typing import Any

import pytest

from flagscale.config.schema import Runner
from flagscale.errors import ConfigError
from flagscale.launcher.runners.cloud.position import DEFAULT_PORT, Position, find_position

PYTORCH_JOB = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "3",
    "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "8",
    "RANK": "2",
    "WORLD_SIZE": "24",
}
POSITIONS: dict[str, tuple[dict[str, str], dict[str, Any], Position]] = {
    "pytorch-job": (PYTORCH_JOB, {}, Position(2, 3, "job-master-0", 23456)),
    "pytorch-job-processes-of-yaml": (
        {**PYTORCH_JOB, "PET_NPROC_PER_NODE": "auto"},
        {"nproc_per_node": 8},
        Position(2, 3, "job-master-0", 23456),
    ),
    "pytorch-job-one-process": (
        {"MASTER_ADDR": "m", "MASTER_PORT": "1", "RANK": "1", "WORLD_SIZE": "2"},
        {},
        Position(1, 2, "m", 1),
    ),
    "job-set": (
        {"JOB_COMPLETION_INDEX": "0", "NNODES": "2", "MASTER_ADDR": "set-workers-0-0.set"},
        {},
        Position(0, 2, "set-workers-0-0.set", DEFAULT_PORT),
    ),
    "yaml-counts": (
        PYTORCH_JOB,
        {"nnodes": 4, "node_rank": 3, "master_addr": "other", "master_port": 5},
        Position(3, 4, "other", 5),
    ),
    "yaml-resolves-contradiction": (
        {**PYTORCH_JOB, "RANK": "7"},
        {"node_rank": 1},
        Position(1, 3, "job-master-0", 23456),
    ),
    "alone": ({"NNODES": "1"}, {}, Position(0, 1, "localhost", DEFAULT_PORT)),
    "spaces": (
        {"NNODES": " 2 ", "NODE_RANK": "1", "MASTER_ADDR": "m "},
        {},
        Position(1, 2, "m", 29500),
    ),
}


@pytest.mark.parametrize(("environment", "keys", "expected"), POSITIONS.values(), ids=POSITIONS)
def test_position_is_found(
    environment: dict[str, str], keys: dict[str, Any], expected: Position
) -> None:
    assert find_position(Runner(**keys), environment) == expected


PROBLEMS: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "nothing": (
        {},
        (
            "nnodes: `type: cloud` needs the number of hosts: set this key, or one of the "
            "variables NNODES, PET_NNODES, WORLD_SIZE",
            "node_rank: `type: cloud` needs the rank of this host",
            "master_addr: `type: cloud` needs the address of the host with rank 0",
        ),
    ),
    "ranks": (
        {**PYTORCH_JOB, "NODE_RANK": "1"},
        (
            "node_rank: NODE_RANK=1 and PET_NODE_RANK=2 and RANK=2 contradict each other; write "
            "the one that counts, as `node_rank: ${env:NODE_RANK}`",
        ),
    ),
    "counts": (
        {**PYTORCH_JOB, "WORLD_SIZE": "16"},
        ("nnodes: PET_NNODES=3 and WORLD_SIZE=16 contradict each other",),
    ),
    "addresses": (
        {**PYTORCH_JOB, "MASTER_ADDR": "other"},
        ("master_addr: MASTER_ADDR=other and PET_MASTER_ADDR=job-master-0 contradict",),
    ),
    "beyond": (
        {"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "m"},
        ("node_rank: 2 of 2 host(s): ranks count from 0; `nnodes` (NNODES, PET_NNODES, ",),
    ),
    "elastic": (
        {"PET_NNODES": "2:4", "NODE_RANK": "0", "MASTER_ADDR": "m"},
        ("nnodes: expected a whole number not less than 1 in PET_NNODES, found '2:4'",),
    ),
    "none": (
        {"NNODES": "0", "NODE_RANK": "0", "MASTER_ADDR": "m"},
        ("nnodes: expected a whole number not less than 1 in NNODES, found '0'",),
    ),
    "port": (
        {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "m", "MASTER_PORT": "65535"},
        ("master_port: expected a port from 1 to 65534, found 65535",),
    ),
}


@pytest.mark.parametrize(("environment", "messages"), PROBLEMS.values(), ids=PROBLEMS)
def test_missing_or_contradictory_value_is_refused(
    environment: dict[str, str], messages: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        find_position(Runner(), environment)
    problems = [f"{p.key}: {p.message}" for p in error.value.problems]
    assert len(problems) == len(messages)
    for problem, message in zip(problems, messages, strict=True):
        assert f"experiment.runner.{message}" in problem
