"""Search for the fastest layout of an experiment (``action=auto_tune``).

- :mod:`.machine`: the devices, hosts and links that a layout runs on.
- :mod:`.prediction`: memory and time of a layout by calculation, by cause.
- :mod:`.space`: enumeration of all legal layouts, and of those that fit.
- :mod:`.belief`: posterior distribution of the time of each layout; :mod:`.linear_algebra`.
- :mod:`.records`: what was tried, in files from which a search goes on.
- :mod:`.trial`: the experiment of a trial; :mod:`.trial_processes`: its processes.
- :mod:`.search`: the order of trials and their end.
- :mod:`.show`, :mod:`.answer`: the table, and the winner as a command line and a YAML.
"""
