"""A user of the cluster: the rights of the page's Role and no others, a folder with code, and commands as they are typed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import yaml

from kit.command import MUSTER, muster_env
from kit.waiting import wait_until
from lab.kubernetes.images import POD_IMAGE

PAGE = Path(__file__).parents[3] / "docs" / "kubernetes.md"
NAMESPACE = "research"  # that of the page's Role
NAME = "researcher"
SITE = "kubernetes"


class User:
    """Who runs `muster` on a cluster from a folder.

    Attributes:
        folder: Where the user's code is.
        home: Of this user's runs.
    """

    def __init__(self, cluster, folder):
        self.cluster, self.folder, self.home = cluster, folder, folder / "home"
        self._kubeconfig = cluster.user(NAME, NAMESPACE)
        subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": NAME}
        kinds = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        wait_until(self._has_account, "an account in the namespace")
        self.give_role()
        cluster.create(
            {
                **kinds,
                "metadata": {"name": NAME, "namespace": NAMESPACE},
                "roleRef": {**subject, "kind": "Role", "name": _role()["metadata"]["name"]},
                "subjects": [{**subject, "kind": "User"}],
            },
        )

    def _has_account(self):
        words = ("get", "serviceaccount", "default", "-n", NAMESPACE)
        return self.cluster.try_kubectl(*words).returncode == 0

    def give_role(self, without=None):
        """Give the user the Role of the page, but for the rules of one resource."""
        role = _role()
        rules = [rule for rule in role["rules"] if without not in rule["resources"]]
        self.cluster.create({**role, "rules": rules})

    def share(self, name, folder):
        """Make a volume of a folder of every node, which may be the same for all; pods take it by the name."""
        size, modes = {"storage": "1Gi"}, ["ReadWriteMany"]
        common = {"accessModes": modes, "storageClassName": ""}
        self.cluster.create(
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": {**common, "capacity": size, "hostPath": {"path": str(folder)}},
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": {"name": name, "namespace": NAMESPACE},
                "spec": {**common, "resources": {"requests": size}, "volumeName": name},
            },
        )

    def write_site(self, **keys):
        """Write the section of muster.toml; a value is text, a number, or a list of text."""
        site = {"kind": "kubernetes", "image": POD_IMAGE, "python": [sys.executable], **keys}
        lines = [f"{key} = {_toml(value)}" for key, value in site.items()]
        text = "\n".join([f"[engines.{SITE}]", *lines, ""])
        (self.folder / "muster.toml").write_text(text)

    def start(self, words, home=None, **options):
        """Start `muster WORDS` in the folder; return the process (options of `Popen`)."""
        cluster = self.cluster
        environment = muster_env(home or self.home) | cluster.environment(self._kubeconfig)
        environment["PYTHONPATH"] = muster_env("")["PYTHONPATH"]
        argv = cluster.user_argv(["env", "-C", self.folder, *MUSTER, *words])
        return subprocess.Popen(argv, env=environment | options.pop("env", {}), **options)

    def run(self, *words, home=None, limit_s=120):
        """Run `muster WORDS` to its end; return its exit code and what it said, in one text."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with self.start(words, home, stdin=subprocess.DEVNULL, **pipes) as process:
            try:
                said, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, said

    def objects(self, kinds="jobs.batch,services,secrets,pods"):
        """Return what the user's runs have on the cluster."""
        found = self.cluster.get(kinds, "-n", NAMESPACE, "-l", "torchmuster.dev/run")
        return found["items"]


def _role():
    """Return the Role as the page has it."""
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    found = (one for block in blocks for one in yaml.safe_load_all(block))
    return next(one for one in found if one.get("kind") == "Role")


def _toml(value):
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        pairs = [f'"{key}" = {_toml(one)}' for key, one in value.items()]
        return f"{{ {', '.join(pairs)} }}"
    return json.dumps(str(value)) if isinstance(value, str | Path) else str(value).lower()
