"""Copies of the training state in host memory, from which a restarted job goes on.

:mod:`.local_state` lists what a rank holds, :mod:`.region` stores it in the host's memory, and
:mod:`.copies` saves it, copies it to another host and restores it.
"""
