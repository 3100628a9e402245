"""Who is a member, at which place, who may leave, and whether the head is the head still."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from kit import values
from kit.values import READY, run_plan, term, worker_end
from kit.waiting import Clock
from torchmuster.core.files.claims import Claims
from torchmuster.core.head import membership
from torchmuster.core.head.options import HeadCredentials
from torchmuster.core.model.failure import EndKind
from torchmuster.core.model.lease import SILENT_S, SLOW_S
from torchmuster.core.model.plan import Limits
from torchmuster.errors import HeadLostError

VERSION = "1"
BOOT = "this boot"


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def roll(clock):
    return make_roll(clock)


@pytest.fixture
def head(roll):
    return admit(roll, "head", wants_place_0=True)


def make_roll(clock, *, max_nodes=3, min_nodes=None, spares=0):
    plan = run_plan(
        min_nodes=min_nodes or max_nodes,
        max_nodes=max_nodes,
        workers_per_node=(2,),
        node_names=tuple(f"n{i + 1}" for i in range(max_nodes + spares)),
        spares=spares,
    )
    return membership.Membership(plan, clock=clock, own_boot_id=BOOT, own_network_id=BOOT)


def hello(host="h", **given):
    return values.hello(host, **{"pid": os.getpid(), "num_workers": 2, **given})


def admit(roll, host="h", **given):
    member = roll.admit(hello(host, **given), channel=object())
    member.ready = READY
    return member


def dead_pid():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


# Places.


def test_an_agent_keeps_the_place_that_it_was_started_for(roll):
    member = admit(roll, "b", place=2)
    roll.number_places()

    assert member.place == 2
    assert roll.at_place(2) is member


def test_the_head_gets_place_0_and_the_others_are_numbered_in_the_natural_order_of_their_hosts(
    roll,
):
    n10, head, n9 = admit(roll, "n10"), admit(roll, "z", wants_place_0=True), admit(roll, "n9")
    roll.number_places()

    assert (head.place, n9.place, n10.place) == (0, 1, 2)


def test_place_0_is_kept_for_a_head_that_has_not_called_yet(roll):
    first = admit(roll, "a")
    roll.number_places()

    assert first.place == 1


def test_a_node_is_called_with_the_machine_under_it_which_may_be_another_one_later(roll):
    assert roll.name(admit(roll, "a", place=1)) == "n2"
    pod = admit(roll, "b", place=2, machine="host7")
    assert roll.name(pod) == "n3 (host7)"
    assert roll.name_alone(pod) == "n3"


def test_a_number_once_given_does_not_change(roll, head):
    late = admit(roll, "n9")
    roll.number_places()
    admit(roll, "n1")
    roll.number_places()

    assert late.place == 1


def test_a_replacement_gets_the_place_that_was_lost(roll, head):
    lost = admit(roll, "n1")
    admit(roll, "n2")
    roll.number_places()
    roll.lose(lost, "gone")
    replacement = admit(roll, "n9")
    roll.number_places()

    assert replacement.place == lost.place
    assert roll.at_place(lost.place) is replacement


def test_missing_places_are_those_that_nobody_holds(roll):
    admit(roll, "a", place=1)

    assert roll.missing_places() == [0, 2]


def test_an_agent_without_a_place_yet_fills_one(roll, head):
    admit(roll, "b")

    assert roll.missing_places() == [2]


def test_an_agent_that_can_t_run_the_job_is_not_present(roll):
    admit(roll, "a", place=0).refused_why = "its Python is too old"

    assert roll.present() == []
    assert roll.missing_places() == [0, 1, 2]


# Refusals.


HELD = "the place of n2 is held by another agent (pid 77 on a)"
CALLERS = {
    "of the same version": ({"place": 0}, None),
    "without a place": ({}, None),
    "of another version": ({"version": "0"}, "it has torchmuster 0, the head has 1"),
    "for a place outside the run": ({"place": 3}, "place 3 is outside this run of 3 nodes"),
    "for a place that is held": ({"place": 1}, HELD),
    "that calls again": ({"place": 1, "incarnation": "a"}, None),
    "for the place of a lost one": ({"place": 2}, None),
}


@pytest.mark.parametrize(("given", "why"), CALLERS.values(), ids=CALLERS)
def test_an_agent_of_the_same_version_may_join_at_a_place_that_nobody_else_has(roll, given, why):
    admit(roll, "a", place=1, pid=77)
    roll.lose(admit(roll, "c", place=2), "gone")

    assert roll.why_not(hello("b", **given), VERSION) == why


def test_one_agent_too_many_is_refused(roll):
    for host in "abc":
        admit(roll, host)

    assert roll.why_not(hello("d"), VERSION) == "the run has all its 3 nodes"


# Who is gone, and who may still have workers.


def lost_member(roll, **given):
    member = admit(roll, "a", place=0, **given)
    member.running_attempt = 0
    roll.lose(member, "its connection ended")
    return member


def test_a_silent_member_is_dangerous_until_its_lease_has_surely_ended(roll, clock):
    member = lost_member(roll)

    clock.now += SILENT_S
    assert roll.dangerous() == [member]
    clock.now += 0.1
    assert roll.dangerous() == []
    assert roll.members == []


def test_a_lost_member_without_workers_is_no_danger(roll):
    lost_member(roll).running_attempt = None

    assert roll.dangerous() == []


def test_a_present_member_is_no_danger(roll):
    member = admit(roll, "a", place=0)
    member.running_attempt = 0

    assert roll.dangerous() == []
    assert roll.members == [member]


def test_dead_pids_on_the_same_boot_prove_that_the_workers_are_gone(roll):
    member = lost_member(roll, boot_id=BOOT, pid=dead_pid(), spawner_pid=dead_pid())
    member.worker_pids = (dead_pid(),)

    assert roll.dangerous() == []


@pytest.mark.parametrize("alive", ["pid", "spawner_pid", "worker"])
def test_one_living_process_is_no_proof(roll, alive):
    pids = {"pid": dead_pid(), "spawner_pid": dead_pid(), "worker": dead_pid(), alive: os.getpid()}
    worker_pid = pids.pop("worker")
    member = lost_member(roll, boot_id=BOOT, **pids)
    member.worker_pids = (worker_pid,)

    assert roll.dangerous() == [member]


def test_a_zombie_is_proof_enough(roll):
    with subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE) as process:
        process.stdout.read()  # its end
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert lost_member(roll, boot_id=BOOT, pid=process.pid).place == 0
        assert roll.dangerous() == []


@pytest.mark.parametrize("boot", ["another boot", ""])
def test_dead_pids_of_another_boot_prove_nothing(clock, boot):
    roll = make_roll(clock)
    roll.own_boot_id = "" if not boot else BOOT
    member = lost_member(roll, boot_id=boot, pid=dead_pid())

    assert roll.dangerous() == [member]


def test_a_member_is_found_by_its_random_name_gone_or_not(roll):
    member = lost_member(roll)

    assert roll.by_incarnation("a") is member
    assert roll.by_incarnation("b") is None


def test_agent_of_a_host_that_the_plan_names_gets_its_place(roll, head):
    assert [admit(roll, f"{name}.site").place for name in ("n3", "n2")] == [2, 1]


def test_host_that_is_missing_is_the_one_that_has_not_called(roll, head):
    admit(roll, "n3")
    assert roll.missing_places() == [1]


@pytest.mark.parametrize(
    ("given", "limit_s"),
    [
        ({"network_id": BOOT}, SILENT_S),
        ({"boot_id": BOOT, "network_id": "another network"}, SILENT_S),
        ({"boot_id": BOOT, "network_id": BOOT}, SLOW_S),
    ],
    ids=["another machine", "behind a network of its own however near", "runs on this machine"],
)
def test_a_silent_member_is_lost_after_its_lease_and_later_where_it_is_seen_to_run(
    roll, clock, given, limit_s
):
    member = admit(roll, **given)
    clock.now += limit_s
    assert roll.silent() == []
    clock.now += 0.1
    assert roll.silent() == [member]


def test_an_agent_of_another_job_is_refused_by_name_and_one_without_a_job_is_not(clock):
    roll = make_roll(clock)
    roll.jobs = ("PBS_JOBID=1[1]",)

    refused = roll.why_not(hello("n2", jobs=("PBS_JOBID=1[2]",)), VERSION)

    assert "it is of job 1[2], and the run at this address is of job 1[1]" in refused
    assert roll.why_not(hello("n2", jobs=("PBS_JOBID=1[1]",)), VERSION) is None
    assert roll.why_not(hello("n2"), VERSION) is None


def test_a_spare_with_snapshots_in_its_memory_goes_before_a_node_that_has_come_anew(clock):
    # The head's node was lost behind n2, whose place the spare n3 had taken: n1 and n2 hold nothing now.
    roll = make_roll(clock, max_nodes=2, spares=1)
    first = admit(roll, "n1", place=0, wants_place_0=True)
    second = admit(roll, "n2", place=1)
    spare = admit(roll, "n3", place=2, holds_memory=True)
    assert (second.place, spare.place) == (1, None)

    roll.prefer_holders()
    placed = roll.number_places()

    assert placed == [spare]
    assert (first.place, second.place, spare.place) == (0, None, 1)
    assert roll.at_place(1) is spare
    roll.prefer_holders()
    assert roll.number_places() == []


def test_no_holder_is_sent_away_for_another(clock):
    roll = make_roll(clock, max_nodes=2, spares=1)
    admit(roll, "n1", place=0, wants_place_0=True)
    second = admit(roll, "n2", place=1, holds_memory=True)
    spare = admit(roll, "n3", place=2, holds_memory=True)
    roll.prefer_holders()
    assert roll.number_places() == []
    assert (second.place, spare.place) == (1, None)


@pytest.mark.parametrize(
    ("jobs", "others", "found"),
    [
        ((), (), None),
        (("PBS_JOBID=1",), (), None),
        ((), ("PBS_JOBID=1",), None),
        (("PBS_JOBID=1",), ("PBS_JOBID=1",), None),
        (("PBS_JOBID=1[2]",), ("PBS_JOBID=1[1]",), ("1[2]", "1[1]")),
        (("PBS_JOBID=1",), ("SLURM_JOB_ID=2",), None),
    ],
    ids=["none", "ssh to the head", "the head by ssh", "one job", "an array", "nothing in common"],
)
def test_only_two_ids_of_one_scheduler_contradict_each_other(jobs, others, found):
    assert membership.other_job(jobs, others) == found


# Which node may leave an elastic run, and when its attempt ends.


GRACE_S = 30.0


def leavers(min_nodes=1, max_nodes=3):
    plan = run_plan(min_nodes=min_nodes, max_nodes=max_nodes, limits=Limits(grace_s=GRACE_S))
    return membership.Leavers(plan)


def member(host, *, is_head=False):
    return membership.Member(hello=hello(host, wants_place_0=is_head), channel=None, heard_at=0.0)


HEAD, N2, N3 = member("n1", is_head=True), member("n2"), member("n3")
ALL = [HEAD, N2, N3]


def end(node, kind=EndKind.SIGNAL):
    return worker_end(kind, rank=1, node=node, asked=True)


def test_a_node_may_leave_while_enough_others_stay():
    assert leavers().may_leave(N2, signal.SIGTERM, ALL)


def test_those_that_leave_already_are_counted_out():
    found = leavers(min_nodes=2)
    assert found.may_leave(N2, signal.SIGTERM, ALL)
    found.add(N2, 0.0)
    assert not found.may_leave(N3, signal.SIGTERM, ALL)


@pytest.mark.parametrize(
    ("who", "signum", "nodes"),
    [
        (HEAD, signal.SIGTERM, (1, 3)),
        (N2, signal.SIGINT, (1, 3)),
        (N2, signal.SIGTERM, (3, 3)),
    ],
)
def test_the_head_a_ctrl_c_and_a_run_of_fixed_size_stop_it_all(who, signum, nodes):
    assert not leavers(*nodes).may_leave(who, signum, ALL)


def test_the_attempt_ends_with_a_worker_of_the_node_or_with_its_grace():
    found = leavers()
    assert not found.is_time(1000.0, [end("n2")], ["n2"])
    found.add(N2, 100.0)
    assert not found.is_time(101.0, [end("n3")], ["n2"])
    assert found.is_time(101.0, [end("n2")], ["n2"])
    assert found.is_time(100.0 + GRACE_S, [], ["n2"])


def test_a_worker_that_leaves_with_75_takes_the_others_with_it():
    found = leavers()
    found.add(N2, 100.0)
    assert not found.is_time(101.0, [end("n2", EndKind.PREEMPTED)], ["n2"])


def test_who_has_been_taken_leaves_once():
    found = leavers()
    found.add(N2, 0.0)
    assert found.take_all() == [N2]
    assert found.take_all() == []
    assert not found.is_time(1e9, [end("n2")], ["n2"])


# A head shows for each attempt that it is the head still.


@pytest.fixture
def credentials(tmp_path):
    claims = Claims(str(tmp_path))
    claims.take(claim(0, "ours", "n1"))
    return HeadCredentials(claims=claims, term=0, holder="ours", place=0, node="n1")


def claim(number, holder, node):
    return term(number, holder=holder, node=node, next_attempt=0)


def start(credentials, attempt, said=None):
    membership.claim_attempt(
        credentials, attempt, (0, 1, 2), 1, (said if said is not None else []).append
    )


def test_each_attempt_takes_the_next_term(credentials):
    start(credentials, 4)
    start(credentials, 5)
    assert credentials.term == 2
    newest = credentials.claims.newest()
    assert (newest.number, newest.holder, newest.members) == (2, "ours", (0, 1, 2))
    assert (newest.next_attempt, newest.restarts_spent) == (6, 1)


def test_a_head_whose_term_another_has_taken_ends_and_names_it(credentials):
    credentials.claims.take(claim(1, "theirs", "n3"))
    with pytest.raises(HeadLostError, match="n3 has become the head of this run"):
        start(credentials, 4)
    assert credentials.term == 0


def test_a_head_that_was_away_for_several_terms_does_not_take_the_next_one(credentials):
    for number in (1, 2, 3):
        credentials.claims.take(claim(number, "theirs", "n3"))
    with pytest.raises(HeadLostError, match="n3"):
        start(credentials, 4)


def fail(monkeypatch, number):
    """Let nothing be written from now on; what is there can be read."""
    real = os.open

    def open_(*_, **__):
        raise OSError(number, os.strerror(number))

    claims = "torchmuster.core.files.claims"
    monkeypatch.setattr(f"{claims}.os.open", open_)
    monkeypatch.setattr(f"{claims}.open_own", lambda path: os.fdopen(real(path, 0), "rb"))


def test_on_a_full_disk_the_run_goes_on_and_says_what_that_means(credentials, monkeypatch):
    said = []
    fail(monkeypatch, errno.ENOSPC)
    start(credentials, 4, said)
    assert said == [
        "the disk is full: until there is space, no other node can take the head's place"
    ]


def test_on_a_full_disk_a_head_that_was_replaced_ends(credentials, monkeypatch):
    credentials.claims.take(claim(1, "theirs", "n3"))
    fail(monkeypatch, errno.ENOSPC)
    with pytest.raises(HeadLostError):
        start(credentials, 4)


def test_a_head_that_can_not_know_whether_it_is_one_ends(credentials, monkeypatch):
    fail(monkeypatch, errno.EIO)
    with pytest.raises(HeadLostError, match="can't know whether it is still the head") as caught:
        start(credentials, 4)
    assert caught.value.why is not None


def test_a_head_sees_whether_another_one_has_followed_it(credentials):
    start(credentials, 4)
    assert not membership.is_deposed(credentials)
    credentials.claims.take(claim(2, "theirs", "n3"))
    assert membership.is_deposed(credentials)
