"""The head of a group with agents in the same process that do as a test says, over real channels."""

import asyncio
import contextlib
import json
import os
import time

import pytest

from kit.waiting import run, wait_until_async
from kit.workflows import workflow_plan
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir
from torchmuster.core.net import messages
from torchmuster.core.net.address import bind
from torchmuster.core.net.channel import ChannelClosedError, HandshakeError, Role, connect
from torchmuster.core.net.listener import Listener
from torchmuster.workflow.head import task_messages
from torchmuster.workflow.head.group_head import SAY_EVERY_S, GroupHead, port_candidates, port_names
from torchmuster.workflow.plan import ExitAction, ExitRule, GroupInput, GroupPlan, TaskPlan
from torchmuster.workflow.record import State
from unit.core.net.loopback import SECRET, raw_connection

AGAIN = ExitRule(action=ExitAction.RESCHEDULE, ranges=((7, 7),))


def group(*names, command=("true",), **options):
    tasks = tuple(
        TaskPlan(name=name, lead=name == names[0], command=command, exit_rules=(AGAIN,))
        for name in names
    )
    return GroupPlan(name="g", tasks=tasks, **options)


def ending(code):
    """Return an agent whose command ends with this code at once."""

    async def behave(agent):
        await agent.begin()
        await agent.end(code)

    return behave


succeed = ending(0)


async def wait_for_stop(agent):
    """An agent whose command runs until it is stopped."""
    await agent.begin()
    await agent.hear_until_left()


async def die_before_calling(agent):
    """An agent that never calls."""
    del agent


async def hang_up_running(agent):
    """An agent that is gone while its command runs."""
    await agent.begin()
    agent.channel.abort()


class FakeAgent:
    """One end of a channel, with the words of a task's agent."""

    free_ports = ()

    def __init__(self, task, attempt, starter):
        self.task, self.attempt, self.starter = task, attempt, starter
        self.heard = []

    async def hello(self):
        self.channel = None
        while self.channel is None:  # a busy door sends callers away, who call again
            with contextlib.suppress(HandshakeError, TimeoutError):
                self.channel = await connect("127.0.0.1", self.starter.port, Role.AGENT, SECRET)
        self.num_started_when_heard = len(self.starter.started)
        us = {"task": self.task, "attempt": self.attempt, "host": f"host-of-{self.task}"}
        self.say(task_messages.TaskHello(**us, version="0", pid=1, address="127.0.0.1"))

    def say(self, message):
        self.channel.send_nowait(message)

    async def hear(self, kind):
        while True:
            message = await self.channel.receive()
            self.heard.append(message)
            if isinstance(message, kind):
                return message

    async def prepare(self):
        """Have all that the command needs, and wait until it may begin."""
        self.say(task_messages.TaskPrepared(attempt=self.attempt, free_ports=self.free_ports))
        await self.hear(task_messages.TaskBegin)

    async def begin(self):
        await self.hello()
        await self.prepare()

    async def end(self, code=0):
        """Tell the command's end, and do as the head says until it lets go."""
        tail = ("the last line",)
        self.say(task_messages.TaskEnded(attempt=self.attempt, code=code, tail=tail))
        await self.hear_until_left()

    async def hear_until_left(self):
        """Do as the head says until it lets go."""
        while True:
            match await self.hear(messages.Message):
                case task_messages.TaskStop():
                    self.say(task_messages.TaskEnded(attempt=self.attempt, code=143, signum=15))
                case task_messages.TaskUpload():
                    self.say(task_messages.TaskUploaded(attempt=self.attempt))
                case task_messages.TaskLeave():
                    return


class FakeStarter:
    """Starts agents as tasks of the same loop; `behaviours` are used up from the left, the last one stays."""

    def __init__(self, behaviours, start_takes_s):
        self.start_takes_s = start_takes_s
        self.behaviours = {task: list(several) for task, several in behaviours.items()}
        self.port = 0
        self.started = []
        self.killed = []
        self.agents = []
        self._running = []

    def start(self, task, attempt):
        ready_at = time.monotonic() + self.start_takes_s
        while time.monotonic() < ready_at:  # as a fork: the loop stands still
            pass
        self.started.append((task, attempt))
        several = self.behaviours[task]
        behave = several.pop(0) if len(several) > 1 else several[0]
        agent = FakeAgent(task, attempt, self)
        self.agents.append(agent)
        self._running.append((task, attempt, asyncio.create_task(self._live(agent, behave))))

    async def _live(self, agent, behave):
        with contextlib.suppress(ChannelClosedError):
            await behave(agent)
        if hasattr(agent, "channel"):
            agent.channel.abort()

    def poll(self):
        over = [entry for entry in self._running if entry[2].done()]
        for entry in over:
            entry[2].result()
            self._running.remove(entry)
        return [(task, attempt, "exit code 1") for task, attempt, _ in over]

    def kill(self, task):
        self.killed.append(task)
        for name, _, living in self._running:
            if name == task:
                living.cancel()


class Stage:
    """A head with its listener, its agents, and the run directory where its record is."""

    def __init__(self, folder, plan_group, starter, backoff_s=0.05, first_attempts=None):
        self.run_dir = RunDir(str(folder))
        os.makedirs(self.run_dir.group("g").path)
        self.starter = starter
        self.starter.folder = str(folder)
        plan = workflow_plan(plan_group, backoff_s=backoff_s, grace_s=0.5, uuid="u")
        self.disk = DiskWriter()
        self.disk.start()
        start = GroupInput(first_attempts=first_attempts or {})
        self.head = GroupHead(plan, plan_group, self.run_dir, starter, self.disk, start)

    async def conduct(self, meanwhile=None):
        listener = Listener(
            bind("127.0.0.1", 0), (SECRET, None), self.head.serve, self.head.refuse_stranger
        )
        self.starter.port = listener.port
        serving = asyncio.create_task(listener.serve())
        beside = asyncio.create_task(meanwhile(self)) if meanwhile else None
        try:
            outcome = await self.head.conduct()
            if beside is not None:
                await beside
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            self.disk.flush(5.0)
        return outcome

    def events(self, name):
        path = self.run_dir.group("g").events
        if not os.path.exists(path):
            return []
        with open(path) as file:
            return [event for line in file if (event := json.loads(line))["event"] == name]

    async def event(self, name):
        """Wait for the first event of this name."""
        return (await wait_until_async(lambda: self.events(name), f"an event {name}"))[0]


@pytest.fixture
def conduct(tmp_path):
    """Return a function that conducts a group to its end; it returns outcome and stage."""

    def conduct(plan_group, behaviours, meanwhile=None, *, start_takes_s=0.0, **options):
        starter = FakeStarter(behaviours, start_takes_s)
        stage = Stage(tmp_path / "run", plan_group, starter, **options)
        return run(stage.conduct(meanwhile)), stage

    return conduct


def begin_of(stage, number):
    heard = stage.starter.agents[number].heard
    return next(one for one in heard if isinstance(one, task_messages.TaskBegin))


def test_a_group_that_succeeds_leaves_its_outcome(conduct):
    outcome, stage = conduct(group("a", "b"), {"a": [succeed], "b": [succeed]})
    assert outcome.state is State.COMPLETED
    assert outcome.exit_code == 0
    states = {task.task: task.state for task in outcome.tasks}
    assert states == {"a": State.COMPLETED, "b": State.COMPLETED}
    assert os.path.exists(stage.run_dir.group("g").result)


def test_a_failure_is_reported_with_its_last_lines_and_code(conduct):
    outcome, _ = conduct(group("a", "b"), {"a": [ending(5)], "b": [wait_for_stop]})
    assert outcome.state is State.FAILED
    assert outcome.exit_code == 5
    assert outcome.report.error == "task a failed: exit code 5"
    assert "the last line" in outcome.report.because


def test_every_command_learns_how_all_tasks_are_reached(conduct):
    _, stage = conduct(group("a", "b"), {"a": [succeed], "b": [succeed]})
    for number in (0, 1):
        hosts = begin_of(stage, number).hosts
        assert hosts == {"a": "host-of-a", "b": "host-of-b"}


def test_a_command_that_begins_later_learns_of_those_that_have_ended(conduct):
    ended = asyncio.Event()

    async def worker(agent):
        await succeed(agent)
        ended.set()

    async def lead(agent):
        await agent.begin()
        await ended.wait()
        await agent.end(7)

    _, stage = conduct(group("a", "b"), {"a": [lead, succeed], "b": [worker]})
    assert begin_of(stage, 2).hosts == {"a": "host-of-a", "b": "host-of-b"}


def test_an_agent_that_dies_before_it_calls_is_replaced(conduct):
    outcome, stage = conduct(group("a"), {"a": [die_before_calling, succeed]})
    assert outcome.state is State.COMPLETED
    assert stage.starter.started == [("a", 0), ("a", 1)]
    assert "before it called" in stage.events("agent_lost")[0]["why"]


@pytest.mark.parametrize("backoff_s", [0.0, 0.05])
def test_one_loss_spends_one_retry(conduct, backoff_s):
    """Its connection and its process both end: that is one loss, not two."""
    outcome, stage = conduct(group("a"), {"a": [hang_up_running, succeed]}, backoff_s=backoff_s)
    assert outcome.state is State.COMPLETED
    assert stage.starter.started == [("a", 0), ("a", 1)]
    assert len(stage.events("agent_lost")) == 1


def test_agents_that_never_come_fail_the_group_in_the_end(conduct):
    outcome, stage = conduct(group("a"), {"a": [die_before_calling]})
    assert outcome.state is State.FAILED_BACKEND_ERROR
    assert len(stage.starter.started) == 4
    assert "tried again 3 times already" in outcome.report.error


def test_a_group_goes_on_with_the_attempts_of_its_lost_head(conduct):
    _, stage = conduct(group("a"), {"a": [succeed]}, first_attempts={"a": 3})
    assert stage.starter.started == [("a", 3)]


@pytest.mark.parametrize(
    ("task", "attempt"), [("a", 3), ("nobody", 0), ("a", 0)], ids=["stale", "unknown", "double"]
)
def test_an_agent_that_nobody_waits_for_is_sent_away(conduct, task, attempt):
    answers = []
    release = asyncio.Event()

    async def patient(agent):
        await agent.begin()
        agent.say(task_messages.TaskStarted(attempt=0, pid=1))
        await release.wait()
        await agent.end()

    async def intrude(stage):
        await stage.event("task_started")
        stranger = FakeAgent(task, attempt, stage.starter)
        await stranger.hello()
        answers.append(await stranger.hear(messages.Message))
        stranger.channel.abort()
        release.set()

    outcome, _ = conduct(group("a"), {"a": [patient]}, intrude)
    assert isinstance(answers[0], task_messages.TaskLeave)
    assert outcome.state is State.COMPLETED


def test_garbage_on_the_port_changes_nothing(conduct):
    async def disturb(stage):
        for _ in range(20):
            async with raw_connection(stage.starter.port) as (_, writer):
                writer.write(os.urandom(300))
                with contextlib.suppress(ConnectionError):
                    await writer.drain()

    outcome, stage = conduct(group("a", "b"), {"a": [succeed], "b": [succeed]}, disturb)
    assert outcome.state is State.COMPLETED
    assert not stage.events("agent_lost")


def test_a_time_limit_is_the_cause_though_a_worker_had_failed_before(conduct):
    plan_group = group("a", "b", exec_timeout_s=3.0)
    outcome, _ = conduct(plan_group, {"a": [wait_for_stop], "b": [ending(3)]})
    assert outcome.state is State.FAILED_EXEC_TIMEOUT
    assert "exec_timeout of 3 s" in outcome.report.error
    assert outcome.report.because == ("b had failed before: exit code 3",)
    assert outcome.exit_code != 0


class Client:
    """Watches a group as its owner, says these messages, and keeps what it hears until the head has gone."""

    def __init__(self, *said):
        self.said, self.heard = said, []

    async def __call__(self, stage):
        channel = await connect("127.0.0.1", stage.starter.port, Role.CLIENT, SECRET)
        for message in (messages.Watch(owner=True), *self.said):
            channel.send_nowait(message)
        with contextlib.suppress(ChannelClosedError):
            while True:
                self.heard.append(await channel.receive())
        channel.abort()


def test_a_client_can_stop_a_group_and_hears_of_it(conduct):
    stop = Client(messages.Stop(signum=15, who="the user"))
    outcome, _ = conduct(group("a", "b"), {"a": [wait_for_stop], "b": [wait_for_stop]}, stop)
    assert outcome.state is State.FAILED_CANCELED
    assert "group_ended" in [message.name for message in stop.heard if hasattr(message, "name")]


def test_who_waits_hears_every_five_seconds_for_whom(conduct):
    assert SAY_EVERY_S <= 5.0
    said = asyncio.Event()

    async def slow(agent):
        await agent.hello()
        agent.say(task_messages.TaskDoing(text="downloading input 0: s3://b/x"))
        await said.wait()
        await agent.prepare()
        await agent.end()

    async def listen(stage):
        await stage.event("group_waits")  # b is not prepared before it
        said.set()

    plan_group = group("a", "b", exec_timeout_s=60.0)
    _, stage = conduct(plan_group, {"a": [succeed], "b": [slow]}, listen)
    text = stage.events("group_waits")[0]["text"]
    assert text.startswith("waiting for b (downloading input 0: s3://b/x); ")
    assert text.endswith(" s left")


def test_barriers_of_the_tasks_meet_at_the_head(conduct):
    async def meet(agent):
        await agent.begin()
        agent.say(task_messages.BarrierCall(caller_id=f"{agent.task}/1/1"))
        answer = await agent.hear(task_messages.BarrierAnswer)
        while answer.kind is task_messages.BarrierState.WAITING:
            answer = await agent.hear(task_messages.BarrierAnswer)
        assert answer.kind is task_messages.BarrierState.RELEASED
        await agent.end()

    outcome, _ = conduct(group("a", "b"), {"a": [meet], "b": [meet]})
    assert outcome.state is State.COMPLETED


def with_ports(behave, *chosen):
    """Return an agent that finds these of its group's candidates free."""

    async def live(agent):
        agent.free_ports = chosen
        await behave(agent)

    return live


@pytest.fixture
def ports():
    """Return a group of two tasks with ports, and its candidates for them."""
    plan_group = group("a", "b", command=("serve", "{{port}}", "{{port:other}}"))
    return plan_group, port_candidates(workflow_plan(plan_group, uuid="u"), plan_group)


def test_tasks_get_the_same_ports_which_are_free_for_all(conduct, ports):
    plan_group, candidates = ports
    assert port_names(plan_group) == ["", "other"]
    free = {"a": candidates[1:], "b": candidates[2:]}
    behaviours = {task: [with_ports(succeed, *chosen)] for task, chosen in free.items()}
    _, stage = conduct(plan_group, behaviours)
    expected = {"": candidates[2], "other": candidates[3]}
    assert begin_of(stage, 0).ports == begin_of(stage, 1).ports == expected


def test_who_begins_later_gets_the_ports_that_the_others_have(conduct, ports):
    """The lead listens on its port by then, so the newcomer does not find it free."""
    plan_group, candidates = ports
    later = asyncio.Event()

    async def lead(agent):
        await agent.begin()
        await later.wait()
        await agent.end()

    async def second(agent):
        await agent.begin()
        later.set()
        await agent.end()

    first = with_ports(ending(7), *candidates)
    later_one = with_ports(second, *candidates[1:])
    behaviours = {"a": [with_ports(lead, *candidates)], "b": [first, later_one]}
    _, stage = conduct(plan_group, behaviours)
    assert [agent.task for agent in stage.starter.agents] == ["a", "b", "b"]
    assert begin_of(stage, 2).ports == begin_of(stage, 0).ports


def test_the_first_agents_of_a_large_group_are_heard_while_others_are_started(conduct):
    """Else they wait for longer than their lease before anybody answers them."""
    names = [f"t{n}" for n in range(100)]
    behaviours = {name: [wait_for_stop] for name in names} | {"t0": [ending(0)]}
    outcome, stage = conduct(group(*names), behaviours, start_takes_s=0.01)
    assert outcome.state is State.COMPLETED
    assert stage.starter.agents[0].num_started_when_heard < len(names)


def test_the_outcome_of_a_group_that_can_not_be_written_is_told(conduct):
    """A full disk is no lost head: whoever watches hears how the group ended."""
    watch = Client()

    async def lead(agent):
        await agent.begin()
        os.makedirs(os.path.join(RunDir(agent.starter.folder).group("g").result, "in-the-way"))
        await agent.end(5)

    outcome, _ = conduct(group("a"), {"a": [lead]}, watch)
    assert outcome.state is State.FAILED
    ends = [one for one in watch.heard if getattr(one, "name", None) == "group_ended"]
    assert ends[0].fields["outcome"]["exit_code"] == 5
