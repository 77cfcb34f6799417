"""Communication backends that a YAML can name."""
