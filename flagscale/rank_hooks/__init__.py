"""Directory that the launcher puts on the path of other programs' ranks, for ``sitecustomize``."""
