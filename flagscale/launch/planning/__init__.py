"""From an experiment and its hosts to exactly what each host will run: environment, plan, scripts.

Pure but for :mod:`.devices`, :mod:`.machines` and :mod:`.ports`, which look at this machine.
"""
