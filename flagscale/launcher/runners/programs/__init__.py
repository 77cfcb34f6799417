"""What hosts are told to do, and how their answers read.

Each module fills one small program that travels to a host and is read by a bash there: it has to be
quick and needs nothing installed. :mod:`.unpack` alone is for the host's Python.
"""
