"""The collectives benchmark: one tool for every communication backend a YAML can name.

:mod:`command` has the flags, of which :mod:`launch` makes a
:class:`~flagscale.bench.collectives.spec.BenchSpec`; :mod:`session` measures on each rank;
:mod:`table`, :mod:`report` and :mod:`records` show what rank 0 collected. What needs torch is
imported on the ranks alone, so a wrong command line is answered at once.
"""
