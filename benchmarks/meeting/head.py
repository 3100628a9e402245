"""The head of one rendezvous, in a process of its own."""

import asyncio
import os
import resource
import sys
import time
from collections import deque
from typing import Any

from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.head.node_policy import Send
from torchmuster.core.head.options import TrainingHeadOptions
from torchmuster.core.head.training_head import TrainingHead
from torchmuster.core.model.events import fields_of
from torchmuster.core.model.plan import Limits, Program, RunPlan, ScriptKind
from torchmuster.core.net import listener
from torchmuster.core.programs.head_host import StorePorts

SECRET = b"benchmark benchmark benchmark 32"
JOIN_TIMEOUT_S = 3600.0  # the benchmark has a limit of its own, and says more


def make_plan(num_nodes: int, num_workers: int = 1) -> RunPlan:
    """Return the plan of a run in which nothing is ever started."""
    program = Program(
        kind=ScriptKind.COMMAND, target="true", args=(), python=(sys.executable,), cwd=os.getcwd()
    )
    return RunPlan(
        run_id="benchmark",
        program=program,
        min_nodes=num_nodes,
        max_nodes=num_nodes,
        workers_per_node=(num_workers,),
        limits=Limits(join_timeout_s=JOIN_TIMEOUT_S),
    )


class CountingHead(TrainingHead):
    """The head, with what passed through it."""

    num_taken = 0
    num_sent = 0

    def take_call(self, hello: Any, channel: Any) -> Any:
        """Count a call."""
        self.num_taken += 1
        return super().take_call(hello, channel)

    def take_word(self, agent: Any, message: Any) -> None:
        """Count a message."""
        self.num_taken += 1
        super().take_word(agent, message)

    def take_loss(self, agent: Any, channel: Any, why: str) -> None:
        """Count a loss."""
        self.num_taken += 1
        super().take_loss(agent, channel, why)

    def _do(self, action: Any) -> None:
        self.num_sent += isinstance(action, Send)
        super()._do(action)

    def where_it_stands(self) -> str:
        """Say what is there and what is missing."""
        members = self.policy.members.members
        ready = sum(member.ready is not None for member in members)
        missing = self.plan.max_nodes - len(members)
        return f"{len(members)} agents have joined, {missing} are missing, {ready} are ready to start workers"


def coordinate(
    num_nodes: int, limit_s: float, folder: str, listening: Any, answer: Any, num_workers: int = 1
) -> None:
    """Serve one rendezvous; answer with memory and messages once every node is told its ranks, or with what is missing.

    Then to each word with the processor seconds and the longest turn of the loop since the last one; None is the end.
    """
    raise_descriptor_limit()
    told: deque[str] = deque(maxlen=3)
    disk = DiskWriter()
    disk.start()
    options = TrainingHeadOptions(
        plan=make_plan(num_nodes, num_workers),
        run_dir=RunDir(folder),
    )

    def show(event: Any) -> None:
        told.append(f"{event.name} {str(fields_of(event))[:200]}")

    head = CountingHead(options, disk, StorePorts().open, show)
    asyncio.run(_serve(head, limit_s, listening, answer, told))
    os._exit(0)


async def _serve(
    head: CountingHead,
    limit_s: float,
    listening: Any,
    answer: Any,
    told: "deque[str]",
) -> None:
    door = listener.Listener(listening, (SECRET, None), head.serve, head.refuse_stranger)
    serving = asyncio.create_task(door.serve())
    conducting = asyncio.create_task(head.conduct())
    try:
        async with asyncio.timeout(limit_s):
            while head.policy.attempt is None and not conducting.done():
                await asyncio.sleep(0.01)
    except TimeoutError:
        answer.send(f"{head.where_it_stands()}; last events: {'; '.join(told)}")
    else:
        if head.policy.attempt is None:
            answer.send(f"the run ended before it began; last events: {'; '.join(told)}")
        else:
            num_nodes = head.plan.max_nodes
            num_messages = head.num_taken + head.num_sent
            answer.send((peak_mib(), num_messages / num_nodes))
    await _account(answer)
    conducting.cancel()
    serving.cancel()
    await asyncio.gather(serving, conducting, return_exceptions=True)


async def _account(answer: Any) -> None:
    asked = asyncio.create_task(asyncio.to_thread(answer.recv))
    used_s, turned_at, longest_s = time.process_time(), time.monotonic(), 0.0
    while True:
        await asyncio.sleep(0.01)
        now = time.monotonic()
        longest_s, turned_at = max(longest_s, now - turned_at), now
        if not asked.done():
            continue
        if asked.result() is None:
            return
        answer.send((time.process_time() - used_s, longest_s))
        used_s, longest_s = time.process_time(), 0.0
        asked = asyncio.create_task(asyncio.to_thread(answer.recv))


def peak_mib() -> float:
    """Return the largest memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def raise_descriptor_limit() -> None:
    """Allow as many descriptors as the system does."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
