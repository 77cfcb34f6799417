"""One file a way of starting a plan's hosts; all speak the verbs of ``base.Runner``."""
