"""Arguments of the training program: definition, parsing, rules and derivation.

- ``spec``: definition of arguments, parsing from a YAML and from the command line.
- ``rules``: rules between arguments, by feature.
- ``hetero``: meshes and micro-batch splits of heterogeneous devices.
- ``compat``: names and values of other programs.
- :mod:`.layout`: parallel layout of a job, and its rules.
- :mod:`.check`: applies all rules.
- :mod:`.derive`: computes the values that follow from the arguments.
"""
