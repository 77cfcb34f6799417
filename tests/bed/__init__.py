"""A test bed of hosts in miniature: each is a set of namespaces with its own real sshd.

Import from the modules: :class:`bed.lab.Bed`, :class:`bed.host.Host`. The fixtures ``bed`` and
``make_bed`` come from :mod:`bed.plugin`, which ``tests/conftest.py`` loads.
"""
