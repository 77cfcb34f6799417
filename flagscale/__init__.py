"""flagscale: one YAML, one command, LLM training on any mix of machines and chips."""

__version__ = "0.1.0"
