"""What the trials train: six families, of random weights and data made here."""
