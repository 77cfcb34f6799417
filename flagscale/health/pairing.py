"""Rounds in which every host exchanges data with one other host. Pure functions.

With p partners each, a slow host shows in all of its pairs, and a healthy one in at most the pairs
with slow hosts. Therefore a host's rate is that of its best pair, and every host needs at least two
partners.
"""

from __future__ import annotations


def pair_hosts(hosts: int, skipped: int = 0) -> list[list[tuple[int, int]]]:
    """Return about log2 rounds of pairs of ``hosts`` hosts, the lower index of a pair first.

    The rounds are those of a round-robin tournament (the circle method), so no pair is repeated.
    ``skipped`` is the number of such selections before this one: the next selection has other
    pairs, as far as there are any. With an odd number one host pauses in each round, and there is a
    round more.
    """
    if hosts < 2:
        return []
    even = hosts + hosts % 2
    available = even - 1
    wanted = min(available, (hosts - 1).bit_length() + hosts % 2)
    first = wanted * skipped
    return [_pair_round((first + i) % available, even, hosts) for i in range(wanted)]


def _pair_round(number: int, even: int, hosts: int) -> list[tuple[int, int]]:
    """Return the pairs of one round: the last place stays, the others move around a circle."""
    circle = even - 1
    pairs = [(number, circle)]
    for distance in range(1, even // 2):
        pairs.append(((number + distance) % circle, (number - distance) % circle))
    ordered = (tuple(sorted(pair)) for pair in pairs)
    return [(low, high) for low, high in ordered if high < hosts]
