"""The training program's arguments, in the order in which one is handled.

``spec``: what an argument is, how it is read from a YAML, written as a command line and parsed by
the ranks. ``rules``: what must hold between arguments, by feature. ``hetero``: meshes and
micro-batch splits of heterogeneous devices. ``compat``: names and values of other programs. On top
of these, :mod:`.layout` describes the parallel layout of a job, :mod:`.check` applies all rules and
:mod:`.derive` fills in what follows from the arguments.
"""
