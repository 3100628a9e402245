"""How a run ends for agents that call late: they are told, and don't wait for a head that has gone."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

import torchmuster
from kit.values import run_result
from torchmuster.core.files.layout import RunDir
from torchmuster.core.head.head import HeadClient
from torchmuster.core.head.options import TrainingHeadOptions
from torchmuster.core.head.training_head import TrainingHead
from torchmuster.core.model.events import fields_of
from torchmuster.core.model.plan import Limits
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import StopCause
from torchmuster.core.net import messages
from torchmuster.core.net.channel import ChannelClosedError, Role
from torchmuster.core.programs.head_host import _end_with_head
from torchmuster.errors import MusterError
from unit.core.head import test_membership as test_roll


class Line:
    """One side of an agent's channel."""

    own_address = "127.0.0.1"
    unsent_bytes = 0

    def __init__(self, *says, role=Role.AGENT, is_open=False):
        self.role, self.is_open = role, is_open
        self.heard = []
        self._says = asyncio.Queue()
        for message in says:
            self._says.put_nowait(message)

    def send_nowait(self, message):
        self.heard.append(message)
        if isinstance(message, messages.Goodbye):
            self._says.put_nowait(None)

    async def receive(self):
        message = await self._says.get()
        if message is None:
            raise ChannelClosedError("closed")
        return message

    async def close(self):
        """Nothing is open."""

    def abort(self):
        """Nothing is open."""


def hello(host, **given):
    return test_roll.hello(host, version=torchmuster.__version__, **given)


@pytest.fixture
def make_head(tmp_path, disk):
    def make(num_nodes, **more):
        plan = replace(
            test_roll.make_roll(None, max_nodes=num_nodes).plan, limits=Limits(join_timeout_s=60)
        )
        options = TrainingHeadOptions(plan=plan, run_dir=RunDir(str(tmp_path)), **more)
        return TrainingHead(options, disk, lambda number, address: 1)

    return make


async def test_an_agent_that_calls_after_the_failure_is_told_so(make_head):
    head = make_head(2)
    conduct = asyncio.create_task(head.conduct())
    first = Line(hello("n2", place=1), messages.SpawnerRefused(why="bad luck"))
    await head.serve(first)
    assert not conduct.done(), "another node is missing"
    late = Line(hello("n1", wants_place_0=True))
    await head.serve(late)
    result = await asyncio.wait_for(conduct, 30)
    assert (result.state, result.exit_code) == (RunState.FAILED, 1)
    assert [type(message) for message in late.heard] == [messages.Welcome, messages.Goodbye]
    assert late.heard[1].exit_code == 1
    assert late.heard[1].sentence is None, "the head's own agent has said it"
    assert first.heard[-1].sentence == "the run has ended: the workers could not be started"


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_client_that_has_not_proved_who_it_is_gets_no_ear(make_head, is_open):
    head = make_head(1)
    client = Line(messages.JobEnds(ends_at=60.0), None, role=Role.CLIENT, is_open=is_open)
    await asyncio.wait_for(head.serve(client), 30)
    assert head.inbox.qsize() == (0 if is_open else 2)


async def test_nobody_is_waited_for_when_all_have_called(make_head):
    head = make_head(1)
    conduct = asyncio.create_task(head.conduct())
    await head.serve(Line(hello("n1", place=0), messages.SpawnerRefused(why="bad luck")))
    assert (await asyncio.wait_for(conduct, 30)).exit_code == 1


def end_with_head(result=None, error=None):
    """Let a head end; return what the agent beside it is told: with which codes to leave, and errors."""
    left, failures = [], []
    ended = {"cancelled": lambda: False, "exception": lambda: error, "result": lambda: result}
    agent = SimpleNamespace(leave=left.append, fail=failures.append)
    _end_with_head(SimpleNamespace(**ended), agent)
    return left, failures


def test_the_head_s_own_agent_ends_with_its_head():
    assert end_with_head(run_result(RunState.FAILED, 1)) == ([1], [])


def test_a_head_that_breaks_is_a_bug_of_muster():
    left, (failure,) = end_with_head(error=ValueError("x"))

    assert isinstance(failure, MusterError)
    assert failure.exit_code == 70
    assert left == []


async def test_a_stop_while_a_node_is_missing_is_the_node_s_loss(make_head):
    head = make_head(2)
    conduct = asyncio.create_task(head.conduct())
    await head.serve(Line(hello("n2", place=1), None))
    await head.serve(
        Line(messages.Stop(signum=15, cause=StopCause.OUTSIDE), None, role=Role.CLIENT)
    )
    result = await asyncio.wait_for(conduct, 30)
    assert (result.state, result.exit_code, result.node_was_lost) == (RunState.PREEMPTED, 75, True)
    assert result.report.error.startswith("n2 was lost, and the job was stopped with SIGTERM")


async def test_who_asked_for_a_stop_is_said_when_it_is_known_after_the_signal(make_head):
    """An agent hears of the signal first; the owner knows that the time is over."""

    head = make_head(2)
    said = []
    head.on_event = lambda event: said.append(getattr(event, "text", None))
    conduct = asyncio.create_task(head.conduct())
    words = [messages.Stop(signum=15, cause=c) for c in (StopCause.OUTSIDE, StopCause.TIME)]
    await head.serve(Line(*words, None, role=Role.CLIENT))
    result, said = await asyncio.wait_for(conduct, 30), [text for text in said if text]
    assert result.state is RunState.TIMED_OUT
    assert said[0].startswith("the system asked to stop")
    assert "the end of the job's time asked for this stop" in said


def test_a_node_that_never_called_is_told_with_the_words_of_what_was_to_start_it(make_head):
    head = make_head(2)
    said = []
    head.on_event = said.append
    head.take_request(HeadClient(Line()), messages.StartFailed(place=1, why="mpiexec said no"))
    head.policy.advance(head.clock() + 5.0)
    head.advance()
    (waiting,) = [event for event in said if event.name == "waiting"]
    whys = {one.node: one.why for one in waiting.missing}
    assert whys["n2"] == "no agent has connected: mpiexec said no"


async def test_the_end_of_the_time_is_recorded(make_head):
    head = make_head(2)
    said = []
    head.on_event = lambda event: said.append((event.name, fields_of(event)))
    conduct = asyncio.create_task(head.conduct())
    looks = [messages.JobEnds(ends_at=99.5), messages.Stop(signum=15)]
    await head.serve(Line(*looks, None, role=Role.CLIENT))
    await asyncio.wait_for(conduct, 30)
    assert ("time_limit", {"ends_at": 99.5}) in said


async def test_an_owner_that_calls_after_the_end_hears_all_that_was_said(make_head):
    line = messages.Output(rank=0, attempt=0, stream=1, text="answer 42\n")

    head = make_head(1, has_owner=True)
    conduct = asyncio.create_task(head.conduct())
    await head.serve(Line(hello("n1", place=0), line, messages.SpawnerRefused(why="bad luck")))
    assert head.is_over
    assert not conduct.done(), "its owner has not called yet"
    late = Line(messages.Watch(owner=True), None, role=Role.CLIENT)
    await head.serve(late)
    await asyncio.wait_for(conduct, 30)
    assert line in late.heard
    assert "run_ended" in [getattr(message, "name", "") for message in late.heard]
