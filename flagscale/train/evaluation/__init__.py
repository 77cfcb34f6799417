"""Evaluation of a model on tasks of lm-evaluation-harness, on the ranks that hold the model."""
