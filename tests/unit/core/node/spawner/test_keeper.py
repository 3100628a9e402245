"""What an agent does about its spawner: hears it, replaces a dead one, ends one that stands still, or refuses the job."""

import asyncio
from types import SimpleNamespace

import pytest

from kit.values import program
from kit.waiting import Clock
from torchmuster.core.model.lease import LEASE_S
from torchmuster.core.net.messages import SpawnerReady, SpawnerRefused
from torchmuster.core.node.spawner import keeper
from torchmuster.core.node.spawner import messages as orders
from torchmuster.core.node.spawner.keeper import SpawnerKeeper

PROGRAM = program()
READY = orders.InterpreterReady(python="3.11", torch="2.13", forks=True, why=None)
KILLED = -9


class FakeLink:
    """A spawner that lives until it is killed or a test ends it."""

    said = "ImportError: no module"

    def __init__(self, pid, on_event, on_end):
        self.pid, self.on_event, self.on_end = pid, on_event, on_end
        self.status = None
        self.heard = []

    def open(self):
        """Nothing is open."""

    def close(self):
        """Nothing is open."""

    def order(self, message, fds=()):
        self.heard.append(message)

    def kill(self):
        self.status = KILLED if self.status is None else self.status

    def exit_status(self):
        return self.status

    def last_words(self):
        return {"hint": "install it"}


class Agent:
    """What a keeper sees of its agent."""

    is_ending = False
    setup_pids = frozenset()

    def __init__(self):
        self.sent, self.told, self.losses, self.work = [], [], [], []
        self.send, self.tell = self.sent.append, self.told.append
        self.voice = SimpleNamespace(say=self.tell, print=self.tell)

    def spawn(self, work):
        self.work.append(asyncio.ensure_future(work))

    def take_event(self, event):
        """Nothing is noted."""

    async def take_spawner_loss(self, why, *, was_killed):
        self.losses.append((why, was_killed))


@pytest.fixture
def world(monkeypatch):
    """Return a function that makes a keeper, its agent, and the spawners that were started."""
    links = []

    def make_link(child, control, on_event, on_end):
        del control
        links.append(FakeLink(child.pid, on_event, on_end))
        return links[-1]

    pids = iter(range(1001, 1100))
    monkeypatch.setattr(keeper, "make_link", make_link)

    def start(*given):
        return (SimpleNamespace(pid=next(pids)), None)

    monkeypatch.setattr(keeper, "start_spawner", start)
    monkeypatch.setattr(keeper, "in_two_turns", lambda hear: hear)
    monkeypatch.setattr(keeper.proc, "end_children", lambda keep: False)

    def made():
        agent, clock = Agent(), Clock()
        spawners = SpawnerKeeper(PROGRAM, {}, "/s", clock, agent)
        spawners.start_with(PROGRAM, {})
        return spawners, agent, links, clock

    return made


def let_it_be(monkeypatch, state):
    """Let the spawner's process be seen in this state."""
    seen = SimpleNamespace(state=state, parent_pid=1)
    monkeypatch.setattr(keeper.proc, "read_process", lambda pid: seen)


async def what_is_due():
    """Return when the loop has made all calls for which it is time."""
    made = asyncio.Event()
    asyncio.get_running_loop().call_later(0.0, made.set)
    await made.wait()


async def end(agent, link, status):
    link.status = status
    link.on_end()
    await asyncio.gather(*agent.work)


async def test_a_killed_spawner_is_replaced_and_its_workers_are_lost(world):
    spawners, agent, links, _ = world()
    links[0].on_event(READY)
    await end(agent, links[0], KILLED)
    assert agent.losses == [("its spawner ended (SIGKILL)", True)]
    assert spawners.link is links[1]
    assert spawners.ready is None, "the new one has not imported torch yet"
    links[1].on_event(READY)
    assert [type(message) for message in agent.sent] == [SpawnerReady, SpawnerReady]


async def test_a_spawner_that_ends_before_it_was_ready_refuses_the_job_in_its_own_words(world):
    spawners, agent, links, _ = world()
    await end(agent, links[0], 1)
    (refused,) = agent.sent
    assert isinstance(refused, SpawnerRefused)
    assert refused.why == "ImportError: no module\nthe job's interpreter ended: exit code 1"
    assert refused.hint == "install it"
    assert spawners.link is None
    assert agent.losses == []


async def test_one_that_is_killed_while_it_imports_gets_three_tries(world):
    _, agent, links, _ = world()
    for number in range(3):
        assert len(links) == number + 1
        await end(agent, links[number], KILLED)
    assert len(links) == 3
    assert isinstance(agent.sent[-1], SpawnerRefused)


async def test_an_agent_that_ends_misses_no_spawner(world):
    _, agent, links, _ = world()
    agent.is_ending = True
    await end(agent, links[0], 0)
    assert len(links) == 1
    assert agent.work == []


async def test_the_first_refusal_stays_and_is_said_again_to_a_head_that_was_not_there(world):
    spawners, agent, _, _ = world()
    spawners.refuse("no room")
    spawners.refuse("no interpreter")
    spawners.announce()
    assert [message.why for message in agent.sent] == ["no room"] * 3


async def test_a_spawner_that_stands_still_for_a_lease_is_killed(world, monkeypatch):
    spawners, agent, links, clock = world()
    let_it_be(monkeypatch, "T")
    links[0].on_event(READY)
    spawners.look()
    clock.now += LEASE_S - 1
    spawners.look()
    assert links[0].status is None
    clock.now += 2
    spawners.look()
    assert links[0].status == KILLED
    assert agent.told == ["the spawner has not responded for 10 s: it is killed"]
    assert all(isinstance(order, orders.PingSpawner) for order in links[0].heard)


@pytest.mark.parametrize(("state", "is_killed"), [("T", True), ("S", False)])
async def test_only_a_stopped_spawner_is_killed_with_workers_that_do_not_end(
    world, monkeypatch, state, is_killed
):
    spawners, _, links, _ = world()
    monkeypatch.setattr(keeper, "_STOPPED_S", 0.0)
    let_it_be(monkeypatch, state)
    spawners.kill_children(lambda: False, ended_well=False)
    await what_is_due()
    assert (links[0].status == KILLED) is is_killed


async def test_a_spawner_whose_workers_have_ended_is_left_alone(world, monkeypatch):
    spawners, _, links, _ = world()
    monkeypatch.setattr(keeper, "_STOPPED_S", 0.0)
    spawners.kill_children(lambda: True, ended_well=True)
    await what_is_due()
    assert links[0].heard == [orders.KillChildren(ended_well=True)]
    assert links[0].status is None
