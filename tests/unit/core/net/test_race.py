"""The race of addresses."""

import asyncio

import pytest

from torchmuster.core.net.channel import (
    Channel,
    HandshakeError,
    RaceError,
    Reason,
    race,
    worst_failure,
)

GOOD, BAD, SILENT = ("good", 1), ("bad", 1), ("silent", 1)
SOON_S = 0.01


class FakeChannel(Channel):
    """A channel that only notes that it was closed."""

    def __init__(self, name):
        self.name = name
        self.aborted = False

    def abort(self):
        self.aborted = True


class Calls:
    """Answers calls by the address's name; notes which were given up."""

    def __init__(self):
        self.given_up = []
        self.made = []

    async def __call__(self, host, port):
        self.made.append(host)
        if host.startswith("good"):
            return FakeChannel(host)
        if host == "refused":
            raise ConnectionRefusedError(111, "Connection refused")
        if host == "stranger":
            raise HandshakeError(Reason.WRONG_SECRET)
        if host == "bad":
            raise OSError(113, "No route to host")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.given_up.append(host)
            raise


async def test_an_address_that_never_answers_costs_nothing():
    calls = Calls()

    channel, address = await race([SILENT, GOOD], calls, stagger_s=SOON_S)

    assert (channel.name, address) == ("good", GOOD)
    assert calls.given_up == ["silent"]


async def test_the_next_is_called_at_once_when_all_so_far_have_failed():
    channel, _ = await race([BAD, GOOD], Calls(), stagger_s=3600.0)

    assert channel.name == "good"


async def test_a_winner_ends_the_calls():
    calls = Calls()

    await race([GOOD, ("good2", 1)], calls, stagger_s=3600.0)

    assert calls.made == ["good"]


async def test_a_stranger_on_one_address_does_not_stop_the_others():
    channel, _ = await race([("stranger", 1), SILENT, GOOD], Calls(), stagger_s=SOON_S)

    assert channel.name == "good"


async def test_all_failures_are_told_and_the_one_that_says_most_is_found():
    with pytest.raises(RaceError) as lost:
        await race([BAD, ("stranger", 1)], Calls(), stagger_s=SOON_S)

    assert [address for address, _ in lost.value.failures] == [BAD, ("stranger", 1)]
    address, error = worst_failure(lost.value, None)
    assert address == ("stranger", 1)
    assert error.reason is Reason.WRONG_SECRET
    assert worst_failure(lost.value, BAD)[0] == BAD


async def test_when_the_address_that_answered_before_refuses_nobody_else_is_waited_for():
    known = ("refused", 1)
    calls = Calls()

    with pytest.raises(RaceError) as lost:
        await race([known, SILENT], calls, stagger_s=SOON_S, decisive=known)

    assert isinstance(worst_failure(lost.value, known)[1], ConnectionRefusedError)
