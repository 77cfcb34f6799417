from __future__ import annotations

import pytest

from flagscale.accelerators.visible import (
    count_automatic_ranks,
    count_visible_devices,
    hides_all_devices,
)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param({}, None, id="none"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0,1"}, 2, id="cuda"),
        pytest.param({"MUSA_VISIBLE_DEVICES": "0, 1 ,2"}, 3, id="other-maker"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "GPU-8a,MIG-3f/1/0"}, 2, id="uuids"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0", "MACA_VISIBLE_DEVICES": "0,1"}, 1, id="fewest"),
        pytest.param({"CUDA_VISIBLE_DEVICES": ""}, None, id="empty-hides-all"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "-1"}, None, id="minus-one"),
        pytest.param({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, 1, id="ends-at-minus-one"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "all"}, None, id="container-variable"),
        pytest.param({"NVIDIA_VISIBLE_DEVICES": "0"}, None, id="container-list"),
        pytest.param({"MY_VISIBLE_DEVICES_X": "0"}, None, id="another-name"),
        pytest.param({"ASCEND_RT_VISIBLE_DEVICES": "4,5"}, 2, id="ascend"),
    ],
)
def test_visible_devices_are_counted(environment: dict[str, str], expected: int | None) -> None:
    assert count_visible_devices(environment) == expected


@pytest.mark.parametrize(
    ("environment", "installed", "expected"),
    [
        ({}, 0, 1),
        ({}, 8, 8),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, 8, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2, 2),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 0, 1),
        ({"CUDA_VISIBLE_DEVICES": ""}, 8, 1),
        ({"MUSA_VISIBLE_DEVICES": "0,1,2"}, 0, 3),
    ],
)
def test_automatic_ranks_match_visible_devices(
    environment: dict[str, str], installed: int, expected: int
) -> None:
    assert count_automatic_ranks(environment, {"cuda": installed}) == expected


@pytest.mark.parametrize(
    ("configured_kind", "environment", "expected"),
    [
        pytest.param("cuda", {}, 8, id="cuda"),
        pytest.param("cuda", {"CUDA_VISIBLE_DEVICES": "0,1"}, 2, id="cuda-some"),
        pytest.param("cuda", {"CUDA_VISIBLE_DEVICES": ""}, 1, id="cuda-hidden"),
        pytest.param("cpu", {}, 8, id="cpu-changes-nothing"),
    ],
)
def test_configured_kind_is_counted(
    configured_kind: str, environment: dict[str, str], expected: int
) -> None:
    assert count_automatic_ranks(environment, {"cuda": 8}, configured_kind) == expected


def test_hides_all_devices() -> None:
    assert hides_all_devices({"CUDA_VISIBLE_DEVICES": ""}, "cuda")
    assert not hides_all_devices({"CUDA_VISIBLE_DEVICES": "0"}, "cuda")
    assert not hides_all_devices({}, "cuda")
