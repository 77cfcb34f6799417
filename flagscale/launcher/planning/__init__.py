"""From an experiment and its hosts to exactly what each host will run: environment, plan, scripts.

Pure but for :func:`.slots.this_machine`, which looks at this machine.
"""
