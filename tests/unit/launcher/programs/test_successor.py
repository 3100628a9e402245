"""Agents whose head is silent, in one process, with a real folder and a clock of the test's own."""

import asyncio
import sys

import pytest

from kit.values import term
from kit.waiting import wait_until_async
from torchmuster.core.files.claims import Claims
from torchmuster.launcher.programs import successor as succession
from torchmuster.launcher.programs.successor import SuccessionWatch


class Link:
    """As much of a `HeadLink` as is looked at; its clock runs a hundred times as fast."""

    def __init__(self):
        self.is_silent = False
        self.gone_s = 0.0

    def clock(self):
        return asyncio.get_running_loop().time() * 100

    def silent_s(self):
        return 11.0 if self.is_silent else None


class Agents:
    """Agents of the places from 1 on; place 0 has the head."""

    def __init__(self, folder, num, answer="sys.exit(1)"):
        self.claims = Claims(str(folder))
        self.claims.take(
            term(holder="first", node="n0", members=tuple(range(num + 1)), next_attempt=1)
        )
        self.links = {place: Link() for place in range(1, num + 1)}
        self.heads, self.said = [], []
        self.idle = True
        self.answer = answer

    def agent(self, place):
        async def take_over(claim):
            self.heads.append(claim)

        return SuccessionWatch(
            self.claims,
            place=place,
            node=f"n{place}",
            link=self.links[place],
            is_idle=lambda: self.idle,
            take_over=take_over,
            ask=lambda node: [sys.executable, "-c", f"import sys; node = {node!r}; {self.answer}"],
            say=lambda text: self.said.append((place, text)),
        )

    def silence(self, *places):
        for place in places:
            self.links[place].is_silent = True

    async def run(self, story):
        watching = [asyncio.create_task(self.agent(place).watch()) for place in self.links]
        try:
            await asyncio.wait_for(story(self), 60)
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(succession, "_LOOK_EVERY_S", 0.005)


async def many_looks(for_s):
    """Let time pass, a hundred times as much by the agents' clocks."""
    loop = asyncio.get_running_loop()
    end = loop.time() + for_s
    await wait_until_async(lambda: loop.time() > end, "many looks")


def play(agents, story):
    asyncio.run(agents.run(story))
    return agents


def test_of_those_who_have_lost_the_head_one_becomes_it(tmp_path):
    async def story(agents):
        agents.silence(1, 2, 3)
        await wait_until_async(lambda: agents.heads, "a head")
        for link in agents.links.values():
            link.is_silent = False

    agents = play(Agents(tmp_path, 3), story)
    assert len(agents.heads) == 1
    claim = agents.heads[0]
    assert claim == agents.claims.newest()
    assert (claim.number, claim.next_attempt, claim.restarts_spent) == (1, 1, 1)
    assert claim.node == f"n{claim.place}"
    assert len({1, 2, 3} & set(claim.members)) >= 3 - 1


def test_whose_workers_live_does_not_vote(tmp_path):
    async def story(agents):
        agents.idle = False
        agents.silence(1, 2)
        await many_looks(0.4)
        assert not agents.claims.votes(0)
        agents.idle = True
        await wait_until_async(lambda: agents.heads, "a head")

    play(Agents(tmp_path, 2), story)


def test_one_of_two_nodes_waits_says_so_and_believes_the_scheduler(tmp_path):
    async def story(agents):
        agents.silence(1)
        waits = "1 of 2 nodes have lost the head on n0"
        await wait_until_async(lambda: any(waits in text for _, text in agents.said), "the word")
        assert not agents.heads
        agents.answer = "print(f'slurm says that {node} is lost')"
        await wait_until_async(lambda: agents.heads, "a head")

    agents = play(Agents(tmp_path, 1), story)
    assert (1, "slurm says that n0 is lost") in agents.said


def test_a_machine_that_refuses_calls_has_no_head_any_more(tmp_path):
    async def story(agents):
        agents.silence(1)
        await wait_until_async(lambda: agents.claims.votes(0), "the vote")
        agents.links[1].gone_s = 2.5
        await wait_until_async(lambda: agents.heads, "a head")

    play(Agents(tmp_path, 1), story)


def test_a_head_that_is_there_again_gets_its_vote_back(tmp_path):
    async def story(agents):
        agents.silence(1)
        await wait_until_async(lambda: agents.claims.votes(0) == {1}, "the vote")
        agents.links[1].is_silent = False
        await wait_until_async(lambda: not agents.claims.votes(0), "its withdrawal")

    agents = play(Agents(tmp_path, 3), story)
    assert not agents.heads
    assert (1, "the head is there again") in agents.said


def test_a_folder_that_is_gone_is_said_once_and_ends_nobody(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()

    async def story(agents):
        (folder / "term-0.json").unlink()
        folder.rmdir()
        agents.silence(1, 2)
        await many_looks(0.3)

    agents = play(Agents(folder, 2), story)
    assert len(agents.said) == 2
    assert all("can't be seen" in text for _, text in agents.said)
