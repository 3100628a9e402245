"""Counting work: what a time would tell on an idle machine only."""

import sys


def num_calls(action):
    """Return how many calls of functions `action()` makes, Python's and C's: the same however busy the machine is.

    What one call of C does in a loop counts once.
    """
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    return count
