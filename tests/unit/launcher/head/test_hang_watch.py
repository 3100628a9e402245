"""A hang is a rank that does nothing while others wait for it; nothing else is."""

from dataclasses import replace
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.core.model.progress import RankPhase
from torchmuster.launcher.facts.stacks import Frame, RankActivity, StackReading
from torchmuster.launcher.head import hang_watch
from torchmuster.launcher.head.hang_watch import HangVerdict
from torchmuster.launcher.model.progress import RankProgress

LIMITS = hang_watch.WatchLimits(floor_s=60.0, ceiling_s=1800.0, blind_s=300.0)
EVERY_S = 2.0
READ = StackReading(
    doing=RankActivity.WORKS, what="read()", frame=Frame(file="/x/data.py", line=88, name="read")
)
WAITS = StackReading(
    doing=RankActivity.WAITS,
    what="all_reduce",
    frame=Frame(file="/x/train.py", line=41, name="<module>"),
)


class Play:
    """A run whose ranks do what a test says, seen through the watch; time passes in digests."""

    def __init__(self, num_ranks=4, limits=LIMITS, step_s=0.1, blind=False, steps=500):
        self.now, self.step_s, self.blind = 1000.0, step_s, blind
        ranks = {rank: f"n{rank // 2 + 1}" for rank in range(num_ranks)}
        self.watch = hang_watch.HangWatch(limits=limits, ranks=ranks, began_at=self.now)
        self.steps = dict.fromkeys(ranks, steps)
        self.beat_at = dict.fromkeys(ranks, self.now)
        self.active_s = dict.fromkeys(ranks, 0.0)
        self.phase = dict.fromkeys(ranks, RankPhase.COMPUTE)
        self.state = dict.fromkeys(ranks, "S")
        self.standing = dict.fromkeys(ranks, WAITS)
        self.told, self.num_asked = [], 0

    def train(self, for_s):
        for _ in range(int(for_s / EVERY_S)):
            for rank in self.steps:
                self.steps[rank] += int(EVERY_S / self.step_s)
                self.beat_at[rank] = self.now + EVERY_S
                self.active_s[rank] += EVERY_S
            self.digest()

    def stand(self, for_s, busy=()):
        for _ in range(int(for_s / EVERY_S)):
            for rank in busy:
                self.active_s[rank] += EVERY_S
            self.digest()
            if self.told and self.told[-1].verdict is HangVerdict.END:
                return

    def digest(self):
        self.now += EVERY_S
        self.watch.take(self.now, [self.progress(rank) for rank in self.steps])
        if self.watch.must_ask(self.now):
            self.num_asked += 1
            judged = self.watch.judge(self.now, {r: (s, "") for r, s in self.standing.items()})
            if judged.verdict is not HangVerdict.NOTHING:
                self.told.append(judged)

    def progress(self, rank):
        age_s = None if self.blind else self.now - self.beat_at[rank]
        return RankProgress(
            rank=rank,
            state=self.state[rank],
            active_s=self.active_s[rank],
            beat_age_s=age_s,
            steps_here=self.steps[rank],
            phase=self.phase[rank],
            p99_s=self.step_s,
        )

    @property
    def verdicts(self):
        return [one.verdict for one in self.told]

    def end(self, for_s=200):
        """Return the end that comes in a time, behind one warning."""
        self.stand(for_s)
        assert self.verdicts == [HangVerdict.WARN, HangVerdict.END]
        return self.told[-1]


def stuck(rank=2, standing=READ, phase=RankPhase.COMPUTE, state="S"):
    """Return a run that has trained for a minute, and one of whose ranks goes no further."""
    play = Play()
    play.train(60)
    play.standing[rank], play.phase[rank], play.state[rank] = standing, phase, state
    return play


def test_a_rank_that_stands_while_others_wait_is_warned_of_and_then_ended():
    play = stuck()
    ended = play.end()
    assert 30 <= play.told[0].silent_s < 36
    assert 60 <= ended.silent_s < 70
    assert (ended.rank, ended.node) == (2, "n2")
    assert ended.headline == (
        f"rank 2 stood still for {ended.silent_s:.0f} s while 3 ranks waited in all_reduce"
    )
    assert ended.sentence == (
        "3 ranks wait in all_reduce (train.py:41);"
        f" rank 2 on n2 is in read() (data.py:88) for {ended.silent_s:.0f} s"
    )


@pytest.mark.parametrize("phase", [RankPhase.SAVE, RankPhase.EVALUATE, RankPhase.BETWEEN])
def test_a_rank_that_stands_is_seen_while_others_wait_in_what_may_take_long(phase):
    play = stuck()
    play.phase = dict.fromkeys(play.phase, phase) | {2: RankPhase.COMPUTE}
    ended = play.end()
    assert ended.rank == 2
    assert 60 <= ended.silent_s < 70


@pytest.mark.parametrize("phase", [RankPhase.SAVE, RankPhase.EVALUATE])
def test_one_rank_may_take_long_while_the_others_wait_for_it(phase):
    play = stuck(phase=phase)
    play.stand(800)
    assert play.verdicts == []
    assert play.end(1200).rank == 2


def test_the_limit_grows_with_the_runs_own_steps_up_to_the_ceiling():
    assert _limit(step_s=0.1) == 60.0
    assert _limit(step_s=20.0) == 200.0
    assert _limit(step_s=1000.0) == 1800.0


def _limit(step_s):
    play = Play(step_s=step_s)
    play.digest()
    return play.watch.limit_s()


STOPPED = StackReading(doing=RankActivity.STOPPED)


def test_a_stopped_rank_is_a_fault_and_is_named():
    ended = stuck(1, STOPPED, state="T").end()
    assert ended.rank == 1
    assert "rank 1 was stopped (SIGSTOP) for" in ended.headline


def test_a_rank_in_another_collective_is_the_one():
    ended = stuck(3, replace(WAITS, what="barrier")).end()
    assert ended.rank == 3
    assert "while 3 ranks waited in all_reduce" in ended.headline


def test_a_job_that_somebody_stopped_as_a_whole_is_not_ended():
    play = stuck()
    play.state = dict.fromkeys(play.state, "T")
    play.standing = dict.fromkeys(play.standing, STOPPED)
    play.stand(4000)
    assert HangVerdict.END not in play.verdicts


def test_a_rank_that_sleeps_in_the_kernel_is_named_before_others_that_stand():
    play = stuck(0)
    play.standing[3] = replace(READ, doing=RankActivity.UNINTERRUPTIBLE)
    play.stand(200)
    assert play.told[-1].rank == 3


def test_a_rank_that_has_ended_is_named_when_all_others_wait_for_it():
    play = stuck(1, WAITS)
    play.watch.note_end(1, "exit code 0")
    ended = play.end()
    assert ended.rank == 1
    assert "rank 1 had ended (exit code 0) while 3 ranks waited" in ended.headline


def test_who_works_is_never_taken_for_standing():
    play = stuck(0)
    play.stand(7200, busy=[0])
    assert play.told == []
    assert play.num_asked < 30  # who is asked in vain is asked less often


@pytest.mark.parametrize(
    ("given", "for_s"),
    [
        pytest.param({"state": "R"}, 7200, id="who would run if the machine let it"),
        pytest.param(
            {"standing": replace(READ, doing=RankActivity.DEBUGGED)},
            20_000,
            id="who sits in a debugger may sit for ever",
        ),
        *(
            pytest.param({"phase": phase}, 880, id=f"{phase.name} has until the ceiling")
            for phase in (RankPhase.SAVE, RankPhase.EVALUATE, RankPhase.BETWEEN, RankPhase.OVER)
        ),
    ],
)
def test_who_has_a_reason_is_not_taken_for_standing(given, for_s):
    play = stuck(0, **given)
    play.stand(for_s)
    assert play.told == []


@pytest.mark.parametrize("what", ["init_process_group", "torchmuster's once"])
def test_who_prepares_something_while_the_others_wait_to_begin_has_until_the_ceiling(what):
    play = Play(blind=True)
    play.standing = dict.fromkeys(play.standing, replace(WAITS, what=what)) | {0: READ}
    play.stand(880)
    assert play.told == []


@pytest.mark.parametrize(
    "doing", [RankActivity.COMPILES, RankActivity.SAVES, RankActivity.EVALUATES]
)
def test_who_compiles_saves_or_evaluates_has_until_the_ceiling(doing):
    play = stuck(0, replace(READ, doing=doing))
    play.stand(880)
    assert play.told == []
    assert play.end(3600).silent_s >= 1800


def test_the_first_steps_have_until_the_ceiling():
    play = Play(steps=0)
    play.phase = dict.fromkeys(play.phase, RankPhase.STARTING)
    play.standing[0] = READ
    play.stand(880)
    assert play.told == []


def test_nothing_counts_while_the_watch_is_held():
    play = stuck()
    play.stand(40)
    assert play.verdicts == [HangVerdict.WARN]
    play.watch.hold(play.now)
    assert not play.watch.must_ask(play.now + 1)


def test_progress_after_a_warning_forgets_it():
    play = stuck()
    play.stand(40)
    play.train(60)
    play.stand(40)
    assert play.verdicts == [HangVerdict.WARN, HangVerdict.WARN]


def test_a_script_without_the_library_is_ended_when_all_do_nothing_for_the_blind_limit():
    play = Play(blind=True)
    play.stand(10, busy=play.steps)
    play.standing[2] = READ
    play.stand(140)
    assert play.told == []
    ended = play.end(400)
    assert ended.rank == 2
    assert ended.silent_s >= 300


@given(
    limit_s=st.sampled_from([60.0, 90.0, 300.0]),
    blind=st.booleans(),
    every_s=st.floats(1.5, 2.5),
    slow_s=st.floats(0.0, 5.0),
)
def test_an_attempt_ends_when_the_line_says_so(limit_s, blind, every_s, slow_s):
    limits = hang_watch.WatchLimits(floor_s=limit_s, ceiling_s=1800.0, blind_s=limit_s)
    play = Play(2, limits=limits, blind=blind)
    play.train(20)
    play.standing[1] = READ
    told_at = []
    while len(told_at) < 2 and play.now < 3000:
        play.now += every_s - EVERY_S + (slow_s if play.num_asked else 0.0)
        play.digest()
        if len(play.told) > len(told_at):
            told_at.append(play.now)
    assert play.verdicts == [HangVerdict.WARN, HangVerdict.END]
    promised_s = play.told[0].left_s
    # A digest after the moment sees it; then the answer to the question.
    assert promised_s - 0.05 * limit_s <= told_at[1] - told_at[0]
    assert told_at[1] - told_at[0] <= promised_s + 0.05 * limit_s + 2 * (every_s + slow_s)


@pytest.mark.parametrize(
    "standing",
    [
        pytest.param(dict.fromkeys(range(4), READ), id="in which nobody waits"),
        pytest.param({}, id="whose stacks nobody can read"),
    ],
)
def test_a_script_without_the_library_is_left_alone(standing):
    play = Play(blind=True)
    play.standing = standing
    play.stand(7200)
    assert play.told == []


def test_a_script_without_the_library_of_which_one_rank_works_is_left_alone():
    play = Play(blind=True)
    play.standing[0] = READ
    play.stand(7200, busy=[0])
    assert play.num_asked == 0


_STANDINGS = st.sampled_from(
    [
        WAITS,
        READ,
        *(StackReading(doing=doing, what="f()", frame=READ.frame) for doing in RankActivity),
    ]
)


@given(
    st.lists(
        st.tuples(_STANDINGS, st.booleans(), st.sampled_from(RankPhase)), min_size=1, max_size=4
    ),
    st.booleans(),
)
def test_no_attempt_ends_without_a_warning_or_while_a_rank_that_does_not_wait_works(ranks, blind):
    play = Play(num_ranks=len(ranks), blind=blind)
    play.train(20)
    for number, (standing, _, phase) in enumerate(ranks):
        play.standing[number], play.phase[number] = standing, phase
        if standing.doing is RankActivity.STOPPED:
            play.state[number] = "T"
    busy = [
        n for n, (s, works, _) in enumerate(ranks) if works and s.doing is not RankActivity.STOPPED
    ]
    play.stand(4000, busy=busy)
    if HangVerdict.END in play.verdicts:
        assert play.verdicts[0] is HangVerdict.WARN
        ended = play.told[-1]
        assert ended.rank is not None
        assert ended.silent_s >= ended.limit_s >= LIMITS.floor_s
        assert not any(s.doing is RankActivity.DEBUGGED for s, _, _ in ranks)
        stopped = any(s.doing is RankActivity.STOPPED for s, _, _ in ranks)
        works = [s for n, (s, _, _) in enumerate(ranks) if n in busy]
        assert stopped or all(s.doing is RankActivity.WAITS for s in works)


@given(st.lists(st.floats(2, 58), min_size=1, max_size=20))
def test_pauses_below_half_of_the_floor_are_never_worth_a_word(pauses):
    play = Play()
    play.standing[1] = READ
    for pause_s in pauses:
        play.train(4)
        play.stand(min(pause_s, 26))
    assert play.told == []


# Stragglers: a rank is slow by its own work, what it waits for others does not count.


def words(rank, steps, data_s, forward_s, step_s, waited_s=0.0, aside_s=0.0):
    seconds = [0.0] * len(RankPhase)
    seconds[RankPhase.DATA], seconds[RankPhase.FORWARD] = data_s * steps, forward_s * steps
    seconds[RankPhase.WAIT], seconds[RankPhase.EVALUATE] = waited_s * steps, aside_s
    return RankProgress(
        rank=rank,
        state="S",
        active_s=0.0,
        beat_age_s=0.0,
        steps_here=steps + 10,
        step_at=100.0 + step_s * steps + aside_s,
        seconds=tuple(seconds),
    )


def play(own, num_windows=4, step_s=None):
    """Return what is told when ranks need (data, forward[, waited]) seconds; all steps take as long as the slowest."""
    stragglers = hang_watch.Stragglers(nodes={rank: f"n{rank + 1}" for rank in range(len(own))})
    step_s = step_s or max(sum(one) for one in own) + 0.02
    told = []
    for number in range(num_windows + 1):
        ranks = [
            words(rank, number * 30, data, forward, step_s, *waited)
            for rank, (data, forward, *waited) in enumerate(own)
        ]
        told += stragglers.take(10.0 * number, ranks)
    return told


def test_a_rank_with_slow_data_is_named_once_with_numbers():
    (one,) = play([(0.02, 0.02), (0.02, 0.02), (0.02, 0.02), (0.08, 0.02)])
    assert one.tell() == (
        "rank 3 on n4 is 100 % slower than the others for 60 steps:"
        " data takes 80 ms of 120 ms (others 20)"
    )


def test_a_rank_with_slow_computation_is_named():
    (one,) = play([(0.01, 0.03), (0.01, 0.06), (0.01, 0.03)])
    assert (one.rank, one.part) == (1, "forward")


def test_a_rank_that_is_slow_in_its_backward_is_named_where_waits_are_measured():
    (one,) = play([(0.01, 0.01, 0.051), (0.01, 0.01, 0.001), (0.01, 0.01, 0.05)], step_s=0.1)
    assert one.tell() == (
        "rank 1 on n2 is 98 % slower than the others for 60 steps:"
        " what follows its forward takes 80 ms of 100 ms (others 31)"
    )


def test_where_one_rank_does_not_measure_its_waits_the_shortest_rest_is_compared():
    parts = dict(enumerate(hang_watch.StepParts(0.1, 0.01, 0.01, wait) for wait in (0.05, 0.0)))
    assert hang_watch.waits_s(parts) == {0: 0.0, 1: 0.0}
    assert hang_watch.waits_s({0: parts[0]}) == {0: 0.0}


def test_ranks_within_twenty_percent_are_not():
    assert play([(0.02, 0.1), (0.02, 0.11), (0.02, 0.105)]) == []


def test_one_slow_window_is_not_enough():
    assert play([(0.02, 0.02), (0.08, 0.02)], num_windows=1) == []


def test_differences_of_less_than_two_milliseconds_are_noise():
    assert play([(0.0001, 0.0001), (0.0015, 0.0001)], step_s=0.002) == []


def test_a_straggler_is_told_again_after_ten_minutes():
    assert len(play([(0.02, 0.02), (0.08, 0.02)], num_windows=70)) == 2


def test_evaluation_does_not_make_a_step_longer():
    stragglers = hang_watch.Stragglers(nodes={0: "n1", 1: "n1"})
    for number in range(5):
        steps = 30 * number
        ranks = [
            words(rank, steps, 0.01, 0.01, 0.05, aside_s=aside_s)
            for rank, aside_s in enumerate((100.0 * number, 0.0))
        ]
        assert stragglers.take(10.0 * number, ranks) == []


@given(st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)), min_size=2, max_size=6))
def test_nobody_is_named_who_is_faster_than_the_median(own):
    told = play(own)
    total = sorted(sum(one) for one in own)
    middle = total[(len(total) - 1) // 2]
    assert all(sum(own[one.rank]) >= middle for one in told)


@given(st.lists(st.floats(0, 10), min_size=2, max_size=9), st.data())
def test_the_median_of_the_others_leaves_one_out(values, data):
    at = data.draw(st.integers(0, len(values) - 1))
    others = values[:at] + values[at + 1 :]
    assert hang_watch.median_without(sorted(values), values[at]) == pytest.approx(median(others))


# Where ranks stand, in the words of a message.


def seen(rank, standing, **given):
    return hang_watch.Seen(rank=rank, node="n1", standing=standing, **given)


UNINTERRUPTIBLE = replace(READ, doing=RankActivity.UNINTERRUPTIBLE)
SLEEPS = "sleeps uninterruptibly in the kernel (nfs_wait) in read() (data.py:88)"
SAVES = StackReading(doing=RankActivity.SAVES)
COMPILES = StackReading(doing=RankActivity.COMPILES)


SENTENCES = {
    "equal ranks stand together, and those that wait come first": (
        [seen(0, SAVES), seen(1, WAITS), seen(2, WAITS)],
        "2 ranks wait in all_reduce (train.py:41); rank 0 on n1 saves",
    ),
    "a single rank waits in the singular": (
        [seen(0, WAITS)],
        "rank 0 waits in all_reduce (train.py:41)",
    ),
    "of ranks that stand together the longest time is told": (
        [seen(1, COMPILES, since_s=20.0), seen(3, COMPILES, since_s=31.0)],
        "ranks 1,3 compile for 31 s",
    ),
    "ranks that sleep in the kernel are told one by one": (
        [
            seen(0, UNINTERRUPTIBLE, kernel="nfs_wait"),
            seen(1, UNINTERRUPTIBLE, kernel="nfs_wait", since_s=12.0),
        ],
        f"rank 0 on n1 {SLEEPS}; rank 1 on n1 {SLEEPS} for 12 s",
    ),
}


@pytest.mark.parametrize("claim", SENTENCES)
def test_a_sentence_tells_where_ranks_stand(claim):
    ranks, said = SENTENCES[claim]
    assert hang_watch.tell(ranks) == said


@pytest.mark.parametrize(
    ("doing", "more", "single", "said"),
    [
        ("STOPPED", {}, True, "is stopped (SIGSTOP)"),
        ("STOPPED", {}, False, "are stopped (SIGSTOP)"),
        ("STOPPED", {"by": "loader 7"}, True, "waits for loader 7, which is stopped (SIGSTOP)"),
        ("DEBUGGED", {}, False, "are in a debugger"),
        ("EVALUATES", {"what": "top_k"}, False, "evaluate in top_k"),
        ("WORKS", {}, True, "is at work"),
        ("WORKS", {"what": "read()"}, True, "is in read()"),
        ("UNKNOWN", {}, False, "do not show a stack"),
    ],
)
def test_what_a_rank_does_ends_a_sentence(doing, more, single, said):
    standing = StackReading(doing=RankActivity[doing], **more)
    assert hang_watch.describe_standing(standing, single=single) == said


@pytest.mark.parametrize("doing", list(RankActivity))
def test_every_standing_has_words(doing):
    for single in (True, False):
        assert hang_watch.describe_standing(StackReading(doing=doing), single=single)


def test_stacks_that_differ_in_addresses_alone_are_shown_once():
    lines = hang_watch.group_texts(
        [("rank 0", "at 0x7f01\nb\n"), ("rank 1", "at 0x7f02\nb\n"), ("rank 2", "c")]
    )

    assert lines == ["rank 0, rank 1:", "  at ", "  b", "", "rank 2:", "  c", ""]


def test_of_many_equal_stacks_sixteen_ranks_are_named():
    (head, *_) = hang_watch.group_texts([(f"rank {rank} on n1", "a") for rank in range(20)])

    assert head.endswith("rank 15 on n1 and 4 more: ranks 0-19:")


@pytest.mark.parametrize("rank", [3, 18, 40])
def test_the_stack_of_the_chosen_rank_stands_first(rank):
    texts = [(f"rank {one} on n1", "File a\nFile b") for one in range(20)]
    lines = hang_watch.group_texts([*texts, ("rank 40 on n3", "File c")])
    shown = hang_watch.rank_first(lines, rank)
    assert shown[0] == f"rank {rank} stands here:"
    assert ("  File c" if rank == 40 else "  File a") in shown[1:3]
    assert {line for line in lines if line.startswith(" ")} <= set(shown), "all stacks are there"


def test_a_rank_without_a_stack_is_said_to_have_none():
    shown = hang_watch.rank_first(hang_watch.group_texts([("rank 0 on n1", "a")]), 7)
    assert shown[:3] == ["rank 7 shows no stack", "", "rank 0 on n1:"]
