"""Worker processes on hosts: started with a Python function, watched, and ended by identity.

A worker runs one function of this project in a process of its own (:mod:`.task`). Workers of this
host are children of the process that starts them (:mod:`.children`). Workers of other hosts are
started through a host connection and may have a control channel of JSON lines (:mod:`.remote` on
the controlling side, :mod:`.control` in the worker).
"""
