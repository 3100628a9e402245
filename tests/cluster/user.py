"""A user of a cluster: what he types on its login node, and what he finds in the folders of his runs."""

import json

from kit.command import run_muster
from kit.waiting import wait_until


class User:
    """Runs `muster` on a login node, in a folder of his own with a home below it, to its end.

    Where nothing else is said, his run is `r`.

    Attributes:
        folder: Where he is; the hosts see it, too.
        env: What a command needs to find the same runs.
    """

    def __init__(self, folder, env):
        self.folder, self.env = folder, env

    def __call__(self, *words, limit_s=120.0, **more):
        return run_muster(*words, env=self.env | more, cwd=self.folder, limit_s=limit_s)

    def script(self, text):
        """Write the training script."""
        (self.folder / "train.py").write_text(text)

    def status(self, run="r", **more):
        """Return what `muster status` says of a run."""
        return json.loads(self("status", run, "--json", **more).stdout)

    def state(self, run="r"):
        return self.status(run)["state"]

    def states(self):
        """Return the states of the members of the sweep `s`."""
        return [member["state"] for member in self.status("s")["members"]]

    def path(self, name, run="r"):
        """Return a file of a run."""
        return self.folder / "home/runs" / run / name

    def read(self, name, run="r"):
        """Return what is in a file of a run."""
        return json.loads(self.path(name, run).read_text())

    def said(self):
        """Return what the job has written so far."""
        path = self.path("job.log")
        return path.read_text() if path.exists() else ""

    def job(self):
        return self.read("job.json")["job_id"]

    def links(self):
        """Return the jobs of the run, one after the other."""
        return self.read("links.json")["links"]

    def wait_for_links(self, number, limit_s=120.0):
        path = self.path("links.json")
        wait_until(lambda: path.exists() and len(self.links()) == number, f"{number} jobs", limit_s)

    def log(self, rank=0, attempt=0):
        """Return the file of what a rank says."""
        return self.path(f"logs/main/train/attempt-{attempt}/rank-{rank}.log")

    def wait_for(self, text, rank=0, attempt=0, limit_s=120.0):
        """Wait until a rank has said it."""
        path = self.log(rank, attempt)
        what = f"{text!r} of rank {rank} in attempt {attempt}"
        wait_until(lambda: path.exists() and text in path.read_text(), what, limit_s)
