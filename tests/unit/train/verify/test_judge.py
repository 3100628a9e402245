"""Who is named when ranks make the same batches: at most one, and never one who has computed as the others."""

from hypothesis import given
from hypothesis import strategies as st

from torchmuster.train.verify.judge import BatchResult, odd_weights
from torchmuster.train.verify.judge import judge as judge_on


def makings(world_size, second, make):
    """Return what ranks make in the rounds of a check: their own, that of the next, then again, and that of a third."""
    rounds = [0, 1, 0, 1] + ([second] if world_size > 2 else [])
    return [
        BatchResult(
            batch=(by + shift) % world_size,
            by=by,
            digest=make(number, by, (by + shift) % world_size),
        )
        for number, shift in enumerate(rounds)
        for by in range(world_size)
    ]


def judge(made, nodes=None):
    """Judge; without `nodes` each rank is on one of its own."""
    return judge_on(made, nodes or range(1 + max(one.by for one in made)))


def right(number, by, batch):
    return f"right {batch}"


def test_nothing_follows_where_all_are_alike():
    verdict = judge(makings(4, 2, right))
    assert (verdict.batches, verdict.odd) == ((), None)


@given(st.integers(3, 9), st.data())
def test_a_rank_that_is_always_wrong_is_named(world_size, data):
    bad = data.draw(st.integers(0, world_size - 1))
    second = data.draw(st.integers(2, world_size - 1))
    verdict = judge(
        makings(world_size, second, lambda n, by, b: f"wrong {b}" if by == bad else f"right {b}")
    )
    assert verdict.odd == bad
    assert not verdict.is_once
    assert bad not in verdict.against


@given(st.integers(2, 9), st.data())
def test_a_rank_that_was_wrong_once_is_named_whoever_it_is(world_size, data):
    bad = data.draw(st.integers(0, world_size - 1))
    second = data.draw(st.integers(2, world_size - 1)) if world_size > 2 else 1
    when = data.draw(st.sampled_from([0, 1]))
    verdict = judge(
        makings(
            world_size,
            second,
            lambda n, by, b: "wrong" if (n, by) == (when, bad) else f"right {b}",
        )
    )
    assert (verdict.odd, verdict.is_once) == (bad, True)
    assert len(verdict.against) == (2 if world_size > 2 else 1)


@given(st.integers(2, 9), st.data())
def test_nobody_is_named_where_each_making_differs(world_size, data):
    second = data.draw(st.integers(2, world_size - 1)) if world_size > 2 else 1
    verdict = judge(makings(world_size, second, lambda n, by, b: f"{n} {by}"))
    assert verdict.odd is None
    assert verdict.batches == tuple(range(world_size))


@given(st.integers(2, 9))
def test_nobody_is_named_where_making_again_is_another_way_for_all(world_size):
    verdict = judge(makings(world_size, 2 % world_size, lambda n, by, b: f"{min(n, 1)} {b}"))
    assert verdict.odd is None


def test_of_two_ranks_that_keep_differing_nobody_is_named():
    verdict = judge(makings(2, 1, lambda n, by, b: f"{by} {b}"))
    assert (verdict.batches, verdict.odd) == ((0, 1), None)


@given(st.integers(4, 9), st.data())
def test_of_two_wrong_ranks_nobody_is_named(world_size, data):
    bad = data.draw(st.sets(st.integers(0, world_size - 1), min_size=2, max_size=2))
    verdict = judge(makings(world_size, 2, lambda n, by, b: f"{by in bad and by} {b}"))
    assert verdict.odd is None


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=9))
def test_the_only_one_with_other_weights_is_named(digests):
    odd, groups = odd_weights(digests)
    assert sorted(rank for group in groups for rank in group) == list(range(len(digests)))
    if odd is not None:
        others = {digest for rank, digest in enumerate(digests) if rank != odd}
        assert len(others) == 1
        assert digests[odd] not in others
        assert len(digests) > 2


def test_ranks_of_one_node_do_not_outvote_another():
    def make(number, by, batch):
        return "wrong" if by in (2, 3) and batch == 0 else f"right {batch}"

    made = [
        BatchResult(batch=(by + shift) % 4, by=by, digest=make(0, by, (by + shift) % 4))
        for shift in (0, 2, 0, 2, 3)
        for by in range(4)
    ]
    assert judge(made, [0, 0, 1, 1]).odd is None
    assert judge(made, [0, 0, 0, 0]).batches == (0,)
