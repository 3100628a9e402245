"""Why a pod was lost: the cluster's reason and the head's word become one verdict."""

import os
from dataclasses import replace

import pytest

from kit.records import lines
from kit.values import run_result, worker_end
from kit.workflows import workflow_plan
from torchmuster.core.files import atomic
from torchmuster.core.model import codec
from torchmuster.core.model.codec import moment_of
from torchmuster.core.model.failure import EndKind
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Circumstances, explain_failure
from torchmuster.kubernetes.pods.losses import (
    LossNotes,
    LostPodRemover,
    explain_group_loss,
    explain_loss,
    explain_task_loss,
    note_removed,
    warn_of_leaving_pods,
)
from torchmuster.kubernetes.pods.reach import RunInPods, find_pods
from torchmuster.launcher.model.job import JobState, JobView
from torchmuster.launcher.views.find import view_run
from torchmuster.workflow.plan import GroupPlan, TaskPlan
from torchmuster.workflow.record import FailureFacts, State, TaskOutcome, explain_task_failure
from unit.kubernetes.engine.site_jobs import DEFAULT
from unit.kubernetes.pods.conftest import (
    JOB_ID,
    RUN_ID,
    SILENT,
    forbidden,
    group_outcome,
    order_of,
)

# In `job-pods-oomkilled` the pod of index 1 was killed at 00:27:09, and its replacement at 00:28:10.
BETWEEN, BEFORE, AFTER = "2026-11-22T00:27:30", "2026-11-22T00:26:50", "2026-11-22T00:29:00"
OOM_SAID = (
    "kubernetes says: OOMKilled (exit code 137) of pod run-7f3a-1-9lbn8 on n2:"
    " all its processes together used more than its limit of 64Mi"
)


def failed(node="run-7f3a-1 (n2)", **given):
    """Return what the head says of a run that has lost a pod."""
    detail = "its agent has gone (the other side closed the connection)"
    end = worker_end(EndKind.NODE_LOST, rank=4, node=node, signum=9, detail=detail, **given)
    known = Circumstances(
        world_size=8,
        attempt=0,
        restarts_spent=1,
        max_restarts=1,
        same_as=None,
        is_final=False,
        early_ranks=(),
        restart_hint=True,
        log_path=None,
    )
    told = {"restarts_spent": 1, "report": explain_failure(end, [end], known), "cause": end}
    return run_result(RunState.FAILED, 137, run_id=RUN_ID, **told)


def begin(run_dir, when):
    nodes = [
        {"node": "run-7f3a-0 (n1)", "host": "run-7f3a-0", "ranks": "0-3"},
        {"node": "run-7f3a-1 (n2)", "host": "run-7f3a-1", "ranks": "4-7"},
    ]
    event = {"time": f"{when}.000Z", "event": "attempt_started", "attempt": 0}
    lines(run_dir.events, [{**event, "world_size": 8, "nodes": nodes}])


def explained(run_dir, result):
    return explain_loss(result, RunInPods(run_dir, order_of(), JOB_ID))


def test_a_container_that_was_killed_as_a_whole_is_the_first_cause_with_pod_node_and_limit(
    run_dir, cluster
):
    cluster.say(pods="job-pods-oomkilled")
    begin(run_dir, BETWEEN)

    found = explained(run_dir, failed())

    assert found.report.error == (
        "memory ran out on run-7f3a-1 (n2): its container was killed as a whole"
    )
    assert found.report.at == "ranks 4-7 of 8 on run-7f3a-1 (n2), attempt 0"
    assert found.report.because == (OOM_SAID,)
    assert found.report.hint == (
        "ask for more memory (`--mem`, or `memory` of the site; what is in /dev/shm counts)"
    )
    assert found.report.more == ("retries: the one spent",)
    assert found.cause.memory_evidence == OOM_SAID


def test_the_pod_of_the_attempt_is_meant_not_one_that_ended_before(run_dir, cluster):
    cluster.say(pods="job-pods-oomkilled")
    begin(run_dir, AFTER)
    assert explained(run_dir, failed()) == failed()


def test_of_two_that_ended_since_the_later_one_is_meant(run_dir, cluster):
    cluster.say(pods="job-pods-oomkilled")
    begin(run_dir, BEFORE)
    assert "run-7f3a-1-9lbn8" in explained(run_dir, failed()).report.because[0]


def test_another_reason_of_the_cluster_stands_before_the_evidence(run_dir, cluster):
    cluster.say(pods="job-pods-evicting")
    gone = failed()
    found = explained(run_dir, gone)
    assert found.report.error == gone.report.error
    said, *rest = found.report.because
    assert said == (
        "kubernetes says of pod run-7f3a-1-xdtqf on n2: its node is drained: the pod moves to another"
        " (EvictionByEvictionAPI: Eviction API: evicting)"
    )
    assert rest == list(gone.report.because)


def test_what_the_kernel_has_told_the_agent_gets_the_words_of_a_site(run_dir, cluster):
    known = failed(memory_evidence="the kernel killed 1 process")
    found = explained(run_dir, known)
    assert found.report.error == known.report.error
    assert "ask for more memory (`--mem`, or `memory` of the site;" in found.report.hint
    assert cluster.asked == []


@pytest.mark.parametrize("refuse", [{}, {"get pods": SILENT}])
def test_where_the_cluster_has_nothing_to_say_the_verdict_is_that_of_the_head(
    run_dir, cluster, refuse
):
    cluster.say(pods="job-pods-running", refuse=refuse)
    assert explained(run_dir, failed()) == failed()


def test_a_run_that_lost_no_pod_asks_nothing(run_dir, cluster):
    other = replace(failed(), cause=replace(failed().cause, kind=EndKind.EXIT_CODE))
    assert explained(run_dir, other) == other
    assert cluster.asked == []


# What is said while the run goes on.


def lose(run_dir, attempt=0, **given):
    """Write what the head notes of an attempt that lost a pod and is followed by another."""
    cause = codec.to_plain(replace(failed(**given).cause, attempt=attempt))
    what = "run-7f3a-1 (n2): its agent has gone (the other side closed the connection)"
    event = {"event": "attempt_failed", "attempt": attempt, "what": what, "cause": cause}
    lines(run_dir.events, [{"time": f"{AFTER}.000Z", "restarts_left": 1, **event}], "a")


def notes_of(run_dir, clock=lambda: 0.0, order=None):
    said = []
    return LossNotes(RunInPods(run_dir, order or order_of(), JOB_ID), said.append, clock), said


def test_an_attempt_that_lost_its_pod_is_explained_while_the_run_goes_on(run_dir, cluster):
    cluster.say(pods="job-pods-oomkilled")
    begin(run_dir, BETWEEN)
    notes, said = notes_of(run_dir)
    notes.look()
    assert (said, cluster.asked) == ([], [])

    lose(run_dir)
    notes.look()
    notes.look()

    assert said == [f"attempt 0: {OOM_SAID}"]
    assert len(cluster.asked) == 1
    (ended,) = view_run(run_dir).attempts
    assert ended.failure.what.endswith(f"closed the connection); {OOM_SAID}")
    again, said = notes_of(run_dir)
    again.look()
    assert said == []


def test_what_was_said_of_a_pod_that_was_removed_before_the_record_tells_of_its_loss_is_kept(
    run_dir, cluster
):
    cluster.say(pods="job-pods-oomkilled")
    (lost,) = (pod for pod in find_pods(JOB_ID) if pod.name in OOM_SAID)
    note_removed(run_dir, "run-7f3a-1", lost)
    cluster.say(pods="job-pods-running")
    begin(run_dir, BETWEEN)
    lose(run_dir)
    notes, said = notes_of(run_dir)
    notes.look()
    assert said == [f"attempt 0: {OOM_SAID}"]


def test_why_a_first_pod_was_drained_is_kept_until_the_next_one_has_begun(run_dir, cluster):
    cluster.say(pods="job-pods-evicting")
    (leaver,) = (pod for pod in find_pods(JOB_ID) if pod.is_leaving)
    begin(run_dir, BETWEEN)
    notes, said = notes_of(run_dir, order=order_of(index=leaver.index))
    notes.look(JobView(job_id=JOB_ID, state=JobState.RUNNING, reason="drained"))
    assert said == []

    cluster.say(pods="job-pods-running")  # nobody has it any more
    event = {"event": "attempt_started", "attempt": 1, "why": "after attempt 0"}
    lines(run_dir.events, [{"time": f"{AFTER}.000Z", **event}], "a")
    notes.look(JobView(job_id=JOB_ID, state=JobState.RUNNING))
    assert len(said) == 1
    assert said[0].startswith(f"attempt 0: kubernetes says of pod {leaver.name} on")
    assert "EvictionByEvictionAPI" in said[0]


def test_what_the_cluster_does_not_know_yet_is_asked_for_again_and_not_for_ever(run_dir, cluster):
    now = [0.0]
    cluster.say(pods="job-pods-running")
    begin(run_dir, BETWEEN)
    lose(run_dir)
    notes, said = notes_of(run_dir, lambda: now[0])
    notes.look()
    assert said == []
    cluster.say(pods="job-pods-oomkilled")
    notes.look()
    assert said == [f"attempt 0: {OOM_SAID}"]

    os.unlink(run_dir.losses)
    cluster.say(pods="job-pods-running")
    notes, said = notes_of(run_dir, lambda: now[0])
    notes.look()
    now[0] = 1000.0
    notes.look()
    asked = len(cluster.asked)
    notes.look()
    assert (said, len(cluster.asked)) == ([], asked)


def test_ends_that_are_no_loss_of_a_pod_ask_nothing(run_dir, cluster):
    begin(run_dir, BETWEEN)
    lose(run_dir, memory_evidence="the kernel killed 1 process")
    odd = {"event": "attempt_failed", "attempt": 1, "cause": {"of": "another version"}}
    lines(run_dir.events, [{"time": f"{AFTER}.000Z", **odd}], "a")
    notes_of(run_dir)[0].look()
    assert cluster.asked == []


# Of a group of a workflow.

HOSTS = ("run-7f3a-0.run-7f3a", "run-7f3a-1.run-7f3a")
GROUP_ORDER = order_of(group="work", hosts=HOSTS)


@pytest.fixture
def group(run_dir):
    """Return the folder of a workflow whose group has a task in each of two pods."""
    tasks = (
        TaskPlan(name="a", command=("true",), lead=True),
        TaskPlan(name="b", command=("true",)),
    )
    plan = workflow_plan(GroupPlan(name="work", tasks=tasks), run_id=RUN_ID)
    atomic.write_json(run_dir.workflow, codec.to_plain(plan))
    os.makedirs(run_dir.group("work").path)
    started = {"event": "task_started", "task": "b", "time": f"{BETWEEN}.000Z"}
    lines(run_dir.group("work").events, [started])
    return run_dir


def lost_task(task="b"):
    facts = FailureFacts(group="work", task=task, attempt=2, why="its agent has gone", log="x.log")
    ends = [
        TaskOutcome(task=one, state=State.FAILED_BACKEND_ERROR, attempt=2, code=3001)
        for one in ("a", "b")
    ]
    report = explain_task_failure(facts)
    return group_outcome(State.FAILED_BACKEND_ERROR, 1, tasks=tuple(ends), report=report)


def explained_task(group, outcome):
    return explain_group_loss(outcome, RunInPods(group, GROUP_ORDER, JOB_ID))


def test_a_task_whose_container_was_killed_as_a_whole_failed_for_its_memory(group, cluster):
    cluster.say(pods="job-pods-oomkilled")
    report = explained_task(group, lost_task()).report
    assert report.error == "task b failed: memory ran out in pod run-7f3a-1-9lbn8 on n2"
    assert report.at == "group work, task b, attempt 2"
    assert report.because == (OOM_SAID,)
    assert report.hint.startswith("ask for more memory (`--mem`, or `memory` of the site")
    assert (
        explain_task_loss(RunInPods(group, GROUP_ORDER, JOB_ID), "b", moment_of(f"{BETWEEN}Z"))
        == OOM_SAID
    )


def test_a_task_whose_pod_was_taken_away_is_told_by_whom(group, cluster):
    cluster.say(pods="job-pods-evicting")
    before = lost_task()
    report = explained_task(group, before).report
    assert report.error == before.report.error
    assert report.because[0].endswith("(EvictionByEvictionAPI: Eviction API: evicting)")


def test_a_task_whose_pod_the_cluster_has_nothing_on_keeps_its_verdict(group, cluster):
    cluster.say(pods="job-pods-oomkilled")
    other = lost_task("a")  # its pod runs
    assert explained_task(group, other) == other
    assert explain_task_loss(RunInPods(group, GROUP_ORDER, JOB_ID), "a", None) == ""
    cluster.say(refuse={"get pods": SILENT})
    assert explained_task(group, lost_task()) == lost_task()
    done = replace(lost_task(), state=State.COMPLETED)
    assert explained_task(group, done) == done


# Pods of dead nodes are removed only where the cluster and the head both say so.


LOST = {"event": "node_lost", "node": "run-7f3a-0 (n2)"}
BACK = {"event": "agent_joined", "node": "run-7f3a-0 (n1)"}
ANEW = {"event": "run_started"}
POD = "run-7f3a-0-wt22k"  # of `job-pods-node-lost-terminating`: on n2, deleted by the taint manager
REMOVAL = [
    f"delete pod {POD} --force --grace-period=0 --wait=false",
    f'patch pod {POD} --type=merge -p {{"metadata": {{"finalizers": null}}}}',
]
SETTLED = replace(DEFAULT, own_keys=(("context", "lab"), ("namespace", "research")))


@pytest.fixture
def release(run_dir, cluster):
    cluster.say(pods="job-pods-node-lost-terminating")
    said = []
    return LostPodRemover(RunInPods(run_dir, order_of(), JOB_ID), said.append), said


def events(run_dir, *rows):
    lines(run_dir.events, [{"time": f"{BETWEEN}.000Z", **row} for row in rows])


def changes(cluster):
    return [line for line in cluster.asked if not line.startswith("get ")]


def test_a_pod_that_both_have_given_up_is_removed_with_its_finalizer(release, run_dir, cluster):
    look, said = release
    events(run_dir, BACK, LOST)

    look.look()
    look.look()

    assert changes(cluster) == REMOVAL
    assert said == [f"n2 does not answer: its pod {POD} was removed, so that another can come"]


@pytest.mark.parametrize(
    ("lines", "goes"),
    [
        ((), True),
        ((LOST, BACK), False),
        ((BACK, ANEW), True),  # its node died with that of the first pod
        ((BACK, ANEW, BACK), False),
    ],
)
def test_a_pod_of_a_dead_node_that_never_joined_is_removed_where_the_record_is_known(
    run_dir, cluster, lines, goes
):
    cluster.say(pods="job-pods-node-lost-terminating")
    events(run_dir, *lines)
    look = LostPodRemover(RunInPods(run_dir, order_of(index=1), JOB_ID), lambda _: None)
    look.look()
    assert changes(cluster) == []
    look.look(is_known=True)
    assert any(line.startswith(f"delete pod {POD}") for line in changes(cluster)) is goes


@pytest.mark.parametrize(
    "lines", [(), (BACK,), (LOST, BACK), ({"event": "node_lost", "node": "run-7f3a-1"},)]
)
def test_a_pod_that_the_head_has_not_lost_stays(release, run_dir, cluster, lines):
    look, said = release
    events(run_dir, *lines)
    look.look()
    assert (changes(cluster), said) == ([], [])


@pytest.mark.parametrize(
    "pods", ["job-pods-node-lost-5s", "job-pods-evicting", "job-pods-pod-deleting"]
)
def test_a_pod_that_the_cluster_has_not_given_up_stays(release, run_dir, cluster, pods):
    look, said = release
    cluster.say(pods=pods)
    events(run_dir, LOST, {"event": "node_lost", "node": "run-7f3a-1"})
    look.look()
    assert (changes(cluster), said) == ([], [])


def test_a_first_pod_that_the_cluster_has_given_up_is_removed_where_it_can_not_be_reached(
    release, cluster
):
    look, _ = release
    silent = "error: error upgrading connection: dial tcp 10.91.0.2:10250: connect: no route\n"
    cluster.say(pods="job-pods-node-lost-terminating", refuse={"port-forward": [1, silent]})
    look.look()
    assert changes(cluster) == []
    look.look(asks=True)
    assert [line for line in changes(cluster) if not line.startswith("port-forward")] == REMOVAL


def test_who_may_not_remove_it_hears_so_once_with_the_line_of_the_role(release, run_dir, cluster):
    look, said = release
    cluster.say(
        pods="job-pods-node-lost-terminating",
        refuse={"delete pod": forbidden('pods "p"', "delete", "pods")},
    )
    events(run_dir, LOST)
    look.look()
    look.look()
    (sentence,) = said
    assert f"its pod {POD} keeps its place" in sentence
    assert 'resources: ["pods"], verbs: ["delete"]' in sentence


def test_a_pod_that_has_just_gone_is_nothing_to_speak_of(release, run_dir, cluster):
    look, said = release
    gone = f'Error from server (NotFound): pods "{POD}" not found\n'
    cluster.say(pods="job-pods-node-lost-terminating", refuse={"delete pod": [1, gone]})
    events(run_dir, LOST)
    look.look()
    assert said == []


@pytest.mark.parametrize(
    ("pods", "said"),
    [
        (
            "job-pods-node-lost-terminating",
            f"pods of an earlier run `run-7f3a` have not ended yet: {POD} on n2; ",
        ),
        ("job-pods-running", None),
    ],
)
def test_pods_of_a_run_that_had_this_name_are_told_before_it_starts(cluster, pods, said):
    cluster.say(pods=pods)
    words = warn_of_leaving_pods(SETTLED)
    assert words is None if said is None else words.startswith(said)


def test_who_can_not_ask_is_told_nothing_of_them(cluster):
    cluster.say(refuse={"get pods": SILENT})
    assert warn_of_leaving_pods(SETTLED) is None
