"""What a test does on the cluster: it starts a run of two pods, hurts it, and reads what the user has of it."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from datetime import datetime
from pathlib import Path

from kit.waiting import wait_until
from lab.kubernetes.cluster import GPU, GPUS
from lab.kubernetes.user import NAMESPACE
from torchmuster.core import proc

TRAIN = Path(__file__).with_name("train.py")
RUN_LIMIT_S = 150.0
NOTES: list[
    tuple[str, float]
] = []  # what was measured, and its seconds, for the end of the session


class Bench:
    """One test's runs.

    Attributes:
        shared: The folder that all pods and this process see.
        said: What the terminal has shown of the run that was started last; kept also when it has ended.
    """

    def __init__(self, cluster, user):
        self.cluster, self.user = cluster, user
        self.shared = user.folder / "shared"
        self._outputs = user.folder / "said"
        shutil.rmtree(self._outputs, ignore_errors=True)
        self._outputs.mkdir()
        self._running = []
        self.run_id = None
        for path in self.shared.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        cluster.hidden.unlink(missing_ok=True)
        self.other_home = user.folder / "other-home"
        for home in (user.home, self.other_home):
            shutil.rmtree(home, ignore_errors=True)
        shutil.copy(TRAIN, user.folder)
        self.site()

    def site(self, **keys):
        """Write the site; the keys are those of this test."""
        given = {"claims": [f"shared:{self.shared}"], "memory": "2Gi", **keys}
        self.user.write_site(**{key: value for key, value in given.items() if value is not None})

    def start(self, *options, nodes=2, run_id="r"):
        """Start the training on two pods, one rank for each; return the process."""
        words = ["run", "--on", "kubernetes", "--nodes", str(nodes), "--nproc-per-node", "1"]
        return self.start_words(run_id, *words, *options, TRAIN.name, str(self.shared))

    def start_words(self, run_id, *words, env=()):
        """Start `muster WORDS` as the run of this name, with more variables; return the process."""
        self.run_id = run_id
        words = [words[0], "--run-id", run_id, *words[1:]]
        with (self._outputs / run_id).open("wb") as out:
            silent = subprocess.DEVNULL
            process = self.user.start(words, stdin=silent, stdout=out, stderr=out, env=dict(env))
        self._running.append(process)
        return process

    @property
    def said(self):
        """Return what the terminal shows until now."""
        return self.said_of(self.run_id) if self.run_id is not None else ""

    def said_of(self, run_id):
        """Return what the terminal shows of a run until now."""
        path = self._outputs / run_id
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_said(self, text, limit_s=RUN_LIMIT_S, run_id=None):
        """Wait until the terminal shows a text, of the last run or another one."""
        wait_until(lambda: text in self.said_of(run_id or self.run_id), f"`{text}`", limit_s)

    def wait_up(self, *, attempt=0, limit_s=RUN_LIMIT_S, process=None):
        """Wait until all ranks train, in this attempt or a later one; `process` is that of a run before the last."""

        def up():
            has_ended = (process or self._running[-1]).poll() is not None
            is_up = self._is_up(attempt)
            assert is_up or not has_ended, f"it ended before attempt {attempt}"
            return is_up

        wait_until(up, f"attempt {attempt}", limit_s)

    def train(self, *options):
        """Start the run `r`; return its process when all ranks train."""
        process = self.start(*options)
        self.wait_up()
        return process

    def end_well(self, process):
        """Let the training end well, and `muster run` with it."""
        self.stop()
        assert self.end(process) == 0

    def must(self, *words, **more):
        """Run `muster WORDS`, which has to succeed; return what it said."""
        code, said = self.user.run(*words, **more)
        assert code == 0, said
        return said

    def _is_up(self, attempt):
        found = [self.rank(rank) for rank in (0, 1)]
        return all(one is not None and one["attempt"] >= attempt for one in found)

    def rank(self, number):
        """Return what a rank has written last: its attempt, its pid in its pod, its pod's host name; None before."""
        path = self.shared / f"up-{number}"
        if not path.exists():
            return None
        attempt, pid, host = path.read_text().split()
        return {"attempt": int(attempt), "pid": int(pid), "host": host}

    def step(self):
        """Return the last step."""
        return int((self.shared / "step").read_text())

    def stop(self):
        """Let the training end well."""
        (self.shared / "stop").touch()

    def end(self, process, limit_s=RUN_LIMIT_S):
        """Wait for the end of `muster run`; return its exit code."""
        return process.wait(limit_s)

    @property
    def run_dir(self):
        """Return the run directory of the user."""
        return self.user.home / "runs" / self.run_id

    def result(self, home=None):
        """Return the result, as it is in the user's home or another one."""
        run_dir = (home or self.user.home) / "runs" / self.run_id
        return json.loads((run_dir / "result.json").read_text())

    def events(self, name):
        """Return the events of this name."""
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == name]

    def attempts(self):
        """Return when each attempt began, in seconds since 1970."""
        return [_seconds(event["time"]) for event in self.events("attempt_started")]

    def begun_at(self):
        """Return the step at which the last attempt began."""
        return int(re.findall(r"begins at step (\d+)", self.said)[-1])

    def note_next_attempt(self, what, since):
        """Keep how long after a time, in seconds since 1970, the last attempt began; return it."""
        seconds = self.attempts()[-1] - since
        NOTES.append((f"{what}: the next attempt", seconds))
        return seconds

    def note_said(self, what, text, since):
        """Wait until the terminal shows a text, and keep how long after a time, in seconds since 1970, it did."""
        self.wait_said(text)
        NOTES.append((f"{what}: said", time.time() - since))

    def note_ended(self, what, process, since):
        """Wait for the end of a run, and keep how long after a time, in seconds since 1970, it came; return its exit code."""
        code = self.end(process)
        NOTES.append((f"{what}: the end", time.time() - since))
        return code

    def wait_running(self, number=2):
        """Wait until the containers of so many pods run; return when the last one began, in seconds since 1970."""
        begun = wait_until(lambda: self._begun(number), f"{number} running pods", RUN_LIMIT_S)
        return max(map(_seconds, begun))

    def _begun(self, number):
        pods = self.user.objects("pods")
        containers = [one for pod in pods for one in pod["status"].get("containerStatuses", ())]
        begun = [
            one["state"]["running"]["startedAt"] for one in containers if "running" in one["state"]
        ]
        return begun if len(begun) == number else None

    def wait_job(self):
        """Wait until the Job has been made; return when, in seconds since 1970."""
        (job,) = wait_until(lambda: self.user.objects("jobs.batch"), "a Job", RUN_LIMIT_S)
        return _seconds(job["metadata"]["creationTimestamp"])

    def ways_to_pods(self, process):
        """Return the pids of the `kubectl port-forward`s below a client."""
        found, inner = set(), [process.pid]
        while inner:
            children = [child for pid in inner for child in proc.children_of(pid)]
            found |= {pid for pid in children if _is_way(pid)}
            inner = children
        return found

    def wait_nothing_left(self):
        """See that a run that has ended has removed its objects, and wait until the cluster has ended its pods."""
        assert not self.user.objects("jobs.batch,services,secrets")
        self.wait_empty()

    def wait_empty(self):
        """Wait until nothing of the user's runs is on the cluster."""
        wait_until(lambda: not self.user.objects(), "an empty cluster", RUN_LIMIT_S)

    def condition(self, kind):
        """Return a condition of the Job; None where it is not true."""
        for job in self.user.objects("jobs.batch"):
            for one in job.get("status", {}).get("conditions", []):
                if (one["type"], one["status"]) == (kind, "True"):
                    return one
        return None

    def pods(self):
        """Return the pods of the run by their index: those that have not ended, and that nobody takes away."""
        found = {}
        for pod in self.user.objects("pods"):
            index = pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
            has_ended = pod["status"]["phase"] in ("Failed", "Succeeded")
            if not has_ended and "deletionTimestamp" not in pod["metadata"]:
                found[int(index)] = pod
        return found

    def uids(self):
        """Return the uids of the run's pods by their index."""
        return {index: pod["metadata"]["uid"] for index, pod in self.pods().items()}

    def pod_of_rank(self, number):
        """Return the name of the pod in which a rank is, and the node."""
        index = int(self.rank(number)["host"].rsplit("-", 1)[1])
        pod = self.pods()[index]
        return pod["metadata"]["name"], pod["spec"]["nodeName"]

    @property
    def whole_nodes(self):
        """Return the `devices` of a pod that has a node for itself."""
        return {GPU: GPUS}

    def kill_container(self, host):
        """Kill the first process of a pod's container."""
        pod = next(p for p in self.pods().values() if p["metadata"]["name"].startswith(f"{host}-"))
        processes = self.cluster.processes_in_pods(pod["spec"]["nodeName"])
        uid = pod["metadata"]["uid"]
        (first,) = [pid for pid in processes if is_first_of(pid, uid)]
        os.kill(first, signal.SIGKILL)

    def create(self, thing):
        """Make an object in the user's namespace."""
        place = {**thing["metadata"], "namespace": NAMESPACE}
        self.cluster.create({**thing, "metadata": place})

    @contextlib.contextmanager
    def without_rule(self, resource):
        """Take a rule from the user's Role for a while."""
        self.user.give_role(without=resource)
        try:
            yield
        finally:
            self.user.give_role()

    def in_pod(self, pod, *words):
        """Run a command in a pod as the administrator."""
        return self.cluster.kubectl("exec", pod, "-n", NAMESPACE, "--", *words)

    def kubectl(self, *words):
        """Run kubectl in the user's namespace, as the administrator."""
        return self.cluster.kubectl("-n", NAMESPACE, *words)

    def close(self):
        """End what still runs."""
        for process in self._running:
            if process.poll() is None:
                process.kill()
                process.wait()
        # Before their Jobs, which they would make again; most clusters have none.
        words = ("delete", "jobsets.jobset.x-k8s.io", "--all", "--wait=false")
        self.cluster.try_kubectl("-n", NAMESPACE, *words)
        self.kubectl("delete", "jobs.batch,services,secrets", "--all", "--wait=false")


def _seconds(time_text):
    return datetime.fromisoformat(time_text).timestamp()


def _is_way(pid):
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return words[0].endswith(b"kubectl") and b"port-forward" in words


def is_first_of(pid, pod):
    """Say whether a process is the first one of a container of a pod, by the pod's uid."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        group = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False
    return pod in group and re.search(r"^NSpid:.*\b1$", status, re.MULTILINE) is not None
