"""Writes a file under the next free number, while several writers may want the same one.

A local disk links a finished file to the name, a store accepts `If-None-Match: *`; both give a number to one
writer only. If a store can do neither, claims are separate files: a writer writes its claim and then lists
the claims. A writer that sees no other claim owns the number; one that sees another withdraws and tries again
later. Of two writers the later one always sees both claims, so two never own the same number.
"""

import random
import secrets
import threading
from collections.abc import Callable

from torchmuster.data.faults import DataError
from torchmuster.data.store import Store

_MAX_TRIES = 1000


def claim_next(
    store: Store,
    newest: Callable[[], int],
    name_of: Callable[[int], str],
    encode: Callable[[int], bytes],
) -> int:
    """Write `encode(n)` to `name_of(n)` for the first free n above `newest()`; return n.

    Raises:
        DataError: The store can't be written, or other writers take every number.
    """
    number = newest() + 1
    waiter = threading.Event()
    for attempt in range(_MAX_TRIES):
        name, data = name_of(number), encode(number)
        done = store.create(name, data)
        if done is None:
            done = _create_by_claim(store, name, data, number)
        if done:
            return number
        if done is None:  # another writer wants it too
            waiter.wait(random.uniform(0.05, 0.2) * min(attempt + 1, 10))
        else:
            number += 1
        number = max(number, newest() + 1)
    what = "other writers have taken every number that was tried"
    raise DataError(what, where=store.url, may_pass=True)


def _create_by_claim(store: Store, name: str, data: bytes, number: int) -> bool | None:
    """Return True when written, False when the number is taken, None when other writers claim it."""
    folder = f"claims/{name}"
    ours = f"{folder}/{secrets.token_hex(8)}"
    store.write(ours, str(number).encode())
    try:
        others = [entry for entry in store.entries(folder) if entry.name != ours]
        if store.stat(name) is not None:
            return False
        if others:
            return None
        store.write(name, data)
        return True
    finally:
        store.delete(ours)
