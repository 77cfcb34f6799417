"""Evaluate a Hugging Face model by lm_eval's own ``HFLM``, and print the scores.

usage: hf_scores.py MODEL MAX_LENGTH TASK.yaml…
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    from flagscale.train.evaluation.scores import read_results
    from flagscale.train.evaluation.tasks import TaskOptions, load_tasks

    tasks = load_tasks(TaskOptions(sys.argv[3:], "tasks"))
    model: Any = HFLM(
        pretrained=sys.argv[1],
        max_length=int(sys.argv[2]),
        device="cpu",
        dtype="float32",
        batch_size=4,
    )
    results: Any = evaluate(model, tasks, bootstrap_iters=0, log_samples=False)
    print("\n" + json.dumps(read_results(results, 0.0).values))


if __name__ == "__main__":
    main()
