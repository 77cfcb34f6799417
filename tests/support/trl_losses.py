"""Train with TRL on the pairs of :mod:`support.preference_files` and record losses and rewards.

    PYTHONPATH=tests:. python tests/support/trl_losses.py tests/integration/train/trl_losses.json

It needs TRL, which the project does not depend on, in an environment of its own; the file states
the versions. The tests compare the recorded values with those of this project.
"""

from __future__ import annotations

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from support.preference_files import (
    PAIR_COUNT,
    STEPS,
    make_dialog_pairs,
    make_text_pairs,
    write_pair_model,
)

# TRL's sigmoid loss has no label smoothing since version 1. Its loss "aot" of a single pair is that
# loss with label smoothing.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "texts-sigmoid": (make_text_pairs, {"loss_type": "sigmoid", "beta": 0.1}),
    "dialogs-sigmoid": (make_dialog_pairs, {"loss_type": "sigmoid", "beta": 0.5}),
    "texts-ipo": (make_text_pairs, {"loss_type": "ipo", "beta": 0.2}),
    "dialogs-smoothed": (
        make_dialog_pairs,
        {"loss_type": "aot", "beta": 0.5, "label_smoothing": 0.2},
    ),
}
NAMES = {
    "loss": "loss",
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
}


def train(model: Path, make_pairs: Any, settings: dict[str, Any], directory: Path) -> Any:
    """Return the values of each training step, and those of the evaluation after the last one."""
    import transformers
    import trl
    from datasets import Dataset

    batch_size = 1 if settings["loss_type"] == "aot" else PAIR_COUNT
    config = trl.DPOConfig(
        output_dir=str(directory),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        gradient_accumulation_steps=PAIR_COUNT // batch_size,
        max_steps=STEPS,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        precompute_ref_log_probs=False,
        **settings,
    )
    trainer = trl.DPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        ref_model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=config,
        train_dataset=Dataset.from_list(make_pairs(seed=0)),
        eval_dataset=Dataset.from_list(make_pairs(seed=1)),
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    evaluation = trainer.evaluate()
    return {
        "steps": [{ours: row[theirs] for theirs, ours in NAMES.items()} for row in rows],
        "evaluation": {ours: evaluation[f"eval_{theirs}"] for theirs, ours in NAMES.items()},
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        model = write_pair_model(directory / "model")
        cases = {
            case: train(model, make_pairs, settings, directory / case)
            for case, (make_pairs, settings) in CASES.items()
        }
    versions = {package: version(package) for package in ("trl", "transformers", "torch")}
    text = json.dumps({"versions": versions, "cases": cases}, indent=2)
    Path(sys.argv[1]).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
