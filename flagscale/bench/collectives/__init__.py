"""The collectives benchmark: one tool for every communication backend a YAML can name.

:mod:`command` reads a command line into a :class:`~flagscale.bench.collectives.spec.BenchSpec`;
:mod:`launch` finds the ranks or starts them; :mod:`session` measures on each rank; :mod:`table`,
:mod:`report` and :mod:`records` show what rank 0 collected. What needs torch is imported on the
ranks alone, so a wrong command line is answered at once.
"""
