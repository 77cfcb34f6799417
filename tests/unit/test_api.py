"""Planning from Python, and what must not be left behind by it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

import flagscale
from flagscale.errors import ConfigError, FlagscaleError, RunStateError


def made(root: Path, **task: Any) -> dict[str, Any]:
    """A configuration as a program has it."""
    given = {"type": "command", "command": ("echo", "${experiment.exp_name}", 1e-05), **task}
    return {
        "experiment": {"exp_name": "x", "exp_dir": root / "exp", "task": given},
        "device_type_specific": None,
    }


def program(config: Any, *overrides: str) -> tuple[str, ...]:
    (host,) = flagscale.plan(config, overrides).hosts
    return host.program


def test_mapping_is_equivalent_to_its_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = made(tmp_path)
    plain = made(tmp_path, command=["echo", "${experiment.exp_name}", 1e-05])
    plain["experiment"]["exp_dir"] = str(tmp_path / "exp")
    # Words of a command are as the YAML writes them.
    text = yaml.safe_dump(plain).replace("1.0e-05", "1e-05")
    Path("x.yaml").write_text(text, encoding="utf-8")
    for one in (config, "x.yaml", Path("x.yaml"), tmp_path / "x"):
        assert program(one) == ("echo", "x", "1e-05")
        assert program(one, "experiment.exp_name=y z") == ("echo", "y z", "1e-05")
    assert not (tmp_path / "exp").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "x.yaml"]


@pytest.mark.parametrize(
    ("changes", "overrides", "said"),
    [
        pytest.param({"experiment": {}}, (), "experiment.exp_name: is required", id="empty"),
        pytest.param({"defaults": ["x"]}, (), "give the path of a YAML", id="groups"),
        pytest.param({"action": object()}, (), "action: expected plain data, found", id="object"),
        pytest.param({"experimnt": 1}, (), "did you mean 'experiment'", id="typo"),
        pytest.param({}, ("action=stop",), "what is called says what is done", id="action"),
        pytest.param({}, "a=b", "expected a list of texts, found 'a=b'", id="text"),
        pytest.param({}, [3], "overrides: expected a list of texts, found [3]", id="number"),
        pytest.param({}, None, "overrides: expected a list of texts, found None", id="none"),
        pytest.param(
            {},
            ("experiment.exp_nme=x",),
            "override: experiment.exp_nme: no such key",
            id="override",
        ),
        pytest.param({}, ("experiment.exp_name=a,b[",), "experiment.exp_name=a,b[", id="taken"),
    ],
)
def test_errors_of_mappings_name_no_file_positions(
    tmp_path: Path, changes: Mapping[str, Any], overrides: Any, said: str
) -> None:
    if said.endswith("["):
        assert program(made(tmp_path), *overrides)[1] == "a,b["
        return
    with pytest.raises(ConfigError) as caught:
        flagscale.plan({**made(tmp_path), **changes}, overrides)
    assert said in str(caught.value)
    assert "config.yaml" not in str(caught.value)


def test_omegaconf_objects_are_accepted(tmp_path: Path) -> None:
    """Lists in it, and interpolations, are as they were written."""
    config = OmegaConf.create({**made(tmp_path), "device_type_specific": {}})
    config.experiment.exp_dir = str(tmp_path / "exp")
    assert program(config) == ("echo", "x", "1e-05")
    config.experiment.exp_dir = "???"
    with pytest.raises(ConfigError, match="exp_dir: is required: replace"):
        flagscale.plan(config)


def test_strings_in_lists_remain_strings(tmp_path: Path) -> None:
    words = ("echo", "1e5", "010", "yes", "2026-11-25", "null")
    assert program(made(tmp_path, command=list(words))) == words


@pytest.mark.parametrize("config", [None, 3, ["x.yaml"]])
def test_invalid_configurations_are_rejected(config: Any) -> None:
    with pytest.raises(ConfigError, match="config: expected a path or nested mappings, found"):
        flagscale.plan(config)


def test_missing_yaml(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no x\.yaml in"):
        flagscale.plan(tmp_path / "x.yaml")
    with pytest.raises(RunStateError, match="is not a run id"):
        flagscale.find("20010101")
    assert not issubclass(FlagscaleError, SystemExit)


def test_hydra_state_of_the_caller_is_preserved(tmp_path: Path) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    (tmp_path / "own.yaml").write_text("a: ${host:b}\n", encoding="utf-8")
    OmegaConf.register_new_resolver("host", lambda word: f"mine {word}", replace=True)
    try:
        with initialize_config_dir(str(tmp_path), version_base=None):
            config = compose("own", return_hydra_config=True)
            HydraConfig.instance().set_config(config)
            assert program(made(tmp_path)) == ("echo", "x", "1e-05")
            assert HydraConfig.get().job.config_name == "own"
            assert compose("own").a == config.a == "mine b"
        program(made(tmp_path))
        assert not GlobalHydra.instance().is_initialized()
    finally:
        OmegaConf.clear_resolver("host")
        HydraConfig.instance().cfg = None


def test_threads_are_independent(tmp_path: Path) -> None:
    names = [f"name-{number}" for number in range(16)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: program(made(tmp_path), f"experiment.exp_name={n}"), names))
    assert [words[1] for words in found] == names


def test_import_is_lazy() -> None:
    code = "import flagscale, flagscale.api, sys; flagscale.launch, flagscale.find; "
    code += "print(sorted({n.partition('.')[0] for n in sys.modules} & "
    code += "{'hydra', 'omegaconf', 'yaml', 'rich', 'torch', 'paramiko'}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        flagscale.lunch  # type: ignore[attr-defined]  # noqa: B018
