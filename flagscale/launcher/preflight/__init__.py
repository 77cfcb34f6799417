"""Checks made on all hosts before anything starts.

:mod:`.host_probe` queries all hosts at once and :mod:`.hosts` evaluates their replies, with
:mod:`.backend`, :mod:`.checkpoint`, :mod:`.directories` and :mod:`.user_code`.
"""
