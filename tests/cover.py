"""Fewer cases, of which every pair of choices is still there."""

from itertools import combinations


def covering(cases):
    """Of ``cases``, (case, its facts) each, those that have every pair of facts that any has: next the one that adds most."""
    rest = [(set(combinations(map(str, facts), 2)), case) for case, facts in cases]
    while rest:
        most, case = max(rest, key=lambda each: len(each[0]))
        yield case
        rest = [(left, other) for facts, other in rest if (left := facts - most)]
