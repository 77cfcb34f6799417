"""What would keep a run from starting, found before anything starts.

:mod:`.local` looks at this machine, :mod:`.survey` asks all other hosts at once and
:mod:`.hosts` judges their answers. :mod:`.backend` and :mod:`.directories` do so for either.
"""
