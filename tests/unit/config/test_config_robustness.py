"""Any YAML or override gives either an experiment or one ConfigError."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from flagscale.config.arguments.spec.command_line import command_line
from flagscale.config.checks import check_world, experiment_notes
from flagscale.config.load import load
from flagscale.errors import ConfigError

CONF = Path(__file__).resolve().parents[3] / "examples" / "llama3" / "conf"
TEXTS = tuple(
    (CONF / name).read_text(encoding="utf-8").splitlines()
    for name in ("train.yaml", "train/tiny.yaml")
)
LINES = tuple(
    (file, number)
    for file, lines in enumerate(TEXTS)
    for number, line in enumerate(lines)
    if ":" in line and not line.lstrip().startswith("#")
)

UNUSUAL_VALUES = (
    *("", "null", "~", "[]", "{}", "[1,2]", "[[1]]", "{a: 1}", "{1: 2}", "{true: x}", "{null: 1}"),
    *("'${'", "${x}", "${experiment}", "???", "''", "a,b", "1:2", "-1", "0", "1e999", ".nan"),
    *("true", "é", "a b", "0x10", "!!binary aGk=", "2020-01-01", "!!set {a, b}", "!foo bar"),
    *("*x", "&y z", "&z {w: *z}", "<<", "{<<: {a: 1}}", "99999999999999999999999", "!!int x"),
)
KEYS = (
    *("experiment", "experiment.envs.A", "experiment.runner", "experiment.task", "train"),
    *("train.model", "train.model.num_layers", "train.data.data_path", "train.data.split"),
    *("action", "hydra.run.dir", "x.y", "experiment.runner.nnodes", "lines", "defaults", "train@a"),
)
UNUSUAL_TEXTS = (
    *("", "null", "[]", "{}", "[1,2]", "{a:1}", "${", "${x}", "${oc.env:NOPE}", "???", "'", '"'),
    *("\\", "a\\'", "a,b", "1:2", "-1", "1e999", "é", "a b", "$(x)", "{a:{b:[1,{c:2}]}}", "\n"),
    *("choice(1,2)", "range(1,3)", "glob(*)", "[${experiment.exp_name}]", "tiny@b", "[tiny,8b]"),
)


def _load_and_check(conf: Path, overrides: list[str]) -> None:
    try:
        experiment = load(conf, "train", overrides, "plan").experiment
    except ConfigError as error:
        assert str(error).strip()
        return
    check_world(experiment, 2)
    experiment_notes(experiment, 2)
    command_line(experiment.train)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(UNUSUAL_VALUES)), max_size=3))
def test_unusual_values_in_files_do_not_crash(
    tmp_path: Path, changes: list[tuple[tuple[int, int], str]]
) -> None:
    texts = [list(lines) for lines in TEXTS]
    for (file, number), value in changes:
        texts[file][number] = f"{texts[file][number].partition(':')[0]}: {value}"
    (tmp_path / "train").mkdir(exist_ok=True)
    (tmp_path / "train.yaml").write_text("\n".join(texts[0]), encoding="utf-8")
    (tmp_path / "train/tiny.yaml").write_text("\n".join(texts[1]), encoding="utf-8")
    _load_and_check(tmp_path, [])


@st.composite
def _random_override(draw: st.DrawFn) -> str:
    prefix = draw(st.sampled_from(["", "+", "++", "~"]))
    separator = draw(st.sampled_from(["=", "=", "", ":"]))
    return prefix + draw(st.sampled_from(KEYS)) + separator + draw(st.sampled_from(UNUSUAL_TEXTS))


@settings(max_examples=50, deadline=None)
@given(st.lists(_random_override(), min_size=1, max_size=2))
@example(["~train=[${experiment.exp_name}]"])
@example(["train=[1,2]"])
@example(["train=[8b,[1]]"])
def test_unusual_overrides_do_not_crash(overrides: list[str]) -> None:
    _load_and_check(CONF, overrides)


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0\r"), max_size=40)


@settings(max_examples=30, deadline=None)
@given(_TEXT.filter(lambda text: "${" not in text and text != "null"))
@example("a\\'b\\")
@example("a,b")
@example("\\\\")
def test_any_text_is_passed_to_the_environment(text: str) -> None:
    if text[:1] in ("[", "{", "'", '"'):
        return  # Hydra's containers and quotes keep their meaning
    overrides = [f"experiment.envs.X={text}"]
    assert load(CONF, "train", overrides, "find").experiment.envs.common["X"] == text


def test_thousand_environment_variables_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train").mkdir()
    (tmp_path / "train/tiny.yaml").write_text("\n".join(TEXTS[1]), encoding="utf-8")
    variables = "\n".join(f"    V{number}: {'x' * 1000}" for number in range(1000))
    text = "\n".join(TEXTS[0]).replace("  envs:\n", f"  envs:\n{variables}\n")
    (tmp_path / "train.yaml").write_text(text, encoding="utf-8")
    experiment = load(tmp_path, "train", [], "plan").experiment
    assert len(experiment.envs.common) == 1001
    assert experiment.exp_dir == Path.cwd() / "outputs_llama3_tiny"
