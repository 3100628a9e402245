"""The end of groups in pods, as a client brings it about whose owner was killed."""

import os

import pytest

from kit.values import run_result
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.kubernetes.pods.copy import RunCopy
from torchmuster.kubernetes.pods.end import catch_up, remove_groups, words_on_reach
from torchmuster.launcher.api.failures import RunFailed
from torchmuster.launcher.api.run import RunHandle
from torchmuster.launcher.jobs.jobs import forget_views
from torchmuster.launcher.views.control import LogChoice, log_files
from torchmuster.launcher.views.find import owner_lives, view_run
from unit.kubernetes.pods.conftest import NO_FORWARD, SILENT, answers, order_of, write_order

HOUR_AGO = 1_700_000_000
JOBS = ["lab/research/two-work-a-0", "lab/research/two-work-b-0"]


def left(folder, **noted):
    """Return a workflow whose group has not ended, with what its owner had noted of its Jobs."""
    run_dir = RunDir(str(folder / "home" / "runs" / "two"))
    group = run_dir.group("work")
    write_order(group, order_of(group="work"))
    noted = {"engine": "kubernetes", "job_id": JOBS[0], "more": JOBS[1:], **noted}
    atomic.write_json(group.job, noted)
    return run_dir


def test_a_jobset_is_removed_as_one(tmp_path, cluster):
    run_dir = left(tmp_path, set="lab/research/two-work")
    assert remove_groups(run_dir) == JOBS
    (asked,) = cluster.asked
    assert asked.split()[:3] == [
        "delete",
        "jobsets.jobset.x-k8s.io/two-work",
        "secrets/two-work",
    ]


def test_jobs_are_removed_one_by_one(tmp_path, cluster):
    assert remove_groups(left(tmp_path, set=None)) == JOBS
    assert [line.split()[1] for line in cluster.asked] == [
        f"jobs.batch/{job.rpartition('/')[2]}" for job in JOBS
    ]


def test_without_the_right_to_reach_pods_a_look_takes_the_first_ones_log_and_says_what_is_lacking(
    run_dir, cluster
):
    """Of a run that somebody looks at and nobody follows, as from another machine."""
    cluster.say(
        pods="job-pods-running",
        logs="muster: run on run-7f3a-0, run-7f3a-1\nstep 7\n",
        refuse={"port-forward": NO_FORWARD},
    )
    catch_up(run_dir, again=True)

    (log,) = log_files(view_run(run_dir), LogChoice())
    with open(log[1]) as file:
        assert file.read().endswith("step 7\n")
    said = words_on_reach(run_dir)
    assert 'resources: ["pods/portforward"], verbs: ["create"]' in said
    assert said.endswith(f"what the first pod wrote is in {run_dir.job_log}")


def test_a_run_whose_pods_can_be_reached_or_do_not_answer_lacks_no_right(run_dir, cluster):
    cluster.say(refuse={"get pods": SILENT})
    catch_up(run_dir, again=True)
    assert words_on_reach(run_dir) is None


def test_who_looks_is_told_that_the_first_pod_can_not_be_reached_now(run_dir, cluster):
    lost = "error: lost connection to pod\n"
    cluster.say(pods="job-pods-running", refuse={"port-forward": [1, lost]})
    catch_up(run_dir, again=True)
    assert words_on_reach(run_dir) == (
        "the first pod can't be reached now (the cluster makes no way to the pod):"
        " what is shown came before"
    )


# Ends of runs whose record does not come.


@pytest.mark.parametrize("refuse", [{}, {"port-forward": NO_FORWARD}])
def test_a_run_whose_record_did_not_come_is_no_success_and_keeps_its_job(run_dir, cluster, refuse):
    """As of a client that connects only after the first pod has ended, or may not connect at all."""
    cluster.say(answers=answers(ended=codec.to_plain(run_result())), refuse=refuse)
    forget_views()

    with pytest.raises(RunFailed) as raised:
        RunHandle(run_dir).wait(30.0)

    assert (raised.value.state, raised.value.exit_code) == ("lost", 15)
    assert "they went with pod run-7f3a-0-x on n1" in raised.value.cause
    assert not any("delete" in line for line in cluster.asked)


def test_a_run_whose_job_is_no_more_ends(run_dir, cluster):
    """A cluster answers for a Job that is gone with an empty List and exit code 0: recorded from Kubernetes 1.36.2."""
    os.utime(run_dir.job, (HOUR_AGO, HOUR_AGO))
    forget_views()

    with pytest.raises(RunFailed) as raised:
        RunHandle(run_dir).wait(30.0)

    assert (raised.value.state, raised.value.exit_code) == ("cancelled", 143)
    assert "does not have the run's Job any more" in raised.value.cause
    assert run_dir.path in raised.value.why


@pytest.mark.parametrize(
    ("age_s", "says"),
    [
        (0, {}),  # of a cluster whose answer does not have it yet
        (60, {"refuse": {"get": SILENT}}),
        (60, {"answers": answers()}),
    ],
)
def test_a_job_that_may_be_there_is_no_end(run_dir, cluster, age_s, says):
    made = os.stat(run_dir.job).st_mtime - age_s
    os.utime(run_dir.job, (made, made))
    cluster.say(**says)
    forget_views()

    copy = RunCopy.of(run_dir, print, print)
    copy.take_last_words()
    copy.close()

    assert not os.path.exists(run_dir.result)
    assert owner_lives(run_dir)
