"""What is trained: a file a family of models, and what they are built of."""
