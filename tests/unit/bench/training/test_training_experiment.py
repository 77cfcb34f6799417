"""An experiment's YAML in place of models: what a turn changes of it, and what is refused."""

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
FSCCL = "--steps 20 --block 10 --arms ring --override +train.system.distributed_backend=fsccl"
ARM = Arm("ring", "fsccl", (("FSCCL_ALGO", "ring"), ("NCCL_ALGO", "allreduce:ring")))


@pytest.fixture
def chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExperimentSource:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "it's.yaml").write_text(YAML)
    return ExperimentSource(tmp_path / "it's.yaml", ("train.model.seed=7",))


def test_turn_overrides_keys_where_the_yaml_has_them(chosen: ExperimentSource) -> None:
    turns = ExperimentTrainer(chosen, TrainingOptions(steps=20, block=10))
    own = f"{turns.directory}/3-apart/ring"
    first = turns.overrides_of(ARM, "3 apart", Block(0, 0, 1, 0, 10))
    assert first == [
        "train.model.seed=7",
        f"experiment.exp_dir='{own}'",
        "++train.system.distributed_backend='fsccl'",
        "++train.system.exit_interval=10",
        "++train.system.save_interval=20",
        f"++train.system.checkpoint.save='{own}/checkpoints'",
        "++train.system.keep_last=1",
        "++train.system.logging.log-interval=1",
        "++train.model.eval_iters=0",
        "++experiment.envs.FSCCL_ALGO='ring'",
        "++experiment.envs.NCCL_ALGO='allreduce:ring'",
    ]
    second = turns.overrides_of(ARM, "3 apart", Block(3, 0, 2, 10, 10))
    assert [word for word in second if word not in first] == [
        f"++train.system.load='{own}/checkpoints'",
        "++train.system.finetune=false",
    ]


@pytest.mark.parametrize("turn", [Block(0, 0, 1, 0, 10), Block(3, 0, 2, 10, 10)], ids=str)
def test_turn_overrides_are_a_valid_configuration(chosen: ExperimentSource, turn: Block) -> None:
    from flagscale import api

    turns = ExperimentTrainer(chosen, TrainingOptions(steps=20, block=10))
    plan = api.plan(chosen.config, turns.overrides_of(ARM, "none", turn))
    words = plan.hosts[0].program
    assert words[words.index("--exit-interval") + 1] == "10"
    assert words[words.index("--train-iters") + 1] == "40"
    assert ("FSCCL_ALGO", "ring") in [(e.name, e.value) for e in plan.hosts[0].environment]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--models gpt2", "--models: the YAML says what is trained"),
        ("-r 2 --hosts a b", "-r, --hosts: the YAML says"),
        ("--steps 50 --block 10", "--steps 50: train.model.train_iters of .*it's.yaml is 40"),
        ("--steps 25 --block 10 --settle 2", "turns of an experiment are whole, of --block 10"),
        ("--steps 20 --block 5", "--settle 5: turns of 5 steps"),
        (
            "--steps 20 --block 10 --arms optireduce",
            "use_distributed_optimizer: true with arm optireduce: it sums",
        ),
        (
            f"{FSCCL} +train.system.comm.algo=tree",
            "comm.algo of the YAML would win",
        ),
        (
            f"{FSCCL} +train.system.comm.tail=exact",
            "comm.tail of the YAML would win",
        ),
        (
            "--steps 20 --block 10 --arms gloo --override +experiment.envs.FSCCL_ALGO=ring",
            "experiment.envs: FSCCL_ALGO would be",
        ),
        ("--override train.model.lr=x", "train.model.lr"),
        (
            "--override experiment.task.type=command +experiment.task.command=[ls]",
            "ls is run",
        ),
    ],
)
def test_experiments_that_cannot_be_compared_are_refused(
    chosen: ExperimentSource, words: str, told: str
) -> None:
    line = ["--config-path", str(chosen.config.parent), "--config-name", chosen.config.name]
    with pytest.raises(ConfigError, match=told):
        TrainingCommand().run_line([*line, *words.split()], "training")


def test_documented_command_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its last override gradients would be summed exactly under every arm."""
    monkeypatch.chdir(PROJECT)
    manual = (PROJECT / "docs" / "guides" / "tail-latency.md").read_text().replace("\\\n", " ")
    (line,) = [
        one for one in manual.splitlines() if one.startswith("flagscale bench training --co")
    ]
    words = shlex.split(line)
    path, name = (words[words.index(f"--config-{what}") + 1] for what in ("path", "name"))
    given = tuple(words[words.index("--override") + 1 :])
    (bounded,) = [arm for arm in words[words.index("--arms") + 1].split(",") if arm == "optireduce"]
    arms = [resolve_arm(bounded, accelerated=False, one_host=True, custom={})]
    training = TrainingOptions(steps=90, block=30)
    ExperimentTrainer(ExperimentSource(Path(path, name), given), training).check_arms(arms)
    with pytest.raises(ConfigError, match="use_distributed_optimizer: true with arm optireduce"):
        ExperimentTrainer(ExperimentSource(Path(path, name), given[:-1]), training).check_arms(arms)


def test_overrides_require_an_experiment() -> None:
    with pytest.raises(ConfigError, match="--override needs --config-name"):
        TrainingCommand().run_line(["-r", "2", "--override", "a=b"], "training")
