"""Ways of starting a plan's hosts, one file each, with the same verbs: see :mod:`.base`."""
