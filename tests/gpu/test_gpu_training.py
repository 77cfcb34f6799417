"""Training on CUDA with nccl: results compared between layouts, and speed figures.

Run on a machine with GPUs: ``pytest -m gpu tests/gpu``. Works with the published megatron.core and
with the adapted tree. Tests that need more GPUs than there are are skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gpu_programs import MODEL, PROGRAM, environment
from support.layout_lab import write_short_documents
from support.layout_models import SHORT_DOCUMENTS

from flagscale.status import STATUS_DIR_VARIABLE, Event, read_events

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "integration" / "train" / "layout_worker.py"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
SP = TP2 + " --sequence-parallel"
HIDDEN = "--tp-comm-overlap"
BY_UNITS, BLOCK = (
    f"--recompute-granularity full --recompute-method {method} --recompute-num-layers 1"
    for method in ("uniform", "block")
)
VPP2 = PP2 + " --num-virtual-stages-per-pipeline-rank 2"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"

MOE = """
--bf16 --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 128
--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none
"""

APART = f"""
--data-path {SHORT_DOCUMENTS} --tokenizer-type NullTokenizer --split 4,1,0 --vocab-size 500
--reset-attention-mask --reset-position-ids --eod-mask-loss
"""

# Adam's steps are as long as the rate, whatever the gradient: at a higher one norms soon part.
LORA = "--peft-type lora --lora-dim 8 --lr 1e-3"

CAPTURED = "--cuda-graph-impl local --cuda-graph-scope full_iteration --cuda-graph-warmup-steps 1"

# What Gemma's and DeepSeek's layers have.
WINDOWS = """
--window-size 63 0 --window-attn-skip-freq 2 --window-rotary-base 100 --sandwich-norm
--layernorm-zero-centered-gamma --scale-embeddings --final-logit-softcapping 30
"""
LATENT = """
--multi-latent-attention --q-lora-rank 96 --kv-lora-rank 48 --qk-head-dim 48
--qk-pos-emb-head-dim 16 --v-head-dim 48 --qk-layernorm --rotary-scaling-factor 4
--mscale-all-dim 1 --original-max-position-embeddings 64
"""

MTP = "--mtp-num-layers 1"
MESHES = "--enable-hetero --hetero-process-meshes 1 1 1 1 1  1 1 1 1 1"

CASES: dict[str, tuple[int, str, str, float]] = {
    "mtp": (1, MTP, "mtp", 0.0),
    "mtp-meshes": (2, f"{MTP} {MESHES}", "mtp", 1e-4),
    "lora-mtp": (1, f"{MTP} {LORA}", "lora-mtp", 0.0),
    "lora-mtp-pp2": (2, f"{MTP} {LORA} {PP2}", "lora-mtp", 1e-4),
    "lora": (1, f"{LORA} --transformer-impl local --attention-backend local", "lora", 0.0),
    "lora-fp32": (1, LORA, "lora", 1e-4),
    "lora-fp32-tp2-sp": (2, f"{LORA} {SP}", "lora", 1e-4),
    "lora-fp32-pp2-vpp2-dp2-overlap": (4, f"{LORA} {VPP2} {OVERLAP}", "lora", 1e-4),
    "lora-bf16": (1, f"{LORA} --bf16", "lora", 2e-2),
    "lora-bf16-overlap": (1, f"{LORA} --bf16 {OVERLAP}", "lora", 2e-2),
    "lora-bf16-recompute": (1, f"{LORA} --bf16 {BY_UNITS}", "lora-bf16", 1e-3),
    "lora-apart-bf16": (1, f"{APART} {LORA} --bf16", "lora-apart", 2e-2),
    "lora-apart": (
        1,
        f"{APART} {LORA} --transformer-impl local --attention-backend local",
        "lora-apart",
        0.0,
    ),
    # Documents that are kept apart: what megatron.core's own attention computes by a mask, in fp32.
    "apart": (1, f"{APART} --transformer-impl local --attention-backend local", "apart", 0.0),
    "apart-fp32": (1, APART, "apart", 1e-4),
    "apart-fp32-cp2": (2, f"{APART} --context-parallel-size 2", "apart", 1e-4),
    "apart-bf16": (1, f"{APART} --bf16", "apart", 2e-2),
    "apart-bf16-plain-layers": (1, f"{APART} --bf16 --transformer-impl local", "apart", 2e-2),
    "apart-per-token": (1, f"{APART} --calculate-per-token-loss", "apart-per-token", 0.0),
    "apart-bf16-mbs2": (
        1,
        f"{APART} --bf16 --micro-batch-size 2 --calculate-per-token-loss",
        "apart-per-token",
        2e-2,
    ),
    "apart-bf16-cp2": (2, f"{APART} --bf16 --context-parallel-size 2", "apart", 2e-2),
    "apart-bf16-tp2-sp": (2, f"{APART} --bf16 {SP}", "apart", 2e-2),
    "fp32": (1, "", "fp32", 0.0),
    "fp32-plain-layers": (1, "--transformer-impl local", "fp32", 1e-4),
    "fp32-cp2": (2, "--context-parallel-size 2", "fp32", 1e-4),
    "fp32-local-attention": (1, "--attention-backend local", "fp32", 1e-4),
    "fp32-dp2-overlap": (2, OVERLAP, "fp32", 1e-4),
    "fp32-tp2-sp": (2, SP, "fp32", 1e-4),
    "fp32-pp2": (2, PP2, "fp32", 1e-4),
    "fp32-pp2-vpp2": (2, VPP2, "fp32", 1e-4),
    "fp32-tp2-sp-dp2-overlap": (4, f"{SP} {OVERLAP}", "fp32", 1e-4),
    "fp32-pp2-vpp2-dp2-overlap": (4, f"{VPP2} {OVERLAP}", "fp32", 1e-4),
    "fp32-tp2-pp2-vpp2": (4, f"{SP} {VPP2}", "fp32", 1e-4),
    "fp32-tp2-pp2-overlap-dp2": (8, f"{SP} {VPP2} {OVERLAP}", "fp32", 1e-4),
    "bf16": (1, "--bf16", "bf16", 0.0),
    "bf16-plain-layers": (1, "--bf16 --transformer-impl local", "bf16", 2e-2),
    "bf16-cp2": (2, "--bf16 --context-parallel-size 2", "bf16", 2e-2),
    "moe": (1, MOE, "moe", 0.0),
    "moe-grouped": (1, f"{MOE} --moe-grouped-gemm", "moe", 2e-2),
    "moe-grouped-ep2": (2, f"{MOE} --moe-grouped-gemm --expert-model-parallel-size 2", "moe", 2e-2),
    "bf16-fp8": (1, "--bf16 --fp8 hybrid", "bf16", 5e-2),
    "bf16-fp8-blockwise": (1, "--bf16 --fp8 e4m3 --fp8-recipe blockwise", "bf16", 5e-2),
    "bf16-flash": (1, "--bf16 --attention-backend flash", "bf16", 1e-2),
    "bf16-local-attention": (1, "--bf16 --attention-backend local", "bf16", 2e-2),
    "bf16-fused-loss": (1, "--bf16 --cross-entropy-loss-fusion", "bf16", 2e-2),
    "bf16-recompute": (1, f"--bf16 {BY_UNITS}", "bf16", 1e-3),
    "captured-bf16": (1, f"--bf16 {CAPTURED}", "bf16", 1e-3),
    "captured-fp32": (1, f"{CAPTURED} --micro-batch-size 2", "fp32", 1e-4),
    "captured-plain-layers": (1, f"--bf16 {CAPTURED} --transformer-impl local", "bf16", 2e-2),
    "captured-fp8": (1, f"--bf16 --fp8 hybrid {CAPTURED}", "bf16-fp8", 1e-2),
    "captured-fp8-blockwise": (
        1,
        f"--bf16 --fp8 e4m3 --fp8-recipe blockwise {CAPTURED}",
        "bf16-fp8-blockwise",
        1e-2,
    ),
    "captured-lora-apart": (1, f"{APART} {LORA} --bf16 {CAPTURED}", "lora-apart-bf16", 1e-2),
    "captured-bert": (1, f"--family bert {CAPTURED}", "bert-fp32", 1e-4),
    "captured-bf16-dp2": (2, f"--bf16 --use-distributed-optimizer {CAPTURED}", "bf16", 1e-2),
    "windows-fp32": (1, WINDOWS, "windows-fp32", 0.0),
    "windows-fp32-plain-layers": (1, f"{WINDOWS} --transformer-impl local", "windows-fp32", 1e-4),
    "windows-bf16": (1, f"{WINDOWS} --bf16", "windows-fp32", 2e-2),
    "bounded-fp32": (1, f"{WINDOWS} --attn-logit-softcapping 2", "bounded-fp32", 0.0),
    "bounded-bf16": (
        1,
        f"{WINDOWS} --attn-logit-softcapping 2 --bf16",
        "bounded-fp32",
        2e-2,
    ),
    "latent-fp32": (1, LATENT, "latent-fp32", 0.0),
    "latent-fp32-plain-layers": (1, f"{LATENT} --transformer-impl local", "latent-fp32", 1e-4),
    "latent-bf16": (1, f"{LATENT} --bf16", "latent-fp32", 2e-2),
    "latent-fp8-blockwise": (
        1,
        f"{LATENT} --bf16 --fp8 e4m3 --fp8-recipe blockwise",
        "latent-bf16",
        5e-2,
    ),
    "latent-fp32-tp2-sp": (2, f"{LATENT} {SP}", "latent-fp32", 1e-4),
    "bert-fp32": (1, "--family bert", "bert-fp32", 0.0),
    "bert-fp32-plain-layers": (1, "--family bert --transformer-impl local", "bert-fp32", 1e-4),
    "bert-bf16": (1, "--family bert --bf16", "bert-fp32", 2e-2),
    "bert-fp32-tp2-sp": (2, f"--family bert {SP}", "bert-fp32", 1e-4),
    "bf16-dp2-overlap": (2, f"--bf16 {OVERLAP}", "bf16", 1e-2),
    "bf16-tp2-sp": (2, f"--bf16 {SP}", "bf16", 2e-2),
    "hidden-fp32-tp2-sp": (2, f"{SP} {HIDDEN}", "fp32", 1e-4),
    "hidden-bf16-tp2-sp": (2, f"--bf16 {SP} {HIDDEN}", "bf16", 2e-2),
    "hidden-fp32-tp2-sp-recompute": (2, f"{SP} {HIDDEN} {BY_UNITS}", "fp32", 1e-4),
    "hidden-fp32-tp2-sp-recompute-block": (2, f"{SP} {HIDDEN} {BLOCK}", "fp32", 1e-4),
    "hidden-lora-fp32-tp2-sp": (2, f"{LORA} {SP} {HIDDEN}", "lora", 1e-4),
    "hidden-latent-fp32-tp2-sp": (2, f"{LATENT} {SP} {HIDDEN}", "latent-fp32", 1e-4),
}


def model_arguments(layout: str) -> str:
    """Return the model's arguments, with mock data unless the layout names data."""
    return MODEL.replace("--mock-data", "") if "--data-path" in layout else MODEL


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Train the layouts of the selected tests and their references; return the results by name."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    names = {call.params["name"] for call in calls if call and call.params.get("name") in CASES}
    names |= {CASES[name][2] for name in names} | {"fp32"}
    directory = tmp_path_factory.mktemp("gpu-layouts")
    cases, answers = directory / "cases.json", directory / "results.json"
    write_short_documents(directory / SHORT_DOCUMENTS, longest=150)
    possible = [
        {
            "id": name,
            "world": world,
            "argv": f"{model_arguments(layout)} {layout} --train-iters 3".split(),
        }
        for name, (world, layout, _, _) in CASES.items()
        if name in names and world <= torch.cuda.device_count()
    ]
    cases.write_text(json.dumps(possible))
    process = subprocess.run(
        [sys.executable, str(WORKER), str(cases), str(answers), "cuda"],
        env=environment(),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    by_name: dict[str, Any] = json.loads(answers.read_text())
    by_name["stderr"] = process.stderr
    return by_name


@pytest.mark.parametrize("name", CASES)
def test_layout_matches_one_gpu(name: str, results: dict[str, Any]) -> None:
    world, _, reference, tolerance = CASES[name]
    if world > torch.cuda.device_count():
        pytest.skip(f"needs {world} GPUs")
    assert {name, reference} <= results.keys(), results["stderr"][-4000:]
    for quantity in ("loss", "norm", "validation"):
        expected = pytest.approx(results[reference][quantity], rel=tolerance, abs=tolerance)
        assert results[name][quantity] == expected, quantity


@pytest.mark.parametrize("name", ["fp32", "lora-fp32"])
def test_first_step_matches_plain_torch(name: str, results: dict[str, Any]) -> None:
    loss, norm = results[name]["by_hand"]
    assert results[name]["loss"][0] == pytest.approx(loss, rel=1e-4)
    assert results[name]["norm"][0] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("name", [n for n in CASES if {"apart", "lora", "fp8"} & {*n.split("-")}])
def test_features_keep_layers_compiled(name: str, results: dict[str, Any]) -> None:
    if CASES[name][0] > torch.cuda.device_count():
        pytest.skip(f"needs {CASES[name][0]} GPUs")
    assert results[name]["uncompiled"] == []


def train_program(directory: Path, arguments: str, gpus: int) -> list[Event]:
    """Run the training program on ``gpus`` GPUs and return the events of rank 0."""
    status = directory / "status"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
    process = subprocess.run(
        [sys.executable, *command, str(PROGRAM), *f"{MODEL} {arguments}".split()],
        env=environment(**{STATUS_DIR_VARIABLE: str(status)}),
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return read_events(status / "rank_0.jsonl")[0]


def test_the_program_trains_on_every_gpu_and_measures(tmp_path: Path) -> None:
    events = train_program(tmp_path, "--bf16 --log-interval 5", min(torch.cuda.device_count(), 8))
    assert next(e for e in events if e.event == "joined").get("backend") == "nccl"
    last = [e for e in events if e.event == "progress"][-1]
    assert last.get("step") == 20
    assert last.get("memory_gib") > 0
    assert last.get("tokens_per_second") > 0
    assert events[-1].get("reason") == "completed"


def test_resumed_run_matches_uninterrupted_run(tmp_path: Path) -> None:
    keep = "--bf16 --use-distributed-optimizer --save checkpoints --load checkpoints"
    whole = train_program(tmp_path, "--bf16 --use-distributed-optimizer --log-interval 1", 1)
    train_program(tmp_path, f"{keep} --exit-interval 10 --log-interval 1", 1)
    again = tmp_path / "again"
    again.mkdir()
    (again / "checkpoints").symlink_to(tmp_path / "checkpoints")
    second = train_program(again, f"{keep} --log-interval 1", 1)
    losses = [{e.get("step"): e.get("loss") for e in es if e.event == "progress"} for es in
              (whole, second)]  # fmt: skip
    assert losses[1]
    for step, loss in losses[1].items():
        assert loss == pytest.approx(losses[0][step], abs=1e-3)


@pytest.mark.parametrize(
    ("model_parallel", "layout"), [(1, OVERLAP), (2, f"{SP} {OVERLAP}"), (4, f"{SP} {VPP2}")],
    ids=["data", "tensor", "tensor-pipeline"],
)  # fmt: skip
def test_fsccl_matches_nccl(tmp_path: Path, model_parallel: int, layout: str) -> None:
    gpus = min(torch.cuda.device_count(), 8) // model_parallel * model_parallel
    if gpus == 0:
        pytest.skip(f"needs {model_parallel} GPUs")
    layout = f"--bf16 --log-interval 1 {layout if gpus > 1 else ''}"
    losses = {}
    for backend in ("nccl", "fsccl"):
        directory = tmp_path / backend
        directory.mkdir()
        events = train_program(directory, f"{layout} --distributed-backend {backend}", gpus)
        assert next(e for e in events if e.event == "joined").get("backend") == backend
        losses[backend] = [e.get("loss") for e in events if e.event == "progress"]
    assert len(losses["nccl"]) == 20
    assert losses["fsccl"] == pytest.approx(losses["nccl"], rel=1e-2)
