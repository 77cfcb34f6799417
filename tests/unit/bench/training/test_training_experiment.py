"""Tests of arms that train an experiment's YAML: overrides of a turn, and refused experiments."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from flagscale.bench.training.arms import Arm, resolve_arm
from flagscale.bench.training.cli import TrainingCommand
from flagscale.bench.training.experiment import ExperimentSource, ExperimentTrainer
from flagscale.bench.training.plan import TrainingOptions
from flagscale.bench.training.schedule import Block
from flagscale.config.schema import PROJECT
from flagscale.errors import ConfigError

pytestmark = pytest.mark.torch

YAML = """
experiment: {exp_name: tiny, exp_dir: runs, task: {type: train}, runner: {nproc_per_node: 2}}
train:
  system:
    use_distributed_optimizer: true
    logging: {log-interval: 10}
    checkpoint: {save: elsewhere}
  model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, seq_length: 16, lr: 0.001,
          max_position_embeddings: 16, micro_batch_size: 1, global_batch_size: 4, train_iters: 40}
  data: {mock_data: true, vocab_size: 100}
"""
FSCCL_LINE = "--steps 20 --block 10 --arms ring --override +train.system.distributed_backend=fsccl"
ARM = Arm("ring", "fsccl", (("FSCCL_ALGO", "ring"), ("NCCL_ALGO", "allreduce:ring")))


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentSource:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's.yaml").write_text(YAML)
    return ExperimentSource(tmp_path / "it's.yaml", ("train.model.seed=7",))


def test_turn_overrides_keys_where_the_yaml_has_them(source: ExperimentSource) -> None:
    trainer = ExperimentTrainer(source, TrainingOptions(steps=20, block=10))
    arm_directory = f"{trainer.directory}/3-apart/ring"
    first = trainer.turn_overrides(ARM, "3 apart", Block(0, 0, 1, 0, 10))
    assert first == [
        "train.model.seed=7",
        f"experiment.exp_dir='{arm_directory}'",
        "++train.system.distributed_backend='fsccl'",
        "++train.system.exit_interval=10",
        "++train.system.save_interval=20",
        f"++train.system.checkpoint.save='{arm_directory}/checkpoints'",
        "++train.system.keep_last=1",
        "++train.system.logging.log-interval=1",
        "++train.model.eval_iters=0",
        "++experiment.envs.FSCCL_ALGO='ring'",
        "++experiment.envs.NCCL_ALGO='allreduce:ring'",
    ]
    second = trainer.turn_overrides(ARM, "3 apart", Block(3, 0, 2, 10, 10))
    assert [word for word in second if word not in first] == [
        f"++train.system.load='{arm_directory}/checkpoints'",
        "++train.system.finetune=false",
    ]


@pytest.mark.parametrize("turn", [Block(0, 0, 1, 0, 10), Block(3, 0, 2, 10, 10)], ids=str)
def test_turn_overrides_are_a_valid_configuration(source: ExperimentSource, turn: Block) -> None:
    from flagscale import api

    trainer = ExperimentTrainer(source, TrainingOptions(steps=20, block=10))
    plan = api.plan(source.config, trainer.turn_overrides(ARM, "none", turn))
    words = plan.hosts[0].program
    assert words[words.index("--exit-interval") + 1] == "10"
    assert words[words.index("--train-iters") + 1] == "40"
    assert ("FSCCL_ALGO", "ring") in [(e.name, e.value) for e in plan.hosts[0].environment]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--models gpt2", "--models: the YAML says what is trained"),
        ("-r 2 --hosts a b", "-r, --hosts: the YAML says"),
        ("--steps 50 --block 10", "--steps 50: train.model.train_iters of .*it's.yaml is 40"),
        ("--steps 25 --block 10 --settle 2", "turns of an experiment are whole, of --block 10"),
        ("--steps 20 --block 5", "--settle 5: turns of 5 steps"),
        (
            "--steps 20 --block 10 --arms optireduce",
            "use_distributed_optimizer: cannot be combined with arm optireduce",
        ),
        (
            f"{FSCCL_LINE} +train.system.comm.algo=tree",
            "comm.algo of the YAML would win",
        ),
        (
            f"{FSCCL_LINE} +train.system.comm.tail=exact",
            "comm.tail of the YAML would win",
        ),
        (
            "--steps 20 --block 10 --arms gloo --override +experiment.envs.FSCCL_ALGO=ring",
            "experiment.envs: FSCCL_ALGO would be",
        ),
        ("--override train.model.lr=x", "train.model.lr"),
        (
            "--override experiment.task.type=command +experiment.task.command=[ls]",
            "it runs ls, which reports no steps",
        ),
    ],
)
def test_experiments_that_cannot_be_compared_are_refused(
    source: ExperimentSource, words: str, message: str
) -> None:
    line = ["--config-path", str(source.config.parent), "--config-name", source.config.name]
    with pytest.raises(ConfigError, match=message):
        TrainingCommand().run_arguments([*line, *words.split()], "training")


def test_documented_command_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last override permits bounded reductions, which the experiment's optimizer does not."""
    monkeypatch.chdir(PROJECT)
    guide = (PROJECT / "docs" / "guides" / "tail-latency.md").read_text().replace("\\\n", " ")
    (line,) = [
        text_line
        for text_line in guide.splitlines()
        if text_line.startswith("flagscale bench training --co")
    ]
    words = shlex.split(line)
    path, name = (words[words.index(f"--config-{suffix}") + 1] for suffix in ("path", "name"))
    overrides = tuple(words[words.index("--override") + 1 :])
    (bounded_arm,) = [
        arm for arm in words[words.index("--arms") + 1].split(",") if arm == "optireduce"
    ]
    arms = [resolve_arm(bounded_arm, accelerated=False, one_host=True, custom={})]
    training = TrainingOptions(steps=90, block=30)
    ExperimentTrainer(ExperimentSource(Path(path, name), overrides), training).check_arms(arms)
    with pytest.raises(
        ConfigError, match="use_distributed_optimizer: cannot be combined with arm opti"
    ):
        ExperimentTrainer(ExperimentSource(Path(path, name), overrides[:-1]), training).check_arms(
            arms
        )


def test_overrides_require_an_experiment() -> None:
    with pytest.raises(ConfigError, match="--override needs --config-name"):
        TrainingCommand().run_arguments(["-r", "2", "--override", "a=b"], "training")
