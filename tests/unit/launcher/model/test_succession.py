"""A lost head has one successor: random histories of nodes that die, stand still and lose each other."""

import os
import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kit.values import term
from torchmuster.core.model.lease import LEASE_S
from torchmuster.launcher.model.succession import ASK_EVERY_S, Heir, HeirView, Move, is_voted_out
from unit.launcher.model.succession_world import World

HISTORIES = int(os.environ.get("MUSTER_SUCCESSIONS", "300"))
QUIET_STEPS = 160  # 80 s: two leases, the votes, a gathering


def claim(number=3, place=0, members=(0, 1, 2)):
    return term(number, place=place, members=members)


def silent(newest, *votes, proved=False):
    return HeirView(newest=newest, votes=frozenset(votes), is_silent=True, is_proved=proved)


def moves(heir, sight, until_s, start_s=0.0):
    """Return what an agent does in a time, without what is nothing: when, and what."""
    steps = int((until_s - start_s) * 2)
    found = ((start_s + n / 2, heir.look(start_s + n / 2, sight)) for n in range(steps))
    return [(at, move) for at, move in found if move is not Move.NOTHING]


# One agent.


def test_an_agent_votes_only_when_its_lease_has_ended_and_its_workers_are_gone():
    heir = Heir(1)
    heir.look(0.0, HeirView(newest=claim()))
    busy = HeirView(newest=claim(), is_silent=True, is_idle=False)
    assert moves(heir, busy, LEASE_S + 5) == []
    assert heir.look(LEASE_S + 5, silent(claim())) is Move.VOTE


def test_a_majority_of_votes_is_needed_and_the_head_counts():
    assert is_voted_out(claim(), frozenset({1, 2}))
    assert not is_voted_out(claim(), frozenset({1}))
    assert not is_voted_out(claim(members=(0, 1)), frozenset({1}))
    assert not is_voted_out(claim(), frozenset({1, 7}))  # 7 is none of its agents


def test_of_two_nodes_the_other_waits_and_asks_the_engine():
    heir = Heir(1)
    two = claim(members=(0, 1))
    said = moves(heir, silent(two, 1), LEASE_S + 3 * ASK_EVERY_S)
    assert [move for _, move in said] == [Move.VOTE, *([Move.ASK] * 3)]
    assert heir.has_voted
    assert heir.look(60.0, silent(two, 1, proved=True)) is Move.CLAIM


def test_the_first_of_those_who_voted_claims_first():
    for place, waits_s in ((1, 0.0), (2, 0.5), (3, 1.0)):
        heir = Heir(place)
        sight = silent(claim(members=(0, 1, 2, 3)), 1, 2, 3)
        claims = [at for at, move in moves(heir, sight, 20.0) if move is Move.CLAIM]
        assert claims[0] == LEASE_S + 1.0 + waits_s


def test_a_head_that_comes_back_is_obeyed_again():
    heir = Heir(1)
    moves(heir, silent(claim(), 1), 12.0)
    assert heir.look(12.0, HeirView(newest=claim(), votes=frozenset({1}))) is Move.WITHDRAW
    assert heir.look(12.5, HeirView(newest=claim())) is Move.NOTHING


def test_who_has_claimed_gets_the_time_of_a_lease():
    heir = Heir(2)
    moves(heir, silent(claim(3), 1, 2), 11.0)
    assert moves(heir, silent(claim(4, 1, (1, 2))), 11.0 + LEASE_S, 11.0) == []
    assert heir.look(11.5 + LEASE_S, silent(claim(4, 1, (1, 2)))) is Move.VOTE


def test_before_the_first_attempt_there_is_nothing_to_take_over():
    assert moves(Heir(1), HeirView(newest=None, is_silent=True), 60.0) == []


# Many.

_PLACES = st.integers(0, 4)
_FAULTS = st.one_of(
    st.tuples(st.just("kill"), _PLACES),
    st.tuples(st.just("revive"), _PLACES),
    st.tuples(st.just("pause"), _PLACES, st.integers(1, 120)),
    st.tuples(st.just("cut"), _PLACES, _PLACES),
    st.tuples(st.just("part"), st.integers(1, 30)),
    st.tuples(st.just("join"), _PLACES, _PLACES),
    st.tuples(st.just("fail"), _PLACES),
    st.tuples(st.just("heal")),
)


def apply(world, fault):
    kind, *words = fault
    num = len(world.nodes)
    if kind in ("cut", "join"):
        pair = (words[0] % num, words[1] % num)
        (world.cut.add if kind == "cut" else world.cut.discard)(pair)
    elif kind == "part":  # the bits say who is on which side
        sides = [words[0] >> place & 1 for place in range(num)]
        pairs = ((a, b) for a in range(num) for b in range(num))
        world.cut.update(pair for pair in pairs if sides[pair[0]] != sides[pair[1]])
    elif kind == "heal":
        world.heal()
    elif kind == "fail":
        world.fail_worker(words[0] % num)
    else:  # kill, revive or pause
        getattr(world, kind)(words[0] % num, *words[1:])


def can_go_on(world):
    """Say whether a head must be found: an electorate or the engine can give one, and enough nodes live."""
    alive = {node.place for node in world.nodes if node.is_alive}
    if not world.claims or len(alive) < world.least:
        return False
    newest = world.claims[-1]
    has_head = world.nodes[newest.place].head is not None
    return has_head or world.is_machine_lost(newest) or is_voted_out(newest, frozenset(alive))


@settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    num=st.integers(2, 5),
    least=st.integers(1, 3),
    faults=st.lists(st.tuples(st.integers(0, 70), _FAULTS), max_size=10),
    seed=st.integers(0, 2**32),
)
def test_never_two_heads_train_and_one_is_found(num, least, faults, seed):
    random_ = random.Random(seed)
    world = World(num, min(least, num), lambda most: random_.randint(0, most))
    for _ in range(8 + random_.randint(0, 8)):
        world.step()
    for steps, fault in faults:
        for _ in range(steps):
            world.step()
        apply(world, fault)
    world.heal()
    for _ in range(QUIET_STEPS):
        world.step()
    if can_go_on(world):
        assert world.training(), "nothing trains, and nothing stands in its way"


def test_the_histories_have_heads_that_are_replaced():
    """What is drawn above is of use only if heads are lost in it, replaced, and lost again."""
    takeovers = 0
    for seed in range(30):
        random_ = random.Random(seed)
        world = World(5, 2, lambda most, random_=random_: random_.randint(0, most))
        for _ in range(20):
            world.step()
        for _ in range(2):
            head = next((node for node in world.nodes if node.head is not None), None)
            if head is not None:
                world.kill(head.place)
            for _ in range(100):
                world.step()
        takeovers += world.takeovers
        assert world.training()
    assert takeovers >= 50
