"""What a test does on the cluster: it starts a run of two pods, hurts it, and reads what the user has of it."""

import json
import shutil
import subprocess
from pathlib import Path

from kit.waiting import wait_until
from lab.kubernetes.user import NAMESPACE

TRAIN = Path(__file__).with_name("train.py")
RUN_LIMIT_S = 150.0
TASKS = "/proc/{pid}/task/{pid}/children"


class Bench:
    """One test's runs.

    Attributes:
        shared: The folder that all pods and this process see.
        said: What the terminal has shown of the run that was started last; kept also when it has ended.
    """

    def __init__(self, cluster, user):
        self.cluster, self.user = cluster, user
        self.shared = user.folder / "shared"
        self._output = user.folder / "said"
        self._running = []
        self.run_id = None
        for path in self.shared.iterdir():
            path.unlink()
        shutil.rmtree(user.home, ignore_errors=True)
        shutil.copy(TRAIN, user.folder)
        self.site()

    def site(self, **keys):
        """Write the site; the keys are those of this test."""
        given = {"claims": [f"shared:{self.shared}"], "memory": "2Gi", **keys}
        self.user.write_site(**{key: value for key, value in given.items() if value is not None})

    def start(self, *options, nodes=2, run_id="r"):
        """Start the training on two pods, one rank for each; return the process."""
        self.run_id = run_id
        words = ["run", "--on", "kubernetes", "--nodes", str(nodes), "--nproc-per-node", "1"]
        words += ["--run-id", run_id, *options, TRAIN.name, str(self.shared)]
        with self._output.open("wb") as out:
            silent = subprocess.DEVNULL
            process = self.user.start(words, stdin=silent, stdout=out, stderr=out)
        self._running.append(process)
        return process

    @property
    def said(self):
        """Return what the terminal shows until now."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def wait_said(self, text, limit_s=RUN_LIMIT_S):
        """Wait until the terminal shows a text."""
        wait_until(lambda: text in self.said, f"`{text}`", limit_s)

    def wait_up(self, *, attempt=0, num_ranks=2):
        """Wait until all ranks train, in this attempt."""

        def up():
            found = [self.rank(rank) for rank in range(num_ranks)]
            return all(one is not None and one["attempt"] >= attempt for one in found)

        wait_until(up, f"attempt {attempt}", RUN_LIMIT_S)

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

    def result(self):
        """Return the result."""
        return json.loads((self.run_dir / "result.json").read_text())

    def events(self, name):
        """Return the events of this name."""
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [e for e in map(json.loads, lines) if e["event"] == name]

    def pods(self):
        """Return the pods of the run by their index, those that nobody takes away."""
        found = {}
        for pod in self.user.objects("pods"):
            index = pod["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"]
            if "deletionTimestamp" not in pod["metadata"]:
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
        self.kubectl("delete", "jobs.batch,services,secrets", "--all", "--wait=false")
