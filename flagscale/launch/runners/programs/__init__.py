"""What hosts are told to do over SSH, and how their answers read.

Each module holds one small program that travels to a host on the standard input of its one
command: bash for what has to be quick and needs nothing installed (:mod:`.facts`, :mod:`.start`,
:mod:`.look`, :mod:`.stop`), Python's standard library for the rest (:mod:`.probe`).
"""
