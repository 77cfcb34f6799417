"""Tests of the command line of `flagscale bench training`: arms, models, and invalid options."""

from __future__ import annotations

from pathlib import Path

import pytest

from flagscale.bench.training.arms import Arm, parse_custom_arms, resolve_arm, unsupported_reason
from flagscale.bench.training.cli import TrainingCommand, refuse_launcher
from flagscale.bench.training.models.names import ModelChoice, parse_models
from flagscale.bench.training.settings import read_settings
from flagscale.errors import ConfigError

pytestmark = pytest.mark.torch  # the backends of arms need torch


@pytest.mark.parametrize(
    ("name", "accelerated", "one_host", "description"),
    [
        ("ring", False, True, "fsccl FSCCL_ALGO=ring FSCCL_SHM=0"),
        ("tree", False, False, "fsccl FSCCL_ALGO=tree"),
        ("transpose", False, False, "fsccl FSCCL_ALGO=transpose"),
        ("fsccl", True, False, "fsccl"),
        ("optireduce", False, False, "fsccl FSCCL_TAIL=bounded"),
        ("gloo", False, True, "gloo"),
        ("wide", False, True, "fsccl FSCCL_TCP_CONNECTIONS=4"),
    ],
)
def test_arm_resolves_to_backend_and_environment(
    name: str, accelerated: bool, one_host: bool, description: str
) -> None:
    custom = parse_custom_arms(["wide=fsccl,FSCCL_TCP_CONNECTIONS=4"])
    arm = resolve_arm(name, accelerated=accelerated, one_host=one_host, custom=custom)
    assert arm.description == description
    assert arm.exact is (name != "optireduce")


@pytest.mark.parametrize(
    ("name", "algorithm"), [("ring", "allreduce:ring"), ("tree", "allreduce:tree")]
)
def test_gpu_arms_set_and_log_the_nccl_algorithm(name: str, algorithm: str) -> None:
    arm = resolve_arm(name, accelerated=True, one_host=True, custom={})
    assert arm.backend == "nccl"
    assert ("NCCL_ALGO", algorithm) in arm.environment
    assert "TUNING" in dict(arm.environment)["NCCL_DEBUG_SUBSYS"]


def test_ineffective_arm_is_refused() -> None:
    """A build that ignores a variable would train two arms with the same algorithm."""
    reason = unsupported_reason(Arm("ring", "gloo", (("FSCCL_ALGO", "ring"),)), "cpu")
    assert reason is not None
    assert "arm ring: gloo on this host does not support FSCCL_ALGO=ring" in reason
    assert unsupported_reason(Arm("gloo", "gloo"), "cpu") is None


def test_bounded_all_reduce_is_an_arm_on_gpus() -> None:
    arm = resolve_arm("optireduce", accelerated=True, one_host=False, custom={})
    assert (arm.backend, arm.environment) == ("fsccl", (("FSCCL_TAIL", "bounded"),))
    assert not arm.exact


@pytest.mark.parametrize("name", ["transpose", "own"])
def test_host_memory_variables_are_refused_on_gpus(name: str) -> None:
    custom = parse_custom_arms(["own=fsccl,FSCCL_ALGO=tree"])
    with pytest.raises(ConfigError, match=f"arm {name}: FSCCL_.* affects only reductions"):
        resolve_arm(name, accelerated=True, one_host=True, custom=custom)
    arm = resolve_arm(name, accelerated=False, one_host=True, custom=custom)
    assert "affects only reductions of host memory" in str(unsupported_reason(arm, "cuda"))


@pytest.mark.parametrize(
    ("word", "size", "models"),
    [
        ("gpt2", "tiny", [ModelChoice("gpt2", "tiny")]),
        ("GPT2:large", "tiny", [ModelChoice("gpt2", "large")]),
        ("bert-large", "base", [ModelChoice("bert", "large")]),
        ("vgg", "base", [ModelChoice("vgg19", "base")]),
    ],
)
def test_models_by_name(word: str, size: str, models: list[ModelChoice]) -> None:
    assert list(parse_models(word, size)) == models  # type: ignore[arg-type]


def test_model_titles() -> None:
    large = ["VGG-19 of 224 x 224", "BERT-large", "BART-large", "RoBERTa-large", "GPT-2-large"]
    assert [c.title for c in parse_models("all", "large")] == [*large, "Llama-3.2-1B"]


# Arguments and the expected error message.
INVALID_LINES = {
    "one rank": ("-r 1 --arms gloo", "one rank has nobody to sum gradients with"),
    "no ranks": ("--arms gloo", "the number of ranks is missing"),
    "model": ("-r 2 --arms gloo --models bret", "'bret' is not a model; did you mean 'bert'?"),
    "size": ("-r 2 --arms gloo --models bert:larg", "'larg' is not a size; did you mean 'large'?"),
    "no model": ("-r 2 --arms gloo --models ,", "expected such as gpt2,bert:large"),
    "arm": ("-r 2 --arms rnig", "'rnig' is not an arm; did you mean 'ring'?"),
    "no arm": ("-r 2 --arms ,", "expected such as ring,tree"),
    "own arm": ("-r 2 --arm x=fsccl,y", "expected NAME=BACKEND[,VARIABLE=VALUE ...]"),
    "own arm's name": ("-r 2 --arm ring=gloo", "the name 'ring' is taken"),
    "own arm's shell": ("-r 2 --arm $(id)=gloo", "expected NAME=BACKEND"),
    "own arm's backend": ("-r 2 --arm x=golo", "--arm x: 'golo' is not a known backend"),
    "absent": ("-r 2 --arms nccl --device cpu", "'nccl' cannot be used here"),
    "backend": ("-r 2 --backend gloo", "here backends are arms"),
    "steps": ("-r 2 --arms gloo --steps 0", "-n/--steps 0; expected at least 1"),
    "settle": ("-r 2 --arms gloo --block 2 --settle 2", "would count none"),
    "last turn": ("-r 2 --arms gloo --steps 21", "the last of 1, would count none"),
    "sequence": ("-r 2 --arms gloo --sequence 999", "GPT-2-tiny takes at most 128 tokens"),
    "of images": ("-r 2 --arms gloo --models vgg19 --sequence 32", "VGG-19/8 takes images"),
    "slurm": ("-r 2 --arms gloo --slurm-mode", "ranks of trials are started here or over SSH"),
    "flag": ("-r 2 --arms gloo --enviroment x", "did you mean --environment?"),
    "option": ("-r 2 --arms gloo --comm sokcet_ifname=lo", "socket_ifname"),
    "option of an arm": ("-r 2 --arms ring --comm algo=tree", "arm ring is fsccl FSCCL_ALGO=ring"),
    "option of all arms": ("-r 2 --arms ring --comm tail=bounded", "--comm tail: arm ring is"),
    "variable of all arms": (
        "-r 2 --arms gloo --hosts a b --env FSCCL_TAIL=bounded",
        "--env: FSCCL_TAIL would be set for every arm",
    ),
    "absent file": ("-r 2 --arms gloo --environment none.json", "none.json: cannot be read"),
    "no traffic": ("-r 2 --arms gloo --apart h=1", "--apart needs --environment"),
    "no directory": ("-r 2 --arms gloo --json no/where.json", "its directory does not exist"),
    "plot": ("-r 2 --arms gloo --plot x.pdf", "expected a file that ends in .svg or .png"),
    "word": ("-r 2 --arms gloo $(reboot)", "unexpected argument $(reboot)"),
}


@pytest.mark.parametrize("name", INVALID_LINES)
def test_invalid_options_are_refused(
    name: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    line, message = INVALID_LINES[name]
    monkeypatch.chdir(tmp_path)
    code = TrainingCommand().main(line.split(" "))
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


def test_ranks_of_a_launcher_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_launcher(None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="started under torchrun: this command starts its own"):
        TrainingCommand().run_arguments(["-r", "2"], "training")


def test_without_files_there_is_no_traffic() -> None:
    (setting,) = read_settings([], [])
    assert (setting.label, setting.environment) == ("none", None)
