"""The agent of a task as a process, with a head that says things in an unkind order."""

import asyncio
import contextlib
import os
import sys

import pytest

from kit.waiting import Clock, run, wait_until_async
from kit.workflows import workflow_plan
from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.model import codec
from torchmuster.core.model.lease import LEASE_S, Lease
from torchmuster.core.net import messages
from torchmuster.core.net.address import bind, read_secret
from torchmuster.core.net.listener import Listener
from torchmuster.core.node import head_link
from torchmuster.core.node.output import LogVoice
from torchmuster.workflow.head import task_messages
from torchmuster.workflow.head.group_head import task_argv
from torchmuster.workflow.owner.workflow import create_workflow_dir
from torchmuster.workflow.plan import GroupPlan, TaskPlan, WorkflowPlan
from torchmuster.workflow.task import agent as task_agent
from torchmuster.workflow.task.agent import TaskAgent
from torchmuster.workflow.task.setup import TaskOptions, TaskOrder


class Head:
    """Listens for one agent; a test says what it is told."""

    def __init__(self, folder, command):
        group = GroupPlan(name="g", tasks=(TaskPlan(name="t", lead=True, command=command),))
        own = {"spec_path": str(folder / "w.yaml"), "cwd": str(folder)}
        self.plan = workflow_plan(group, python=(sys.executable,), uuid="u", **own)
        self.run_dir = create_workflow_dir(self.plan, "", "")
        os.makedirs(self.run_dir.group("g").path, exist_ok=True)
        atomic.write_json(self.run_dir.group("g").start, {})
        written = atomic.read_json(self.run_dir.workflow)
        assert codec.from_plain(WorkflowPlan, written) == self.plan
        self.secret = read_secret(self.run_dir.secret)
        self.came = asyncio.Queue()

    def listen(self):
        listening = bind("127.0.0.1", 0)
        self.listener = Listener(listening, (self.secret, None), self.serve, self.refuse)

    async def serve(self, channel):
        await self.came.put(channel)
        await asyncio.Event().wait()

    def refuse(self, peer, error):
        raise AssertionError((peer, error))

    @contextlib.asynccontextmanager
    async def serving(self):
        """Answer an agent's call."""
        serving = asyncio.create_task(self.listener.serve())
        try:
            self.channel = await self.came.get()
            yield
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def meet(self, conversation):
        """Start an agent and return what the conversation with it comes to; then it must end."""
        self.listen()
        head = f"127.0.0.1:{self.listener.port}"
        order = TaskOrder(run_dir=self.run_dir.path, group="g", task="t", attempt=0, head=(head,))
        child = proc.start(task_argv(order))
        try:
            async with self.serving():
                await self.hear(task_messages.TaskHello)
                await self.hear(task_messages.TaskPrepared)
                return await conversation(self)
        finally:
            await wait_until_async(lambda: child.poll() is not None, "the agent's end")

    async def hear(self, kind):
        while not isinstance(message := await self.channel.receive(), kind):
            pass
        return message

    def say(self, *several):
        for message in several:
            self.channel.send_nowait(message)


@pytest.fixture
def meet(tmp_path, monkeypatch):
    """Return a function that starts the agent of a command for a conversation with its head."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    return lambda conversation, *command: run(Head(tmp_path, command).meet(conversation))


def begin(attempt=0):
    return task_messages.TaskBegin(attempt=attempt, hosts={}, addresses={}, ports={})


def test_a_stop_that_comes_together_with_the_start_is_not_lost(meet):
    async def conversation(head):
        head.say(begin(), task_messages.TaskStop(attempt=0, grace_s=5.0))
        ended = await head.hear(task_messages.TaskEnded)
        head.say(task_messages.TaskLeave())
        return ended

    assert meet(conversation, "sleep", "60").signum == 15


def test_a_stop_of_an_attempt_before_this_one_is_ignored(meet):
    async def conversation(head):
        head.say(task_messages.TaskStop(attempt=0, grace_s=0.0), task_messages.TaskAgain(attempt=1))
        await head.hear(task_messages.TaskPrepared)
        head.say(begin(1), task_messages.TaskStop(attempt=0, grace_s=0.0))
        ended = await head.hear(task_messages.TaskEnded)
        head.say(task_messages.TaskLeave())
        return ended

    ended = meet(conversation, "bash", "-c", "sleep 0.2; exit 3")
    assert (ended.attempt, ended.code, ended.signum) == (1, 3, None)


def test_a_command_does_not_outlive_the_connection_to_the_head(meet):
    async def conversation(head):
        head.say(begin())
        pid = (await head.hear(task_messages.TaskStarted)).pid
        head.channel.abort()
        return pid

    assert not proc.is_running(meet(conversation, "sleep", "60"))


def test_what_a_command_leaves_behind_is_ended_with_it(meet, tmp_path):
    async def conversation(head):
        head.say(begin())
        await head.hear(task_messages.TaskEnded)
        pid = int((tmp_path / "left").read_text())
        assert not proc.is_running(pid), "it is gone before the end is told"
        head.say(task_messages.TaskLeave())

    meet(conversation, "bash", "-c", f"setsid sleep 60 & echo $! > {tmp_path}/left; exit 0")


async def test_the_lease_of_an_agent_begins_when_its_call_is_answered(tmp_path, monkeypatch):
    """The head of a large group may answer late: that is no silence."""
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    monkeypatch.setattr(head_link, "PING_EVERY_S", 0.02)
    monkeypatch.setattr(task_agent, "_LEASE_CHECK_S", 0.001)
    clock = Clock()
    head = Head(tmp_path, ("true",))
    head.listen()
    agent = agent_of(head, str(tmp_path / "s"))
    agent._link.clock, agent._link.lease = clock, Lease(clock)
    living = asyncio.create_task(agent.run())
    clock.now += LEASE_S + 1  # it calls all the time
    async with head.serving():
        for _ in range(
            3
        ):  # none is answered: what it looks at meanwhile is the lease from its call
            await head.hear(messages.Ping)
        head.say(task_messages.TaskLeave())
        assert await living == 0


def agent_of(head, socket_path):
    """Return the agent of the task of this head, in this process."""
    disk = DiskWriter()
    disk.start()
    (group,) = head.plan.groups
    options = TaskOptions(
        plan=head.plan,
        group=group,
        task=group.tasks[0],
        attempt=0,
        run_dir=head.run_dir,
        heads=(("127.0.0.1", head.listener.port),),
        secret=head.secret,
        socket_path=socket_path,
    )
    return TaskAgent(options, disk, LogVoice(head.run_dir.agent_log("t"), disk))
