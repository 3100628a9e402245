"""Why a pod was lost: the cluster's reason and the head's word become one verdict."""

import json
from dataclasses import replace

import pytest

from torchmuster.model.failure import EndKind, WorkerEnd
from torchmuster.model.states import RunState
from torchmuster.model.verdict import Circumstances, Result, explain_failure
from torchmuster.owner.pods.losses import explain_loss
from unit.owner.pods.conftest import JOB_ID, RUN_ID, order_of

# In `job-pods-oomkilled` the pod of index 1 was killed at 00:27:09, and its replacement at 00:28:10.
BETWEEN, BEFORE, AFTER = "2026-11-22T00:27:30", "2026-11-22T00:26:50", "2026-11-22T00:29:00"


def failed(node="run-7f3a-1 (n2)", **given):
    """Return what the head says of a run that has lost a pod."""
    end = WorkerEnd(
        attempt=0,
        rank=4,
        local_rank=0,
        node=node,
        kind=EndKind.NODE_LOST,
        asked=False,
        elapsed_s=9.0,
        signum=9,
        detail="its agent has gone (the other side closed the connection)",
        **given,
    )
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
    return Result(
        run_id=RUN_ID,
        state=RunState.FAILED,
        exit_code=137,
        attempts=1,
        restarts_spent=1,
        elapsed_s=9.0,
        report=explain_failure(end, [end], known),
        cause=end,
    )


def begin(run_dir, when):
    nodes = [
        {"node": "run-7f3a-0 (n1)", "host": "run-7f3a-0", "ranks": "0-3"},
        {"node": "run-7f3a-1 (n2)", "host": "run-7f3a-1", "ranks": "4-7"},
    ]
    event = {"time": f"{when}.000Z", "event": "attempt_started", "attempt": 0}
    with open(run_dir.events, "w") as file:
        file.write(json.dumps({**event, "world_size": 8, "nodes": nodes}) + "\n")


def explained(run_dir, result):
    return explain_loss(result, run_dir, order_of(), JOB_ID)


def test_a_container_that_was_killed_as_a_whole_is_the_first_cause_with_pod_node_and_limit(
    run_dir, cluster
):
    cluster.say(pods="job-pods-oomkilled")
    begin(run_dir, BETWEEN)

    found = explained(run_dir, failed())

    evidence = (
        "kubernetes says: OOMKilled (exit code 137) of pod run-7f3a-1-9lbn8 on n2:"
        " all its processes together used more than its limit of 64Mi"
    )
    assert found.report.error == (
        "memory ran out on run-7f3a-1 (n2): its container was killed as a whole"
    )
    assert found.report.at == "ranks 4-7 of 8 on run-7f3a-1 (n2), attempt 0"
    assert found.report.because == (evidence,)
    assert found.report.hint == (
        "ask for more memory (`--mem`, or `memory` of the site; what is in /dev/shm counts);"
        " the one restart is spent"
    )
    assert found.cause.memory_evidence == evidence


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


@pytest.mark.parametrize(
    "refuse", [{}, {"get pods": [1, "Unable to connect to the server: i/o timeout\n"]}]
)
def test_where_the_cluster_has_nothing_to_say_the_verdict_is_that_of_the_head(
    run_dir, cluster, refuse
):
    cluster.say(pods="job-pods-running", refuse=refuse)
    assert explained(run_dir, failed()) == failed()


def test_a_run_that_lost_no_pod_asks_nothing(run_dir, cluster):
    other = replace(failed(), cause=replace(failed().cause, kind=EndKind.EXIT_CODE))
    assert explained(run_dir, other) == other
    assert cluster.asked == []
