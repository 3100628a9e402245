"""How a wait is told: who is missing, in few words however many they are."""

from collections.abc import Sequence

MAX_NAMES = 8


def name_missing(names: Sequence[str], num_missing: int) -> str:
    """Return `b, c`, or `2 of b, c, d` when any two of these are enough, or `5 more`.

    Args:
        names: Who may be meant; the first few are enough when all of them are.
        num_missing: How many have to come still.
    """
    shown = list(names[:MAX_NAMES])
    if not shown:
        return f"{num_missing} more"
    if len(names) > num_missing:
        rest = len(names) - len(shown)
        return f"{num_missing} of {', '.join(shown)}{f' and {rest} more' if rest else ''}"
    rest = num_missing - len(shown)
    return f"{', '.join(shown)}{f' and {rest} more' if rest else ''}"


def say_missing(num_here: int, num_needed: int, who: str) -> str:
    """Return the sentence of a progress line."""
    return f"{num_here} of {num_needed} {'is' if num_here == 1 else 'are'} here, missing: {who}"
