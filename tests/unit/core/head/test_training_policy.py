"""Random lives of a training run: nodes that come, fall silent, and are lost, workers that end in every way, stops.

What must hold in every one of them is what `docs/faults.md` promises.
"""

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.values import READY, hello, run_plan, worker_end
from kit.work import num_calls
from torchmuster.core.files.layout import RunDir
from torchmuster.core.head import node_policy
from torchmuster.core.head.attempt import AttemptPhase
from torchmuster.core.head.membership import Membership
from torchmuster.core.head.options import TrainingHeadOptions
from torchmuster.core.head.training_policy import Debuggers, TrainingPolicy
from torchmuster.core.model.events import WorkersStartedEvent
from torchmuster.core.model.failure import EndKind, PythonError, first_cause
from torchmuster.core.model.lease import LEASE_S
from torchmuster.core.model.plan import Limits
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import StopCause
from torchmuster.core.net import messages

VERSION = "1"
WORKERS_PER_NODE = 2
MAX_STEPS = 600
ENDS = {
    "well": {"kind": EndKind.SUCCESS, "exit_code": 0},
    "code 3": {"kind": EndKind.EXIT_CODE, "exit_code": 3},
    "preempted": {"kind": EndKind.PREEMPTED, "exit_code": 75},
    "killed": {"kind": EndKind.SIGNAL, "signum": 9},
    "bug": {"kind": EndKind.EXCEPTION, "exit_code": 1},
    "echo": {"kind": EndKind.EXCEPTION, "exit_code": 1},
    "wrong": {"kind": EndKind.EXCEPTION, "exit_code": 1},
}


def error(type_name, message, line, **more):
    where = {"where": f"train.py:{line}", "traceback": "..."}
    return PythonError(type_name=type_name, message=message, **where, **more)


ERRORS = {
    "bug": error("ValueError", "x", 7),
    "echo": error("RuntimeError", "Connection closed by peer", 9),
    "wrong": error("DiffersError", "rank 1 has computed something else", 9, blames_node=True),
}


class FakeLine:
    """A connection that is only looked at."""

    is_open = False
    own_address = "10.0.0.1"
    peer_address = "10.0.0.2"


@dataclass(slots=True)
class Orphans:
    """Workers whose agent is gone: they live until their lease has ended."""

    pids: tuple[int, ...]
    heard_at: float


@dataclass(slots=True)
class Node:
    """A machine: its agent's process, its connection, and the workers that live on it."""

    place: int
    local: bool  # the head sees its processes
    incarnation: int = -1
    line: FakeLine | None = None
    member: object = None
    lives: bool = False  # the agent's process
    is_silent: bool = False
    heard_at: float = 0.0
    attempt: int | None = None
    workers: set[int] = field(default_factory=set)
    started: bool = False
    pids: tuple[int, ...] = ()
    spawner: int = 0
    asked: bool = False
    owes: list[messages.Message] = field(default_factory=list)  # what its agent has yet to say


class World:
    """The nodes of a run; they do what the head orders, and whatever else may happen."""

    def __init__(self, draw, plan, *, local):
        self.started = []  # of each node and attempt: the ranks and their pids
        self.draw, self.plan = draw, plan
        self.now = 1000.0
        self.nodes = [Node(place, local or place == 0) for place in range(plan.num_places)]
        self.pids = itertools.count(10_000)
        self.incarnations = itertools.count()
        self.alive_pids = set()
        self.orphans = []
        self.starts = []  # (attempt, why-relevant facts)
        self.arrived = {}  # attempt -> ends in the order in which the head has heard of them
        self.joins = 0
        self.good_from = None
        self.was_spent = False
        members = Membership(
            plan,
            clock=lambda: self.now,
            own_boot_id="here",
            own_network_id="net",
            is_running=self.alive_pids.__contains__,
            state_of=lambda pid, whose, own: None,
        )
        options = TrainingHeadOptions(plan=plan, run_dir=RunDir("/run"), pid=1)
        self.policy = TrainingPolicy(options, members, self.now, self.checks)

    def checks(self, policy):
        return node_policy.StartChecks(policy, "10.0.0.1", "net")

    # What the head does.

    def settle(self):
        """Carry out what the policy orders, and let it look at the time, until it has no more to say."""
        self.was_spent = self.policy.book.is_spent  # when what is asked for was decided
        self.policy.advance(self.now)
        while actions := self.policy.take_actions():
            for action in actions:
                self.carry_out(action)
        self.check()

    def carry_out(self, action):
        match action:
            case node_policy.OpenStore(attempt=attempt, address=address):
                self.check_start(attempt)
                self.policy.store_is_open(attempt, address, 29500)
            case node_policy.Send(channel=line, message=message):
                for node in self.nodes:
                    if node.line is line and node.lives:
                        self.obey(node, message)
            case node_policy.CutOff(channel=line):
                for node in self.nodes:
                    if node.line is line:
                        node.line = None
            case node_policy.Record(event=WorkersStartedEvent(attempt=attempt, pids=pids)):
                started = [(min(r), p) for number, r, p in self.started if number == attempt]
                assert pids == sum((p for _, p in sorted(started)), ())[:64], "pids in rank order"
            case node_policy.AskForNodes(places=places):
                assert all(0 <= place < self.plan.num_places for place in places)
                gathering = self.policy.phase is AttemptPhase.GATHERING
                assert gathering or not self.was_spent, "nobody would need them"

    def obey(self, node, message):
        match message:
            case messages.StartAttempt(attempt=attempt, ranks=ranks):
                assert message.restarts_spent <= message.max_restarts, "the budget is overspent"
                node.attempt, node.asked, node.started = attempt, False, False
                node.workers = set(range(ranks.first_rank, ranks.first_rank + ranks.num_workers))
                node.pids = tuple(next(self.pids) for _ in node.workers)
                self.alive_pids.update(node.pids)
                self.started.append((attempt, frozenset(node.workers), node.pids))
                told = {"pids": node.pids, "spawner_pid": node.spawner}
                node.owes.append(messages.WorkersStarted(attempt=attempt, **told))
            case messages.Welcome() if node.attempt is not None:  # it was given up for lost
                attempt = node.attempt
                self.kill_workers(node, attempt)
                node.owes.append(messages.AllReaped(attempt=attempt))
            case messages.KillAttempt(attempt=attempt):
                self.kill_workers(node, attempt)
                node.owes.append(messages.AllReaped(attempt=attempt))
            case messages.SignalWorkers():
                node.asked = node.asked or message.asks_to_stop
            case messages.Goodbye() | messages.Refused():
                self.die(node, workers=True)

    def kill_workers(self, node, attempt):
        """Workers take a moment to die: until the agent says that all are reaped."""
        if node.attempt == attempt:
            for rank in sorted(node.workers):
                node.owes.append(self.end(node, rank, "killed", asked=True))

    def clear(self, node):
        self.alive_pids.difference_update(node.pids)
        node.workers, node.pids, node.attempt = set(), (), None

    def end(self, node, rank, how, *, asked):
        of = {"attempt": node.attempt, "rank": rank, "node": self.plan.node_name(node.place)}
        end = worker_end(**of, asked=asked, error=ERRORS.get(how), **ENDS[how])
        return messages.WorkerEnded(end=end)

    # What must hold.

    def check_start(self, attempt):
        """No attempt starts while a worker of an earlier one may live; numbers and ranks are whole."""
        living = [(node.place, node.workers) for node in self.nodes if node.workers]
        assert not living, f"attempt {attempt.number} starts beside {living}"
        assert not self.orphans, f"attempt {attempt.number} starts beside {self.orphans}"
        assert attempt.number == len(self.starts)
        ranks = sorted(
            rank
            for one in attempt.ranks.values()
            for rank in range(one.first_rank, one.first_rank + one.num_workers)
        )
        assert ranks == list(range(attempt.world_size))
        assert self.plan.min_nodes <= len(attempt.members) <= self.plan.max_nodes
        assert 0 in attempt.members, "the head's own node takes part"
        starts = [member.hello.place for member in attempt.members.values()]
        assert len(set(starts)) == len(starts), "a node has one place"
        assert not self.left_out() & set(starts), "a node that computes wrongly gets no rank again"
        self.starts.append(attempt)

    def left_out(self):
        """Return where the nodes were started that were the cause of a failure because they compute wrongly."""
        found = set()
        for attempt in self.starts:
            cause = first_cause(attempt.ends)
            preempted = any(end.kind is EndKind.PREEMPTED for end in attempt.ends)
            if cause is not None and cause.error is ERRORS["wrong"] and not preempted:
                found.add(attempt.member_of(cause.rank).hello.place)
        return found

    def check(self):
        policy = self.policy
        assert policy.book.spent <= self.plan.limits.max_restarts
        assert (policy.phase is AttemptPhase.OVER) == (policy.result is not None)

    # What happens.

    def join(self, node):
        """A new agent is started at a place, where nothing of the last one is left."""
        node.incarnation = next(self.incarnations)
        node.lives, node.is_silent, node.owes = True, False, []
        node.spawner = next(self.pids)
        self.alive_pids.add(node.spawner)
        self.joins += 1
        self.call(node)

    def join_all(self, *places):
        """The nodes of these places join one after the other, or all of them; then the head looks."""
        for place in places or range(len(self.nodes)):
            self.join(self.nodes[place])
        self.settle()
        return self

    def call(self, node):
        if self.is_ending(node):
            self.clear(node)
        node.owes.clear()  # what could not be said is lost
        node.line, node.is_silent = FakeLine(), False
        said = hello(
            f"host{node.place}",
            incarnation=str(node.incarnation),
            pid=100_000 + node.incarnation,
            boot_id="here" if node.local else "there",
            num_workers=WORKERS_PER_NODE,
            place=node.place,
            spawner_pid=node.spawner,
            attempt=node.attempt,
            wants_place_0=node.place == 0,
            network_id="net",
        )
        self.alive_pids.add(said.pid)
        node.heard_at = self.now
        node.member = self.policy.called(self.now, said, node.line, VERSION)
        if node.member is not None:
            self.policy.said(self.now, node.member, READY)
            return
        while actions := self.policy.take_actions():
            for action in actions:
                self.carry_out(action)

    def die(self, node, *, workers):
        """The agent's process is gone; its workers die with it, or at the end of their lease."""
        node.lives = False
        node.owes.clear()
        self.alive_pids.discard(100_000 + node.incarnation)
        if node.workers and not workers:  # they die with the spawner
            self.orphans.append(Orphans((*node.pids, node.spawner), node.heard_at))
            node.pids = ()
        else:
            self.alive_pids.discard(node.spawner)
        self.clear(node)
        self.drop(node)

    def drop(self, node):
        """The connection ends; the head hears of it."""
        line, node.line = node.line, None
        if line is not None and node.member is not None:
            self.policy.gone(self.now, node.member, line, "its connection ended")

    def say(self, node):
        """The agent says the next of what it owes."""
        message = node.owes.pop(0)
        self.hear(node)
        if isinstance(message, messages.AllReaped) and message.attempt == node.attempt:
            self.clear(node)
        if isinstance(message, messages.WorkerEnded):
            attempt = self.policy.attempt
            if attempt is not None and attempt.number == message.end.attempt:
                self.arrived.setdefault(attempt.number, []).append(message.end)
        self.policy.said(self.now, node.member, message)

    def hear(self, node):
        node.heard_at = node.member.heard_at = self.now

    def finish_worker(self, node, how):
        rank = self.draw(st.sampled_from(sorted(node.workers)))
        node.workers.discard(rank)
        node.owes.append(self.end(node, rank, how, asked=node.asked and how != "well"))
        if not node.workers:
            self.alive_pids.difference_update(node.pids)

    def wait(self, seconds):
        """Time passes; who can speak is heard, and leases end on the nodes' own side."""
        for _ in range(max(int(seconds), 1)):
            self.now += 1.0
            for node in self.nodes:
                if node.line is not None and not node.is_silent and node.lives:
                    self.hear(node)
                elif self.now - node.heard_at > LEASE_S:
                    self.end_lease(node)
            gone = [one for one in self.orphans if self.now - one.heard_at > LEASE_S]
            for one in gone:
                self.alive_pids.difference_update(one.pids)
                self.orphans.remove(one)
            self.settle()

    def end_lease(self, node):
        if node.lives:
            for rank in sorted(node.workers):
                node.owes.append(self.end(node, rank, "killed", asked=False))
            if node.attempt is not None:
                node.owes.append(messages.AllReaped(attempt=node.attempt))
        self.clear(node)

    # One step.

    def can(self):
        """Return what may happen now: (weight, what)."""
        choices = [(3, lambda: self.wait(1)), (1, lambda: self.wait(6))]
        for node in self.nodes:
            here = node.line is not None and node.lives and not node.is_silent
            if here and node.owes:
                choices.append((8, lambda node=node: self.say(node)))
            if here and node.workers and not self.is_ending(node):
                choices.append((3, lambda node=node: self.finish_worker(node, "well")))
                choices.append((1, lambda node=node: self.cascade(node)))
                how = self.draw(st.sampled_from(sorted(ENDS)))
                choices.append((1, lambda node=node, how=how: self.finish_worker(node, how)))
            if node.lives and node.line is None and node.place:
                choices.append((3, lambda node=node: self.call(node)))
            if not node.lives and self.joins < 4 * len(self.nodes):
                choices.append((4, lambda node=node: self.join(node)))
            if here and node.place and self.good_from is None:
                choices.append((1, lambda node=node: self.harm(node)))
        return choices

    def is_ending(self, node):
        return any(isinstance(message, messages.AllReaped) for message in node.owes)

    def cascade(self, node):
        """One rank fails, and on every other node one fails because of it, whoever is heard first."""
        for other in self.nodes:
            if other.line is not None and other.workers and not self.is_ending(other):
                how = ["bug", "killed", "code 3"] if other is node else ["echo"]
                self.finish_worker(other, self.draw(st.sampled_from(how)))

    def harm(self, node):
        how = self.draw(st.sampled_from(["dies", "dies with workers", "drops", "falls silent"]))
        if how == "drops":
            self.drop(node)
        elif how == "falls silent":
            node.is_silent = True
        else:
            self.die(node, workers=how == "dies with workers")

    def step(self):
        choices = self.can()
        weights = [index for index, (weight, _) in enumerate(choices) for _ in range(weight)]
        choices[self.draw(st.sampled_from(weights))][1]()
        if self.policy.result is None:
            self.settle()

    def step_well(self, *, comes_back, stubborn):
        """Nothing is lost any more: each does what is expected, but for nodes that stay away, and workers that hang."""
        for node in self.nodes:
            if node.lives and node.is_silent and node.line is not None:
                self.drop(node)
            if node.lives and node.line is None:
                self.call(node)
            elif not node.lives and comes_back:
                self.join(node)
            while node.line is not None and node.owes:
                self.say(node)
            for _ in range(0 if stubborn or self.is_ending(node) else len(node.workers)):
                self.finish_worker(node, "well")
        self.wait(5)


def make_plan(num_nodes, *, min_nodes=None, max_restarts=3, grow=True, spares=0):
    return run_plan(
        num_nodes,
        min_nodes=min_nodes or num_nodes,
        workers_per_node=(WORKERS_PER_NODE,),
        node_names=tuple(f"n{place + 1}" for place in range(num_nodes + spares)),
        spares=spares,
        limits=Limits(max_restarts=max_restarts, join_timeout_s=60.0, grace_s=5.0),
        grow=grow,
    )


def must_cost(attempt):
    """Say whether the attempt after this one costs a restart: a failure that nobody had asked for."""
    preempted = any(end.kind is EndKind.PREEMPTED for end in attempt.ends)
    return any(end.is_failure and not (preempted and end.looks_like_echo) for end in attempt.ends)


def check_end(world, stopped):
    """What the verdict says is what has happened."""
    result = world.policy.result
    spent = [attempt for attempt in world.starts[:-1] if must_cost(attempt)]
    assert len(spent) <= world.plan.limits.max_restarts, "more attempts than the budget has"
    last = world.starts[-1] if world.starts else None
    assert result.attempts == len(world.starts)
    assert result.restarts_spent <= world.plan.limits.max_restarts
    if result.state is RunState.SUCCEEDED:
        assert last is not None
        assert last.is_done
        assert result.exit_code == 0
        heard = {end.rank: end for end in world.arrived[last.number]}
        assert sorted(heard) == list(range(last.world_size)), "every rank has ended"
        assert all(end.kind is EndKind.SUCCESS for end in heard.values())
        return
    assert result.exit_code != 0
    assert result.report is not None
    if result.exit_code == 6:  # it never had its nodes; else another job may have them
        assert last is None or not world.policy._lost
    if result.state in (RunState.CANCELLED, RunState.TIMED_OUT):
        assert stopped
    if result.cause is not None and result.cause.kind is not EndKind.PREEMPTED:
        failures = [end for end in last.ends if end.is_failure]
        own = [end for end in failures if not end.looks_like_echo]
        assert result.cause is (own or failures)[0], "the first cause, and no echo of it"


@settings(max_examples=300, deadline=None)
@given(
    st.data(),
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
    st.booleans(),
    st.integers(0, 3),
    st.integers(0, 120),
    st.sampled_from([None, StopCause.USER, StopCause.TIME, StopCause.OUTSIDE]),
    st.booleans(),
    st.booleans(),
)
def test_every_life_of_a_run_ends_and_keeps_its_promises(
    data, num_nodes, spares, elastic, local, max_restarts, harm_steps, stop, comes_back, stubborn
):
    min_nodes, spares = (1, 0) if elastic else (None, spares)
    plan = make_plan(num_nodes, min_nodes=min_nodes, max_restarts=max_restarts, spares=spares)
    world = World(data.draw, plan, local=local)
    stop_at = data.draw(st.integers(0, 60)) if stop else None
    for step in range(MAX_STEPS):
        if world.policy.result is not None:
            break
        if step == stop_at:
            world.policy.stop(world.now, 15, stop)
            world.settle()
        if step == harm_steps:
            world.good_from = step
        if step < harm_steps + 100:
            world.step()
        else:  # workers that hang end by a stop only
            world.step_well(comes_back=comes_back, stubborn=stubborn and stop is not None)
    assert world.policy.result is not None, f"the run does not end: {world.policy.phase}"
    check_end(world, stopped=stop_at is not None)


def lose_a_node(world):
    """Let a run of two nodes begin, and lose one of them for good."""
    for node in world.join_all().nodes:
        world.say(node)
    first, second = world.nodes
    world.die(second, workers=True)
    world.settle()
    while first.owes:
        world.say(first)
    for _ in range(LIMIT_S):
        if world.policy.phase is AttemptPhase.GATHERING:
            return
        for rank in list(first.workers):
            first.owes.append(world.end(first, rank, "killed", asked=True))
            world.say(first)
        world.wait(1)
        while first.owes:
            world.say(first)
    raise AssertionError(world.policy.phase)


LIMIT_S = 60


def test_a_run_that_has_lost_a_node_for_good_goes_on_elsewhere():
    world = World(None, make_plan(2), local=True)
    lose_a_node(world)
    for _ in range(2 * LIMIT_S):
        world.wait(1)
        if world.policy.result is not None:
            break
    result = world.policy.result
    assert (result.state, result.exit_code) == (RunState.PREEMPTED, 75)
    assert result.node_was_lost
    assert result.report.error == "n2 was lost, and no node came in its place"
    assert "only 1 of 2 nodes came within 60 s" in result.report.because


@pytest.mark.parametrize(
    ("later_s", "state"), [(0.2, RunState.CANCELLED), (2.0, RunState.PREEMPTED)]
)
def test_who_cancels_while_a_node_is_missing_has_cancelled(later_s, state):
    """The agent beside the head is sent the scheduler's signal before the owner tells who asked for it."""
    world = World(None, make_plan(2), local=True)
    lose_a_node(world)
    world.policy.stop(world.now, 15, StopCause.OUTSIDE)
    world.settle()
    assert world.policy.result is None
    world.now += later_s
    if later_s > 1.0:
        world.settle()
    world.policy.stop(world.now, 15, StopCause.USER)
    world.wait(2)
    assert world.policy.result.state is state


@pytest.mark.parametrize(
    ("signum", "num_debugged", "least", "most"),
    [(2, 2, 3, 4), (2, 0, 5, 6), (2, 1, 5, 6), (15, 2, 5, 6)],
)
def test_ctrl_c_gives_debuggers_that_are_left_alone_no_whole_grace(
    signum, num_debugged, least, most
):
    world = World(None, make_plan(1), local=True).join_all()
    (node,) = world.nodes
    while node.owes:
        world.say(node)
        world.settle()
    assert world.policy.phase is AttemptPhase.RUNNING
    for rank in range(num_debugged):
        world.policy.said(world.now, node.member, messages.Debugger(rank=rank, active=True))
    world.policy.stop(world.now, signum, StopCause.USER)
    began = world.now
    while world.policy.phase is AttemptPhase.RUNNING and world.now < began + 20:
        world.now += 0.5
        world.policy.advance(world.now)
    assert least <= world.now - began <= most


def calls_of_an_end(num_nodes):
    """Return how many calls it takes from a worker's death to the next attempt, if all others' ends are heard one by one."""
    world = World(None, make_plan(num_nodes), local=True).join_all()
    for node in world.nodes:
        world.say(node)
    first, policy = world.nodes[0], world.policy
    first.owes.append(world.end(first, min(first.workers), "killed", asked=False))
    world.say(first)
    world.settle()
    assert policy.phase is AttemptPhase.ENDING

    def hear_all():
        for node in world.nodes:
            for message in node.owes:
                policy.said(world.now, node.member, message)
                policy.due(world.now)
                policy.advance(world.now)

    count = num_calls(hear_all)
    assert any(isinstance(action, node_policy.OpenStore) for action in policy.take_actions())
    return count


def test_an_end_that_twice_as_many_ranks_tell_is_twice_the_work():
    assert calls_of_an_end(200) < 2.5 * calls_of_an_end(100)


# Which ranks somebody debugs.


@pytest.fixture
def debuggers():
    return Debuggers()


def debugger(rank, waits="", *, active=True):
    folder = "/code" if waits else ""
    return messages.Debugger(rank=rank, active=active, waits=waits, folder=folder)


@pytest.mark.parametrize(("waits", "is_told"), [("debugpy", True), ("", False)])
def test_a_rank_that_somebody_debugs_is_held_and_told_to_the_client_if_it_waits(
    debuggers, waits, is_told
):
    assert debuggers.take(debugger(3, waits)) is is_told
    assert debuggers == {3}


def test_of_ranks_that_failed_only_the_first_is_looked_at(debuggers):
    assert debuggers.take(debugger(1, "pdb"))
    assert not debuggers.take(debugger(0, "pdb"))
    assert not debuggers.take(debugger(1))
    assert debuggers == {1}
    debuggers.take(debugger(1, active=False))
    assert not debuggers


def test_who_fails_because_the_first_is_gone_is_not_looked_at_before_the_next_attempt(debuggers):
    debuggers.take(debugger(1, "pdb"))
    debuggers.take(debugger(1, active=False))
    assert not debuggers.take(debugger(0, "pdb"))
    assert not debuggers
    debuggers.clear()
    assert debuggers.take(debugger(0, "pdb"))


def test_a_rank_that_stops_and_goes_on_can_stop_again_and_fail(debuggers):
    for waits in ("pdb:stops", "pdb:stops", "pdb"):
        assert debuggers.take(debugger(1, waits))
        assert debuggers == {1}
        debuggers.take(debugger(1, active=False))
        assert not debuggers
