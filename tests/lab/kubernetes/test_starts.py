"""Runs that can't start on a real cluster: the reason is the cluster's own sentence, soon, and nothing is left behind."""

import json

import pytest

SOON_S = 15.0


def test_an_image_that_can_not_be_pulled_is_named(bench):
    bench.site(image="localhost/nowhere:1")
    run = bench.start()
    assert bench.end(run) != 0
    assert "localhost/nowhere:1" in bench.said
    assert "kubernetes says" in bench.said
    assert not bench.user.objects("jobs.batch,services,secrets")


def test_an_interpreter_that_the_image_lacks_is_named(bench):
    bench.site(python=["/no/such/python3"])
    run = bench.start()
    assert bench.end(run, limit_s=60) != 0
    assert "/no/such/python3" in bench.said
    assert not bench.user.objects("jobs.batch,services,secrets")


def test_pods_that_no_node_has_room_for_are_told_with_the_schedulers_sentence(bench):
    run = bench.start("--gpus-per-node", "64", "--join-timeout", "10s")
    bench.wait_said("Insufficient nvidia.com/gpu", limit_s=SOON_S)
    assert bench.end(run, limit_s=60) != 0
    assert "no pod came within 10 s" in bench.said
    assert not bench.user.objects("jobs.batch,services,secrets")


def test_a_quota_that_has_no_room_is_told(bench):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "spec": {"hard": {"pods": "1"}}}
    bench.create({**quota, "metadata": {"name": "few"}})
    try:
        run = bench.start("--join-timeout", "10s")
        bench.wait_said("quota", limit_s=SOON_S)
        assert bench.end(run, limit_s=90) != 0
        assert "exceeded quota" in bench.said
    finally:
        bench.kubectl("delete", "resourcequota", "few")


def test_a_policy_that_keeps_pods_apart_is_named(bench):
    spec = {"podSelector": {}, "policyTypes": ["Ingress"]}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": spec}
    bench.create({**policy, "metadata": {"name": "nobody"}})
    try:
        run = bench.start("--join-timeout", "20s")
        if bench.comes_up(run):
            pytest.skip("the network of this cluster takes no notice of a NetworkPolicy")
        assert "NetworkPolicy" in bench.said
    finally:
        bench.kubectl("delete", "networkpolicy", "nobody")


def test_the_server_takes_the_manifest_of_a_dry_run(bench):
    words = ("run", "--on", "kubernetes", "--nodes", "2", "--dry-run", "train.py")
    code, said = bench.user.run(*words)
    assert code == 0
    manifest = said[said.index("{") : said.rindex("}") + 1]
    kinds = [one["kind"] for one in json.loads(manifest)["items"]]
    assert kinds == ["Secret", "Service", "Job"]
    bench.cluster.kubectl("create", "--dry-run=server", "-n", "research", "-f", "-", text=manifest)
