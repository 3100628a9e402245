"""Muster's agents up to their ranks: the product's own class, with only the workers' part replaced.

Whatever the head comes to ask for is answered by the product's code, so no new message can be forgotten here.
"""

import asyncio
import os
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any

from meeting.head import JOIN_TIMEOUT_S, SECRET, make_plan, raise_descriptor_limit
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.net import messages
from torchmuster.core.net.channel import Channel
from torchmuster.core.node.agent import Agent
from torchmuster.core.node.head_link import HeadLink
from torchmuster.core.node.options import AgentOptions, HeadPlace
from torchmuster.core.node.output import LogVoice
from torchmuster.core.node.setup import make_socket_folder
from torchmuster.core.node.spawner.messages import InterpreterReady

# Thousands of nodes have thousands of processors; light agents share one, so that each would keep the head
# waiting for its half of the handshake. A few at a time answer as promptly as a node.
MOST_HANDSHAKES = 24
READY = InterpreterReady(python="3.11", torch="2.13", forks=True, why=None)


class AgentWithoutWorkers(Agent):
    """An agent whose spawner is ready at once, and to which an attempt is its end.

    Attributes:
        reached_at: When it had its ranks, once.
    """

    def __init__(
        self, number: int, port: int, folder: str, disk: DiskWriter, num_workers: int = 1
    ) -> None:
        options = AgentOptions(
            plan=make_plan(1, num_workers),
            num_workers=num_workers,
            host=f"n{number}",
            head=HeadPlace(
                addresses=(("127.0.0.1", port),), secret=SECRET, join_timeout_s=JOIN_TIMEOUT_S
            ),
            run_dir=folder,
            place=number,
            is_head=number == 0,
            environment=dict(os.environ) if number == 0 else {},
        )
        voice = LogVoice(os.path.join(folder, "log"), disk)
        super().__init__(options, None, os.path.join(folder, "agent.sock"), disk, voice)
        self.spawners.ready = READY
        for part in self.parts:
            part.take_torch({})
        self.reached_at: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def _obey(self, message: messages.Message) -> bool:
        if not isinstance(message, messages.StartAttempt):
            return await super()._obey(message)
        if not self.reached_at.done():
            self.reached_at.set_result(time.monotonic())
        return True


class GatedLink(HeadLink):
    """Calls the head only as one of a few at a time."""

    gate: asyncio.Semaphore

    async def _connect(self, host: str, port: int) -> Channel:
        async with self.gate:
            return await super()._connect(host, port)


class LightAgent(AgentWithoutWorkers):
    """Many of these share a process: its connection and its answers, without what belongs to a process."""

    def __init__(
        self,
        number: int,
        port: int,
        folder: str,
        disk: DiskWriter,
        gate: asyncio.Semaphore,
        num_workers: int = 1,
    ) -> None:
        self._gate = gate
        super().__init__(number, port, folder, disk, num_workers)

    def make_link(self) -> HeadLink:
        """Return a connection that waits for its turn."""
        link = GatedLink(self.options.head, self.voice.say)
        link.gate = self._gate
        return link

    async def live(self) -> None:
        """Stay connected and answer until cancelled."""
        await self._stay_connected()


class KillableAgent(LightAgent):
    """One whose workers are said to start, and to die when the head wants it.

    Attributes:
        again_at: When it had its ranks in the second attempt.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.again_at: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._order: messages.StartAttempt | None = None

    async def _obey(self, message: messages.Message) -> bool:
        if isinstance(message, messages.KillAttempt):
            self._end_workers(asked=True)
            self.send(messages.AllReaped(attempt=message.attempt))
            return True
        if isinstance(message, messages.StartAttempt):
            self._order = message
            pids = tuple(range(message.ranks.num_workers))
            started = messages.WorkersStarted(attempt=message.attempt, pids=pids, spawner_pid=None)
            self.send(started)
            if message.attempt:
                self.again_at.set_result(time.monotonic())
        return await super()._obey(message)

    def kill_one(self) -> None:
        """Say that the first worker got SIGKILL."""
        self._end_workers(asked=False, most=1)

    def _end_workers(self, *, asked: bool, most: int | None = None) -> None:
        if self._order is None:
            return
        ranks = self._order.ranks
        for number in range(ranks.num_workers)[:most]:
            end = WorkerEnd(
                attempt=self._order.attempt,
                rank=ranks.first_rank + number,
                local_rank=number,
                node=self.options.host,
                kind=EndKind.SIGNAL,
                signum=9,
                asked=asked,
                elapsed_s=1.0,
            )
            self.send(messages.WorkerEnded(end=end))


async def _first(reached: "asyncio.Future[float]", living: "asyncio.Task[Any]") -> float:
    """Return when an agent had its ranks; raise what ended it before."""
    await asyncio.wait({reached, living}, return_when=asyncio.FIRST_COMPLETED)
    if not reached.done():
        living.result()
        raise RuntimeError("the agent ended before it had its ranks")
    return reached.result()


def real_agent(port: int, number: int, barrier: Barrier, out: Any) -> None:
    """Run muster's agent in a process of its own, up to its ranks."""

    async def live(folder: str, disk: DiskWriter) -> None:
        agent = AgentWithoutWorkers(number, port, folder, disk)
        living = asyncio.create_task(agent.run())
        out.send(await _first(agent.reached_at, living))
        await living  # an agent that hangs up would end the attempt

    _play(barrier, out, live)


def light_agents(port: int, numbers: range, barrier: Barrier, out: Any) -> None:
    """Run many agents in one process, up to the last one's ranks."""

    async def live(folder: str, disk: DiskWriter) -> None:
        gate = asyncio.Semaphore(MOST_HANDSHAKES)
        agents = [LightAgent(number, port, folder, disk, gate) for number in numbers]
        living = [asyncio.create_task(agent.live()) for agent in agents]
        waiting = [_first(a.reached_at, task) for a, task in zip(agents, living, strict=True)]
        out.send(max(await asyncio.gather(*waiting)))
        await asyncio.gather(*living)

    _play(barrier, out, live)


def killable_agents(
    port: int, numbers: range, num_workers: int, barrier: Barrier, out: Any
) -> None:
    """Run many agents in one process, up to the second attempt; the process that is told to kills a worker of its last one."""

    async def live(folder: str, disk: DiskWriter) -> None:
        gate = asyncio.Semaphore(MOST_HANDSHAKES)
        agents = [KillableAgent(n, port, folder, disk, gate, num_workers) for n in numbers]
        living = [asyncio.create_task(agent.live()) for agent in agents]
        out.send(max(await asyncio.gather(*(agent.reached_at for agent in agents))))
        if await asyncio.to_thread(out.recv):
            agents[-1].kill_one()
        out.send(max(await asyncio.gather(*(agent.again_at for agent in agents))))
        await asyncio.gather(*living)

    _play(barrier, out, live)


def _play(barrier: Barrier, out: Any, live: Callable[[str, DiskWriter], Any]) -> None:
    """Wait for the others, then play; what goes wrong is sent in words. This process is killed in the end."""
    raise_descriptor_limit()
    folder = make_socket_folder()
    disk = DiskWriter()
    disk.start()
    barrier.wait()
    try:
        asyncio.run(live(folder, disk))
    except Exception as error:  # noqa: BLE001 - the benchmark says it
        out.send(f"{type(error).__name__}: {error}")
    os._exit(0)
