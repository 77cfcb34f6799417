"""Metrics sinks: places where the metrics of a training run are logged. No torch."""
