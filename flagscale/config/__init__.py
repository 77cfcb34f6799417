"""The typed schema of an experiment: composing it from YAML, checking it, explaining it."""
