"""A pretended cluster whose pods really run (`tests/fakes/pods/kubectl`), and a user of it."""

import contextlib
import json
import os
import subprocess
import sys

from cluster.netns import Nodes
from kit import missing
from kit.command import SOURCE, muster_env, run_muster
from kit.namespaces import why_no_networks
from kit.packages import keep_package
from kit.waiting import wait_until

FAKES = SOURCE.parent / "tests" / "fakes" / "pods"
SITE = """
[engines.kube]
kind = "kubernetes"
image = "example.com/team/train:7"
home = "{home}"
python = ["{python}"]
"""


class Lab:
    """A cluster, and a user on one machine; another machine has a `home` of its own."""

    def __init__(self, folder, network):
        self.folder, self.state, self.started = folder, folder / "cluster", []
        self.state.mkdir()
        nodes = [network.argv(number, []) for number in range(1, network.num_nodes + 1)]
        (self.state / "nodes.json").write_text(json.dumps(nodes))
        self.code = folder / "code"
        self.code.mkdir()
        keep_package(folder / "home")
        home = self.state / "scratch" / "muster"
        (self.code / "muster.toml").write_text(SITE.format(home=home, python=sys.executable))

    def env(self, home="home"):
        path = f"{FAKES}:{os.environ['PATH']}"
        return muster_env(self.folder / home, PATH=path, FAKE_CLUSTER=str(self.state))

    def __call__(self, *words, home="home"):
        return run_muster(*words, env=self.env(home), cwd=self.code)

    def popen(self, *words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
        command = [sys.executable, "-m", "torchmuster", *words]
        started = subprocess.Popen(
            command, env=self.env(), cwd=self.code, stdout=stdout, stderr=stderr
        )
        self.started.append(started)
        return started

    def breaks(self, mode):
        """Let `port-forward` break in this way; in none: empty."""
        part = self.state / "forward.part"
        part.write_text(mode)
        part.replace(self.state / "forward")

    def run_dir(self, name="r"):
        return self.folder / "home" / "runs" / name

    def pods(self):
        found = [json.loads(path.read_text()) for path in self.state.glob("*/state.json")]
        return [one for objects in found for one in objects if one["kind"] == "Pod"]

    def ends(self):
        """Return why each pod's container has ended; None for one that runs."""
        states = [one["status"]["containerStatuses"][0]["state"] for one in self.pods()]
        return [state.get("terminated", {}).get("reason") for state in states]

    def jobs(self):
        return sorted(path.parent.name for path in self.state.glob("*/state.json"))


@contextlib.contextmanager
def live_cluster(made, folder, num_nodes=6):
    """Yield what `made` makes of a folder and of a cluster; afterwards all pods have ended."""
    if (reason := why_no_networks()) is not None:
        missing.stop(reason)
    with Nodes(num_nodes) as network:
        lab = made(folder, network)
        try:
            yield lab
        finally:
            for client in lab.started:  # of a test that has failed
                client.kill()
                client.wait()
        for job in lab.jobs():
            (lab.state / job / "deleted").touch()
        wait_until(lambda: not lab.jobs(), "the end of all pods")
