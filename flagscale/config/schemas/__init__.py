"""JSON schemas of an experiment's YAML files, written by ``make docs`` from
:mod:`flagscale.config.json_schema`.
"""

from __future__ import annotations

from pathlib import Path

DIRECTORY = Path(__file__).parent
EXPERIMENT_FILE = "experiment.schema.json"
"""Schema of an experiment: ``conf/train.yaml``."""
TRAIN_FILE = "train.schema.json"
"""Schema of a file of the config group ``train``: ``conf/train/8b.yaml``."""
