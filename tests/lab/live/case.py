"""Faults that are really made on the hosts of a lab, each with the one right answer.

    @fault("firewall", by="explain", quick=True)
    def firewall_drops_the_endpoint(bench):
        bench.lab.deny("n1", "tcp dport 29500")
        return bench.explain(bench.torchrun(limit_s=30))

A fault's function makes the fault and returns what `muster doctor` said before the job (`Told` of
`bench.doctor`) or what `muster explain` said after it. `test_live_faults.py` runs all of them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kit.command import MUSTER, SOURCE
from kit.waiting import wait_until
from lab.netlab import Host
from lab.trains import TORCHRUN, Together, muster_environment

DOCTOR_LIMIT_S = 120.0
FAULTS: list["Fault"] = []
# Names as a careful cluster has them. `lab.netlab` by itself makes careless ones: each calls itself 127.0.1.1.
NAMES = ("10.10.0.1 n1", "10.10.0.2 n2")
CAREFUL = (Host("n1", hosts=NAMES), Host("n2", hosts=NAMES))


@dataclass(frozen=True)
class Told:
    """What was answered.

    Attributes:
        first: The first cause, as its word; "healthy" when there is none.
        is_sure: Whether it was said without doubt: confidence high, or a finding of level failure.
        others: The causes of the same rank as the first that were named behind it.
        text: All of it, for a test that fails.
        notes: What `explain` said beside the causes.
    """

    first: str
    is_sure: bool
    others: tuple[str, ...]
    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Fault:
    """A fault to make.

    Attributes:
        right: The causes that are right as the first.
        quick: Whether `make test-all` makes it too; `make lab` makes all.
        hosts: The hosts of a lab of its own; None for the two careful ones that all share.
    """

    name: str
    right: tuple[str, ...]
    make: Callable[["Bench"], Told]
    quick: bool
    hosts: tuple[Host, ...] | None


def fault(*right, quick=False, hosts=None):
    """Enter a function in the list of faults; its name is the fault's."""

    def enter(make):
        FAULTS.append(Fault(make.__name__, right, make, quick, hosts))
        return make

    return enter


def chosen(entries):
    """Return faults or set-ups as parameters; those that are not quick are for `make lab`."""
    return [
        pytest.param(one, id=one.name, marks=() if one.quick else pytest.mark.lab)
        for one in entries
    ]


class Bench:
    """Two hosts, a folder that both see, and the commands that a person would type."""

    def __init__(self, lab, folder):
        self.lab, self.folder = lab, folder
        self.script = lab.shared / "train.py"

    def torchrun(self, *words, before=(), **options):
        """Run torchrun on each host at once and return the files of what they said.

        Args:
            words: Its arguments, script and all; `{host}` and `{place}` are filled in. None given: the
                usual ones for two hosts and `train.py`.
            before: A command that torchrun's own words are added to, like `("sh", "-c", "...; exec \\"$@\\"", "-")`.
            options: Those of `together`.
        """
        words = words or (*self.usual(), str(self.script))
        return self.together([*before, *TORCHRUN, *words], **options)

    def usual(
        self, *, num_nodes=2, per_node=1, endpoint="n1:29500", rdzv_id="7", join_s=15, read_s=12
    ):
        """Return the usual arguments of torchrun, with waits of seconds instead of minutes."""
        size = (f"--nnodes={num_nodes}", f"--nproc-per-node={per_node}")
        where = ("--rdzv-backend=c10d", f"--rdzv-id={rdzv_id}", f"--rdzv-endpoint={endpoint}")
        waits = f"--rdzv-conf=join_timeout={join_s},read_timeout={read_s}"
        return (*size, *where, "--local-addr={address}", waits)

    def together(
        self, argv, *, each=None, hosts=None, limit_s=60.0, env=None, until=None, once=None
    ):
        """Run a command on each host at once and return the files of what they said.

        Args:
            argv: Its words.
            each: More words by host, right before the last one: of an option given twice they count.
            hosts: Default all.
            limit_s: Those that run longer are killed.
            env: Added to the environment.
            until: Ends all of them when one has said this.
            once: What one has to say, and what is done then.
        """
        hosts = hosts or list(self.lab.hosts)
        run = Commands(self.lab, hosts, argv, self.folder, each or {}, env)
        if once:
            wait_until(lambda: any(once[0] in run.said(host) for host in hosts), once[0])
            once[1]()
        run.wait_for(until, limit_s) if until else run.wait(limit_s)
        return [run.files[host] for host in hosts]

    def explain(self, files):
        """Return what `muster explain` says of these logs."""
        argv = [*MUSTER, "explain", "--json", *map(str, files)]
        env = {**os.environ, "PYTHONPATH": str(SOURCE)}
        done = subprocess.run(argv, capture_output=True, text=True, env=env, timeout=60)
        assert done.stdout.startswith("{"), done.stderr
        return self._told_by_explain(json.loads(done.stdout), done.stdout, files)

    def muster(self, *words, limit_s=120.0, env=None, once=None):
        """Do `muster run` over ssh from the laptop, then return what `muster explain last` says of it.

        `once` is as in `together`.
        """
        argv = [*MUSTER, "run", "--hosts", ",".join(self.lab.hosts), *words]
        log = self.folder / "muster.log"
        options = {"env": self._env() | (env or {}), "cwd": self.lab.shared}
        options |= {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with (
            open(log, "wb") as out,
            self.lab.start(self.lab.controller, argv, stdout=out, **options) as client,
        ):
            try:
                if once:
                    wait_until(lambda: once[0] in log.read_text(), once[0])
                    once[1]()
                client.wait(limit_s)
            finally:
                client.kill()
        argv = [*MUSTER, "explain", "--json", "last"]
        told = self.lab.run(self.lab.controller, argv, env=self._env(), cwd=self.lab.shared)
        assert told.stdout.startswith("{"), log.read_text() + told.stderr
        return self._told_by_explain(json.loads(told.stdout), told.stdout, [log])

    def doctor(self, *words, hosts=None):
        """Return what `muster doctor` says of the hosts, asked from the laptop."""
        names = ",".join(hosts or self.lab.hosts)
        argv = [*MUSTER, "doctor", "--hosts", names, "--no-job", "--json", *words]
        done = self.lab.run(
            self.lab.controller, argv, env=self._env(), cwd=self.lab.shared, limit_s=DOCTOR_LIMIT_S
        )
        assert done.stdout.startswith("{"), done.stderr
        said = json.loads(done.stdout)
        findings = [f for f in said["findings"] if f["level"] != "note"]
        top = [f["cause"] for f in findings if f["level"] == findings[0]["level"]]
        first = top[0] if top else "healthy"
        is_sure = bool(findings) and findings[0]["level"] == "failure"
        return Told(first, is_sure, tuple(dict.fromkeys(top[1:])), done.stdout)

    def _env(self):
        return muster_environment(self.lab) | {"MUSTER_SSH": " ".join(self.lab.ssh)}

    def _told_by_explain(self, said, text, files):
        logs = "".join(f"--- {path.name}\n{path.read_text(errors='replace')}" for path in files)
        found = said["found"]
        first = "healthy" if said["healthy"] else found[0]["cause"] if found else "unknown"
        is_sure = bool(found) and found[0]["confidence"] == "high"
        return Told(
            first,
            is_sure,
            tuple(one["cause"] for one in found[1:]),
            text + logs,
            tuple(said["notes"]),
        )


class Commands(Together):
    """Commands on several hosts at once, with words of their own for some."""

    file_name = "{host}.log"

    def __init__(self, lab, hosts, words, folder, each, env):
        self.each = each
        super().__init__(lab, hosts, words, folder, env=env)

    def _start(self, host, words, env):
        place = self.hosts.index(host)
        address = self.lab.address(host, next(iter(self.lab.networks)))
        filled = [
            word.replace("{address}", address).replace("{place}", str(place))
            if word.startswith("-") or "{address}" in word
            else word
            for word in words
        ]
        own = self.each.get(host, ())
        return super()._start(host, [*filled[:-1], *own, *filled[-1:]], env)


def train(*, before="", at_step="", steps=8, timeout_s=20, after=""):
    """Return a script: `steps` times an all-reduce over Gloo, with `before` and `at_step` put in."""
    indented = "\n".join(f"    {line}" for line in at_step.splitlines())
    return f"""
import os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
torch.set_num_threads(1)
RANK = int(os.environ.get("RANK", "0"))
{before}
dist.init_process_group("gloo", timeout=timedelta(seconds={timeout_s}))
for step in range({steps}):
{indented}
    loss = torch.ones(1)
    dist.all_reduce(loss)
    print(f"step {{step}} loss {{loss.item():.3f}}", flush=True)
{after}
dist.destroy_process_group()
"""


PYTHON = sys.executable
