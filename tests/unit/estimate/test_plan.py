"""Tests of the estimates and notes of experiments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from flagscale.config.load import load
from flagscale.config.schema import Experiment, Options
from flagscale.errors import ConfigError
from flagscale.estimate import cost_cache
from flagscale.estimate.costs import DENSE, PartCost, RankCosts
from flagscale.estimate.notes import estimate_notes
from flagscale.estimate.plan import estimate_experiment
from flagscale.estimate.show import to_json
from flagscale.launcher.preview import print_estimate

REPOSITORY = Path(__file__).resolve().parents[3]
CONF = REPOSITORY / "examples" / "llama3" / "conf"
KEEPING_ALL = ("train=8b", "train.system.recompute_granularity=null")
SHARED = ("train.system.tensor_model_parallel_size=2", "train.system.sequence_parallel=true")


@dataclass(frozen=True)
class HostOnKind:
    name: str
    device_type: str | None
    ranks: range


Load = Callable[..., Experiment]


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def load_one(name: str, *overrides: str) -> Experiment:
        return load(CONF, name, ["action=dryrun", *overrides]).experiment

    return load_one


def make_hosts(kind: str | None, *counts: int) -> Sequence[HostOnKind]:
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [
        HostOnKind(f"h{index}", kind, range(first_rank, first_rank + count))
        for index, (first_rank, count) in enumerate(zip(starts, counts, strict=True))
    ]


A800_AND_BI = (*make_hosts("A800", 16), HostOnKind("b", "BI", range(16, 32)))
REPLICAS = (
    "+train.system.hetero.hetero_mode=dp",
    "+train.system.hetero.hetero_micro_batch_sizes=[16,1,16,4]",
    "~train.system.hetero.hetero_process_meshes",
    "~train.system.hetero.hetero_pipeline_layer_split",
    "train.system.sequence_parallel=false",
    "train.model.global_batch_size=160",
)


def test_meshes_with_memory_and_work(load_example: Load) -> None:
    assert list(estimate_notes(load_example("train_hetero"), A800_AND_BI)) == [
        "stage 0, mesh 0 (A800 tp2 dp8): a rank takes 56.8 GiB (weights 4.1, gradients 8.3, "
        "optimizer 3.1, activations 40.5, transient 0.7) and does the most arithmetic",
        "stage 1, mesh 1 (BI dp16): a rank takes 41.4 GiB (weights 6.7, gradients 13.3, optimizer "
        "2.5, activations 15.8, transient 3.1) and does 0.89 x the arithmetic of one of stage "
        "0, mesh 0 (A800 tp2 dp8)",
        "how long stages compute and wait is not known: no peak is known of type=BI, and "
        "train.system.peak_tflops gives none",
    ]


def test_times_of_heterogeneous_meshes(load_example: Load) -> None:
    """``peak_tflops`` applies to the devices whose peak is unknown."""
    experiment = load_example("train_hetero", "+train.system.peak_tflops=100")
    estimate = estimate_experiment(experiment, A800_AND_BI)
    step_time = estimate.step_time
    assert step_time is not None
    assert estimate.peaks == [312, 100]
    work = [64 * sum(stage.flops) for stage in estimate.forecast.stages]
    # Such layers reach about 60% of the peak.
    expected = (work[0] / (0.6 * 312e12), work[1] / (0.6 * 100e12))
    assert step_time.busy_seconds == pytest.approx(expected, rel=0.06)
    step, computing = list(estimate_notes(experiment, A800_AND_BI))[2:]
    assert step == (
        f"a step takes {step_time.seconds:.3g} s, as layers do on an H200, other communication "
        "hidden"
    )
    assert computing == (
        f"computing: stage 0 for {step_time.busy_seconds[0]:.2f} s of it (idle 63%), stage 1 for "
        f"{step_time.busy_seconds[1]:.2f} s of it (idle 1%); the busiest stage 46% longer than "
        "stages on average"
    )


def test_meshes_of_no_type_have_memory_too(load_example: Load) -> None:
    first_stage, second_stage, time = estimate_notes(
        load_example("train_hetero", "train=tiny_hetero"), make_hosts(None, 4)
    )
    assert "(tp2): a rank takes" in first_stage
    assert " MiB (weights" in first_stage
    assert second_stage.endswith("does the most arithmetic")
    assert time.endswith("was measured with bf16: true alone")


def test_times_that_were_measured(load_example: Load) -> None:
    experiment = load_example(
        "train_hetero", "train.system.hetero.hetero_pipeline_layer_split=auto"
    )
    hosts = A800_AND_BI
    args = estimate_experiment(experiment, hosts).args
    for index, seconds in enumerate((0.01, 0.03)):
        costs = RankCosts({DENSE: PartCost(seconds, 2 * seconds)})
        path = cost_cache.mesh_cost_path(vars(args), args.meshes, index)
        cost_cache.write_costs(path, cost_cache.CachedCosts(costs, {}, "2026-11-23"))
    assert list(estimate_notes(experiment, hosts))[-3:] == [
        "a step takes 46.8 s, layers 24+8, by times measured on 2026-11-23",
        "computing: stage 0 for 46.08 s of it (idle 2%), stage 1 for 46.08 s of it (idle 2%); the "
        "busiest stage 0% longer than stages on average",
        "the layers shown are an even split; training measures first, and chooses",
    ]


def test_no_notes_if_everything_fits(load_example: Load) -> None:
    assert list(estimate_notes(load_example("train"), make_hosts(None, 1))) == []
    assert list(estimate_notes(load_example("train", "train=8b"), make_hosts("H200", 8))) == []


def test_notes_explain_excess_memory_and_its_remedy(load_example: Load) -> None:
    experiment = load_example("train", *KEEPING_ALL, "train.model.micro_batch_size=4")
    problem, remedy = estimate_notes(experiment, make_hosts("H100", 8))
    assert problem.startswith("stage 0 does not fit: 209.6 GiB (weights 15.0, ")
    assert problem.endswith(" a rank, a H100 has 79 GiB, 69 of them for tensors")
    assert remedy == (
        "what would fit: tensor_model_parallel_size: 4, or recompute_granularity: full and "
        "optimizer_cpu_offload: true, or micro_batch_size: 1 and recompute_granularity: full"
    )


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["train.model.micro_batch_size=2"], "tensor_model_parallel_size: 4"),
        (["train.system.use_distributed_optimizer=false",
          "train.system.overlap_param_gather=false"], "use_distributed_optimizer: true"),
        (["train.model.num_layers=3200"], "that takes more ranks, or a smaller model"),
    ],
    ids=["smaller", "sharded", "hopeless"],
)  # fmt: skip
def test_notes_propose_settings_that_fit(
    overrides: list[str], expected: str, load_example: Load
) -> None:
    experiment = load_example("train", *KEEPING_ALL, *overrides)
    assert expected in list(estimate_notes(experiment, make_hosts("H100", 8)))[-1]


@pytest.mark.parametrize(
    ("precision", "shares"),
    [
        ([], (0.55, 0.65)),
        (["+train.system.precision.fp8=hybrid"], (0.7, 0.8)),
        (
            [
                "+train.system.precision.fp8=e4m3",
                "+train.system.precision.fp8_recipe=blockwise",
            ],
            (0.65, 0.75),
        ),
    ],
    ids=["bf16", "fp8", "fp8-blockwise"],
)
def test_the_time_of_a_known_device(
    precision: list[str], shares: tuple[float, float], load_example: Load
) -> None:
    experiment = load_example("train", *KEEPING_ALL, "train.model.global_batch_size=64", *precision)
    estimate = estimate_experiment(experiment, make_hosts("H200", 8))
    assert estimate.seconds is not None
    at_the_peak = estimate.forecast.flops_per_step / (8 * 989e12)
    assert shares[0] < at_the_peak / estimate.seconds[0] < shares[1]
    assert estimate_experiment(experiment, make_hosts("Frobnicator", 8)).seconds is None


@pytest.mark.parametrize(("precision", "hidden"), [("null", True), ("hybrid", False)])
def test_exchanges_are_hidden_by_products_in_16_bits_alone(
    precision: str, hidden: bool, load_example: Load
) -> None:
    def seconds(overlap: str) -> float:
        overrides = (f"+train.system.precision.fp8={precision}", f"+train.system.{overlap}")
        estimate = estimate_experiment(
            load_example("train", *KEEPING_ALL, *SHARED, *overrides), make_hosts("H200", 8)
        )
        assert estimate.seconds is not None
        return estimate.seconds[0]

    assert (seconds("tp_comm_overlap=true") < seconds("tp_comm_overlap=false")) is hidden


@pytest.mark.parametrize("kind", ["H200", "Frobnicator", None])
def test_configured_peak_determines_the_time(kind: str | None, load_example: Load) -> None:
    experiment = load_example("train", *KEEPING_ALL, "+train.system.peak_tflops=100")
    estimate = estimate_experiment(experiment, make_hosts(kind, 8))
    assert estimate.seconds is not None
    assert estimate.seconds[0] == pytest.approx(
        estimate.forecast.flops_per_step / (8 * 0.62 * 100e12), rel=0.05
    )


@pytest.mark.parametrize("meshes", ["auto", "[{device_type: A800, ranks: 16}, {ranks: 16}]"])
def test_sizes_that_are_chosen_later(meshes: str, load_example: Load) -> None:
    open_ = f"train.system.hetero.hetero_process_meshes={meshes}"
    removals = [f"~train.system.hetero.{name}" for name in ("hetero_pipeline_layer_split",
                                                         "hetero_device_types")]  # fmt: skip
    experiment = load_example("train_hetero", open_, *removals)
    hosts = [*make_hosts("A800", 16), HostOnKind("b", "BI", range(16, 32))]
    assert list(estimate_notes(experiment, hosts)) == []
    with pytest.raises(ConfigError, match="sizes are chosen by measuring when training starts"):
        estimate_experiment(experiment, hosts)


def test_largest_micro_batch_determines_memory(load_example: Load) -> None:
    estimate = estimate_experiment(load_example("train_hetero", *REPLICAS), A800_AND_BI)
    small = estimate_experiment(load_example("train", *KEEPING_ALL), make_hosts("A800", 8))
    activations = [
        estimates.forecast.stages[0].memory.activations for estimates in (estimate, small)
    ]
    assert activations[0] == 4 * activations[1]
    assert estimate.seconds is None


def test_heterogeneous_replicas(load_example: Load) -> None:
    memory_text = "(weights 15.0, gradients 29.9, optimizer 2.8, activations"
    experiment = load_example("train_hetero", *REPLICAS, "+train.system.peak_tflops=100")
    first_replica, second_replica, step, excess = estimate_notes(experiment, A800_AND_BI)
    assert first_replica.startswith(
        f"replicas 0-15 (A800): a rank takes 86.8 GiB {memory_text} 36.0"
    )
    assert first_replica.endswith("; its share of a step takes 4.47 s, idle 92%")
    assert second_replica.startswith(
        f"replicas 16-31 (BI): a rank takes 201.2 GiB {memory_text} 144.0"
    )
    assert second_replica.endswith("; its share of a step takes 56.57 s, idle 0%")
    assert step == (
        "a step takes 56.6 s, as layers do on an H200, other communication hidden; the slowest "
        "replica 85% longer than replicas on average"
    )
    assert excess.startswith("replicas 0-15 (A800) does not fit: 86.8 GiB")
    assert excess.endswith(
        "a A800 has 79 GiB, 69 of them for tensors; it takes tensor parallelism, or recomputation"
    )
    records = to_json(estimate_experiment(experiment, A800_AND_BI))["replicas"]
    assert [record["micro_batch_size"] for record in records] == [1, 4]
    assert records[1]["seconds"] == pytest.approx(4 * 312 / 100 * records[0]["seconds"], rel=0.05)


@pytest.mark.parametrize(
    ("device", "length", "expected"),
    [("H200", 8192, "micro-batches of 2 would"), ("A800", 4096, "micro-batches of 1 would")],
)
def test_replicas_micro_batches_that_fit(
    device: str, length: int, expected: str, load_example: Load
) -> None:
    experiment = load_example("train_hetero", *REPLICAS, f"train.model.seq_length={length}")
    hosts = [*make_hosts("H200", 16), HostOnKind("b", device, range(16, 32))]
    assert list(estimate_notes(experiment, hosts))[-1].endswith(expected)


def test_external_programs_are_rejected(load_example: Load, tmp_path: Path) -> None:
    (tmp_path / "own.py").touch()
    experiment = load_example("train", f"experiment.task.entrypoint={tmp_path / 'own.py'}")
    assert list(estimate_notes(experiment, make_hosts("H100", 1))) == []
    with pytest.raises(ConfigError, match=r"own\.py is not this project's training program"):
        estimate_experiment(experiment, make_hosts("H100", 1))


@pytest.mark.parametrize("as_json", [False, True])
def test_estimate_action_prints_the_forecast(
    as_json: bool,
    load_example: Load,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    hostfile = tmp_path / "hosts"
    hostfile.write_text("n1 slots=8 type=H100\n")
    overrides = (f"experiment.runner.hostfile={hostfile}", "train.model.micro_batch_size=4")
    assert (
        print_estimate(load_example("train", *KEEPING_ALL, *overrides), Options(json=as_json)) == 2
    )
    output = capsys.readouterr().out
    if as_json:
        record = json.loads(output)
        assert record["stages"][0]["device"] == {
            "kind": "H100",
            "peak": 989.0,
            "memory": 79.1,
            "bandwidth": 3350.0,
        }
        assert record["stages"][0]["memory"]["weights"] == 2 * 8_030_261_248
        assert len(record["does_not_fit"]) == 2
    else:
        assert "209.6" in output
        assert "H100 79" in output
        assert "what would fit: tensor_model_parallel_size: 4" in output
