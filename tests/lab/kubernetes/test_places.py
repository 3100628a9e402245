"""What a namespace, an image and a volume ask of pods: the strictest level, users without a name, roots that are read-only."""

import os

import pytest

from lab.kubernetes.user import NAMESPACE

LEVEL = "pod-security.kubernetes.io/enforce"


@pytest.fixture
def restricted(bench):
    """Return what a test does in a namespace of the level `restricted`."""
    bench.kubectl("label", "namespace", NAMESPACE, f"{LEVEL}=restricted")
    os.chmod(bench.shared, 0o777)
    yield bench
    bench.kubectl("label", "namespace", NAMESPACE, f"{LEVEL}-")


@pytest.mark.parametrize("run_as", [None, 1000680000])
def test_a_restricted_namespace_takes_pods_with_a_root_that_is_read_only(restricted, run_as):
    container = "spec.template.spec.containers.0"
    frozen = f"{container}.securityContext.readOnlyRootFilesystem=true"
    restricted.site(directives=[frozen], run_as=run_as)
    run = restricted.train()
    pod, _ = restricted.pod_of_rank(1)
    script = 'id -u; (: >/etc/here) 2>/dev/null || echo "no file in /etc"'
    user, *said = restricted.in_pod(pod, "/bin/sh", "-c", script).splitlines()
    assert int(user) == (run_as or 1000)
    assert said == ["no file in /etc"]
    restricted.end_well(run)
    assert restricted.result()["state"] == "succeeded"
    restricted.wait_nothing_left()


def test_pods_that_the_level_of_a_namespace_forbids_are_named(restricted):
    with restricted.without_rule("namespaces"):
        run = restricted.start()
        code = restricted.note_ended("Pod Security forbids the pods", run, restricted.wait_job())
    assert code != 0
    assert "the namespace's Pod Security level forbids its pods" in restricted.said
    assert 'violates PodSecurity "restricted:latest"' in restricted.said
    assert "`pod_security` of the site fits the pods to it" in restricted.said
    restricted.wait_nothing_left()


def test_a_home_on_a_volume_keeps_runs_and_code(bench):
    home = bench.shared / "home"
    large = bench.user.folder / "large.bin"
    large.write_bytes(os.urandom(5 << 20))  # the Secrets have no room for it
    bench.site(home=str(home))
    try:
        for run_id in ("first", "second"):
            run = bench.start(run_id=run_id)
            bench.wait_up(process=run)
            bench.end_well(run)
            bench.wait_nothing_left()
            assert (home / "runs" / run_id / "result.json").exists()
            for path in bench.shared.glob("*[0-9p]"):
                path.unlink()
    finally:
        large.unlink()
    assert bench.said_of("first") != bench.said_of("second")
