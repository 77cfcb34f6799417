"""Kinds of chips that ranks run on, an adapter each.

What the launcher asks (how many, which variable hides them, how a host's shell counts them) needs
no torch: :mod:`.registry`, :mod:`.probes`. What ranks ask does: :mod:`.device`.
"""
