"""Runs of a sweep and the names of their directories."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.sweeps import expand_sweep, load_combinations
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace


@pytest.mark.parametrize(
    ("overrides", "keys", "runs"),
    [
        pytest.param(
            ["train.model.lr=1e-4,3e-4", "train=8b", "train.model.seed=1,2"],
            ("lr", "seed"),
            {
                "lr=0.0001_seed=1": "train.model.lr=0.0001 train=8b train.model.seed=1",
                "lr=0.0001_seed=2": "train.model.lr=0.0001 train=8b train.model.seed=2",
                "lr=0.0003_seed=1": "train.model.lr=0.0003 train=8b train.model.seed=1",
                "lr=0.0003_seed=2": "train.model.lr=0.0003 train=8b train.model.seed=2",
            },
            id="two keys",
        ),
        pytest.param(
            ["+x.seed=range(1,4)"],
            ("seed",),
            {f"seed={n}": f"+x.seed={n}" for n in (1, 2, 3)},
            id="range",
        ),
        pytest.param(
            ["a.lr=1,2", "b.lr=3,4"],
            ("a.lr", "b.lr"),
            {f"a.lr={a}_b.lr={b}": f"a.lr={a} b.lr={b}" for a in (1, 2) for b in (3, 4)},
            id="one leaf twice",
        ),
        pytest.param(
            ["train=tiny,8b", "a=[1,2]", "experiment.envs.X=$HOME"],
            ("train",),
            {
                "train=tiny": "train=tiny a=[1,2] experiment.envs.X=$HOME",
                "train=8b": "train=8b a=[1,2] experiment.envs.X=$HOME",
            },
            id="groups, lists and texts",
        ),
        pytest.param(["a=1,1,2"], ("a",), {"a=1": "a=1", "a=2": "a=2"}, id="the same twice"),
        pytest.param(
            ['experiment.exp_name="it\'s",b c'],
            ("exp_name",),
            {
                "exp_name=it_s-36bfd60f": "experiment.exp_name=it's",
                "exp_name=b_c-12262e47": "experiment.exp_name=b c",
            },
            id="odd texts",
        ),
    ],
)
def test_sweep_is_expanded_to_combinations(
    overrides: list[str], keys: tuple[str, ...], runs: dict[str, str]
) -> None:
    sweep = expand_sweep(overrides)
    assert sweep.keys == keys
    assert {
        combination.name: " ".join(combination.overrides) for combination in sweep.combinations
    } == runs


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        pytest.param(["a=1"], "no override has several values", id="none"),
        pytest.param(["a='1,2'"], "no override has several values", id="quoted"),
        pytest.param(["action=run,stop"], "action: a sweep performs one action", id="action"),
        pytest.param(["train=glob(*)"], "list the values, or use range or choice", id="glob"),
        pytest.param(["a=interval(0,1)"], "list the values", id="interval"),
        pytest.param(
            ["experiment.envs.HF_TOKEN=a,b"], "HF_TOKEN: looks like a secret", id="secret"
        ),
        pytest.param(["a=range(0,200)", "b=range(0,200)"], "40,000 runs; at most", id="many"),
    ],
)
def test_invalid_sweep_is_rejected(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        expand_sweep(overrides)


VALUES = st.lists(
    st.one_of(
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.text(st.characters(exclude_characters="\0'\\\n\r", codec="utf-8"), min_size=1).map(
            lambda text: f"'{text}'"
        ),
    ),
    min_size=2,
    max_size=4,
    unique_by=str,
)


@settings(max_examples=30)  # Hydra's parser is slow.
@given(VALUES, VALUES)
def test_run_names_are_unique_and_portable(first: list[object], second: list[object]) -> None:
    overrides = [
        f"experiment.exp_name={','.join(map(str, first))}",
        f"b={','.join(map(str, second))}",
    ]
    sweep = expand_sweep(overrides)
    names = [combination.name for combination in sweep.combinations]
    assert len(set(names)) == len(names) <= len(first) * len(second)
    assert all(re.fullmatch(r"[A-Za-z0-9.+=_-]{1,100}", name) for name in names)
    # The name of a combination does not depend on the other combinations of the sweep.
    smaller = expand_sweep([overrides[0], f"b={','.join(map(str, second[:2]))}"])
    assert {combination.name for combination in smaller.combinations} <= set(names)


def test_combinations_are_loaded_with_their_directories(workspace: Workspace) -> None:
    overrides = [
        "train.model.optimizer.lr_scheduler.lr=1e-4,2e-4",
        "experiment.exp_dir=out/${experiment.exp_name}",
    ]
    combinations = load_combinations(workspace.conf, "train", expand_sweep(overrides), None)
    runs = [
        (run.experiment.exp_dir.relative_to(workspace.root).as_posix(), run.experiment.train["lr"])
        for run in combinations
    ]
    assert runs == [
        ("out/demo/lr=0.0001", 0.0001),
        ("out/demo/lr=0.0002", 0.0002),
    ]
    # Directories that are swept over are used as they are.
    directory_sweep = load_combinations(
        workspace.conf, "train", expand_sweep(["experiment.exp_dir=a,'b, c'"]), None
    )
    assert [run.experiment.exp_dir.name for run in directory_sweep] == ["a", "b, c"]


def test_runs_do_not_share_an_address(workspace: Workspace) -> None:
    """A run that saves to object storage loads from there."""
    sweep = ["train.model.optimizer.lr_scheduler.lr=1e-4,2e-4"]
    save = "+train.system.checkpoint.save=s3://bucket/a"
    with pytest.raises(ConfigError, match="s3://bucket/a is the address of several runs"):
        load_combinations(workspace.conf, "train", expand_sweep([*sweep, save]), None)
    save += "/${train.model.optimizer.lr_scheduler.lr}"
    runs = load_combinations(workspace.conf, "train", expand_sweep([*sweep, save]), None)
    assert [run.experiment.train["save"] for run in runs] == [
        "s3://bucket/a/0.0001",
        "s3://bucket/a/0.0002",
    ]


def test_error_names_the_combination(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match=r"num_layers: .*found -1 \(with num_layers=-1\)"):
        load_combinations(
            workspace.conf, "train", expand_sweep(["train.model.num_layers=2,-1"]), None
        )
