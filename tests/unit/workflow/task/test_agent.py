"""The agent of a task as a process, with a head that says things in an unkind order."""

import asyncio
import os
import sys

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

    def __init__(self, tmp_path, monkeypatch, command):
        monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
        task = TaskPlan(name="t", lead=True, command=command)
        plan = workflow_plan(
            GroupPlan(name="g", tasks=(task,)),
            spec_path=str(tmp_path / "w.yaml"),
            python=(sys.executable,),
            cwd=str(tmp_path),
            uuid="u",
        )
        self.run_dir = create_workflow_dir(plan, "", "")
        os.makedirs(self.run_dir.group("g").path, exist_ok=True)
        atomic.write_json(self.run_dir.group("g").start, {})
        assert codec.from_plain(WorkflowPlan, atomic.read_json(self.run_dir.workflow)) == plan
        self.came = asyncio.Queue()
        self.child = None

    async def serve(self, channel):
        await self.came.put(channel)
        await asyncio.Event().wait()

    def refuse(self, peer, error):
        raise AssertionError((peer, error))

    async def meet(self, conversation):
        """Start an agent and let the conversation with it happen; then it must end."""
        secret = read_secret(self.run_dir.secret)
        listener = Listener(bind("127.0.0.1", 0), (secret, None), self.serve, self.refuse)
        serving = asyncio.create_task(listener.serve())
        order = TaskOrder(
            run_dir=self.run_dir.path,
            group="g",
            task="t",
            attempt=0,
            head=(f"127.0.0.1:{listener.port}",),
        )
        self.child = proc.start(task_argv(order))
        try:
            self.channel = await self.came.get()
            await self.hear(task_messages.TaskHello)
            await conversation(self)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await wait_until_async(lambda: self.child.poll() is not None, "the agent's end")

    async def hear(self, kind):
        while not isinstance(message := await self.channel.receive(), kind):
            pass
        return message

    def say(self, *several):
        for message in several:
            self.channel.send_nowait(message)


def begin(attempt=0):
    return task_messages.TaskBegin(attempt=attempt, hosts={}, addresses={}, ports={})


def test_a_stop_that_comes_together_with_the_start_is_not_lost(tmp_path, monkeypatch):
    ended = []

    async def conversation(head):
        await head.hear(task_messages.TaskPrepared)
        head.say(begin(), task_messages.TaskStop(attempt=0, grace_s=5.0))
        ended.append(await head.hear(task_messages.TaskEnded))
        head.say(task_messages.TaskLeave())

    run(Head(tmp_path, monkeypatch, ("sleep", "60")).meet(conversation))
    assert ended[0].signum == 15


def test_a_stop_of_an_attempt_before_this_one_is_ignored(tmp_path, monkeypatch):
    ended = []

    async def conversation(head):
        await head.hear(task_messages.TaskPrepared)
        head.say(task_messages.TaskStop(attempt=0, grace_s=0.0), task_messages.TaskAgain(attempt=1))
        await head.hear(task_messages.TaskPrepared)
        head.say(begin(1), task_messages.TaskStop(attempt=0, grace_s=0.0))
        ended.append(await head.hear(task_messages.TaskEnded))
        head.say(task_messages.TaskLeave())

    run(Head(tmp_path, monkeypatch, ("bash", "-c", "sleep 0.2; exit 3")).meet(conversation))
    assert (ended[0].attempt, ended[0].code, ended[0].signum) == (1, 3, None)


def test_a_command_does_not_outlive_the_connection_to_the_head(tmp_path, monkeypatch):
    pids = []

    async def conversation(head):
        await head.hear(task_messages.TaskPrepared)
        head.say(begin())
        pids.append((await head.hear(task_messages.TaskStarted)).pid)
        head.channel.abort()

    run(Head(tmp_path, monkeypatch, ("sleep", "60")).meet(conversation))
    assert not proc.is_running(pids[0])


def test_what_a_command_leaves_behind_is_ended_with_it(tmp_path, monkeypatch):
    pids = []

    async def conversation(head):
        await head.hear(task_messages.TaskPrepared)
        head.say(begin())
        await head.hear(task_messages.TaskEnded)
        pids.append(int((tmp_path / "left").read_text()))
        assert not proc.is_running(pids[0]), "it is gone before the end is told"
        head.say(task_messages.TaskLeave())

    script = f"setsid sleep 60 & echo $! > {tmp_path}/left; exit 0"
    run(Head(tmp_path, monkeypatch, ("bash", "-c", script)).meet(conversation))
    assert pids


async def test_the_lease_of_an_agent_begins_when_its_call_is_answered(tmp_path, monkeypatch):
    """The head of a large group may answer late: that is no silence."""
    monkeypatch.setattr(head_link, "PING_EVERY_S", 0.02)
    monkeypatch.setattr(task_agent, "_LEASE_CHECK_S", 0.001)
    clock = Clock()
    head = Head(tmp_path, monkeypatch, ("true",))

    secret = read_secret(head.run_dir.secret)
    listener = Listener(bind("127.0.0.1", 0), (secret, None), head.serve, head.refuse)
    agent = agent_of(head, ("127.0.0.1", listener.port), secret, str(tmp_path / "s"))
    agent._link.clock, agent._link.lease = clock, Lease(clock)
    living = asyncio.create_task(agent.run())
    clock.now += LEASE_S + 1  # it calls all the time
    serving = asyncio.create_task(listener.serve())
    head.channel = await head.came.get()
    for _ in range(3):  # none is answered: what it looks at meanwhile is the lease from its call
        await head.hear(messages.Ping)
    head.say(task_messages.TaskLeave())
    assert await living == 0
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


def agent_of(head, address, secret, socket_path):
    """Return the agent of the task of this head, in this process."""
    plan = codec.from_plain(WorkflowPlan, atomic.read_json(head.run_dir.workflow))
    disk = DiskWriter()
    disk.start()
    options = TaskOptions(
        plan=plan,
        group=plan.groups[0],
        task=plan.groups[0].tasks[0],
        attempt=0,
        run_dir=head.run_dir,
        heads=(address,),
        secret=secret,
        socket_path=socket_path,
    )
    return TaskAgent(options, disk, LogVoice(head.run_dir.agent_log("t"), disk))
