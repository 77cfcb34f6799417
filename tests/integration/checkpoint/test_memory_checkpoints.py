"""Copies of the training state in host memory: restored exactly in every layout, also on a host
that has lost its memory.
"""

from __future__ import annotations

from typing import Any

import pytest
from integration.checkpoint.checkpoint_lab import LAYOUTS, STEPS, CheckpointLab, Layout, make_case

pytestmark = [pytest.mark.integration, pytest.mark.torch]

OPTION = "--non-persistent-save-interval 1"
FAST = ("one", "dp2-do-overlap", "dp2-sharded", "moe-ep2-sharded", "bf16-dp2-sharded-lean")
SLOW = (
    *("tp2-sp-do", "pp2-vpp2", "bf16-pp2-dp2-sharded", "meshes", "moe-lora-lean-offload"),
    *("bf16-offload", "bf16-dp2-lean", "replicas-pp2-do", "sgd-one", "tied-meshes-do"),
)
FP16 = Layout(2, "--use-distributed-optimizer --fp16 --initial-loss-scale 1048576")
CASES = {**{name: LAYOUTS[name] for name in (*FAST, *SLOW)}, "fp16": FP16}


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    selected = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    lab = CheckpointLab(tmp_path_factory.mktemp("memory"))
    for world in sorted({CASES[name].world for name in selected}):
        names = [name for name in CASES if name in selected and CASES[name].world == world]
        cases = (
            make_case(name, "restore_from_memory", CASES[name], OPTION, steps=STEPS)
            for name in names
        )
        lab.add_stage(world, *cases)
    return lab.run()


@pytest.mark.parametrize(
    "name", [*FAST, "fp16", *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_state_is_restored_exactly(name: str, results: dict[str, Any]) -> None:
    result = results[name]
    assert "error" not in result, result
    for rank in result["ranks"]:
        assert rank["found"] == STEPS
        assert rank["restored"] == rank["expected"]
        assert rank["warnings"] == []
    ranks = CASES[name].world
    origin = f", 1 of {ranks} ranks' from another host" if ranks > 1 else ""
    assert result["memory_report"] == f"loaded iteration {STEPS} from host memory{origin}"
