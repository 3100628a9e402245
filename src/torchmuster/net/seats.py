"""Decides which of many callers is closed and which is served next, so that one address can't block others. Pure."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Seats(Generic[T]):
    """Callers in order of arrival, by address."""

    def __init__(self) -> None:
        self._by_address: dict[str, OrderedDict[T, float]] = {}
        self._addresses: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._addresses))

    def take(self, caller: T, address: str, now: float) -> None:
        """Give a seat to a caller."""
        self._addresses[caller] = address
        self._by_address.setdefault(address, OrderedDict())[caller] = now

    def leave(self, caller: T) -> str | None:
        """Free the seat of a caller; return its address, None if it has no seat."""
        address = self._addresses.pop(caller, None)
        if address is None:
            return None
        here = self._by_address[address]
        del here[caller]
        if not here:
            del self._by_address[address]
        return address

    def oldest_of_the_crowd(self) -> tuple[T, float]:
        """Return the caller to close first, and the time of its arrival: the oldest of the address with the most seats."""
        return next(iter(max(self._by_address.values(), key=len).items()))

    def next_in_turn(self) -> T:
        """Return the caller to serve next: the oldest of the address with the fewest seats."""
        address = min(self._by_address, key=lambda name: len(self._by_address[name]))
        return next(iter(self._by_address[address]))
