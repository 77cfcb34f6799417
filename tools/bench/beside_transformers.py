"""Compare training of a Llama with plain transformers and peft, on one GPU in the same run.

The model is Llama-3.2-1B with tied embeddings, initialized randomly, on random tokens: 8 sequences
of 2048 tokens a step in one micro-batch, bf16. ``full`` trains all weights with AdamW; ``lora``
trains adapters of rank 16 of all linear layers. transformers runs eagerly with scaled dot product
attention and torch's fused AdamW on bf16 weights; flagscale runs its defaults, with fp32 gradients,
master weights and moments. The two run alternately.

    python tools/bench/beside_transformers.py --output docs/results/transformers-1xh200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu
import torch

from flagscale import files
from flagscale.bench import machine
from flagscale.cli_errors import run_command
from flagscale.errors import ConfigError

LAYERS, SEQUENCE, MICRO_BATCH, VOCABULARY = 16, 2048, 8, 128256
RANK, ALPHA = 16, 32
MODEL = f"{gpu.LLAMA_1B} --vocab-size {VOCABULARY}"
ROWS = {
    "full": gpu.GpuRow("full", LAYERS, SEQUENCE, MICRO_BATCH, 1, model=MODEL, tie=""),
    "lora": gpu.GpuRow(
        "lora", LAYERS, SEQUENCE, MICRO_BATCH, 1, model=MODEL, tie="",
        options=f"--peft-type lora --lora-dim {RANK} --lora-alpha {ALPHA}",
    ),
}  # fmt: skip


def compare_rows(
    names: Sequence[str], steps: int, repetitions: int, scratch: Path, profiles: Path | None
) -> Iterator[dict[str, Any]]:
    """Measure each row with both libraries and yield a record with the ratio of their medians."""
    for name in names:
        records: dict[str, list[dict[str, Any]]] = {"flagscale": [], "transformers": []}
        for repetition in range(repetitions):
            directory = scratch / f"{name}-{repetition}"
            directory.mkdir()
            (record,) = gpu.measure_rows([ROWS[name]], steps, directory, profiles)
            records["flagscale"].append(record)
            records["transformers"].append(measure_in_subprocess(name, steps))
        medians = {
            library: statistics.median(run["tokens_per_second_per_gpu"] for run in runs)
            for library, runs in records.items()
        }
        ratio = round(medians["flagscale"] / medians["transformers"], 3)
        yield {"name": name, **records, "ratio": ratio}


def measure_in_subprocess(name: str, steps: int) -> dict[str, Any]:
    """Train a row with transformers in a process of its own, whose memory is freed at its end."""
    arguments = [str(Path(__file__).resolve()), "--only-transformers", name, "--steps", str(steps)]
    record: dict[str, Any] = json.loads(gpu.run_program(arguments).splitlines()[-1])
    return record


def measure_transformers(name: str, steps: int) -> dict[str, Any]:
    """Train a row with transformers in this process. Return its speed and memory."""
    device = torch.device("cuda")
    model = build_model(has_adapters=name == "lora", device=device)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=3e-4, betas=(0.9, 0.999), fused=True)
    tokens = torch.randint(VOCABULARY, (steps, MICRO_BATCH, SEQUENCE), device=device)
    begin = time.perf_counter()
    for step in range(steps):
        if step == gpu.WARM_UP:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        loss = model(input_ids=tokens[step], labels=tokens[step]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    step_seconds = (time.perf_counter() - begin) / (steps - gpu.WARM_UP)
    return {
        "step_seconds": step_seconds,
        "tokens_per_second_per_gpu": round(MICRO_BATCH * SEQUENCE / step_seconds),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "last_loss": float(loss),
    }


def build_model(*, has_adapters: bool, device: torch.device) -> Any:
    """Return Llama-3.2-1B in bf16 with random weights, and with adapters if asked for."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=2048, intermediate_size=8192, num_hidden_layers=LAYERS,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=SEQUENCE,
        rms_norm_eps=1e-5, tie_word_embeddings=True, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    )  # fmt: skip
    with device:
        model: Any = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    if has_adapters:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(
            r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
        )
        model = get_peft_model(model, adapters)
    model.train()
    return model


def format_record(record: dict[str, Any]) -> str:
    """Format a record as a line."""
    speeds = " | ".join(
        f"{library} "
        + ", ".join(
            f"{run['tokens_per_second_per_gpu']:,} tok/s ({run['memory_gib']:.1f} GiB)"
            for run in record[library]
        )
        for library in ("flagscale", "transformers")
    )
    return f"{record['name']:>8} | {speeds} | {record['ratio']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", default=",".join(ROWS), help="comma-separated (default: %(default)s)"
    )
    parser.add_argument(
        "--steps", type=int, default=24, help="training steps per run (default: %(default)s)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=1, help="runs of each library (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--profiles", type=Path, help="directory for traces of flagscale's runs")
    parser.add_argument("--only-transformers", choices=tuple(ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.only_transformers:
        print(json.dumps(measure_transformers(options.only_transformers, options.steps)))
        return 0
    names = options.rows.split(",")
    for name in names:
        if name not in ROWS:
            raise ConfigError(f"--rows: no such row: {name!r}", hint=f"rows: {', '.join(ROWS)}")
    records = []
    with tempfile.TemporaryDirectory() as scratch:
        for record in compare_rows(
            names, options.steps, options.repetitions, Path(scratch), options.profiles
        ):
            records.append(record)
            print(format_record(record), flush=True)
            if options.output:
                facts = machine.describe_machine(
                    "torch", "triton", "megatron-core", "transformers", "peft"
                )
                options.output.write_text(
                    files.format_json({**facts, **gpu.query_gpus(), "rows": records})
                )
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
