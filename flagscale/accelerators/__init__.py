"""Kinds of accelerators that ranks run on, with an adapter for each.

The launcher's part (number of devices, visibility variables, the shell code that counts devices
on a host) works without torch: :mod:`.registry`, :mod:`.probes`. The ranks' part uses torch:
:mod:`.device`.
"""
