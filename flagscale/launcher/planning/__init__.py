"""Planning of a run: the environment, command line and script of every host.

Pure functions of an experiment and its hosts, except :func:`.assignment.this_machine`, which reads
the state of this machine.
"""
