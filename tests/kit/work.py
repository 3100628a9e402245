"""Counting work and memory: what a time would tell on an idle machine only; and work that many do together."""

import os
import sys
import threading
from pathlib import Path


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


def rss_bytes():
    """Return how much memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def do_together(number, action):
    """Let so many threads call `action` with their number, all at the same moment; return when all are done."""
    begin = threading.Barrier(number)

    def work(who):
        begin.wait()
        action(who)

    threads = [threading.Thread(target=work, args=(who,)) for who in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
