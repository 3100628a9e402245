"""What happens to a group when its tasks come, end or are lost: every rule, then random lives."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchmuster.workflow.head import group_policy as gang
from torchmuster.workflow.plan import ExitAction, ExitRule, GroupPlan, TaskPlan
from torchmuster.workflow.record import State

AGAIN = 7  # the exit code with RESCHEDULE
IN_PLACE = 8  # the exit code with RESTART
FINE = 9  # the exit code with COMPLETE
RULES = (
    ExitRule(action=ExitAction.RESCHEDULE, ranges=((AGAIN, AGAIN),)),
    ExitRule(action=ExitAction.RESTART, ranges=((IN_PLACE, IN_PLACE),)),
    ExitRule(action=ExitAction.COMPLETE, ranges=((FINE, FINE),)),
)


def group(*, workers=("w",), max_retries=3, rules=RULES, **given_options):
    same = {"command": ("true",), "exit_rules": rules, "max_retries": max_retries}
    names = ("lead", *workers)
    tasks = tuple(TaskPlan(name=name, lead=name == "lead", **same) for name in names)
    return GroupPlan(name="g", tasks=tasks, **given_options)


def kinds(orders, cls):
    return [order for order in orders if isinstance(order, cls)]


def tasks_of(orders, cls):
    return [order.task for order in kinds(orders, cls)]


def told(orders, task):
    return [order.state for order in kinds(orders, gang.Tell) if order.task == task]


def prepare(machine, *tasks):
    orders = []
    for task in tasks:
        orders += machine.joined(task)
        orders += machine.prepared(task)
    return orders


def finish(machine, *tasks, code=0, signum=None, error=None):
    """Let commands end, by default well, and what they wrote arrive, or not for a reason."""
    for task in tasks:
        machine.ended(task, code=code, signum=signum)
        machine.uploaded(task, error)


def started(**options):
    """Return a group whose agents start."""
    machine = gang.GroupPolicy(group(**options), grace_s=30.0, backoff_s=1.0)
    machine.start()
    return machine


def running(*, workers=("w",), **options):
    """Return a group whose commands all run."""
    machine = started(workers=workers, **options)
    prepare(machine, "lead", *workers)
    assert all(machine.phase(name) is gang.TaskPhase.RUNNING for name in ("lead", *workers))
    return machine


# The barrier.


def test_no_command_begins_before_all_are_prepared():
    machine = gang.GroupPolicy(group(workers=("w", "v")))
    assert tasks_of(machine.start(), gang.StartAgent) == ["lead", "w", "v"]
    assert not kinds(prepare(machine, "lead", "w"), gang.StartCommand)
    assert machine.waits_for() == ["v (its agent starts)"]
    assert tasks_of(prepare(machine, "v"), gang.StartCommand) == ["lead", "w", "v"]
    assert machine.waits_for() == []


def test_what_a_task_prepares_is_in_the_sentence_on_the_wait():
    machine = started()
    machine.joined("lead")
    machine.doing("lead", "downloading input 0")
    assert machine.waits_for() == ["lead (downloading input 0)", "w (its agent starts)"]


def test_without_a_barrier_a_command_begins_as_soon_as_all_agents_are_known():
    machine = started(barrier=False)
    assert not kinds(prepare(machine, "lead"), gang.StartCommand), (
        "the address of w is not known yet"
    )
    assert tasks_of(machine.joined("w"), gang.StartCommand) == ["lead"]
    assert machine.phase("w") is gang.TaskPhase.PREPARING
    assert tasks_of(machine.prepared("w"), gang.StartCommand) == ["w"]


def test_a_message_twice_changes_nothing():
    machine = running()
    assert machine.joined("w") == []
    assert machine.prepared("w") == []
    machine.ended("w", code=0, signum=None)
    assert machine.ended("w", code=3, signum=None) == []
    machine.uploaded("w", None)
    assert machine.uploaded("w", "an error") == []
    assert machine.first_failure is None


def test_a_task_that_can_not_prepare_is_waited_for_no_more():
    machine = started()
    prepare(machine, "lead")
    machine.joined("w")
    orders = machine.could_not_prepare("w", State.FAILED, "no such input", 2010)
    assert told(orders, "w") == [State.FAILED]
    assert tasks_of(orders, gang.StartCommand) == ["lead"]
    assert machine.state is State.RUNNING


def test_the_group_fails_when_its_lead_can_not_prepare():
    machine = started()
    machine.joined("lead")
    orders = machine.could_not_prepare("lead", State.FAILED_START_ERROR, "no room", 3003)
    assert told(orders, "w") == [State.FAILED]
    assert machine.is_over
    assert machine.state is State.FAILED_START_ERROR
    assert machine.first_failure == gang.Failure(task="lead", attempt=0, why="no room", code=3003)


def test_preparing_is_tried_again_only_when_a_rule_says_so():
    rules = (ExitRule(action=ExitAction.RESTART, ranges=((2010, 2010),)),)
    machine = started(rules=rules, max_retries=1)
    machine.joined("lead")
    orders = machine.could_not_prepare("lead", State.FAILED_IMAGE_PULL, "no input", 2010)
    assert kinds(orders, gang.StartAgent) == [
        gang.StartAgent(task="lead", attempt=1, after_s=1.0)
    ], "a place that could not be prepared is not used again"
    machine.joined("lead")
    machine.could_not_prepare("lead", State.FAILED_IMAGE_PULL, "no input", 2010)
    assert machine.state is State.FAILED_IMAGE_PULL, "the state that its agent named, not FAILED"


# Ends.


def test_the_lead_s_success_lets_the_others_wind_down_and_counts_them_completed():
    machine = running()
    orders = machine.ended("lead", code=0, signum=None)
    assert tasks_of(orders, gang.UploadOutputs) == ["lead"]
    assert kinds(orders, gang.StopCommand) == [
        gang.StopCommand(task="w", grace_s=30.0, after_s=gang.WIND_DOWN_S)
    ]
    assert tasks_of(machine.ended("w", code=143, signum=15), gang.UploadOutputs) == ["w"]
    assert machine.is_succeeding("w")
    machine.uploaded("w", None)
    machine.uploaded("lead", None)
    assert machine.state is State.COMPLETED
    assert machine.is_over
    assert machine.first_failure is None


def test_the_lead_s_success_ends_a_worker_that_still_prepares():
    machine = running(workers=("w",))
    machine.ended("w", code=AGAIN, signum=None)
    orders = machine.ended("lead", code=0, signum=None)
    assert told(orders, "w") == [State.COMPLETED]
    machine.uploaded("lead", None)
    assert machine.is_over


@pytest.mark.parametrize("ignore_nonlead", [True, False])
def test_the_lead_s_failure_stops_the_others_and_fails_the_group(ignore_nonlead):
    machine = running(ignore_nonlead=ignore_nonlead)
    orders = machine.ended("lead", code=3, signum=None)
    assert kinds(orders, gang.StopCommand) == [
        gang.StopCommand(task="w", grace_s=gang.FAILURE_GRACE_S)
    ]
    finish(machine, "w")
    machine.uploaded("lead", None)
    assert machine.state is State.FAILED
    assert machine.first_failure.why == "exit code 3"


def test_a_worker_s_failure_is_only_its_own():
    machine = running(workers=("w", "v"))
    orders = machine.ended("w", code=3, signum=None)
    assert not kinds(orders, gang.StopCommand)
    machine.uploaded("w", None)
    assert machine.phase("v") is machine.phase("lead") is gang.TaskPhase.RUNNING
    finish(machine, "lead", "v")
    assert machine.state is State.COMPLETED


def test_a_worker_s_failure_fails_a_group_that_counts_all():
    machine = running(ignore_nonlead=False)
    orders = machine.ended("w", code=137, signum=9)
    assert tasks_of(orders, gang.StopCommand) == ["lead"]
    finish(machine, "lead", code=143, signum=15)
    machine.uploaded("w", None)
    assert machine.state is State.FAILED
    assert machine.first_failure.task == "w"
    assert "SIGKILL" in machine.first_failure.why


def test_a_worker_may_end_well_before_its_lead():
    machine = running(ignore_nonlead=False)
    assert not kinds(machine.ended("w", code=0, signum=None), gang.StopCommand)
    machine.uploaded("w", None)
    finish(machine, "lead")
    assert machine.state is State.COMPLETED


def test_a_rule_makes_an_exit_code_a_success():
    machine = running()
    machine.ended("lead", code=FINE, signum=None)
    assert machine.is_succeeding("lead")


def test_the_failure_that_came_first_is_the_one_reported():
    machine = running(ignore_nonlead=False, workers=("w", "v"))
    machine.ended("v", code=4, signum=None)
    machine.ended("w", code=5, signum=None)
    machine.ended("lead", code=6, signum=None)
    assert machine.first_failure == gang.Failure(task="v", attempt=0, why="exit code 4", code=4)


def test_a_failure_that_does_not_count_is_kept_beside_the_one_that_does():
    machine = running(workers=("w",))
    machine.ended("w", code=4, signum=None)
    machine.ended("lead", code=6, signum=None)
    assert machine.first_failure.task == "lead"
    assert [failure.task for failure in machine.ignored] == ["w"]


# Again.


def test_a_rescheduled_lead_gets_a_new_agent_and_restarts_the_others_in_place():
    machine = running()
    orders = machine.ended("lead", code=AGAIN, signum=None)
    assert told(orders, "lead") == [State.RESCHEDULED]
    assert tasks_of(orders, gang.ReleaseAgent) == ["lead"]
    assert kinds(orders, gang.StartAgent) == [gang.StartAgent(task="lead", attempt=1, after_s=1.0)]
    assert kinds(orders, gang.StopCommand) == [gang.StopCommand(task="w", grace_s=0.0)]
    orders = machine.ended("w", code=137, signum=9)
    assert kinds(orders, gang.RetryInPlace) == [gang.RetryInPlace(task="w", attempt=1)]
    machine.prepared("w")
    assert tasks_of(prepare(machine, "lead"), gang.StartCommand) == ["lead", "w"]


def test_a_restarted_lead_keeps_its_agent():
    machine = running()
    orders = machine.ended("lead", code=IN_PLACE, signum=None)
    assert not kinds(orders, gang.ReleaseAgent)
    assert kinds(orders, gang.RetryInPlace) == [
        gang.RetryInPlace(task="lead", attempt=1, after_s=1.0)
    ]
    assert tasks_of(orders, gang.StopCommand) == ["w"]


def test_a_rescheduled_worker_leaves_the_others_alone():
    machine = running(workers=("w", "v"))
    orders = machine.ended("w", code=AGAIN, signum=None)
    assert not kinds(orders, gang.StopCommand)
    assert tasks_of(prepare(machine, "w"), gang.StartCommand) == ["w"], (
        "it does not wait for the running"
    )


def test_a_rescheduled_worker_of_a_group_that_counts_all_restarts_the_others():
    machine = running(workers=("w", "v"), ignore_nonlead=False)
    orders = machine.ended("w", code=AGAIN, signum=None)
    assert tasks_of(orders, gang.StopCommand) == ["lead", "v"]


def test_a_task_that_is_killed_for_a_restart_spends_no_retry_and_does_not_fail():
    machine = running(max_retries=1)
    machine.ended("lead", code=AGAIN, signum=None)
    machine.ended("w", code=137, signum=9)
    machine.prepared("w")
    prepare(machine, "lead")
    orders = machine.ended("w", code=AGAIN, signum=None)
    assert tasks_of(orders, gang.StartAgent) == ["w"]
    assert machine.first_failure is None


def test_two_that_are_tried_again_at_once_meet_at_the_barrier():
    machine = running()
    machine.ended("lead", code=AGAIN, signum=None)
    machine.ended("w", code=AGAIN, signum=None)  # on its way when it was to be killed
    assert (machine.attempt("lead"), machine.attempt("w")) == (1, 1)
    machine.prepared("w")
    assert tasks_of(prepare(machine, "lead"), gang.StartCommand) == ["lead", "w"]


def test_the_pause_before_a_retry_doubles_up_to_a_minute():
    machine = running(max_retries=8)
    pauses_s = []
    for _ in range(8):
        orders = machine.ended("w", code=AGAIN, signum=None)
        pauses_s += [order.after_s for order in kinds(orders, gang.StartAgent)]
        prepare(machine, "w")
    assert pauses_s == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_spent_budget_is_a_failure_that_says_so():
    machine = running(max_retries=2, workers=())
    for _ in range(2):
        machine.ended("lead", code=IN_PLACE, signum=None)
        machine.prepared("lead")
    orders = machine.ended("lead", code=IN_PLACE, signum=None)
    assert tasks_of(orders, gang.UploadOutputs) == ["lead"], (
        "what it wrote is uploaded all the same"
    )
    machine.uploaded("lead", None)
    assert machine.state is State.FAILED
    assert machine.first_failure.why == "exit code 8; tried again 2 times already"


def test_no_retries_at_all_is_said_as_such():
    machine = running(max_retries=0, workers=())
    machine.ended("lead", code=AGAIN, signum=None)
    assert machine.first_failure.why == "exit code 7; max_retries is 0"


def test_a_retry_does_not_take_the_state_of_the_group_back():
    machine = running(workers=())
    machine.ended("lead", code=AGAIN, signum=None)
    assert machine.state is State.RUNNING


def test_an_exit_code_of_an_earlier_attempt_is_not_that_of_the_last():
    machine = running()
    machine.ended("w", code=AGAIN, signum=None)
    orders = machine.ended("lead", code=0, signum=None)
    codes = [order.code for order in kinds(orders, gang.Tell) if order.task == "w"]
    assert codes == [None]


def test_after_a_lost_head_attempts_go_on():
    machine = gang.GroupPolicy(group())
    orders = machine.start({"w": 4})
    assert [o.attempt for o in kinds(orders, gang.StartAgent)] == [0, 4]


# Losses.


def test_a_lost_agent_is_replaced_in_a_new_place():
    machine = running(rules=())
    orders = machine.lost("w", "its agent has gone")
    assert kinds(orders, gang.StartAgent) == [gang.StartAgent(task="w", attempt=1, after_s=1.0)]
    assert not kinds(orders, gang.StopCommand)


def test_a_lost_lead_restarts_the_others():
    machine = running(rules=())
    assert tasks_of(machine.lost("lead", "gone"), gang.StopCommand) == ["w"]


def test_an_agent_that_is_lost_too_often_is_a_backend_error():
    machine = running(rules=(), max_retries=1, workers=())
    machine.lost("lead", "gone")
    machine.lost("lead", "gone")
    assert machine.is_over
    assert machine.state is State.FAILED_BACKEND_ERROR
    assert machine.first_failure.code == gang.CODE_AGENT_LOST


def test_a_rule_may_forbid_to_replace_a_lost_agent():
    rule = ExitRule(action=ExitAction.FAIL, ranges=((gang.CODE_AGENT_LOST, gang.CODE_AGENT_LOST),))
    machine = running(rules=(rule,), workers=())
    machine.lost("lead", "gone")
    assert machine.state is State.FAILED_BACKEND_ERROR


def test_a_lead_that_is_lost_while_it_uploads_has_failed_and_is_reported():
    machine = running(ignore_nonlead=False)
    machine.ended("lead", code=0, signum=None)
    machine.lost("lead", "gone")
    finish(machine, "lead", "w")
    assert machine.is_over
    assert machine.state is not State.COMPLETED
    assert machine.first_failure.task == "lead"


def test_a_task_that_is_lost_while_it_uploads_is_tried_again():
    machine = running()
    machine.ended("w", code=0, signum=None)
    orders = machine.lost("w", "gone")
    assert tasks_of(orders, gang.StartAgent) == ["w"]
    assert machine.phase("w") is gang.TaskPhase.ABSENT
    assert not machine.state.is_failed


def test_a_loss_during_a_restart_in_place_is_a_new_place():
    machine = running()
    machine.ended("lead", code=IN_PLACE, signum=None)
    orders = machine.lost("w", "gone")
    assert tasks_of(orders, gang.StartAgent) == ["w"]
    assert machine.attempt("w") == 1


# Uploads.


def test_an_output_that_does_not_arrive_fails_a_task_that_had_succeeded():
    machine = running(workers=())
    finish(machine, "lead", error="access denied")
    assert machine.state is State.FAILED
    assert machine.first_failure.code == gang.CODE_UPLOAD


def test_an_upload_error_after_a_failure_is_not_the_cause():
    machine = running(workers=())
    finish(machine, "lead", code=3, error="access denied")
    assert machine.first_failure.why == "exit code 3"


def test_the_lead_s_upload_error_fails_the_group_and_lets_the_others_wind_down():
    machine = running()
    machine.ended("lead", code=0, signum=None)
    orders = machine.uploaded("lead", "access denied")
    assert not kinds(orders, gang.StopCommand), "they have been told already"
    finish(machine, "w")
    assert machine.state is State.FAILED
    assert machine.first_failure.why == "access denied"


def test_uploads_that_the_group_waits_for_are_said():
    machine = running()
    machine.ended("w", code=0, signum=None)
    assert machine.waits_for() == [], "the lead runs"
    machine.ended("lead", code=0, signum=None)
    machine.doing("lead", "uploading to s3://b/x")
    assert machine.waits_for() == ["lead (uploading to s3://b/x)", "w (uploading)"]


# Stops.


def test_a_cancelled_command_gets_its_grace_and_nothing_is_uploaded():
    machine = running()
    orders = machine.stop(State.FAILED_CANCELED, "stopped by the user")
    assert {o.grace_s for o in kinds(orders, gang.StopCommand)} == {30.0}
    for task in ("lead", "w"):
        assert not kinds(machine.ended(task, code=0, signum=None), gang.UploadOutputs)
    assert machine.is_over
    assert machine.state is State.FAILED_CANCELED


def test_a_second_stop_is_sigkill_at_once():
    machine = running()
    machine.stop(State.FAILED_CANCELED, "stopped by the user")
    orders = machine.stop(State.FAILED_CANCELED, "stopped by the user", 0.0)
    assert {o.grace_s for o in kinds(orders, gang.StopCommand)} == {0.0}


def test_a_command_that_took_too_long_keeps_what_it_wrote():
    machine = running()
    machine.stop(State.FAILED_EXEC_TIMEOUT, "too long")
    assert tasks_of(machine.ended("lead", code=143, signum=15), gang.UploadOutputs) == ["lead"]
    machine.uploaded("lead", None)
    finish(machine, "w", code=143, signum=15)
    assert machine.state is State.FAILED_EXEC_TIMEOUT


BOTH = ("lead", "w")


@pytest.mark.parametrize(
    ("joined", "prepared", "codes"),
    [
        ((), (), {}),
        (BOTH, (), {}),
        (BOTH, ("lead",), {}),
        (BOTH, BOTH, {"lead": IN_PLACE, "w": 137}),
        (BOTH, BOTH, {"w": 3, "lead": 0}),
    ],
    ids=["absent", "preparing", "ready", "pausing", "uploading"],
)
def test_where_no_command_runs_a_cancellation_ends_at_once(joined, prepared, codes):
    machine = started()
    for task in joined:
        machine.joined(task)
    for task in prepared:
        machine.prepared(task)
    for task, code in codes.items():
        machine.ended(task, code=code, signum=None)
    orders = machine.stop(State.FAILED_CANCELED, "stopped by the user")
    assert not kinds(orders, gang.StopCommand)
    assert sorted(tasks_of(orders, gang.ReleaseAgent)) == ["lead", "w"]
    assert machine.is_over
    assert machine.state is State.FAILED_CANCELED


def test_a_stop_ends_a_restart_in_place():
    machine = running()
    machine.ended("lead", code=IN_PLACE, signum=None)
    machine.stop(State.FAILED_CANCELED, "stopped by the user")
    orders = machine.ended("w", code=137, signum=9)
    assert not kinds(orders, gang.RetryInPlace)
    assert machine.is_over


# Random lives.


class Agents:
    """Agents of tasks: they do what the head orders, in random order, and may be lost at any time."""

    def __init__(self, plan, draw):
        self.machine = gang.GroupPolicy(plan, grace_s=30.0, backoff_s=1.0)
        self.draw = draw
        self.can_do = []  # (task, attempt, what)
        self.alive = {}  # task -> the attempt that its agent works on
        self.begun = Counter()
        self.states = {}  # (task, attempt) -> states told
        self.old = []  # messages that were delivered
        self.obey(self.machine.start())

    def obey(self, orders):
        for order in orders:
            self.take(order, order.task)
        self.check()

    def take(self, order, task):
        match order:
            case gang.StartAgent(attempt=attempt):
                self.can_do.append((task, attempt, "join"))
            case gang.StartCommand():
                attempt = self.machine.attempt(task)
                assert self.alive.get(task) == attempt, "begin only where an agent is"
                self.begun[task, attempt] += 1
                assert self.begun[task, attempt] == 1, "one begin for one attempt"
                self.can_do.append((task, attempt, "end"))
            case gang.RetryInPlace(attempt=attempt):
                assert task in self.alive, "again only where an agent is"
                self.alive[task] = attempt
                self.can_do.append((task, attempt, "prepare"))
            case gang.StopCommand():
                assert task in self.alive
            case gang.UploadOutputs():
                self.can_do.append((task, self.machine.attempt(task), "upload"))
            case gang.ReleaseAgent():
                self.alive.pop(task, None)
                self.can_do = [entry for entry in self.can_do if entry[0] != task]
            case gang.Tell(attempt=attempt, state=state):
                seen = self.states.setdefault((task, attempt), [])
                assert not seen or seen[-1].may_become(state), (task, seen, state)
                seen.append(state)

    def check(self):
        for member in self.machine.plan.tasks:
            if self.machine.phase(member.name) is gang.TaskPhase.OVER:
                last = self.states[member.name, self.machine.attempt(member.name)][-1]
                assert last.is_final
                assert last is not State.RESCHEDULED
        assert self.machine.state.is_final == self.machine.is_over

    def step(self):
        index = self.draw(st.integers(0, len(self.can_do) - 1))
        kind = self.draw(st.sampled_from(["do"] * 12 + ["lose", "repeat"]))
        if kind == "repeat" and self.old:
            self.repeat(self.draw(st.sampled_from(self.old)))
        elif kind == "lose":
            self.lose(self.can_do[index][0])
        else:
            self.do(*self.can_do.pop(index))

    def do(self, task, attempt, what):
        if what == "join":
            if (
                attempt == self.machine.attempt(task)
                and self.machine.phase(task) is gang.TaskPhase.ABSENT
            ):
                self.alive[task] = attempt
                self.can_do.append((task, attempt, "prepare"))
                self.deliver("joined", task)
            return
        self.deliver(*self.words(task, what))

    def words(self, task, what):
        if what == "prepare":
            if self.draw(st.sampled_from([False] * 9 + [True])):
                return "could_not_prepare", task, State.FAILED, "no input", 2010
            return "prepared", task
        if what == "end":
            return "ended", task, self.draw(st.sampled_from([0, 0, 3, AGAIN, IN_PLACE, FINE]))
        return "uploaded", task, self.draw(st.sampled_from([None, None, None, "denied"]))

    def deliver(self, name, task, *rest):
        self.old.append((name, task, self.machine.attempt(task), rest))
        self.call(name, task, rest)

    def call(self, name, task, rest):
        if name == "ended":
            self.obey(self.machine.ended(task, code=rest[0], signum=None))
        else:
            self.obey(getattr(self.machine, name)(task, *rest))

    def repeat(self, entry):
        """The same message once more, as the head would pass it on."""
        name, task, attempt, rest = entry
        same_attempt = attempt == self.machine.attempt(task)
        expected = {
            "joined": (),
            "prepared": (),
            "ended": (gang.TaskPhase.RUNNING, gang.TaskPhase.ENDING),
        }
        if name in expected and same_attempt and self.machine.phase(task) not in expected[name]:
            self.call(name, task, rest)

    def lose(self, task):
        self.alive.pop(task, None)
        self.can_do = [entry for entry in self.can_do if entry[0] != task]
        self.obey(self.machine.lost(task, "its agent has gone"))


@settings(max_examples=400)
@given(
    st.data(),
    st.integers(0, 3),
    st.fixed_dictionaries(
        {
            "barrier": st.booleans(),
            "ignore_nonlead": st.booleans(),
            "max_retries": st.integers(0, 3),
        }
    ),
    st.sampled_from([None, State.FAILED_CANCELED, State.FAILED_EXEC_TIMEOUT]),
)
def test_every_life_of_a_group_ends_and_leaves_each_task_in_a_final_state(
    data, num_workers, options, stop
):
    plan = group(workers=tuple(f"w{n}" for n in range(num_workers)), **options)
    agents = Agents(plan, data.draw)
    stop_after = data.draw(st.integers(0, 40)) if stop else None
    for step in range(2000):
        if agents.machine.is_over:
            break
        if step == stop_after:
            agents.obey(agents.machine.stop(stop, "stopped"))
            continue
        assert agents.can_do, f"nothing can happen any more: {agents.machine}"
        agents.step()
    assert agents.machine.is_over
    failed = agents.machine.state.is_failed
    assert not failed or stop or agents.machine.first_failure is not None
    assert failed or agents.machine.state is State.COMPLETED
