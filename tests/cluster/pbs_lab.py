"""A real OpenPBS on this machine, where `PBS_PREFIX` names an installed one: a server, and hosts in namespaces.

As the lab of Slurm, whose house and links it has: nothing of it is on the host but one temporary folder. The server's data
service runs as Debian's `postgres`, jobs as a user of the lab's own: PBS does not count what root's processes use, and ends
only one group of them. Seen to work with 23.06.06.
"""

import json
import os
from pathlib import Path

from cluster.slurm_lab import LOGIN, SlurmLab
from kit import namespaces
from kit.waiting import wait_until
from kit.world import MACHINE, MACHINE_PATH

PROGRAMS = ("ip", "nsenter", "su")
READY_LIMIT_S = 90.0
UID = 54321
# Where the lab sees its folder: PBS refuses a home below a folder that others may write to, as /tmp.
SPOOL = "/mnt"
CONF = """\
PBS_EXEC={prefix}
PBS_SERVER={login}
PBS_HOME={home}
PBS_START_SERVER={serves}
PBS_START_SCHED={serves}
PBS_START_COMM={serves}
PBS_START_MOM={runs}
PBS_CORE_LIMIT=0
PBS_SCP=/bin/false
"""
MOM = "$clienthost {login}\n$usecp *:/ /\n$enforce mem\n"
# Root may submit; a host that is missed is given up after 10 s instead of five minutes.
SERVER = """\
set server job_history_enable = True
set server flatuid = True
set server acl_roots = root@*
set server scheduler_iteration = 5
set server node_fail_requeue = 10
"""
NODE = "create node {name}\nset node {name} resources_available.ncpus = 8\n"


def why_not():
    """Return why no lab can be made; None when one can."""
    prefix = MACHINE.get("PBS_PREFIX", "")
    if not os.access(f"{prefix}/sbin/pbs_mom", os.X_OK):
        return "PBS_PREFIX names no installed OpenPBS"
    return namespaces.why_not("a PBS lab", PROGRAMS, "mnpuif", "ip link add lab0 type bridge")


class PbsLab(SlurmLab):
    """A server and login node, and hosts of 8 CPUs that its jobs get.

    `uid` is who submits, and whose jobs they are.
    """

    def __init__(self, num_nodes=2, *, uid=UID):
        self.prefix, self.hidden, self.uid = MACHINE["PBS_PREFIX"], {}, uid
        super().__init__(num_nodes)

    def _write(self, *_):
        self.folder.chmod(0o755)
        for name in ("log", "bin", "shared", "postgres", LOGIN, *self.nodes):
            (self.folder / name).mkdir(mode=0o755)
        self.shared.chmod(0o1777)
        (self.folder / "postgres").chmod(0o1777)
        self._write_names()
        user = f"muster:x:{UID}:65534::{SPOOL}/shared:/bin/bash\n"
        self._put("passwd", Path("/etc/passwd").read_text() + user)
        for name in (LOGIN, *self.nodes):
            serves = int(name == LOGIN)
            text = CONF.format(
                prefix=self.prefix,
                login=LOGIN,
                home=f"{SPOOL}/{name}",
                serves=serves,
                runs=1 - serves,
            )
            self._put(f"{name}.conf", text)

    def _environment(self):
        environment = super()._environment()
        del environment["SLURM_CONF"]
        own = f"{self.folder}/bin:{self.prefix}/bin:{self.prefix}/sbin:{environment['PATH']}"
        return environment | self._names_of(LOGIN) | {"PATH": own}

    def _names_of(self, name):
        return {"PBS_CONF_FILE": f"{SPOOL}/{name}.conf", "PBS_EXEC": self.prefix}

    def _start(self):
        self._start_house()
        # Its socket, whose name the port makes, is another lab's too.
        run = "/run/postgresql"
        self.must("mount", "--bind", str(self.folder), SPOOL)
        self.must("mount", "--bind", f"{SPOOL}/passwd", "/etc/passwd")
        self.must("sh", "-ec", f"mkdir -p {run}; mount --bind {self.folder}/postgres {run}")
        self.must("setsid", f"{self.prefix}/libexec/pbs_init.d", "start", limit_s=READY_LIMIT_S)
        orders = SERVER + "".join(NODE.format(name=name) for name in self.nodes)
        wait_until(lambda: self.run(["qstat", "-B"]).returncode == 0, "the server", READY_LIMIT_S)
        self.must("qmgr", stdin=orders)
        for name in self.nodes:
            self.must(f"{self.prefix}/libexec/pbs_habitat", on=name, env=self._names_of(name))
            tmp = self.folder / name / "tmp"  # of jobs: one that another lab has left holds a job
            tmp.mkdir()
            tmp.chmod(0o1777)
            orders = (
                MOM.format(login=LOGIN) + f"$tmpdir {SPOOL}/{name}/tmp\n"
            )  # sockets need a short name
            (self.folder / name / "mom_priv" / "config").write_text(orders)
            own = [f"{key}={value}\n" for key, value in self._names_of(name).items()]
            path = f"PATH={self.prefix}/bin:{MACHINE_PATH}\n"
            (self.folder / name / "pbs_environment").write_text("".join([path, *own]))
            self._start_mom(name)
        self.wait_for_nodes(*self.nodes)

    def _start_mom(self, name, *options):
        self._start_daemon(name, name, self.mom_argv(name, *options))

    def mom_argv(self, name, *options):
        """Return the command that is a host's daemon, from which all of its jobs come."""
        conf = [f"{key}={value}" for key, value in self._names_of(name).items()]
        own = []
        if (hidden := self.hidden.get(name)) is not None:
            hide = 'mount -t tmpfs none "$1"; shift; exec "$@"'
            own = ["unshare", "--mount", "sh", "-ec", hide, "sh", str(hidden)]
        return [*own, "env", *conf, f"{self.prefix}/sbin/pbs_mom", "-N", *options]

    def must(self, *words, uid=0, **options):
        """Run a command, as root unless another is given, that has to succeed; return what it prints."""
        done = self.run(words, uid=uid, **options)
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def wait_for_nodes(self, *names, states=("free",), limit_s=READY_LIMIT_S):
        """Wait until the server gives one of `states` for each of these hosts."""
        super().wait_for_nodes(*names, states=states, limit_s=limit_s)

    def state_of_nodes(self):
        """Return the state of each host: {"n1": "free"}."""
        said = self.run(["pbsnodes", "-a", "-F", "json"]).stdout
        nodes = json.loads(said).get("nodes", {}) if said else {}
        return {name: node["state"] for name, node in nodes.items()}

    def submit(self, script, *options, uid=None):
        """Give qsub a script (bash, without the first line); return the job's id.

        Its output is in `shared / "pbs.out"`.
        """
        words = ["qsub", "-k", "oed", "-j", "oe", "-o", f"{self.shared}/pbs.out", *options]
        text = f"#!/bin/bash\n{script}\n"
        return self.must(*words, stdin=text, uid=self.uid if uid is None else uid).strip()

    def job(self, job_id):
        """Return what qstat says of a job."""
        said = self.must("qstat", "-x", "-f", "-F", "json", job_id)
        return json.loads(said)["Jobs"][job_id]

    def wait_for_job(self, job_id, *states, limit_s=60.0):
        """Wait until a job is in one of these states, `R` or `F`; return `job()`."""

        def reached():
            job = self.job(job_id)
            return job if job["job_state"] in states else None

        return wait_until(reached, f"job {job_id} to be {' or '.join(states)}", limit_s)

    def restart_mom(self, name, *options, hides=None):
        """End a host's daemon and start it again.

        Args:
            name: A name of `nodes`.
            options: `-p` lets its jobs live, as a site's own scripts may not.
            hides: A folder that its jobs don't see from now on.
        """
        self.daemons[name].kill()
        self.daemons[name].wait()
        self.hidden = {**self.hidden, name: hides}
        self._start_mom(name, *options)

    def start_node(self, name):
        """Start the daemon of a killed host, as its next boot does."""
        self.set_link(name, "up")
        self._start_mom(name)

    def restore_node(self, name):
        """Start a killed host; return when the server gives it jobs."""
        self.start_node(name)
        self.wait_for_nodes(name)

    def reset(self):
        """Delete all jobs, restore killed hosts and wait until all are free again."""
        for name in self.nodes:
            self.set_link(name, "up")
            if self.daemons[name].poll() is not None:
                self._start_mom(name)
        if jobs := self.run(["qselect"]).stdout.split():
            self.run(["qdel", "-W", "force", *jobs], uid=0)
        self.wait_for_nodes(*self.nodes)

    def logs(self, num_lines=40):
        """Return the last lines of the daemons' logs."""
        found = []
        for path in sorted(self.folder.glob("*/*_logs/*")):
            lines = path.read_text(errors="replace").splitlines()[-num_lines:]
            found += [f"--- {path.relative_to(self.folder)}", *lines]
        return "\n".join(found)
