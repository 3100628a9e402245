"""Runs in real pods: they train, and go on when workers, pods and nodes go."""

import time

import pytest

from kit.waiting import wait_until

SOON_S = 5.0
LOST_LIMIT_S = 40.0  # a lease of 15 s, the next look of the head, and the next attempt
GIVEN_UP_LIMIT_S = 150.0  # until the cluster gives up a node and its pods, and a new pod trains


def test_two_pods_train_with_the_rights_of_the_page(bench):
    run = bench.train()
    assert {bench.rank(0)["host"], bench.rank(1)["host"]} == {"r-0", "r-1"}
    bench.end_well(run)
    assert bench.result()["state"] == "succeeded"
    assert "attempt 0 of 2 ranks begins at step 0" in bench.said
    bench.wait_nothing_left()


def test_a_name_that_comes_late_is_said_and_waited_for(bench):
    bench.cluster.hidden.write_text("r-1\n")
    run = bench.start()
    running_at = bench.wait_running()
    text = "waiting for pods: r-1 (its name is not known)"
    bench.note_said("the second pod's name is not known", text, running_at)
    bench.cluster.hidden.unlink()
    bench.wait_up()
    bench.end_well(run)


def test_a_killed_worker_restarts_inside_the_living_pods(bench):
    run = bench.train()
    uids = bench.uids()
    pod, _ = bench.pod_of_rank(1)
    killed_at = time.time()
    bench.in_pod(pod, "/usr/bin/kill", "-9", str(bench.rank(1)["pid"]))
    bench.wait_up(attempt=1)
    assert bench.uids() == uids
    bench.end_well(run)
    assert bench.note_next_attempt("a worker is killed", killed_at) < SOON_S
    assert bench.result()["restarts_spent"] == 1


def test_a_process_out_of_memory_is_named_and_restarts_inside_the_pod(bench):
    run = bench.train("--max-restarts", "1")
    uids = bench.uids()
    _, node = bench.pod_of_rank(1)
    where = f"{bench.rank(1)['host']} ({node})"
    (bench.shared / "fill-1").touch()
    bench.wait_up(attempt=1)
    assert bench.uids() == uids
    (bench.shared / "fill-1").touch()
    assert bench.end(run) == 137
    bench.wait_nothing_left()
    failed, _ = bench.events("attempt_failed")
    assert failed["what"] == f"SIGKILL in rank 1 on {where} because memory ran out"
    assert bench.result()["restarts_spent"] == 1
    report = bench.result()["report"]
    assert report["error"] == "rank 1 was ended by SIGKILL because memory ran out"
    assert report["at"] == f"rank 1 of 2 on {where}, attempt 1"
    assert "(limit 2.00 GiB)" in report["because"][0]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_container_that_is_killed_as_a_whole_for_its_memory_is_the_verdict(bench, rank):
    # With equal requests and limits all processes but the first one are the kernel's last choice.
    cpu = "spec.template.spec.containers.0.resources"
    equal = [f"{cpu}.limits.cpu=500m", f"{cpu}.requests.cpu=500m"]
    bench.site(
        memory="1Gi", shm="2Gi", directives=equal
    )  # a full /dev/shm of half of it is an error
    run = bench.train("--max-restarts", "0")
    pod, node = bench.pod_of_rank(rank)
    host = bench.rank(rank)["host"]
    # The record has come to the other pod by then: one that goes with the first pod knows nothing of the budget.
    wait_until(lambda: bench.step() > 150, "more steps", 60)
    (bench.shared / f"fill-shm-{rank}").touch()
    assert bench.end(run) == 137
    report = bench.result()["report"]
    assert (
        report["error"] == f"memory ran out on {host} ({node}): its container was killed as a whole"
    )
    assert report["at"] == f"rank {rank} of 2 on {host} ({node}), attempt 0"
    assert report["because"][0].startswith(
        f"kubernetes says: OOMKilled (exit code 137) of pod {pod} on {node}: "
    )
    assert report["because"][0].endswith("its limit of 1 GiB")
    assert "/dev/shm" in report["hint"]


def test_a_first_process_that_is_killed_costs_a_restart_and_its_pod_is_made_again(bench):
    run = bench.train()
    uids = bench.uids()
    bench.kill_container("r-1")
    bench.wait_up(attempt=1)
    assert bench.uids()[0] == uids[0]
    assert bench.uids()[1] != uids[1]
    bench.end_well(run)
    assert bench.result()["restarts_spent"] == 1


def test_a_deleted_pod_comes_again_and_no_restart_is_spent(bench):
    run = bench.train()
    step = bench.step()
    pod, _ = bench.pod_of_rank(1)
    deleted_at = time.time()
    bench.kubectl("delete", "pod", pod, "--wait=false")
    bench.wait_up(attempt=1)
    bench.end_well(run)
    bench.note_next_attempt("a pod is deleted", deleted_at)
    assert bench.begun_at() >= step
    assert bench.result()["restarts_spent"] == 0


def test_a_drained_node_is_left_and_no_restart_is_spent(bench):
    run = bench.train()
    step = bench.step()
    _, node = bench.pod_of_rank(1)
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s", "--force")
    drained_at = time.time()
    bench.cluster.kubectl("drain", node, *words)
    try:
        bench.wait_up(attempt=1)
        assert bench.pod_of_rank(1)[1] != node
        bench.end_well(run)
    finally:
        bench.cluster.kubectl("uncordon", node)
    bench.note_next_attempt("a node is drained", drained_at)
    assert bench.begun_at() >= step
    assert bench.result()["restarts_spent"] == 0


def test_the_first_pod_that_is_deleted_comes_again_and_goes_on(bench):
    run = bench.train()
    step = bench.step()
    uids = bench.uids()
    pod, _ = bench.pod_of_rank(0)
    deleted_at = time.time()
    bench.kubectl("delete", "pod", pod, "--wait=false")
    bench.wait_up(attempt=1)
    assert bench.uids()[0] != uids[0]
    assert bench.uids()[1] == uids[1]
    bench.end_well(run)
    bench.note_next_attempt("the first pod is deleted", deleted_at)
    assert bench.result()["state"] == "succeeded"
    assert bench.begun_at() >= step
    assert (bench.result()["attempts"], bench.result()["restarts_spent"]) == (2, 0)


def test_a_job_that_is_suspended_goes_on_when_it_is_resumed(bench):
    bench.site(home=str(bench.shared / "home"))
    run = bench.train()
    step = bench.step()
    suspend = '{"spec": {"suspend": %s}}'
    bench.kubectl("patch", "jobs.batch", "r", "--type=merge", "-p", suspend % "true")
    wait_until(lambda: not bench.user.objects("pods"), "no pods", GIVEN_UP_LIMIT_S)
    bench.kubectl("patch", "jobs.batch", "r", "--type=merge", "-p", suspend % "false")
    bench.wait_up(attempt=1)
    bench.end_well(run)
    assert bench.begun_at() >= step
    assert (bench.result()["attempts"], bench.result()["restarts_spent"]) == (2, 0)


@pytest.mark.parametrize("spares", [0, 1])
def test_a_node_without_power_is_replaced(bench, spares):
    bench.site(devices=bench.whole_nodes)
    run = bench.train("--spares", str(spares))
    _, first = bench.pod_of_rank(0)
    _, node = bench.pod_of_rank(1)
    assert node != first
    cut_at = time.time()
    bench.cluster.cut_power(node)
    try:
        bench.wait_up(attempt=1, limit_s=LOST_LIMIT_S if spares else GIVEN_UP_LIMIT_S)
        assert bench.pod_of_rank(1)[1] != node
        bench.end_well(run)
    finally:
        bench.cluster.start_node(node)
        bench.cluster.wait_ready(node)
    assert bench.result()["restarts_spent"] == 1
    bench.note_next_attempt(f"a node loses its power, --spares {spares}", cut_at)
