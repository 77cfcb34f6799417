"""Runner for hosts that something else has started: a Kubernetes operator, a cloud's job service.

Every host runs the same command. :mod:`.position` reads this host's rank and the master's address,
:mod:`.rendezvous` makes the hosts agree on a run, and :mod:`.runner` starts this host's part.
"""
