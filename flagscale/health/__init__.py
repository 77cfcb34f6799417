"""Hardware checks: hosts are measured at the same time, and compared with their equals.

:mod:`.session` starts a worker on every host (:mod:`.worker`), which measures its devices, one
process per device (:mod:`.measure`, :mod:`.ranks`), and then exchanges data with other hosts in
pairs (:mod:`.pairing`); :mod:`.passes` has the order. :mod:`.slow` decides which rates are too low,
:mod:`.judgement` what is wrong with which host. Whatever is suspicious is measured again: two
measurements must agree before a host is called sick. :mod:`.rows` describes the result.

Only :mod:`.measure` and :mod:`.ranks`, which run on the hosts, import torch.
"""
