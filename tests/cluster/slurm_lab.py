"""A real Slurm cluster on this machine, from Debian's slurm-wlm, that can't harm another one.

Everything of it is in namespaces without a name (`slurm_house.py`) and in one temporary folder:
links, processes, /etc/hosts, configuration, munge's key and socket. The host is not written to, and
the lab ends with the process that made it, whatever ends that. Jobs run as whoever submits them:
root, or another uid (`run(..., uid=65534)`) if that user can read the interpreter.
"""

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from kit import namespaces
from kit.command import SOURCE, Child, finished
from kit.waiting import wait_until
from kit.world import MACHINE, MACHINE_PATH
from torchmuster.core import proc

HERE = Path(__file__).parent
LOGIN, PREFIX = "login", "10.88.0"
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "ip", "nsenter")
# Not munged: the package starts one at the next boot, and it has nothing to do with a lab's own.
DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "slurmrestd")
# What the kernel must allow: all kinds of namespaces, and a bridge in one.
TRIAL = "ip link add lab0 type bridge"
READY_LIMIT_S = 120.0

SLURM_CONF = """\
ClusterName=lab
SlurmctldHost={login}({prefix}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/affinity
SwitchType=switch/none
MailProg=/bin/true
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=50000,sched_interval=1,batch_sched_delay=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdTimeout={down_after_s}
MessageTimeout=5
TCPTimeout=2
KillWait=2
MinJobAge=3600
MpiDefault=none
GresTypes=gpu
NodeName={nodes} NodeAddr={addresses} CPUs={cpus} Boards=1 SocketsPerBoard=1 \
CoresPerSocket={cpus} ThreadsPerCore=1 RealMemory=8000 Gres=gpu:{gpus} State=UNKNOWN
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""


def why_not(environ=MACHINE, etc=Path("/etc"), proc=Path("/proc")):
    """Return why no lab may start on this machine; None when one may."""
    if found := [name for name in ("SLURM_CONF", "SLURM_JOB_ID") if environ.get(name)]:
        return f"this shell belongs to a Slurm cluster: {found[0]} is set"
    if found := sorted(etc.glob("slurm*/slurm.conf")):
        return f"this machine belongs to a Slurm cluster: {found[0]}"
    if found := _daemon(proc):
        return f"this machine runs {found}: no lab beside another Slurm"
    packages = "slurm-wlm munge iproute2"
    return namespaces.why_not("a Slurm lab", PROGRAMS, "mnpuif", TRIAL, install=packages)


def _daemon(proc):
    """Return a daemon of Slurm of this machine; another lab's are in namespaces of theirs."""
    for folder in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (folder / "comm").read_text().strip()
            if name in DAEMONS and _space(folder, "pid") == _space(proc / "self", "pid"):
                return f"{name} (pid {folder.name})"
    return None


def _space(folder, kind):
    return os.readlink(folder / "ns" / kind)


def _depth(pid):
    """Return how many processes stand above one."""
    depth = 0
    while (facts := proc.read_process(pid)) is not None and facts.parent_pid > 1:
        depth, pid = depth + 1, facts.parent_pid
    return depth


class SlurmLab:
    """A controller and login node, and `num_nodes` compute nodes with pretend GPUs.

    `down_after_s` is how long a node may be silent until Slurm takes it for dead, 300 by default in real ones.
    `nodes` are the names (n1, n2, ...), `shared` is a folder that all of them see, `env` is what a
    command of the login node needs. Use it as a context manager. `uid` runs what names nobody else.
    """

    uid = 0

    def __init__(self, num_nodes=2, *, cpus=4, gpus=2, down_after_s=6):
        self.nodes = [f"n{number}" for number in range(1, num_nodes + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="muster-slurm-"))
        self.shared = self.folder / "shared"
        self.daemons = {}
        self.house = None
        try:
            self._write(cpus, gpus, down_after_s)
            self.env = self._environment()
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _write(self, cpus, gpus, down_after_s):
        self.folder.chmod(0o755)
        for name in ("munge", "state", "log", "bin", "shared", *(f"spool.{n}" for n in self.nodes)):
            (self.folder / name).mkdir(mode=0o755)
        self.shared.chmod(0o1777)
        key = os.open(self.folder / "munge.key", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o400)
        with open(key, "wb") as file:
            file.write(os.urandom(128))
        values = {
            "login": LOGIN,
            "prefix": PREFIX,
            "folder": self.folder,
            "nodes": f"n[1-{len(self.nodes)}]",
            "addresses": f"{PREFIX}.[1-{len(self.nodes)}]",
            "cpus": cpus,
            "gpus": gpus,
            "down_after_s": down_after_s,
        }
        self._put("slurm.conf", SLURM_CONF.format(**values))
        for number in range(gpus):
            # Slurm wants a device for each GPU; this one is /dev/null by another name.
            os.mknod(self.folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        self._put("gres.conf", f"AutoDetect=off\nName=gpu File={self.folder}/gpu[0-{gpus - 1}]\n")
        self._put("cgroup.conf", "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self._write_names()

    def _write_names(self):
        hosts = [f"{PREFIX}.{number} {name}" for number, name in enumerate(self.nodes, 1)]
        lines = ["127.0.0.1 localhost", f"{PREFIX}.254 {LOGIN}", *hosts]
        self._put("hosts", "".join(f"{line}\n" for line in lines))
        # No name server can be asked from here: a look-up fails at once instead of after 10 s.
        self._put("resolv.conf", "")
        self._put("nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n")
        muster = f'#!/bin/sh\nexec {sys.executable} -m torchmuster "$@"\n'
        self._put("bin/muster", muster, mode=0o755)

    def _put(self, name, text, mode=0o644):
        path = self.folder / name
        path.write_text(text)
        path.chmod(mode)

    def _environment(self):
        other = ("SLURM_", "PBS_", "MUSTER_", "COV_", "PYTEST_")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(other)}
        python = Path(sys.executable).parent
        return environment | {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{self.folder}/bin:{python}:{MACHINE_PATH}",
            "PYTHONPATH": str(SOURCE),
            # A login shell of a job reads no profile of whoever runs the tests: killed in one, it may leave a lock.
            "HOME": str(self.shared),
            "MUSTER_HOME": str(self.shared / "home"),
            "OMP_NUM_THREADS": "1",
        }

    def _start(self):
        self._start_house()
        self._start_munge()
        self._start_daemon("slurmctld", LOGIN, ["slurmctld", "-D", "-c"])
        for name in self.nodes:
            self._start_slurmd(name)
        self.wait_for_nodes(*self.nodes)

    def _start_house(self):
        self.house = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "slurm_house.py"), self.folder, *self.nodes],
            stdin=subprocess.PIPE,  # the lifeline: the kernel closes it when we end
            stdout=subprocess.PIPE,
            cwd="/",
            env={"PATH": MACHINE_PATH},
            start_new_session=True,
        )
        said = self.house.stdout.readline()
        assert said, "the namespaces of the lab did not come up"
        self.pids = json.loads(said)

    def _start_munge(self):
        words = ["munged", "--foreground", "--force", f"--key-file={self.folder}/munge.key"]
        words += [f"--socket={self.folder}/munge/socket", f"--pid-file={self.folder}/munged.pid"]
        words += [f"--seed-file={self.folder}/munged.seed", f"--log-file={self.folder}/munged.log"]
        self._start_daemon("munged", LOGIN, words)
        wait_until((self.folder / "munge" / "socket").exists, "munge's socket")

    def _start_slurmd(self, name):
        self._start_daemon(name, name, self.slurmd_argv(name))

    def slurmd_argv(self, name):
        """Return the command that is a node's daemon, from which all of its jobs come."""
        return ["slurmd", "-D", "-N", name]

    def _start_daemon(self, name, on, words):
        with open(self.folder / "log" / f"{name}.out", "ab") as out:
            self.daemons[name] = self.popen(
                words, on=on, cwd="/", uid=0, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )

    def wait_for_nodes(self, *names, states=("idle",), limit_s=READY_LIMIT_S):
        """Wait until `sinfo` gives one of `states` for each of these nodes."""

        def reached():
            said = self.state_of_nodes()
            return all(said.get(name) in states for name in names)

        wait_until(reached, f"{', '.join(names)} to be {' or '.join(states)}", limit_s)

    def state_of_nodes(self):
        """Return the state of each node, as `sinfo` prints it: {"n1": "idle"}."""
        said = self.run(["sinfo", "-h", "-N", "-o", "%N %T"])
        return dict(line.split() for line in said.stdout.splitlines())

    def popen(self, words, *, on=None, env=None, cwd=None, uid=None, **options):
        """Start `words` on a node, or on the login node; killing it kills the command.

        Args:
            words: The command and its arguments.
            on: A name of `nodes`; None is the login node.
            env: Added to `self.env`.
            cwd: Default `shared`.
            uid: Who runs it; anyone but root must be able to read what it needs.
            options: Those of `subprocess.Popen`.
        """
        who = self.uid if uid is None else uid
        place = [str(self.pids[on or LOGIN]), str(who), str(cwd or self.shared)]
        return Child(
            [*namespaces.ENTER, *place, *map(str, words)], env=self.env | (env or {}), **options
        )

    def run(self, words, *, limit_s=60.0, **options):
        """Run `words` and return its `CompletedProcess` (text); see `popen`."""
        return finished(self.popen, words, limit_s=limit_s, **options)

    def submit(self, script, *options, uid=None):
        """Give sbatch a script (bash, without the first line); return the job's id, as text.

        Its output is in `shared / "ID.out"`.
        """
        words = ["sbatch", "--parsable", f"--output={self.shared}/%j.out", *options]
        said = self.run(words, stdin=f"#!/bin/bash\n{script}\n", uid=uid)
        assert said.returncode == 0, said.stderr
        return said.stdout.strip().partition(";")[0]

    def job(self, job_id):
        """Return what `scontrol show job` says: {"JobState": "RUNNING", "Restarts": "0", ...}."""
        said = self.run(["scontrol", "-o", "show", "job", job_id])
        assert said.returncode == 0, said.stderr
        return dict(word.partition("=")[::2] for word in said.stdout.split())

    def wait_for_job(self, job_id, *states, limit_s=60.0):
        """Wait until the job is in one of these states; return `job()`."""

        def reached():
            job = self.job(job_id)
            return job if job["JobState"] in states else None

        return wait_until(reached, f"job {job_id} to be {' or '.join(states)}", limit_s)

    def output_of(self, job_id):
        """Return what the job has printed until now."""
        path = self.shared / f"{job_id}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def processes_on(self, name):
        """Return the pids, those of the host, of what runs on this node."""
        holder = self.pids[name]
        space = _space(Path(f"/proc/{holder}"), "net")
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if _space(folder, "net") == space and int(folder.name) != holder:
                    state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(folder.name)] if state not in "ZX" else []
        return found

    def commands_on(self, *nodes):
        """Return the words of what runs on these nodes, as bytes, by pid."""
        found = {}
        for pid in [pid for node in nodes for pid in self.processes_on(node)]:
            with contextlib.suppress(OSError):
                found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return found

    def kill_node(self, name, *, unplug=False):
        """Kill slurmd, job steps and all other processes of a node, with SIGKILL, none of which sees the end of another.

        Args:
            name: A name of `nodes`.
            unplug: Cut its link first: peers then see silence, as when a power supply dies.
        """
        assert name in self.nodes
        if unplug:
            self.set_link(name, "down")

        def dead():
            # A child before its parent: who is stopped in a group that has lost its parent gets SIGHUP, and goes on.
            found = sorted(self.processes_on(name), key=_depth, reverse=True)
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            return not found

        wait_until(dead, f"the end of {name}'s processes")
        self.daemons[name].wait()

    def start_node(self, name):
        """Start slurmd again on a killed node, as its next boot does."""
        self.set_link(name, "up")
        self._start_slurmd(name)

    def restore_node(self, name):
        """Start a killed node; return when Slurm gives it jobs."""
        self.start_node(name)
        self.wait_for_nodes(name, states=("idle", "mixed", "allocated"))

    def reset(self):
        """Cancel all jobs, restore killed nodes and wait until all are idle again."""
        for name, state in self.state_of_nodes().items():
            if self.daemons[name].poll() is not None:
                self.restore_node(name)
            elif state.startswith(("down", "drain")):
                self.run(["scontrol", "update", f"nodename={name}", "state=resume"])
        if jobs := self.run(["squeue", "-h", "-o", "%A"]).stdout.split():
            self.run(["scancel", "--signal=KILL", "--full", *jobs])
            self.run(["scancel", *jobs])
        self.wait_for_nodes(*self.nodes)

    def set_link(self, name, state):
        """Set a node's link "up" or "down"; its processes live on."""
        said = self.run(["ip", "link", "set", name, state], cwd="/", uid=0)
        assert said.returncode == 0, said.stderr
        # What was unreachable is looked for anew. Else the kernel refuses a connection (EHOSTUNREACH, which Slurm does
        # not try again) when an old search, begun by what a killed process has left to send, comes to its end.
        for one in (None, *self.nodes) if state == "up" else ():
            self.run(["ip", "neigh", "flush", "all"], on=one, cwd="/", uid=0)

    def logs(self, num_lines=40):
        """Return the last lines of all daemons' logs."""
        found = []
        for path in sorted((self.folder / "log").glob("*.log")):
            lines = path.read_text(errors="replace").splitlines()[-num_lines:]
            found += [f"--- {path.name}", *lines]
        return "\n".join(found)

    def close(self):
        """End all processes of the lab and remove its folder."""
        if self.house is not None:
            self.house.stdin.close()
            self.house.stdout.close()
            self.house.wait(READY_LIMIT_S)
            for daemon in self.daemons.values():
                daemon.wait(READY_LIMIT_S)
        shutil.rmtree(self.folder, ignore_errors=True)
