"""Which runs a sweep is of, and how their directories are called."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flagscale.config.sweeps import load_each, sweep
from flagscale.errors import ConfigError

if TYPE_CHECKING:
    from conftest import Workspace


@pytest.mark.parametrize(
    ("given", "keys", "runs"),
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
def test_combinations(given: list[str], keys: tuple[str, ...], runs: dict[str, str]) -> None:
    found = sweep(given)
    assert found.keys == keys
    assert {one.name: " ".join(one.overrides) for one in found.combinations} == runs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(["a=1"], "no override has several values", id="none"),
        pytest.param(["a='1,2'"], "no override has several values", id="quoted"),
        pytest.param(["action=run,stop"], "action: a sweep does one thing", id="action"),
        pytest.param(["train=glob(*)"], "list the values, or use range or choice", id="glob"),
        pytest.param(["a=interval(0,1)"], "list the values", id="interval"),
        pytest.param(
            ["experiment.envs.HF_TOKEN=a,b"], "HF_TOKEN: looks like a secret", id="secret"
        ),
        pytest.param(["a=range(0,200)", "b=range(0,200)"], "40,000 runs; at most", id="many"),
    ],
)
def test_what_is_no_sweep(given: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        sweep(given)


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


@settings(max_examples=30)  # Hydra's parser takes its time.
@given(VALUES, VALUES)
def test_each_run_has_a_directory_of_its_own_that_any_program_takes(
    first: list[object], second: list[object]
) -> None:
    given = [f"experiment.exp_name={','.join(map(str, first))}", f"b={','.join(map(str, second))}"]
    found = sweep(given)
    names = [one.name for one in found.combinations]
    assert len(set(names)) == len(names) <= len(first) * len(second)
    assert all(re.fullmatch(r"[A-Za-z0-9.+=_-]{1,100}", name) for name in names)
    # A combination's name is its own: it does not hang on what else is tried.
    alone = sweep([given[0], f"b={','.join(map(str, second[:2]))}"])
    assert {one.name for one in alone.combinations} <= set(names)


def test_each_is_loaded_with_its_directory(workspace: Workspace) -> None:
    overrides = [
        "train.model.optimizer.lr_scheduler.lr=1e-4,2e-4",
        "experiment.exp_dir=out/${experiment.exp_name}",
    ]
    loaded = load_each(workspace.conf, "train", sweep(overrides), None)
    found = [
        (one.experiment.exp_dir.relative_to(workspace.root).as_posix(), one.experiment.train.model)
        for one in loaded
    ]
    assert [(path, model["optimizer"]["lr_scheduler"]["lr"]) for path, model in found] == [
        ("out/demo/lr=0.0001", 0.0001),
        ("out/demo/lr=0.0002", 0.0002),
    ]
    # Where directories are the values, they are what was meant.
    named = load_each(workspace.conf, "train", sweep(["experiment.exp_dir=a,'b, c'"]), None)
    assert [one.experiment.exp_dir.name for one in named] == ["a", "b, c"]


def test_a_mistake_tells_in_which_run_it_is(workspace: Workspace) -> None:
    with pytest.raises(ConfigError, match=r"num_layers: .*found -1 \(with num_layers=-1\)"):
        load_each(workspace.conf, "train", sweep(["train.model.num_layers=2,-1"]), None)
