"""Connects to several addresses of one node in parallel, slightly staggered: the first valid answer wins."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from torchmuster.net.channel import Channel
from torchmuster.net.handshake import HandshakeError, Reason

STAGGER_S = 0.15

Address = tuple[str, int]


class RaceError(Exception):
    """No address answered; `failures` has one error for each address, in the order of their ends."""

    def __init__(self, failures: list[tuple[Address, Exception]]) -> None:
        super().__init__("no address answered")
        self.failures = failures


def worst_failure(lost: RaceError, known: Address | None) -> tuple[Address, Exception]:
    """Return the most informative failure.

    That is the one of the address that has answered before, else of a muster that refused us, else the first.
    """
    for address, error in lost.failures:
        if address == known:
            return address, error
    telling = (Reason.WRONG_SECRET, Reason.OTHER_VERSION)
    for address, error in lost.failures:
        if isinstance(error, HandshakeError) and error.reason in telling:
            return address, error
    return lost.failures[0]


async def race(
    addresses: Sequence[Address],
    call: Callable[[str, int], Awaitable[Channel]],
    *,
    stagger_s: float = STAGGER_S,
    decisive: Address | None = None,
) -> tuple[Channel, Address]:
    """Return the first channel and its address; all other attempts are closed.

    Each address is called `stagger_s` after the one before it, at once when all calls so far have failed. When
    `decisive` is refused, the others are not waited for.

    Raises:
        RaceError: All calls have failed.
    """
    waiting = list(addresses)
    calls: dict[asyncio.Task[Channel], Address] = {}
    failures: list[tuple[Address, Exception]] = []
    try:
        while waiting or calls:
            if waiting:
                address = waiting.pop(0)
                calls[asyncio.ensure_future(call(*address))] = address
            done, _ = await asyncio.wait(
                calls,
                timeout=stagger_s if waiting else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            won = _sort_out(done, calls, failures)
            if won is not None:
                return won
            if any(a == decisive and isinstance(e, ConnectionRefusedError) for a, e in failures):
                break
        raise RaceError(failures)
    finally:
        await _give_up(calls)


def _sort_out(
    done: set["asyncio.Task[Channel]"],
    calls: dict["asyncio.Task[Channel]", Address],
    failures: list[tuple[Address, Exception]],
) -> tuple[Channel, Address] | None:
    """Remove ended attempts from `calls`: return the winner, close a second one."""
    won: tuple[Channel, Address] | None = None
    for task in [task for task in calls if task in done]:
        address = calls.pop(task)
        error = task.exception()
        if error is None:
            if won is None:
                won = task.result(), address
            else:
                task.result().abort()
        elif isinstance(error, Exception):
            failures.append((address, error))
        else:
            raise error
    return won


async def _give_up(calls: dict["asyncio.Task[Channel]", Address]) -> None:
    for task in calls:
        task.cancel()
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(ended, Channel):  # it had won in the same moment
            ended.abort()
