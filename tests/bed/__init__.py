"""A test bed of real machines in miniature: hosts as namespaces, each with its own real sshd.

Import what a test needs from the modules: :class:`bed.lab.Bed`, :class:`bed.host.Host`. The
fixtures ``bed`` and ``make_bed`` come with :mod:`bed.plugin`, which ``tests/conftest.py`` loads.
"""
