"""How sure the first cause is, when it is held against the others: certainty is what no rival shakes.

A finding comes with the confidence of its own evidence. It is lowered here where the message itself has a second reading,
or where another cause of like weight has evidence of its own that began earlier. Nothing raises it.
"""

from collections.abc import Sequence
from dataclasses import replace

from torchmuster.diagnose.explain.events import LogFinding
from torchmuster.diagnose.finding import Confidence

_LIKE = 6  # weights that are nearer than this decide nothing


def weighed(ordered: Sequence[LogFinding]) -> list[LogFinding]:
    """Return findings with the confidence of the first lowered by what speaks for another."""
    if not ordered:
        return []
    first, *rest = ordered
    shaking = [other for other in rest if shakes(first, other)]
    if first.confidence is Confidence.HIGH and (first.rivals or shaking):
        first = replace(first, confidence=Confidence.MEDIUM)
    rivals = tuple(dict.fromkeys((*first.rivals, *(other.cause for other in shaking))))
    return [replace(first, rivals=rivals), *rest]


def shakes(first: LogFinding, other: LogFinding) -> bool:
    """Say whether another finding is a rival: of like weight, no guess, of another cause, and seen before."""
    if other.cause == first.cause or other.confidence is Confidence.LOW:
        return False
    if first.weight - other.weight > _LIKE or first.began is None or other.began is None:
        return False
    if first.began.when is not None and other.began.when is not None:
        return other.began.when < first.began.when
    return other.began.order < first.began.order
