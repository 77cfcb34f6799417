"""Background traffic between hosts, calibrated to a tail: p99 ÷ p50 of a probe on the same path.

:mod:`.spec` says what there is to play, :mod:`.session` plays it, :mod:`.calibration` finds the
bursts, :mod:`.environment` keeps what was found as a file.
"""
