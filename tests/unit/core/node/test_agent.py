"""When the attempts of a node start, and what the head is told of their processes: the spawner here is a list of orders."""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import contract
from torchmuster.core.model.failure import EndKind
from torchmuster.core.model.ranks import assign_ranks
from torchmuster.core.net import messages
from torchmuster.core.node import kernel as memory
from torchmuster.core.node.agent import Agent, AttemptKeeper
from torchmuster.core.node.spawner import messages as orders
from torchmuster.core.node.workers import WorkerSettings

READY = orders.InterpreterReady(python="3.11", torch="2.13", forks=True, why=None)
KILLED = int(signal.SIGKILL)


class Spawners:
    """What the keeper of attempts sees of the keeper of spawners; one lives, and is ready, unless a test says otherwise."""

    pid = 77
    has_torch = True

    def __init__(self):
        self.environment = {}
        self.link, self.ready = SimpleNamespace(order=self._take), READY
        self.ordered = []

    def order(self, order, *fds):
        self._take(order, fds)

    def _take(self, order, fds):
        self.ordered.append(order)
        for fd in fds:
            os.close(fd)

    def kill_children(self, is_done, *, ended_well):
        self.ordered.append(orders.KillChildren(ended_well=ended_well))


class FakeAgent:
    """What a keeper of attempts needs of its agent."""

    def __init__(self, folder):
        self.is_set_up = True
        self.sent, self.told = [], []
        self.send, self.tell = self.sent.append, self.told.append
        socket_path = os.path.join(folder, "agent.sock")
        self._settings = WorkerSettings(
            run_id="r-1",
            run_dir=RunDir(folder),
            role="default",
            extra_env={contract.SOCKET_VARIABLE: socket_path},
            base_env={},
            shown=lambda rank, local_rank: frozenset(),
        )

    def spawn(self, work):
        self.beside = asyncio.ensure_future(work)

    def settings_of(self, order):
        return self._settings if self.is_set_up else None

    def waiting(self, attempt, workers):
        return set()


def order_of(attempt):
    return messages.StartAttempt(
        attempt=attempt,
        restarts_spent=0,
        max_restarts=0,
        master_addr="127.0.0.1",
        master_port=29500,
        node="n1",
        num_nodes=1,
        world_size=2,
        ranks=assign_ranks({0: 2})[0],
    )


def started(rank):
    return orders.ChildStarted(pid=100 + rank, kind="worker", rank=rank)


def ended(rank, status):
    return orders.ChildEnded(pid=100 + rank, kind="worker", rank=rank, status=status)


def kinds(sent):
    return [type(one) for one in sent]


@pytest.fixture
def world(tmp_path, disk):
    """Return a function that gives a keeper which has some orders, its agent and its spawners."""

    @contextlib.asynccontextmanager
    async def made(*attempts_ordered, take_store=None):
        agent, spawners = FakeAgent(str(tmp_path)), Spawners()
        showing = SimpleNamespace(
            prefix_lines=lambda *given: None,
            show=lambda *given: None,
            is_congested=lambda: False,
            settle=lambda: asyncio.sleep(0),
        )
        attempts = AttemptKeeper(spawners, showing, disk, agent, take_store)
        for attempt in attempts_ordered:
            attempts.take_order(order_of(attempt))
        try:
            yield attempts, agent, spawners
        finally:
            await attempts.finish()

    return made


async def test_an_order_starts_one_worker_for_each_rank_of_the_node(world):
    async with world(0) as (_, _, spawners):
        started = [(type(order), order.rank) for order in spawners.ordered]
        assert started == [(orders.StartWorker, 0), (orders.StartWorker, 1)]


@pytest.mark.parametrize("missing", ["a spawner", "its readiness", "the setup"])
async def test_an_order_waits_until_the_node_is_ready_for_it(world, missing):
    async with world() as (attempts, agent, spawners):
        link = spawners.link
        spawners.link = None if missing == "a spawner" else link
        spawners.ready = None if missing == "its readiness" else READY
        agent.is_set_up = missing != "the setup"
        attempts.take_order(order_of(0))
        assert spawners.ordered == []
        assert attempts.living() is None
        spawners.link, spawners.ready, agent.is_set_up = link, READY, True
        attempts.start_if_ready()
        assert len(spawners.ordered) == 2
        attempts.start_if_ready()
        assert len(spawners.ordered) == 2, "an order is carried out once"


async def test_an_attempt_begins_when_nothing_is_left_of_the_one_before(world):
    async with world(0, 1) as (attempts, agent, spawners):
        assert attempts.living().attempt == 0
        spawners.ordered.clear()
        await attempts.finish()
        assert agent.sent == [messages.AllReaped(attempt=0)]
        assert attempts.living().attempt == 1
        assert kinds(spawners.ordered) == [orders.StartWorker] * 2


async def test_the_head_hears_of_the_start_when_every_worker_has_a_process(world):
    async with world(0) as (attempts, agent, spawners):
        attempts.take_child(started(1))
        assert agent.sent == []
        attempts.take_child(started(0))
        assert agent.sent == [
            messages.WorkersStarted(attempt=0, pids=(100, 101), spawner_pid=spawners.pid)
        ]


async def test_the_end_of_a_worker_is_passed_on_at_once(world):
    async with world(0) as (attempts, agent, _):
        attempts.take_child(started(0))
        attempts.take_child(ended(0, 3 << 8))
        (said,) = agent.sent
        assert (said.end.rank, said.end.exit_code) == (0, 3)
        assert attempts.living() is not None, "other processes may be left"


async def test_a_kill_ends_what_runs_and_takes_back_what_waits(world):
    async with world(0, 1) as (attempts, agent, spawners):
        attempts.take_kill(messages.KillAttempt(attempt=0, ended_well=True))
        assert spawners.ordered[-1] == orders.KillChildren(ended_well=True)
        assert agent.sent == [], "its workers are not reaped yet"
        await attempts.finish()
        assert attempts.living() is None
        assert agent.sent == [messages.AllReaped(attempt=0)]


async def test_an_attempt_that_waits_is_forgotten_with_the_head_that_wanted_it(world):
    """The next head does not know of it, and would wait for its own for ever."""

    async with world() as (attempts, _, spawners):
        spawners.ready = None
        attempts.take_order(order_of(0))
        attempts.kill()  # at the welcome of the next head
        spawners.ready = READY
        attempts.start_if_ready()
        assert spawners.ordered == []
        attempts.take_order(order_of(1))
        assert attempts.living().attempt == 1


@pytest.mark.parametrize("runs", [True, False])
async def test_of_an_attempt_that_is_not_here_nothing_is_left(world, runs):
    async with world(*[0] * runs) as (attempts, agent, spawners):
        spawners.ordered.clear()
        attempts.take_kill(messages.KillAttempt(attempt=5))
        assert agent.sent == [messages.AllReaped(attempt=5)]
        assert spawners.ordered == []


async def test_a_lost_spawner_is_the_end_of_its_attempt(world):
    async with world(0) as (attempts, agent, _):
        await attempts.lose("its spawner ended (SIGKILL)", was_killed=False)
        lost, reaped = agent.sent
        assert lost.end.kind is EndKind.NODE_LOST
        assert lost.end.detail == "its spawner ended (SIGKILL)"
        assert reaped == messages.AllReaped(attempt=0)
        await attempts.lose("its spawner ended (SIGKILL)", was_killed=False)
        assert len(agent.sent) == 2, "without an attempt there is nothing to lose"


@pytest.mark.parametrize("was_killed", [True, False])
async def test_a_spawner_that_the_kernel_killed_for_its_memory_is_lost_with_that_evidence(
    world, monkeypatch, was_killed
):
    kills = iter([{"/group": 0}, {"/group": 1}])
    monkeypatch.setattr(memory, "read_counters", lambda: next(kills))

    async with world(0) as (attempts, agent, _):
        await attempts.lose("its spawner ended", was_killed=was_killed)
        evidence = agent.sent[0].end.memory_evidence
        assert (evidence is not None and "memory ran out" in evidence) == was_killed


async def test_a_store_that_ends_is_told_unless_its_attempt_was_killed(world):
    async with world() as (attempts, agent, _):
        over = orders.ChildEnded(pid=99, kind="store", rank=-1, status=KILLED)
        attempts.take_order(order_of(0))
        attempts.take_child(over)
        assert agent.sent == [messages.StoreLost(attempt=0, detail="SIGKILL")]
        attempts.kill()
        attempts.take_child(over)
        assert len(agent.sent) == 1


@pytest.mark.parametrize("has_torch", [True, False])
async def test_the_store_of_an_attempt_is_served_where_there_is_torch(world, has_torch):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        async with world(take_store=lambda attempt: listening) as (attempts, _, spawners):
            spawners.has_torch = has_torch
            attempts.take_order(order_of(0))
            start = orders.StartStore(host="127.0.0.1", port=29500)
            assert (spawners.ordered[0] == start) is has_torch
            assert listening.fileno() == -1, "no port is held by a process that does not serve it"


# The folder that an agent's disk checks is that of its first welcome.


def ignore(*_):
    """Do nothing."""


def test_files_of_a_second_run_are_written_after_a_head_began_anew(tmp_path):
    lost: list[str] = []
    disk = DiskWriter(lambda lines, why: lost.append(why))
    disk.start()

    def folder(run_id):
        return RunDir(str(tmp_path / run_id))

    agent = SimpleNamespace(
        welcome=None,
        disk=disk,
        options=SimpleNamespace(run_directory=folder, is_head=False),
        link=SimpleNamespace(welcome=ignore),
        voice=SimpleNamespace(say=ignore),
        spawners=SimpleNamespace(announce=ignore),
        attempts=SimpleNamespace(kill=ignore),
        _unsaid=[],
    )
    take: Callable[..., None] = Agent._take_welcome
    usual = {"node": "n2", "tee": "0", "head_pid": 1, "boot_id": "", "network_id": ""}
    for run_id in ("a", "b"):
        take(agent, messages.Welcome(run_id=run_id, **usual))
        disk.append(str(tmp_path / run_id / "out.log"), b"line\n")
        assert disk.flush(10.0)
    assert [(tmp_path / name / "out.log").read_text() for name in ("a", "b")] == ["line\n"] * 2
    assert lost == []
