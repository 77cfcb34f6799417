"""Checkpoints of real training steps: resumed, resharded, damaged, refused."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from integration.checkpoint.checkpoint_lab import (
    DO,
    LAYOUTS,
    STEPS,
    Lab,
    Layout,
    case,
    checkpoint_names,
)
from support.needs import explain_no_compiler

pytestmark = [pytest.mark.integration, pytest.mark.torch]

SAME = tuple(LAYOUTS)
RESHARD = (
    ("one", "tp2"),
    ("one", "pp2-vpp2"),
    ("one-do", "dp2-do"),
    ("tp2", "pp2"),
    ("tp2", "dp2"),
    ("tp2", "one"),
    ("pp2", "tp2"),
    ("pp2-vpp2", "dp2"),
    ("dp2", "tp2"),
    ("dp2-do", "tp2-sp-do"),
    ("dp2-do", "pp2-do"),
    ("tp2-sp-do", "pp2-do"),
    ("tp2-sp-do", "one-do"),
    ("pp2-do", "dp2-do-overlap"),
    ("dp2-do", "compiled-tp2-do"),
    ("compiled-tp2-do", "one-do"),
    ("dp2-do-overlap", "one-do"),
    ("tied-pp2", "tied-one"),
    ("moe-one", "moe-grouped"),
    ("moe-ep2-do", "moe-grouped-ep2-do"),
    ("moe-grouped-ep2-do", "moe-ep2-do"),
    ("dp2-do", "cp2-do"),
    ("tied-meshes-do", "tied-pp2-do"),
    ("tied-pp2-do", "tied-meshes-do"),
    ("tied-meshes-do", "tied-meshes-turned-do"),
    ("meshes", "one"),
    ("dp2-do", "replicas-pp2-do"),
    ("replicas-pp2-do", "tp2-sp-do"),
    ("tp2", "meshes"),
    ("moe-meshes-do", "moe-last-one-do"),
    ("moe-last-one-do", "moe-meshes-do"),
    ("mtp-meshes-do", "mtp-pp2-do"),
    ("mtp-pp2-do", "mtp-meshes-do"),
    ("moe-one", "moe-ep2"),
    ("bert-tp2-sp-do", "bert-pp2-do"),
    ("sgd-one", "sgd-tp2"),
    ("meshes-vpp2-do", "pp2-do"),
    ("tp2-sp-do", "meshes-vpp2-do"),
    ("meshes-cp2-do", "meshes-vpp2-do"),
    ("dp2-do", "meshes-cp2-do"),
    ("moe-meshes-ep2-do", "moe-ep2-do"),
    ("moe-ep2-do", "moe-meshes-ep2-do"),
)
SLOW = {
    *("meshes", "tied-meshes-turned-do", "meshes-vpp2-do", "meshes-cp2-do", "moe-meshes-ep2-do"),
    *("moe-meshes-do", "moe-last-one-do", "moe-grouped-ep2-do", "moe-grouped", "tied-pp2"),
    *("dp2", "pp2", "cp2-do", "bert-pp2-do", "sgd-one", "sgd-tp2"),
    *("mtp-meshes-do", "mtp-pp2-do"),
}
"""Layouts that seldom find what others do not."""


# --- resume and resharding ------------------------------------------------------------------


def mark_slow(names: Iterable[str]) -> list[Any]:
    """Return parameters of tests, marked slow if a layout is."""
    return [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in names]


def layout_pairs() -> list[Any]:
    """Return parameters of tests with a source and a target layout, marked slow if one is."""
    return [
        pytest.param(*pair, id="-".join(pair), marks=[pytest.mark.slow] if SLOW & {*pair} else [])
        for pair in RESHARD
    ]


def requested_layouts(request: pytest.FixtureRequest) -> set[tuple[str, str]]:
    """Return the source and target layouts that the selected tests need."""
    here = (item for item in request.session.items if item.path == request.path)
    parameters = [one.params for item in here if (one := getattr(item, "callspec", None))]
    names = {(item["name"], item["name"]) for item in parameters if item.get("name") in LAYOUTS}
    names |= {(item["source"], item["target"]) for item in parameters if "source" in item}
    return names | {("one", "one")}


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Train each requested layout for six steps, with a checkpoint after three.

    Three more steps from that checkpoint are run by the same and by other layouts.
    """
    # The operations of gloo, of which tensor-parallel steps have hundreds, take half of the time.
    backend = "gloo" if explain_no_compiler() else "fsccl"
    lab = Lab(tmp_path_factory.mktemp("checkpoints"), backend=backend)
    requested = sorted(requested_layouts(request))
    layouts = {name: LAYOUTS[name] for pair in requested for name in pair}
    worlds = sorted({layout.world for layout in layouts.values()})
    saves: dict[int, list[dict[str, Any]]] = {world: [] for world in worlds}
    loads: dict[int, list[dict[str, Any]]] = {world: [] for world in worlds}
    for name, layout in layouts.items():
        save = f"--save {lab.root / name}"
        saves[layout.world].append(
            case(f"{name} whole", "save_and_go_on", layout, save, steps=STEPS)
        )
    for source, target in requested:
        layout = LAYOUTS[target]
        loads[layout.world].append(
            case(f"{source} > {target}", "train_and_save", layout, f"--load {lab.root / source}",
                 steps=STEPS)
        )  # fmt: skip
    for cases in (saves, loads):
        for world in worlds:
            lab.stage(world, *cases[world])
    return lab.run()


def continued(trained: dict[str, Any], name: str) -> dict[str, Any]:
    assert name in trained, trained["stderr"][-4000:]
    results: dict[str, Any] = trained[name]
    assert "error" not in results, results["error"]
    return results


@pytest.mark.parametrize("name", mark_slow(SAME))
def test_a_resumed_run_equals_the_uninterrupted_one(name: str, trained: dict[str, Any]) -> None:
    whole = continued(trained, f"{name} whole")
    resumed = continued(trained, f"{name} > {name}")
    assert resumed["progress"] == whole["progress"]
    assert "without" not in resumed["report"]
    for quantity in ("loss", "norm"):
        assert resumed[quantity] == pytest.approx(whole[quantity][STEPS:], abs=1e-6), quantity


@pytest.mark.parametrize("name", [name for name in SAME if name.startswith("bert")])
def test_a_resumed_run_equals_it_to_the_bit(name: str, trained: dict[str, Any]) -> None:
    """The masked tokens are the same as well."""
    whole = continued(trained, f"{name} whole")
    assert continued(trained, f"{name} > {name}")["loss"] == whole["loss"][STEPS:]


@pytest.mark.parametrize(("source", "target"), layout_pairs())
def test_another_layout_goes_on_where_one_stopped(
    source: str, target: str, trained: dict[str, Any]
) -> None:
    whole = continued(trained, f"{target} whole")
    resumed = continued(trained, f"{source} > {target}")
    assert resumed["report"].startswith(f"iteration {STEPS} from ")
    for quantity in ("loss", "norm"):
        assert resumed[quantity] == pytest.approx(whole[quantity][STEPS:], rel=1e-5, abs=1e-5), (
            quantity
        )


def test_the_optimizers_state_matters(trained: dict[str, Any]) -> None:
    """Steps after the checkpoint change the loss by far more than the tolerances above."""
    losses = continued(trained, "one whole")["loss"]
    assert max(abs(b - a) for a, b in pairwise(losses)) > 0.01


# --- what is kept, what is found, what is refused -------------------------------------------


@pytest.fixture(scope="module")
def handled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    lab = Lab(tmp_path_factory.mktemp("handled"))
    root, dp2, case_ = lab.root, LAYOUTS["dp2-do"], LAYOUTS["one"]
    history = root / "history"
    newest, older = history / "iter_0000004", history / "iter_0000003"
    lab.stage(
        2,
        case("keep", "save_each_step", dp2, f"--save {root / 'keep'} --keep-last 2", steps=4),
        case("async", "save_each_step", dp2,
             f"--save {root / 'async'} --keep-last 1 --async-save", steps=4),
        case("from-async", "train_and_save", dp2, f"--load {root / 'async'}", steps=2),
        case("whole", "train_and_save", dp2, steps=6),
        case("history", "save_each_step", dp2, f"--save {history}", steps=4),
        case("none", "load_only", dp2, f"--load {root / 'nowhere'}"),
        case("all", "load_only", dp2, f"--load {history}"),
        case("cut", "damage", dp2, edits=[[str(newest / "__1_0.distcp"), 1000]]),
        case("cut-newest", "load_only", dp2, f"--load {history}"),
        case("cut-more", "damage", dp2, edits=[[str(older / ".metadata"), None]]),
        case("cut-two", "load_only", dp2, f"--load {history}"),
        case("back", "damage", dp2,
             edits=[[str(history / "latest_checkpointed_iteration.txt"), "1\n"]]),
        case("gone-back", "load_only", dp2, f"--load {history}"),
        case("again", "save_each_step", dp2,
             f"--load {history} --save {history} --keep-last 1", steps=2),
        case("after-again", "load_only", dp2, f"--load {history}"),
        case("draw", "draw_and_save", dp2, f"--save {root / 'draw'}"),
        case("drawn", "load_only", dp2, f"--load {root / 'draw'}"),
        case("no-rng", "load_only", dp2, f"--load {root / 'draw'} --no-load-rng"),
        case("kill", "kill_the_writer", dp2, f"--save {root / 'kill'} --async-save"),
        case("kill-load", "load_only", dp2, f"--load {root / 'kill'}"),
    )  # fmt: skip
    saved = root / "keep"
    lab.stage(
        1,
        case("finetune", "train_and_save", case_, f"--load {saved} --finetune", steps=1),
        case("no-optimizer", "train_and_save", case_, f"--load {saved} --no-load-optim", steps=1),
        case("other-optimizer", "load_only", case_, f"--load {saved}"),
        case("precision", "load_only", Layout(1, DO, "bf16"), f"--load {saved}"),
        case("schedule", "load_only", LAYOUTS["one-do"], f"--load {saved} --min-lr 1e-4"),
        case("longer", "load_only", LAYOUTS["one-do"], f"--load {saved} --train-iters 9"),
        case("override", "load_only", LAYOUTS["one-do"],
             f"--load {saved} --min-lr 1e-4 --override-opt-param-scheduler"),
        case("other-model", "load_only", case_,
             f"--load {saved} --num-layers 2 --hidden-size 32 --no-load-optim"),
        case("vocabulary", "load_only", LAYOUTS["one-do"],
             f"--load {saved} --vocab-size 1000"),
        case("bare", "train_and_save", case_,
             f"--save {root / 'bare'} --no-save-optim --no-save-rng", steps=1),
        case("from-bare", "load_only", case_, f"--load {root / 'bare'}"),
        case("ruin", "damage", case_, edits=[[str(root / "bare/iter_0000001/manifest.json"), "{"]]),
        case("ruined", "load_only", case_, f"--load {root / 'bare'}"),
        case("external", "damage", case_,
             edits=[[str(root / "async/iter_0000004/manifest.json"), None]]),
        case("from-external", "load_only", LAYOUTS["one-do"], f"--load {root / 'async'}"),
        case("external-schedule", "load_only", LAYOUTS["one-do"],
             f"--load {root / 'async'} --min-lr 1e-4"),
        case("external-cut", "damage", case_,
             edits=[[str(root / "async/iter_0000004/__0_0.distcp"), 1000]]),
        case("from-external-cut", "load_only", LAYOUTS["one-do"], f"--load {root / 'async'}"),
        case("no-save-dir", "train_and_save", case_, steps=0),
    )  # fmt: skip
    return lab.run()


def test_keep_last(handled: dict[str, Any]) -> None:
    assert handled["keep"]["names"] == checkpoint_names(3, 4)
    assert handled["keep"]["polled"] == [1, 2, 3, 4]
    assert handled["keep"]["warnings"] == []


def test_asynchronous_saves_are_whole_and_the_same(handled: dict[str, Any]) -> None:
    assert handled["async"]["names"] == checkpoint_names(4)
    assert handled["async"]["polled"] == [1, 2, 3, 4]
    ours, whole = handled["from-async"]["loss"], handled["whole"]["loss"]
    assert ours == pytest.approx(whole[4:], abs=1e-6)


def test_nothing_to_load(handled: dict[str, Any]) -> None:
    assert handled["none"]["report"] is None


def test_a_truncated_checkpoint_is_skipped_with_a_note(handled: dict[str, Any]) -> None:
    assert handled["all"]["report"].startswith("iteration 4 from ")
    report = handled["cut-newest"]["report"]
    assert report.startswith("iteration 3 from ")
    assert "skipped iter_0000004: __1_0.distcp has 1000 bytes, expected " in report
    assert handled["cut-newest"]["progress"]["iteration"] == 3
    report = handled["cut-two"]["report"]
    assert report.startswith("iteration 2 from ")
    assert "skipped iter_0000003: .metadata is missing" in report


def test_going_back_by_the_tracker_file(handled: dict[str, Any]) -> None:
    report = handled["gone-back"]["report"]
    assert report.startswith("iteration 1 from ")
    assert "iter_0000002: newer than latest_checkpointed_iteration.txt says (1)" in report
    # Iterations 2 and 3 are saved again, over what was there; the cut one ahead is not touched.
    assert handled["again"]["names"] == checkpoint_names(3, 4)
    assert handled["after-again"]["report"].startswith("iteration 3 from ")


def test_random_states_come_back_on_each_rank(handled: dict[str, Any]) -> None:
    drawn = [rank["drawn"] for rank in handled["draw"]["ranks"]]
    assert drawn[0] != drawn[1]
    assert [rank["drawn"] for rank in handled["drawn"]["ranks"]] == drawn
    assert [rank["drawn"] for rank in handled["no-rng"]["ranks"]] != drawn


def test_a_killed_writer_costs_one_checkpoint(handled: dict[str, Any]) -> None:
    result = handled["kill"]
    assert result["names"] == checkpoint_names(1, 3)
    assert result["warnings"] == [
        "the checkpoint of iteration 2 was not saved: rank 1: the process that writes the "
        "checkpoint was killed"
    ]
    assert all(rank["warnings"] == result["warnings"] for rank in result["ranks"])
    assert handled["kill-load"]["report"].startswith("iteration 3 from ")


def test_weights_alone(handled: dict[str, Any]) -> None:
    whole = handled["whole"]["loss"]
    finetune, without = handled["finetune"], handled["no-optimizer"]
    assert finetune["progress"]["iteration"] == 1
    assert "finetune: the weights alone" in finetune["report"]
    assert without["progress"]["iteration"] == 5
    assert without["loss"] == pytest.approx(whole[4:5], abs=1e-5)  # before its first update
    assert finetune["loss"][0] < whole[0] - 0.1


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("other-optimizer", ["use_distributed_optimizer: true, this run has false",
                             "no_load_optim: true to go on"]),
        ("precision", ["trained in fp32, this run in bf16"]),
        ("schedule", ["learning-rate schedule differs",
                      "minimum learning rate: the checkpoint has 0.",
                      "override_opt_param_scheduler: true"]),
        ("longer", ["total number of iterations (in samples): the checkpoint has 24, the arguments "
                    "36", "override_opt_param_scheduler: true"]),
        ("external-schedule", ["minimum learning rate: the checkpoint has 0.",
                               "the arguments 0.0001"]),
        ("other-model", ["num_layers: the checkpoint has 4, the model 2",
                         "hidden_size: the checkpoint has 64, the model 32"]),
        ("vocabulary", ["vocabulary: the checkpoint has 449 to 512 tokens, the model 961 to 1024"]),
        ("from-bare", ["holds no optimizer state", "finetune: true"]),
        ("ruined", ["holds no whole checkpoint", "manifest.json cannot be read"]),
        ("from-external-cut", ["__0_0.distcp has 1000 bytes, expected"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_incompatible_checkpoints_are_refused(
    name: str, parts: list[str], handled: dict[str, Any]
) -> None:
    message = handled[name]
    assert message["kind"] == "CheckpointError"
    for part in parts:
        assert part in message["error"]


def test_compatible_changes_are_accepted(handled: dict[str, Any]) -> None:
    assert handled["override"]["progress"]["iteration"] == 4
    assert handled["from-external"]["progress"]["iteration"] == 4
    assert handled["bare"]["names"] == checkpoint_names(1)
    assert handled["no-save-dir"]["warnings"] == []
