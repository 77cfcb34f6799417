"""Every argument of the training program, readable without torch."""
