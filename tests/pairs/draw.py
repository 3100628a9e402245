"""Draws cases from a seed, so that as few of them as possible have each possible pair of values."""

import itertools
import random

from pairs.features import FEATURES, why_not

TRIES = 3


def pairs_of(case):
    """Return the pairs of values that a case has."""
    return set(itertools.combinations(sorted(case.items()), 2))


def possible_pairs(features=FEATURES):
    """Return all pairs of values that some case can have."""
    items = [(feature, value) for feature, values in features.items() for value in values]
    both = (tuple(sorted(pair)) for pair in itertools.combinations(items, 2))
    return {
        pair for pair in both if pair[0][0] != pair[1][0] and _fill(dict(pair), _off) is not None
    }


def draw(seed, number, features=FEATURES):
    """Return `number` cases: each is of several tries the one that has the most pairs that no case before had."""
    dice = random.Random(seed)
    left = sorted(possible_pairs(features))
    cases = []
    while len(cases) < number:
        partners = _partners(left)
        tried = [_try(dice, left, partners, features) for _ in range(TRIES)]
        best = max(
            tried, key=lambda case: sum(_new(case, *item, partners) for item in case.items())
        )
        had = pairs_of(best)
        left = [pair for pair in left if pair not in had]
        cases.append({feature: best[feature] for feature in features})
    return cases


def _partners(pairs):
    """Return with which values each value has a pair."""
    found = {}
    for one, other in pairs:
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return found


def _new(case, feature, value, partners):
    """Return how many pairs a value makes with those of a case."""
    with_whom = partners.get((feature, value))
    return len(with_whom.intersection(case.items())) if with_whom else 0


def _try(dice, left, partners, features):
    """Return a case with a pair that is left, the rest by what has most pairs that are left with what is there."""

    def choose(case, feature):
        values = dice.sample(features[feature], len(features[feature]))
        return sorted(values, key=lambda value: -_new(case, feature, value, partners))

    order = dice.sample(list(features), len(features))
    while True:
        begun = dict(dice.choice(left)) if left else {}
        if (case := _fill(begun, choose, order)) is not None:
            return case


def _off(case, feature):
    """Return the values of a feature, the one without asking first."""
    del case
    return FEATURES[feature]


def _fill(case, choose, order=tuple(FEATURES)):
    """Return a possible case with these values, others in the order that `choose` gives; None where there is none."""
    if why_not(case) is not None:
        return None
    rest = [feature for feature in order if feature not in case]
    if not rest:
        return case
    for value in choose(case, rest[0]):
        if (found := _fill({**case, rest[0]: value}, choose, order)) is not None:
            return found
    return None
