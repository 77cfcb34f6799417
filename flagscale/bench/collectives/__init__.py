"""Benchmark of collectives for any communication backend that a YAML can name.

Order of the modules: ``options`` and ``cli`` (command line to :class:`.spec.BenchSpec`),
``worker`` (a rank), ``session`` (all sizes of a specification), ``collective_calls``, ``timing``
and ``checks`` (one size), ``records``, ``table``, ``curves`` and ``report`` (results),
``presenter`` (rank 0's output). ``watch`` detects ranks that hang.
"""
