"""kubectl's command lines and what its answers to them mean."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchmuster.kubernetes.engine.dialect import DIALECT, job_id_of, kubectl, name_of, place_of
from torchmuster.launcher.engines.base import EngineError
from torchmuster.launcher.model.job import JobState, NodeChunk
from unit.kubernetes.engine.site_jobs import DEFAULT, JOBS, manifest_of, site

RECORDED = json.loads((Path(__file__).parent / "recorded.json").read_text())
HERE = ["kubectl", "--context=lab", "--namespace=research", "--request-timeout=20s"]
EKS = "arn:aws:eks:eu-west-1:123:cluster/train"


def made(name="default"):
    """Return what `create -o json` prints: the objects, one after the other, with their uids."""
    objects = json.loads(manifest_of(name))["items"]
    for number, one in enumerate(objects):
        one["metadata"] |= {"uid": f"uid-{number}", "namespace": "research"}
    return "\n".join(json.dumps(one, indent=1) for one in objects)


def answer(what):
    return json.dumps({"kind": "List", "items": RECORDED[what]})


def test_every_command_names_its_cluster_unless_there_is_only_one():
    assert kubectl("lab", "research", "get", "pods") == [*HERE, "get", "pods"]
    assert kubectl("", "ml", "get")[1:3] == ["--namespace=ml", "--request-timeout=20s"]


@pytest.mark.parametrize("context", ["", "lab", EKS, "team/a/b"])
def test_a_job_is_found_again_by_its_id_whatever_contexts_are_called(context):
    assert place_of(job_id_of(context, "ml", "run-1")) == (context, "ml", "run-1")


@pytest.mark.parametrize("job_id", ["", "run-1", "ml/run-1", "lab/ml/"])
def test_what_is_no_id_is_refused(job_id):
    with pytest.raises(EngineError, match="is not CONTEXT/NAMESPACE/NAME"):
        place_of(job_id)


@given(run=st.text(max_size=90), num_pods=st.integers(1, 5000))
def test_every_run_has_a_name_that_its_last_pod_can_have(run, num_pods):
    name = name_of(run, num_pods)
    assert re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(f"{name}-{num_pods - 1}") <= 63


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("train-7f3a", "train-7f3a"),
        ("Train_GPT.2-7f3a", "train-gpt-2-7f3a"),
        ("7f3a", "run-7f3a"),
        ("___", "run"),
    ],
)
def test_a_name_stays_close_to_the_run_s(run, name):
    assert name_of(run, 2) == name


def test_a_name_that_is_cut_keeps_what_tells_runs_of_one_script_apart():
    names = {name_of("a" * 70 + end, 2) for end in ("-7f3a", "-11c0")}
    assert {name[-4:] for name in names} == {"7f3a", "11c0"}


def test_the_id_of_a_job_is_read_from_what_was_made():
    assert DIALECT.job_id(made()) == "lab/research/run-7f3a"
    with pytest.raises(EngineError, match="it made no Job"):
        DIALECT.job_id('{"kind": "Secret", "metadata": {"name": "x"}}')


def test_the_job_owns_what_was_made_with_it_and_nothing_stays_of_a_failure():
    ((*argv, patch),) = DIALECT.settle_argv(DEFAULT, made())
    assert argv == [*HERE, "patch", "secret/run-7f3a", "service/run-7f3a", "--type=merge", "-p"]
    (owner,) = json.loads(patch)["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("Job", "run-7f3a", "uid-2")

    assert DIALECT.settle_argv(DEFAULT, None) == [DIALECT.cancel_argv("lab/research/run-7f3a")]


def test_volcano_s_group_is_owned_too():
    ((*_, group, _, _, _),) = DIALECT.settle_argv(DEFAULT, made("volcano"))
    assert group == "podgroup/run-7f3a"


def test_jobs_of_one_namespace_are_asked_for_together():
    ids = [job_id_of(EKS, "ml", name) for name in ("b", "a", "b")]
    (argv,) = DIALECT.status_argv(ids)
    assert argv[1] == f"--context={EKS}"
    assert argv[-5:] == ["jobs.batch,pods", "-l", "torchmuster.dev/run in (a,b)", "-o", "json"]
    assert DIALECT.apart(ids[0]) == f"{EKS}/ml"
    assert DIALECT.status_argv([]) == []


@pytest.mark.parametrize(
    ("what", "kinds"),
    [
        ("job-pods-running", []),
        ("job-pods-unschedulable", []),
        ("job-pods-podsecurity", ["events"]),
        ("job-pods-quota", ["events"]),
        ("job-pods-fresh", ["events"]),  # only they tell what a pod is prepared for
        ("job-pods-mounting", ["events"]),
        ("kueue-suspended-job", ["workloads.kueue.x-k8s.io"]),
        ("kueue-next", ["workloads.kueue.x-k8s.io", "--raw"]),
        ("kueue-admitted", []),
    ],
)
def test_more_is_asked_where_the_answer_does_not_say_why_pods_are_missing(what, kinds):
    (argv,) = DIALECT.status_argv(["lab/research/x"])
    asked = DIALECT.more_argv(argv, answer(what))
    assert [words[len(HERE) + 1] for words in asked] == kinds
    assert all(words[: len(HERE)] == HERE for words in asked)


def test_a_queue_is_asked_once_how_many_wait_before_the_jobs_in_it():
    (argv,) = DIALECT.status_argv(["lab/research/x", "lab/research/y"])
    jobs = json.loads(answer("kueue-next"))["items"] + json.loads(answer("kueue-second"))["items"]
    raw = [words[-1] for words in DIALECT.more_argv(argv, json.dumps({"items": jobs}))[1:]]
    assert raw == [
        "/apis/visibility.kueue.x-k8s.io/v1beta1/namespaces/default/localqueues/team/pendingworkloads"
    ]


def test_a_view_is_found_by_the_id_of_its_job():
    objects = [dict(one) for one in RECORDED["job-pods-running"]]
    for one in objects:
        one["metadata"] = {
            **one["metadata"],
            "namespace": "ml",
            "annotations": {"torchmuster.dev/context": EKS},
        }
    ((job_id, view),) = DIALECT.views(json.dumps({"items": objects})).items()
    assert job_id == view.job_id == f"{EKS}/ml/run-7f3a"
    assert view.state is JobState.RUNNING


def test_an_end_removes_all_objects_by_their_names():
    assert DIALECT.cancel_argv("lab/research/r") == [
        *HERE,
        *("delete", "jobs.batch/r", "services/r", "secrets/r"),
        *(f"secrets/r.p{number}" for number in range(1, 5)),
        *("--wait=false", "--ignore-not-found"),
    ]


def test_an_account_and_chunks_of_pbs_mean_nothing_to_pods():
    job = replace(DEFAULT, account="a1", chunks=(NodeChunk(extra=(("x", "y"),)),))
    assert [sentence.partition(":")[0] for sentence in DIALECT.unmapped(job)] == [
        "account",
        "chunk",
    ]
    assert DIALECT.unmapped(site()) == []


def test_a_refusal_is_told_without_what_kubectl_says_before_it():
    stderr = (
        'E1122 00:28:44.359113 29815 memcache.go:265] "Unhandled Error" err="..."\n'
        * 5
        + 'Error from server (Forbidden): error when creating "/tmp/x": secrets is forbidden: User "u" cannot create resource'
        ' "secrets" in API group "" in the namespace "ml"\n'
        'Error from server (Forbidden): error when creating "/tmp/x": jobs.batch is forbidden: User "u" cannot create resource'
        ' "jobs" in API group "batch" in the namespace "ml"\n'
    )
    report = DIALECT.explain_refusal(stderr)
    assert report.error == "the cluster does not let you do this"
    assert not any("memcache" in line or "/tmp/x" in line for line in report.because)
    assert report.hint == (
        'the Role of the namespace ml, if that is its name, lacks {apiGroups: [""], resources: ["secrets"], verbs: ["create"]}'
        ' and {apiGroups: ["batch"], resources: ["jobs"], verbs: ["create"]}; docs/kubernetes.md has it whole'
    )


def test_a_job_of_several_kinds_is_one_jobset_whose_first_job_is_that_of_the_run():
    objects = json.loads(manifest_of("kinds"))["items"]
    assert [one["kind"] for one in objects] == ["Secret", "JobSet"]
    stdout = made("kinds")
    assert DIALECT.job_id(stdout) == "lab/research/run-7f3a-a-0"
    (argv,) = DIALECT.settle_argv(JOBS["kinds"], stdout)
    assert argv[len(HERE) :][:2] == ["patch", "secret/run-7f3a"]
    (owner,) = json.loads(argv[-1])["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == ("JobSet", "run-7f3a", "uid-1")


def test_a_jobset_goes_with_its_secret_also_where_it_was_refused():
    words = ["delete", "jobsets.jobset.x-k8s.io/run-7f3a", "secrets/run-7f3a"]
    assert DIALECT.remove_set_argv("lab/research/run-7f3a")[len(HERE) :][:3] == words
    (argv,) = DIALECT.settle_argv(JOBS["kinds"], None)
    assert argv == DIALECT.remove_set_argv("lab/research/run-7f3a")
