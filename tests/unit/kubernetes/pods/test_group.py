"""A group in pods as the owner of its workflow shows it."""

import os
from dataclasses import replace

from kit.records import lines
from kit.waiting import wait_until
from kit.workflows import workflow_plan
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.verdict import Report
from torchmuster.kubernetes.pods.group import PodGroup
from torchmuster.kubernetes.pods.reach import RunInPods
from torchmuster.launcher.jobs.jobs import forget_views
from torchmuster.launcher.model.job import JobState, JobView
from torchmuster.workflow.head import task_messages
from torchmuster.workflow.plan import GroupPlan, TaskPlan
from torchmuster.workflow.record import State, read_outcome
from unit.kubernetes.pods.conftest import JOB_ID, answers, group_outcome, order_of, site_of


def group_of(run_dir, hear):
    """Return a group of one task, and its workflow's folder."""
    group = GroupPlan(name="work", tasks=(TaskPlan(name="t", command=("true",)),))
    plan = workflow_plan(group, run_id="w", cwd=run_dir.path)
    return PodGroup(plan, group, run_dir, site_of(), hear, print)


def started_group(run_dir, hear=print, **order):
    """Return the same in pods of the run `RUN_ID`, its only Job."""
    group = group_of(run_dir, hear)
    atomic.write_json(run_dir.workflow, codec.to_plain(group.plan))
    group._run = RunInPods(run_dir, order_of(group="work", num_pods=1, **order), JOB_ID)
    group._job_ids = [JOB_ID]
    os.makedirs(run_dir.group("work").path)
    return group


def test_pods_that_did_not_come_are_told_with_what_the_cluster_says_of_their_job(tmp_path):
    run_dir = RunDir(str(tmp_path))
    os.makedirs(run_dir.group("work").path)
    group = group_of(run_dir, print)
    report = Report(error="only 1 of 2 pods came within 300 s", because=("w-b-0.w-b",))
    outcome = group_outcome(State.FAILED_START_ERROR, 15, report=report)
    assert group._joined(outcome) == outcome
    held = JobView(job_id="lab/ml/w-b", state=JobState.HELD, reason="Pending: 1 more needed")
    group._waiting = {held.job_id: held}
    said = "job lab/ml/w-b is held (Pending: 1 more needed)"
    assert group._joined(outcome).report.because == (said, "w-b-0.w-b")
    assert read_outcome(run_dir, "work").report.because[0] == said
    ended = replace(outcome, state=State.FAILED)
    assert group._joined(ended) == ended


def test_logs_are_shown_from_whichever_attempt_the_record_begins(tmp_path):
    run_dir = RunDir(str(tmp_path))
    heard = []
    shown = group_of(run_dir, heard.append)
    # The first pod was made again on an empty disk: attempts before are in another folder.
    for attempt in (9, 10):
        path = run_dir.task_log("work", "t", attempt)
        os.makedirs(os.path.dirname(path))
        with open(path, "w") as log:
            log.write(f"attempt {attempt}\n")
    shown._pass_on()
    texts = [one.text for one in heard if isinstance(one, task_messages.TaskOutput)]
    assert texts == ["attempt 9\n", "attempt 10\n"]


def test_a_task_that_lost_its_pod_is_told_with_the_clusters_reason(run_dir, cluster):
    """Its attempt before has begun before the pod ended; the next one is none of the cause."""
    heard = []
    shown = started_group(run_dir, heard.append, hosts=("run-7f3a-1.run-7f3a",))
    events = [
        {"event": "task_started", "task": "t", "time": "2026-11-22T00:27:30.000Z"},
        {"event": "agent_lost", "task": "t", "time": "2026-11-22T00:28:10.000Z"},
        {"event": "task_started", "task": "t", "time": "2026-11-22T00:29:00.000Z"},
    ]
    lines(run_dir.group("work").events, events)
    cluster.say(pods="job-pods-running")
    shown._pass_on()
    shown._explain_losses()
    cluster.say(pods="job-pods-oomkilled")
    shown._explain_losses()
    shown._explain_losses()
    notices = [one.fields["text"] for one in heard if one.name == "notice"]
    assert len(notices) == 1
    assert notices[0].startswith(
        "task t: kubernetes says: OOMKilled (exit code 137) of pod run-7f3a-1-9"
    )


def test_a_group_that_waits_longer_for_room_than_its_queue_timeout_ends_with_the_reason(tmp_path):
    run_dir = RunDir(str(tmp_path))
    os.makedirs(run_dir.group("work").path)
    group = group_of(run_dir, print)
    reason = "Unschedulable: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    short = JobView(job_id="lab/ml/w", state=JobState.PENDING, reason=reason)
    running = JobView(job_id="lab/ml/w", state=JobState.RUNNING)
    group.group = replace(group.group, queue_timeout_s=0.0)

    group._wait_for_room([running])
    assert read_outcome(run_dir, "work") is None
    group._wait_for_room([running, short])
    wait_until(lambda: group._wait_for_room([short]) or read_outcome(run_dir, "work"), "the end")

    outcome = read_outcome(run_dir, "work")
    assert outcome.state is State.FAILED_QUEUE_TIMEOUT
    assert outcome.report.error == "it waited longer than its queue_timeout of 0 s"
    assert outcome.report.because == (f"kubernetes says: {reason}",)


def left_by(run_dir, cluster, items):
    """Return a group whose Job has ended, or is gone, as the cluster says: judged, and its Job removed or not."""
    group = started_group(run_dir)
    cluster.say(answers={"get jobs.batch,pods": {"items": items}, "get pods": {"items": items}})
    forget_views()
    assert group._look()
    group._end_without_record()
    group._remove()
    return read_outcome(run_dir, "work"), [line for line in cluster.asked if "delete" in line]


def test_a_group_whose_record_did_not_come_is_no_success_and_keeps_its_job(run_dir, cluster):
    outcome = codec.to_plain(group_outcome(State.COMPLETED))
    ended = answers(ended={"group": outcome})["get jobs.batch,pods"]["items"]

    found, removed = left_by(run_dir, cluster, ended)

    assert (found.state, found.exit_code, removed) == (State.FAILED_BACKEND_ERROR, 15, [])
    assert "they went with pod run-7f3a-0-x on n1" in found.report.error


def test_a_group_whose_job_is_no_more_ends(run_dir, cluster):
    found, removed = left_by(run_dir, cluster, [])

    assert found.state is State.FAILED_BACKEND_ERROR
    assert found.report.error == "the cluster does not have the Job of group work any more"
    assert len(removed) == 1  # its Secret and Service
