"""Runs that can't start on a real cluster: the reason is the cluster's own sentence, soon, and nothing is left behind."""

import json
import os
import struct

ARM, INTEL = 183, 62
OTHER_PROCESSOR = INTEL if os.uname().machine == "aarch64" else ARM
# The head of a program, 64 bits: magic, then type, machine, version, entry; no kernel of this machine takes it.
ELF_OF_ANOTHER_PROCESSOR = b"\x7fELF\2\1\1".ljust(16, b"\0") + struct.pack(
    "<HHIQ", 2, OTHER_PROCESSOR, 1, 0
).ljust(48, b"\0")


def test_an_image_that_can_not_be_pulled_is_named(bench):
    bench.site(image="localhost/nowhere:1")
    run = bench.start()
    assert bench.note_ended("the image can't be pulled", run, bench.wait_job()) != 0
    assert "localhost/nowhere:1" in bench.said
    assert "kubernetes says" in bench.said
    bench.wait_nothing_left()


def test_an_interpreter_that_the_image_lacks_is_named(bench):
    bench.site(python=["/no/such/python3"])
    run = bench.start()
    assert bench.note_ended("the image lacks the interpreter", run, bench.wait_job()) != 0
    assert "/no/such/python3" in bench.said
    bench.wait_nothing_left()


def test_a_program_for_another_processor_is_named(bench):
    interpreter = bench.shared / "python3"
    interpreter.write_bytes(ELF_OF_ANOTHER_PROCESSOR)
    interpreter.chmod(0o755)
    bench.site(python=[str(interpreter)])
    run = bench.start()
    assert bench.note_ended("the image is for another processor", run, bench.wait_job()) != 0
    assert "the image is made for another processor than that of the node" in bench.said
    assert "exec format error" in bench.said
    bench.wait_nothing_left()


def test_pods_that_no_node_has_room_for_are_told_with_the_schedulers_sentence(bench):
    run = bench.start("--gpus-per-node", "64", "--join-timeout", "10s")
    bench.note_said("no node has room", "Insufficient nvidia.com/gpu", bench.wait_job())
    assert bench.end(run, limit_s=60) != 0
    assert "no pod came within 10 s" in bench.said
    bench.wait_nothing_left()


def test_a_quota_that_has_no_room_is_told(bench):
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "spec": {"hard": {"pods": "1"}}}
    bench.create({**quota, "metadata": {"name": "few"}})
    try:
        run = bench.start("--join-timeout", "10s")
        bench.note_said("a quota has no room", "exceeded quota", bench.wait_job())
        assert bench.end(run, limit_s=90) != 0
        bench.wait_nothing_left()
    finally:
        bench.kubectl("delete", "resourcequota", "few")


def test_a_policy_that_keeps_pods_apart_is_named(bench):
    spec = {"podSelector": {}, "policyTypes": ["Ingress"]}
    policy = {"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": spec}
    bench.create({**policy, "metadata": {"name": "nobody"}})
    bench.site(devices=bench.whole_nodes)
    try:
        with bench.cluster.pods_kept_apart():  # what a network that enforces the policy would do
            run = bench.start("--join-timeout", "20s")
            running_at = bench.wait_running()
            bench.note_said("a NetworkPolicy keeps pods apart", "waiting for pods: r-1", running_at)
            assert bench.end(run) != 0
    finally:
        bench.kubectl("delete", "networkpolicy", "nobody")
    assert "the NetworkPolicy nobody (Ingress) of the namespace selects these pods" in bench.said
    bench.wait_nothing_left()


def test_the_server_takes_the_manifest_of_a_dry_run(bench):
    words = ("run", "--on", "kubernetes", "--nodes", "2", "--dry-run", "train.py")
    code, said = bench.user.run(*words)
    assert code == 0
    manifest = said[said.index("{") : said.rindex("}") + 1]
    kinds = [one["kind"] for one in json.loads(manifest)["items"]]
    assert kinds == ["Secret", "Secret", "Service", "Job"]  # the second one has the parcels
    bench.cluster.kubectl("create", "--dry-run=server", "-n", "research", "-f", "-", text=manifest)
