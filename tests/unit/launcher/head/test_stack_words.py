"""Where ranks stand, in the words of a hang's message."""

import pytest

from torchmuster.launcher.facts.stacks import RankActivity, StackReading
from torchmuster.launcher.head.hang_watch import (
    Seen,
    describe_standing,
    group_texts,
    rank_first,
    tell,
)


def seen(rank, doing, what="", *, by="", since_s=None, kernel=""):
    standing = StackReading(doing=doing, what=what, by=by)
    return Seen(rank=rank, node="n1", standing=standing, since_s=since_s, kernel=kernel)


def test_equal_ranks_stand_together_and_those_that_wait_come_first():
    ranks = [
        seen(0, RankActivity.SAVES),
        *(seen(rank, RankActivity.WAITS, "all_reduce") for rank in (1, 2)),
    ]

    assert tell(ranks) == "2 ranks wait in all_reduce; rank 0 on n1 saves"


def test_the_longest_time_is_told_of_ranks_that_stand_together():
    ranks = [
        seen(rank, RankActivity.COMPILES, since_s=since_s)
        for rank, since_s in ((1, 20.0), (3, 31.0))
    ]

    assert tell(ranks).endswith("compile for 31 s")


def test_ranks_that_sleep_in_the_kernel_are_told_one_by_one():
    ranks = [seen(rank, RankActivity.UNINTERRUPTIBLE, kernel="nfs_wait") for rank in (0, 1)]

    assert tell(ranks) == "; ".join(
        f"rank {rank} on n1 sleeps uninterruptibly in the kernel (nfs_wait)" for rank in (0, 1)
    )


@pytest.mark.parametrize(
    ("standing", "single", "said"),
    [
        (StackReading(doing=RankActivity.STOPPED), True, "is stopped (SIGSTOP)"),
        (StackReading(doing=RankActivity.STOPPED), False, "are stopped (SIGSTOP)"),
        (
            StackReading(doing=RankActivity.STOPPED, by="loader 7"),
            True,
            "waits for loader 7, which is stopped (SIGSTOP)",
        ),
        (StackReading(doing=RankActivity.DEBUGGED), False, "are in a debugger"),
        (StackReading(doing=RankActivity.EVALUATES, what="top_k"), False, "evaluate in top_k"),
        (StackReading(doing=RankActivity.WORKS), True, "is at work"),
        (StackReading(doing=RankActivity.WORKS, what="read()"), True, "is in read()"),
        (StackReading(doing=RankActivity.UNKNOWN), False, "do not show a stack"),
    ],
)
def test_what_a_rank_does_ends_a_sentence(standing, single, said):
    assert describe_standing(standing, single=single) == said


def test_stacks_that_differ_in_addresses_alone_are_shown_once():
    lines = group_texts(
        [("rank 0", "at 0x7f01\nb\n"), ("rank 1", "at 0x7f02\nb\n"), ("rank 2", "c")]
    )

    assert lines == ["rank 0, rank 1:", "  at ", "  b", "", "rank 2:", "  c", ""]


def test_of_many_equal_stacks_sixteen_ranks_are_named():
    (head, *_) = group_texts([(f"rank {rank} on n1", "a") for rank in range(20)])

    assert head.endswith("rank 15 on n1 and 4 more: ranks 0-19:")


@pytest.mark.parametrize("rank", [3, 18, 40])
def test_the_stack_of_the_chosen_rank_stands_first(rank):
    texts = [(f"rank {one} on n1", "File a\nFile b") for one in range(20)]
    lines = group_texts([*texts, ("rank 40 on n3", "File c")])
    shown = rank_first(lines, rank)
    assert shown[0] == f"rank {rank} stands here:"
    assert ("  File c" if rank == 40 else "  File a") in shown[1:3]
    assert {line for line in lines if line.startswith(" ")} <= set(shown), "all stacks are there"


def test_a_rank_without_a_stack_is_said_to_have_none():
    shown = rank_first(group_texts([("rank 0 on n1", "a")]), 7)
    assert shown[:3] == ["rank 7 shows no stack", "", "rank 0 on n1:"]
