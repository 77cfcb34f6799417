"""Rules between arguments, one module per feature; :mod:`..check` applies them all."""
