"""Every message on what is wrong with a cluster, a site or its pods, word for word; kubectl replays what a real one answered.

Where each answer was recorded: `fakes/kubernetes/kubectl`. `pytest tests/golden --update-golden` writes the transcripts again.
"""

import json
import os
import re

import pytest

from kit.command import muster_env, run_muster
from kit.packages import keep_package
from kit.transcripts import GOLDEN, read_sections
from unit.kubernetes.pods.conftest import FAKES, shown_job, shown_pod

pytestmark = pytest.mark.slow

SITE = {"kind": "kubernetes", "image": "example.com/team/train:7"}
USER = 'User "system:serviceaccount:research:guest"'


def forbidden(*kinds):
    """What `create` says for each kind of object that a Role does not have."""
    groups = {"jobs": "batch", "secrets": "", "services": ""}
    return "".join(
        f'Error from server (Forbidden): error when creating "$FILE": {name} is forbidden: {USER} cannot create resource "{kind}"'
        f' in API group "{groups[kind]}" in the namespace "research"\n'
        for kind, name in ((k, f"{k}.{groups[k]}".rstrip(".")) for k in kinds)
    )


def discovery(problem):
    """What kubectl says before it gives a cluster up: the same line five times, from its cache."""
    line = f'E1122 00:28:44.359113   29815 memcache.go:265] "Unhandled Error" err="couldn\'t get current server API group list: {problem}"'
    return f"{line}\n" * 5


NO_HOST = "dial tcp: lookup no-such-host.invalid on 10.0.0.2:53: no such host"
DOWN = "dial tcp 127.0.0.1:1: connect: connection refused"


FAILED = {
    "type": "Failed",
    "status": "True",
    "reason": "PodFailurePolicy",
    "message": "Container node for pod research/wrong-0-x7k2p failed with exit code 113 matching FailJob rule at index 0",
}


def on_cluster(last_message, *, beside=()):
    """A cluster whose first pod has ended the run `wrong` with this message, beside which other containers go on."""
    job = shown_job("wrong", 2, conditions=[dict(FAILED)])
    ended = {"exitCode": 113, "reason": "Error", "message": json.dumps(last_message)}
    pods = []
    for index, state in enumerate([{"terminated": ended}, {"running": {}}]):
        pod = shown_pod(state, index, "wrong", phase="Running")
        pod["metadata"]["name"] = f"wrong-{index}-x7k2p"
        containers = [{"name": name} for name in (*beside, "node")]
        pod["spec"] = {"nodeName": f"n{index + 1}", "containers": containers}
        others = [{"name": name, "state": {"running": {}}} for name in beside]
        pod["status"]["containerStatuses"][:0] = others
        pods.append(pod)
    if beside:
        job["status"] = {}  # its pods do not end
    items = {"items": [job, *pods]}
    return {"get jobs.batch,pods": items, "get pods": {"items": pods}}


def succeeded():
    """A cluster on which the run `wrong` has succeeded before its first pod could be reached."""
    plain = {"run_id": "wrong", "state": "succeeded", "exit_code": 0, "attempts": 1}
    answers = on_cluster({**plain, "restarts_spent": 0, "elapsed_s": 3.2})
    answers["get jobs.batch,pods"]["items"][0]["status"]["conditions"][0]["type"] = "Complete"
    return answers


def did_not_come(why):
    """What the first pod leaves of a run whose second pod it never reached."""
    report = {
        "error": "only 1 of 2 pods came within 600 s",
        "at": "wrong-1",
        "because": [f"wrong-1 ({why})"],
        "hint": "`kubectl describe pod wrong-1` tells what it waits for; a longer wait: --join-timeout 1200s",
    }
    plain = {"run_id": "wrong", "state": "failed", "exit_code": 6, "attempts": 0}
    return {**plain, "restarts_spent": 0, "elapsed_s": 600.0, "report": report}


DENIES = {
    "kind": "NetworkPolicy",
    "metadata": {"name": "default-deny"},
    "spec": {"podSelector": {}},
}


# What `kubernetes/node/start.py` leaves, see `unit/kubernetes/node/test_start.py`.
LEFT_BY_OLD_PYTHON = {
    "error": "the image's Python is too old for muster",
    "because": "/usr/bin/python3 is 3.9.2",
    "hint": "take an image with Python 3.11 or later, or set `python` of the site to another interpreter of it",
}
LEFT_WITHOUT_DISK = {
    "error": "the pod can't write to its own disk",
    "because": "/scratch belongs to another user than 1234",
    "hint": "`run_as` of the site sets the user",
}


def may_not(verb, kind, group=""):
    """What the cluster says of a verb that a Role does not have."""
    return (
        f'Error from server (Forbidden): {kind}{f".{group}" * bool(group)} is forbidden: {USER} cannot {verb} resource "{kind}"'
        f' in API group "{group}" in the namespace "research"\n'
    )


def claim_for(mode):
    return {"persistentvolumeclaim": {"spec": {"accessModes": [mode]}}}


def case(cluster=None, words="", **site):
    """What the cluster answers, more words of the command, and keys of the site."""
    return site, words, cluster or {}


def refused(word, stderr, words="", **site):
    """The same for a cluster that refuses the command with this word."""
    return case({"refuse": {word: [1, stderr]}}, words, **site)


def apart(why, answers, beside=()):
    """The same for a run whose pods did not reach each other."""
    ended = on_cluster(did_not_come(why), beside=beside)
    return case({"answers": {**answers, **ended}}, "--nodes 2")


# Topic: name of the case.
TOPICS = {
    "cluster": {
        "no_configuration": refused("current-context", "error: current-context is not set\n"),
        "unknown_context": refused(
            "get",
            'error: context "nosuch" does not exist\n',
            context="nosuch",
            namespace="research",
        ),
        "unreadable_configuration": refused(
            "config",
            "error: error loading config file \"/home/user/.kube/config\": yaml: line 1: did not find expected ',' or ']'\n",
        ),
        "expired_credentials": refused(
            "get namespace", "error: You must be logged in to the server (Unauthorized)\n"
        ),
        "missing_login_plugin": refused(
            "get namespace",
            "Unable to connect to the server: getting credentials: exec: executable no-such-login-plugin not found\n\n"
            "It looks like you are trying to use a client-go credential plugin that is not installed.\n",
        ),
        "server_that_is_down": refused(
            "get namespace",
            discovery(f'Get \\"https://127.0.0.1:1/api?timeout=5s\\": {DOWN}')
            + "The connection to the server 127.0.0.1:1 was refused - did you specify the right host or port?\n",
        ),
        "server_without_an_address": refused(
            "get namespace",
            discovery(f'Get \\"https://no-such-host.invalid:6443/api\\": {NO_HOST}')
            + f"Unable to connect to the server: {NO_HOST}\n",
        ),
        "unknown_namespace": refused(
            "get namespace",
            'Error from server (NotFound): namespaces "reserch" not found\n',
            namespace="reserch",
        ),
        "no_kueue": refused(
            "localqueues",
            'error: the server doesn\'t have a resource type "localqueues"\n',
            queue="gpus",
        ),
        "misspelled_queue": case({"queues": ["gpus", "night"]}, queue="gpu"),
        "queue_in_a_namespace_without": case(queue="gpus"),
    },
    "refused": {
        "no_right_to_create": refused(
            "create", forbidden("secrets", "secrets", "services", "jobs")
        ),
        "no_right_to_create_one": refused("create", forbidden("secrets")),
        "quota_of_jobs": refused(
            "create",
            'Error from server (Forbidden): error when creating "$FILE": jobs.batch "$RUN" is forbidden: exceeded quota: gpus,'
            " requested: count/jobs.batch=1, used: count/jobs.batch=2, limited: count/jobs.batch=2\n",
        ),
        "field_that_the_cluster_does_not_know": refused(
            "create",
            'Error from server (BadRequest): error when creating "$FILE": Job in version "v1" cannot be handled as a Job:'
            ' strict decoding error: unknown field "spec.template.spec.noSuchField"\n',
            directives=["spec.template.spec.noSuchField=1"],
        ),
        "gang_that_the_cluster_does_not_know": refused(
            "create",
            'error: error validating "$FILE": error validating data: ValidationError(Job.spec): unknown field "scheduling" in'
            " io.k8s.api.batch.v1.JobSpec; if you choose to ignore these errors, turn validation off with --validate=false\n",
            gang="native",
        ),
        "webhook_that_does_not_answer": refused(
            "create",
            'Error from server (InternalError): error when creating "$FILE": Internal error occurred: failed calling webhook'
            ' "mjob.kb.io": failed to call webhook: Post "https://kueue-webhook-service.kueue-system.svc:443/mutate-batch-v1-job'
            '?timeout=10s": no endpoints available for service "kueue-webhook-service"\n',
        ),
        "webhook_whose_program_has_ended": refused(
            "create",
            'Error from server (InternalError): error when creating "$FILE": Internal error occurred: failed calling webhook'
            ' "mjobset.kb.io": failed to call webhook: Post "https://jobset-webhook-service.jobset-system.svc:443/mutate-jobset-x-k8s-io'
            '-v1alpha2-jobset?timeout=10s": dial tcp 10.91.0.254:9444: connect: connection refused\n',
        ),
        "name_too_long_for_the_cluster": refused(
            "create",
            'The Job "$RUN" is invalid: spec.template.spec: Invalid value: "$RUN-10": will not able to create pod with invalid DNS label:'
            " must be no more than 63 characters\n",
        ),
        "name_that_is_there": refused(
            "create",
            'Error from server (AlreadyExists): error when creating "$FILE": jobs.batch "$RUN" already exists\n',
        ),
    },
    "site": {
        "no_image": case(image=None),
        "misspelled_pull_policy": case(pull_policy="IfNotPresnt"),
        "misspelled_gang": case(gang="volcanoo"),
        "misspelled_level": case(pod_security="restriced"),
        "memory_without_unit": case(memory="lots"),
        "claim_without_path": case(claims=["team-home"]),
        "toleration_with_an_unknown_effect": case(tolerations=["gpu:NoSchedul"]),
        "device_that_is_no_number": case(devices={"rdma/ib": "one"}),
        "directive_without_value": case(directives=["template.spec.x"]),
        "volume_that_is_for_one_pod": case(
            {"answers": claim_for("ReadWriteOncePod")},
            "--nodes 2",
            claims=["team-home:/home/team"],
        ),
        "volume_of_one_node_for_pods_that_stay_apart": case(
            {"answers": claim_for("ReadWriteOnce")},
            "--nodes 2",
            claims=["team-home:/home/team"],
            host_network=True,
        ),
        "volume_of_one_node": case(
            {
                "answers": claim_for("ReadWriteOnce"),
                "refuse": {"create": [1, forbidden("jobs").replace("$FILE", "job.sh")]},
            },
            "--nodes 2",
            claims=["team-home:/home/team"],
        ),
        "volume_that_is_not_there": refused(
            "persistentvolumeclaim",
            'Error from server (NotFound): persistentvolumeclaims "team-hom" not found\n',
            claims=["team-hom:/home/team"],
        ),
        "name_too_long": case(words=f"--name {'a' * 64}"),
    },
    "pods": {
        "image_without_python": case({"pods": "job-pods-command-not-found"}),
        "image_for_another_processor": case(
            {
                "pods": "job-pods-exec-format",
                "logs": "exec /opt/conda/bin/python3: exec format error\n",
            }
        ),
        "user_who_may_not_run_python": case({"pods": "job-pods-other-user"}),
        "level_that_forbids": case(
            {"pods": "job-pods-podsecurity", "events": "events-podsecurity", "run": "run-ps"}
        ),
        "quota_of_pods": case(
            {"pods": "job-pods-quota-none", "events": "events-quota-none", "run": "run-q0"},
            "--join-timeout 1",
        ),
        "no_room": case({"pods": "job-pods-unschedulable"}, "--join-timeout 1"),
        "image_with_an_old_python": case({"answers": on_cluster(LEFT_BY_OLD_PYTHON)}, "--nodes 2"),
        "disk_of_another_user": case({"answers": on_cluster(LEFT_WITHOUT_DISK)}, "--nodes 2"),
        "claim_that_is_not_bound": case({"pods": "job-pods-claim-unbound"}, "--join-timeout 1"),
        "mount_that_is_missing": case(
            {"pods": "job-pods-mounting", "events": "events-mounting", "run": "run-mount"},
            "--join-timeout 1",
        ),
    },
    "rights": {
        "no_right_to_get_jobs_and_pods": refused(
            "get jobs.batch,pods", may_not("list", "jobs", "batch"), "--join-timeout 1"
        ),
        "no_right_to_list_pods": refused(
            "get jobs.batch,pods", may_not("list", "pods"), "--join-timeout 1"
        ),
        "no_right_to_patch": case(
            {
                "pods": "job-pods-unschedulable",
                "refuse": {
                    "patch": [1, may_not("patch", "secrets") + may_not("patch", "services")]
                },
            },
            "--join-timeout 1",
        ),
        "no_right_to_delete": case(
            {
                "pods": "job-pods-unschedulable",
                "refuse": {"delete": [1, may_not("delete", "jobs", "batch")]},
            },
            "--join-timeout 1",
        ),
    },
    "ends": {
        "record_that_did_not_come": case({"answers": succeeded()}, "--nodes 2"),
        "record_that_stayed_on_a_volume": case(
            {"answers": succeeded()},
            "--nodes 2",
            claims=["team:/home/team"],
            home="/home/team/muster",
        ),
        "record_of_a_run_that_failed": case(
            {"answers": on_cluster({**did_not_come("it was lost"), "attempts": 1})}, "--nodes 2"
        ),
    },
    "apart": {
        "names_that_dns_never_knows": apart(
            "its name is not known", {"get services": "service/wrong\n"}
        ),
        "network_policy_that_denies": apart(
            "no answer in time", {"networkpolicies": {"items": [DENIES]}}
        ),
        "proxy_of_a_mesh": apart(
            "no answer in time", {"networkpolicies": {"items": []}}, beside=("istio-proxy",)
        ),
    },
}
CASES = {name: (topic, *case) for topic, cases in TOPICS.items() for name, case in cases.items()}
EXIT_CODES = {
    **dict.fromkeys((*TOPICS["cluster"], *TOPICS["refused"], *TOPICS["pods"]), 14),
    **dict.fromkeys(TOPICS["site"], 2),
    **dict.fromkeys(TOPICS["apart"], 6),
    **dict.fromkeys(TOPICS["ends"], 15),
    "record_of_a_run_that_failed": 6,
    **dict.fromkeys(TOPICS["rights"], 14),
    "no_right_to_delete": 6,
    "no_right_to_patch": 6,
    **dict.fromkeys((name for name in TOPICS["site"] if name.startswith("volume_")), 14),
    **{
        name: 6
        for name, case in TOPICS["pods"].items()
        if "--join-timeout" in case[1] or name == "image_for_another_processor"
    },
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What every run brings along is packed once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def place(tmp_path, cache):
    """A working directory with a script, and a home."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "cache").symlink_to(cache)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text("raise SystemExit('this must never run')\n")
    return tmp_path


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f'"{k}" = {toml(v)}' for k, v in value.items()) + " }"
    return json.dumps(value)


def run(place, site, words, case, *, path=None, command=None):
    """Run `muster run --on kube`, or another command, against a pretended cluster; return transcript and exit code."""
    keys = {k: v for k, v in {**SITE, **site}.items() if v is not None}
    lines = "".join(f"{key} = {toml(value)}\n" for key, value in keys.items())
    (place / "work" / "muster.toml").write_text(f"[engines.kube]\n{lines}")
    (place / "case.json").write_text(json.dumps(case))
    shown = command or f"run --on kube --run-id wrong {words} train.py".replace("  ", " ")
    keep_package(place / "home")
    if "--name" in words:
        shown = shown.replace("--run-id wrong ", "")
    env = muster_env(place / "home", FAKE_KUBECTL=str(place / "case.json"))
    env["PATH"] = path or f"{FAKES}:{os.environ['PATH']}"
    del env["MUSTER_ON"]
    done = run_muster(*shown.split(), env=env, cwd=place / "work", limit_s=60)
    assert done.stdout == ("wrong\n" if words == "--detach" else "")
    said = done.stderr.replace(str(place), "$TMP")
    # The page is made, or where that takes too long the command that makes it is named.
    said = re.sub(r"^muster: report: .*", "muster: report: $PAGE", said, flags=re.MULTILINE)
    extra = "".join(f"{key} = {toml(value)}\n" for key, value in site.items() if value is not None)
    return f"{extra}$ muster {shown}\n{said}exit {done.returncode}\n", done.returncode


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_said_in_these_words_and_nothing_is_left_there(name, place, golden):
    topic, site, words, case = CASES[name]

    text, code = run(place, site, words, case)

    assert code == EXIT_CODES[name]
    golden(f"kubernetes/{topic}.txt", name, text)
    log = place / "case.json.log"
    asked = log.read_text() if log.exists() else ""
    # But for what another run has under this name, where all is forbidden, and a record that is nowhere else.
    leaves = " create " in asked and " delete " not in asked.rstrip().splitlines()[-1]
    nothing_made = name in ("name_that_is_there", "no_right_to_create")
    assert leaves == (nothing_made or topic == "ends"), asked


def test_a_group_that_a_cluster_refuses_is_told_with_what_it_said_and_what_helps(place):
    lines = ("workflow:", "  name: one", "  tasks:", "  - name: a", '    command: ["true"]')
    (place / "work" / "one.yaml").write_text("\n".join(lines))
    case = TOPICS["refused"]["webhook_whose_program_has_ended"][2]

    text, code = run(place, {}, "", case, command="submit --on kube --run-id wrong one.yaml")

    assert code != 0
    assert "\nerror: group a-group is FAILED_START_ERROR: an extension of the cluster" in text
    assert "\n  because: Error from server (InternalError): Internal error occurred" in text
    assert "\nhint: try again in a minute" in text


def order_in(run_dir):
    return json.loads((run_dir / "pods" / "order.json").read_text())


def test_a_run_in_pods_is_started_again_as_it_was_on_the_snapshots_of_its_volume(place):
    site = {"claims": ["team:/home/team"], "home": "/home/team/muster"}
    case = TOPICS["pods"]["no_room"][2]
    run(place, site, "--nodes 3 --warn 9 --join-timeout 1", case)
    (place / "work" / "train.py").write_text("raise SystemExit('this is the code of now')\n")

    text, code = run(place, site, "", case, command="restart wrong")

    assert code == EXIT_CODES["no_room"]
    assert "no pod came within 1 s (--join-timeout)" in text
    (again,) = [one for one in (place / "home" / "runs").iterdir() if one.name != "wrong"]
    order = order_in(again)
    assert f"run {again.name[16:]} is job lab/research/{order['job']} of kubernetes" in text
    assert (order["continues"], order["run_id"]) == ("wrong", again.name)
    assert (order["num_pods"], order["warn_s"], order["start_limit_s"]) == (3, 9.0, 1.0)
    assert order["code_sha"] != order_in(place / "home" / "runs" / "wrong")["code_sha"]
    assert (place / "case.made").read_text() == order["job"]


def test_a_run_that_was_found_on_its_cluster_is_started_again_where_it_was_submitted(place):
    run(place, {}, "--join-timeout 1", TOPICS["pods"]["no_room"][2])
    path = place / "home" / "runs" / "wrong" / "job.json"
    noted = json.loads(path.read_text())
    path.write_text(json.dumps({k: noted[k] for k in ("engine", "job_id")}))
    (path.parent / "pods" / "code.tar.gz").unlink()

    text, code = run(place, {}, "", {}, command="restart wrong")

    assert code == 2
    assert text.splitlines()[1:-1] == [
        "error: the run wrong was submitted on another machine",
        "  at: $TMP/home/runs/wrong",
        "  because: its code, and what it asked of the cluster, are there",
        "hint: restart it there, or type its command here",
    ]


def test_a_run_whose_snapshots_went_with_its_pods_is_not_started_again(place):
    case = TOPICS["pods"]["no_room"][2]
    run(place, {}, "--join-timeout 1", case)
    folder = "/scratch/muster/runs/wrong/snapshots"
    saved = {"event": "saved", "step": 60, "saved": 60, "folder": folder}
    (place / "home" / "runs" / "wrong" / "training.jsonl").write_text(f"{json.dumps(saved)}\n")
    (place / "case.json.log").unlink()

    text, code = run(place, {}, "", case, command="restart wrong")

    assert code == 2
    assert text.splitlines()[1:] == [
        "error: the snapshots of wrong are gone: the last was of step 60",
        f"  at: {folder}",
        "  because: they were on the disks of its pods and went with them",
        "hint: type its command again to start over at step 0; `claims` and `home` of the site keep runs on a volume",
        "exit 2",
    ]
    assert not (place / "case.json.log").exists()


def test_a_run_whose_job_was_deleted_has_ended_and_says_what_is_left(place, golden):
    """A cluster answers for a Job that is gone with an empty List and exit code 0: recorded from Kubernetes 1.36.2."""
    run(place, {}, "--detach", {"pods": "job-pods-running"})
    submitted = place / "home" / "runs" / "wrong" / "job.json"
    os.utime(submitted, (1_700_000_000, 1_700_000_000))

    text, code = run(place, {}, "", {}, command="wait wrong")

    assert code == 143
    golden("kubernetes/ends.txt", "job_that_was_deleted", text)


def test_a_machine_without_kubectl_is_told_so(place, golden):
    text, code = run(place, {}, "", {}, path="/nonexistent")

    assert code == 14
    golden("kubernetes/cluster.txt", "no_kubectl", text)


@pytest.mark.parametrize("name", CASES)
def test_every_message_on_a_cluster_has_the_form_of_a_message(name):
    text = read_sections(f"kubernetes/{CASES[name][0]}.txt")[name]
    begins = re.search(r"^error: ", text, re.MULTILINE)
    lines = text[begins.start() :].rstrip("\n").split("\n")[:-1]
    lines = [line for line in lines if not line.startswith("muster: ")]
    heads = [line.split(":")[0] for line in lines if not line.startswith("    ")]
    heads = [head for head in heads if head not in ("next", "  retries", "  log")]
    assert heads == ["error", "  at", *(["  because"] if "  because" in heads else []), "hint"]


def test_no_case_of_a_cluster_is_left_over_from_a_message_that_is_gone():
    found = {
        path.stem: set(read_sections(f"kubernetes/{path.name}"))
        for path in (GOLDEN / "kubernetes").glob("*.txt")
    }
    found["cluster"].remove("no_kubectl")
    found["ends"].remove("job_that_was_deleted")
    assert found == {topic: set(cases) for topic, cases in TOPICS.items()}
