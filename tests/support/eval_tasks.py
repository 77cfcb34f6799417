"""Small tasks of lm-evaluation-harness with data of their own: one for each type of request."""

from __future__ import annotations

import json
import random
from pathlib import Path

from support.chat_files import WORDS, write_lines

_COMMON = {"dataset_path": "json", "test_split": "test"}


def write_tasks(directory: Path) -> list[Path]:
    """Write the YAML files of three tasks: ``choice``, ``texts`` and ``copy``."""
    directory.mkdir()
    generator = random.Random(0)

    def words(count: int) -> str:
        return " ".join(generator.choices(WORDS, k=count))

    choices = [
        {
            "question": words(generator.randint(2, 6)),
            "choices": [words(generator.randint(1, 3)) for _ in range(3)],
            "answer": generator.randrange(3),
        }
        for _ in range(12)
    ]
    write_lines(directory / "choices.jsonl", choices)
    # Longer than a sequence, so that several windows are scored.
    write_lines(directory / "texts.jsonl", [{"text": words(count)} for count in (3, 60, 150)])
    means = {"aggregation": "mean", "higher_is_better": True}
    tasks = [
        {
            **{"task": "choice", **_COMMON, "output_type": "multiple_choice"},
            "dataset_kwargs": {"data_files": {"test": "choices.jsonl"}},
            **{"num_fewshot": 1, "fewshot_split": "test"},
            **{"doc_to_text": "Q: {{question}} A:", "doc_to_choice": "choices"},
            "doc_to_target": "answer",
            "metric_list": [{"metric": "acc", **means}, {"metric": "acc_norm", **means}],
        },
        {
            **{"task": "texts", **_COMMON, "output_type": "loglikelihood_rolling"},
            "dataset_kwargs": {"data_files": {"test": ["texts.jsonl"]}},
            **{"doc_to_text": "", "doc_to_target": "{{text}}"},
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        {
            **{"task": "copy", **_COMMON, "output_type": "generate_until"},
            "dataset_kwargs": {"data_files": {"test": "choices.jsonl"}},
            **{"doc_to_text": "{{question}}", "doc_to_target": "{{question}}"},
            "generation_kwargs": {"until": ["e", "\n"], "max_gen_toks": 6, "do_sample": False},
            "metric_list": [{"metric": "chrf"}],  # of similar texts, so that any change counts
        },
    ]
    paths = [directory / f"{task['task']}.yaml" for task in tasks]
    for path, task in zip(paths, tasks, strict=True):
        path.write_text(json.dumps(task), encoding="utf-8")  # JSON is YAML
    return paths
