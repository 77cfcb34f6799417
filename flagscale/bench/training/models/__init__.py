"""Models for the training benchmark: six families with random weights and generated data."""
