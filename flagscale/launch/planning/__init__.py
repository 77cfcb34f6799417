"""From an experiment and its hosts to exactly what each host will run: environment, plan, scripts.

Pure but for :mod:`.devices` and :func:`.slots.this_machine`, which look at this machine.
"""
