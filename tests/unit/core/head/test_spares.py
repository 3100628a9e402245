"""Spare nodes: who takes the place of a lost node, when, and who does not."""

import pytest

from torchmuster.core.head.attempt import AttemptPhase
from torchmuster.core.model.events import fields_of
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import StopCause
from torchmuster.core.net import messages
from unit.core.head.test_training_policy import World, make_plan


class Told(World):
    """A world that keeps the events of its head."""

    def __init__(self, plan):
        super().__init__(draw=None, plan=plan, local=True)
        self.events = []
        self.asked = []
        self.goodbyes = []
        self.policy.tell = lambda event: self.events.append((event.name, fields_of(event)))

    def carry_out(self, action):
        if hasattr(action, "places"):
            self.asked += action.places
        message = getattr(action, "message", None)
        if isinstance(message, messages.Goodbye):
            self.goodbyes.append(message)
        super().carry_out(action)

    def named(self, name):
        return [fields for event, fields in self.events if event == name]

    def lose(self, place):
        self.die(self.nodes[place], workers=True)
        self.settle()
        self.let_speak()

    def let_speak(self):
        """Each agent says what it owes, until nobody owes anything."""
        while speaking := [n for n in self.nodes if n.owes and self.is_heard(n)]:
            self.say(speaking[0])
            self.settle()
        return self

    def is_heard(self, node):
        return node.line is not None and node.lives and not node.is_silent


@pytest.fixture
def world():
    return Told(make_plan(2, spares=1)).join_all().let_speak()


def leave(world, node, rank, how):
    """A worker ends by itself, and its agent has yet to say so."""
    node.workers.discard(rank)
    node.owes.append(world.end(node, rank, how, asked=False))


def places(world):
    return {place: member.hello.place for place, member in world.policy.attempt.members.items()}


def test_the_spare_node_gets_no_rank(world):
    assert places(world) == {0: 0, 1: 1}
    assert world.named("attempt_started")[0]["spares"] == ["n3"]
    assert world.policy.attempt.world_size == 4
    assert not world.nodes[2].workers


def test_a_spare_takes_the_place_of_a_lost_node_without_waiting(world):
    now = world.now
    world.lose(1)
    assert world.now == now
    assert world.policy.phase is AttemptPhase.RUNNING
    assert places(world) == {0: 0, 1: 2}
    assert world.named("spare_taken") == [{"node": "n3", "place": 1, "before": "n2"}]
    assert world.asked == [1], "the lost node is asked for again"
    assert world.nodes[2].workers == {2, 3}, "the ranks stay where their place is"


def test_a_node_that_comes_back_is_spare_from_then_on(world):
    world.lose(1)
    world.join_all(1)
    assert world.named("spare_joined") == [{"node": "n2"}]
    assert not world.nodes[1].workers
    assert world.policy.phase is AttemptPhase.RUNNING
    world.lose(2)
    assert places(world) == {0: 0, 1: 1}
    assert world.asked == [1, 2]


def test_a_spare_that_is_lost_ends_nothing(world):
    world.die(world.nodes[2], workers=True)
    world.settle()
    assert world.policy.phase is AttemptPhase.RUNNING
    assert world.named("spare_lost")
    assert not world.named("node_lost")
    assert world.asked == [2]
    assert world.policy.book.spent == 0


def test_a_spare_that_comes_first_waits_for_those_that_were_to_get_the_ranks():
    world = Told(make_plan(2, spares=1)).join_all(2, 0)
    assert world.policy.attempt is None
    world.join_all(1)
    assert places(world) == {0: 0, 1: 1}


def test_a_spare_begins_in_the_place_of_a_node_that_does_not_come():
    world = Told(make_plan(2, spares=1)).join_all(2, 0)
    world.wait(world.plan.limits.last_call_s + 2)
    assert places(world) == {0: 0, 1: 2}


def test_a_run_does_not_begin_without_its_head():
    world = Told(make_plan(1, spares=2)).join_all(1, 2)
    world.wait(10)
    assert world.policy.attempt is None
    world.join_all(0)
    assert places(world) == {0: 0}


def lose_and_bring_back(world, number):
    world.lose(number)
    world.join_all(number).let_speak()


def test_a_node_that_was_lost_twice_is_not_taken_while_another_is_there():
    world = Told(make_plan(2, spares=2, max_restarts=9)).join_all().let_speak()
    lose_and_bring_back(world, 1)  # n3 takes place 1
    lose_and_bring_back(world, 1)  # as a spare, for the second time
    assert places(world) == {0: 0, 1: 2}
    lose_and_bring_back(world, 2)
    assert places(world) == {0: 0, 1: 3}, "n4, and not n2"
    lose_and_bring_back(world, 3)
    assert places(world) == {0: 0, 1: 2}, "n3, which was lost once"
    for node in (world.nodes[0], world.nodes[2]):
        for rank in sorted(node.workers):
            leave(world, node, rank, "well")
    world.let_speak()
    world.wait(1)
    world.let_speak()
    assert world.policy.result.state is RunState.SUCCEEDED
    assert [note.partition(" was")[0] for note in world.policy.result.notes] == ["host1"]


def test_a_spare_whose_interpreter_is_refused_is_let_go(world):
    refused = messages.SpawnerRefused(what="python is too old", where="n3", why="3.9", hint="")
    world.policy.said(world.now, world.nodes[2].member, refused)
    world.settle()
    assert world.policy.phase is AttemptPhase.RUNNING
    assert world.named("notice")[-1]["text"] == "the spare n3 can't be used: 3.9"
    assert not world.nodes[2].lives


def test_a_node_that_is_lost_after_its_echo_was_heard_is_the_cause(world):
    """Its workers were killed on their own node, and what they leave the other node hears first."""
    first, second, _ = world.nodes
    second.is_silent = True
    leave(world, first, 0, "echo")
    world.say(first)
    world.settle()
    assert world.policy.phase is AttemptPhase.ENDING
    while world.policy.attempt.number == 0:
        world.wait(1)
        world.let_speak()
    (failed,) = world.named("attempt_failed")
    assert failed["cause"]["kind"] == "node_lost"
    assert failed["cause"]["node"] == "n2"
    assert places(world) == {0: 0, 1: 2}


def compute_wrongly(world, place):
    """A rank of the node in this place finds that it has computed something else than the others."""
    node = world.nodes[world.policy.attempt.members[place].hello.place]
    leave(world, node, min(node.workers), "wrong")
    world.let_speak()
    world.settle()
    world.let_speak()


def test_a_node_that_computes_wrongly_gets_no_rank_again(world):
    compute_wrongly(world, 1)
    assert places(world) == {0: 0, 1: 2}
    assert world.named("node_left_out") == [{"node": "n2", "rank": 2, "machine": "host1"}]
    assert world.policy.book.spent == 1
    assert world.asked == [], "it is there, and nobody has to be started for it"
    assert world.nodes[1].lives
    world.die(world.nodes[1], workers=True)
    world.join_all(1)
    assert not world.named("node_lost")
    assert world.asked == []
    compute_wrongly(world, 1)
    result = world.policy.result
    assert (result.state, result.exit_code) == (RunState.FAILED, 1)
    why = "rank 2 did so on n2 as well: look at what the script does on this rank"
    assert why in str(result.report.more)
    assert [note.partition(" was")[0] for note in result.notes] == ["n2"], "n3 is not blamed"


def test_a_run_with_a_range_goes_on_without_a_node_that_computes_wrongly():
    world = Told(make_plan(3, min_nodes=2)).join_all().let_speak()
    compute_wrongly(world, 2)
    assert places(world) == {0: 0, 1: 1}
    world.die(world.nodes[2], workers=True)
    world.join(world.nodes[2])
    world.wait(5)
    assert places(world) == {0: 0, 1: 1}, "nor does it grow by it"
    compute_wrongly(world, 1)
    assert world.policy.result.state is RunState.FAILED


def test_the_run_ends_where_its_head_is_on_the_node_that_computes_wrongly(world):
    compute_wrongly(world, 0)
    assert world.policy.result.state is RunState.FAILED
    assert "n1 gets no ranks again" in str(world.policy.result.report.more)


def test_all_nodes_hear_of_the_end(world):
    world.policy.stop(world.now, 15, StopCause.USER)
    world.wait(10)
    world.let_speak()
    assert world.policy.result is not None
    world.policy.dismiss_all()
    world.settle()
    assert len(world.goodbyes) == 3
