"""Programs that are sent to hosts, and the parsing of their results.

Each module fills in the values of one small bash program that is sent to a host and run there. Bash
starts quickly and needs nothing installed. Only :mod:`.unpack` runs in the host's Python.
"""
