"""The head of a group and the agents of its tasks in one event loop: what user code waits at."""

import asyncio
import contextlib
import os
import threading
import time

from torchmuster.core.net.ipc import BarrierWaits, IpcServer, TaskRequest
from torchmuster.core.node.setup import make_socket_folder
from torchmuster.workflow.head.barriers import Barriers
from torchmuster.workflow.head.task_messages import BarrierCall
from torchmuster.workflow.task.agent import answer_of_barrier

TICK_S = 0.02


class FakeHead:
    """Runs in a thread; each task has a socket, and processes below this one are believed."""

    def __init__(self, members):
        self.members = members
        self.paths = {m: os.path.join(make_socket_folder(), "task.sock") for m in members}
        self.barriers = Barriers(members)
        self.num_waiting = 0
        self._loop = asyncio.new_event_loop()
        self._inbox = {}
        self._sockets = {}
        self._last_call = 0
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def __enter__(self):
        self._ready = threading.Event()
        self._over = asyncio.Event()
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_):
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._loop.close()

    def end_member(self, member, why):
        """As when the agent of a task says that its command has ended."""
        self._loop.call_soon_threadsafe(lambda: self._send(self.barriers.end_member(member, why)))

    def lose_agent(self, member):
        """As when the agent of a task is killed."""
        self._loop.call_soon_threadsafe(self._sockets[member].close)

    async def _run(self):
        for member in self.members:
            task_socket = IpcServer(
                self.paths[member], lambda: {os.getpid()}, TaskRequest, self._handler_of(member)
            )
            self._sockets[member] = task_socket
            await task_socket.open()
        self._ready.set()
        while not self._over.is_set():
            self._send(self.barriers.tick(time.monotonic()))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), TICK_S)
        for task_socket in self._sockets.values():
            task_socket.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _send(self, answers):
        for answer in answers:
            self._inbox[answer.caller_id].put_nowait(answer)

    def _handler_of(self, member):
        async def handle(call):
            self._last_call += 1
            caller_id = str(self._last_call)
            inbox = self._inbox[caller_id] = asyncio.Queue()
            try:
                self._send(self._arrive(call, caller_id, member))
                await self._relay(call, inbox)
            finally:
                self.barriers.leave(caller_id)
                del self._inbox[caller_id]

        return handle

    def _arrive(self, call, caller_id, member):
        said = BarrierCall(caller_id=caller_id, **vars(call.request))
        return self.barriers.arrive(member, said, time.monotonic())

    async def _relay(self, call, inbox):
        closing = asyncio.create_task(call.closed.wait())
        self.num_waiting += 1
        try:
            while not call.closed.is_set():
                getting = asyncio.create_task(inbox.get())
                await asyncio.wait([getting, closing], return_when=asyncio.FIRST_COMPLETED)
                if not getting.done():
                    getting.cancel()
                    return
                answer = answer_of_barrier(getting.result())
                await call.reply(answer)
                if not isinstance(answer, BarrierWaits):
                    return
        finally:
            self.num_waiting -= 1
            closing.cancel()
