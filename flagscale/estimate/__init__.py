"""What a step of training takes, before it is taken: arithmetic, time, memory. No torch."""
