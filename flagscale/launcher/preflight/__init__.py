"""What would keep a run from starting, found before anything starts.

:mod:`.survey` asks all hosts at once and :mod:`.hosts` judges their answers, with
:mod:`.backend`, :mod:`.checkpoint` and :mod:`.directories`.
"""
