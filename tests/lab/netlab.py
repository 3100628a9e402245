"""Hosts with real networks between them, all on this machine and gone without a trace afterwards.

    with NetLab([Host("n1"), Host("n2", shared=False), Host("n3", ssh="silent")]) as lab:
        done = lab.run(lab.controller, [*lab.ssh, "n1", "hostname"])
        child = lab.start("n2", ["sleep", "100"])
        lab.cut("n2")                                   # nothing passes any more
        lab.heal("n2")
        assert lab.leftovers() == {}

A host has a network, a name, processes, mounts and IPC of its own (`net_house.py`). By default it
is like a node of a careless cluster:

- `hsn0`, 10.10.0.K/24: the fast interface; all hosts reach each other on it.
- `mgmt0`, 192.168.50.K/24: management; hosts don't reach each other (no answer to ARP), only the
  controller reaches them, and its ssh uses it.
- `docker0`, 172.17.0.1/16: the same address on every host.
- Its own name is 127.0.1.1, as Debian writes it; the others' names are their `hsn0` addresses.

K is 1 for the first host; the controller, the user's laptop without a way to `hsn0`, is the last.

What else a test may choose:

- `Network(name, subnet, kind)`: any interfaces, of kind "joined", "isolated" or "identical", with
  `mtu` (set inside the hosts; that of the bridge stays 9000) and `rate` ("100mbit", by tc's tbf).
- `Host`: how its sshd is (`SSH`), whether it sees the folder `lab.shared` that others see, which
  `python` its sessions find, what is hidden from it, what its /etc/hosts says, its interfaces.
- While it runs: `cut`, `heal`, `deny` (any match of nft, by drop or reject), `limit`, and `run`
  for all that `ip`, `tc` and `nft` can do inside a host; `kill` (all processes, as a crash does),
  `pause_sshd`, `start_sshd`.

Files: HOME is `lab.home` and the shared folder `lab.shared` on every host; the paths are the same
everywhere, what lies there is each host's own, except in `lab.shared` of hosts with `shared=True`.
From outside, `lab.root(host)` holds them: `home`, `tmp`, `shared`. The interpreter that runs the
tests, and the source tree, are the same files everywhere.

Nothing of it is on the host: no link, no named namespace, no mount, no file outside one temporary
folder. It ends with the process that made it, also when that gets SIGKILL.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from kit import namespaces
from kit.command import SOURCE, Child, finished
from kit.waiting import wait_until
from lab import host_files, lab_ssh
from lab.parts import DOCKER, HSN, MGMT, USUAL, Host, Network

__all__ = ["DOCKER", "HSN", "MGMT", "SOURCE", "Host", "NetLab", "Network", "why_not"]
HERE = Path(__file__).parent
PROGRAMS = ("ip", "tc", "nft", "nsenter", "sshd", "ssh", "ssh-keygen")
# What the kernel must allow: all kinds of namespaces, a bridge and a firewall in one.
TRIAL = "ip link add lab0 type bridge && nft add table inet lab0"
BRIDGE_MTU = 9000
READY_LIMIT_S = 30.0
NOT_OURS = ("SLURM_", "PBS_", "MUSTER_", "COV_", "PYTEST_", "SSH_", "XDG_", "PYTHON")


def why_not():
    """Return why no lab may start on this machine; None when one may."""
    packages = "openssh-server nftables iproute2"
    return namespaces.why_not("a network lab", PROGRAMS, "mnpuif", TRIAL, install=packages)


class NetLab:
    """Hosts in namespaces, and a controller that reaches them by ssh; see the module's docstring.

    `hosts` are their names, `controller` is the name of the one that the user sits at, `ssh` the
    words of a command that knows all keys, `home` and `shared` paths that are the same everywhere.
    """

    controller = "laptop"

    def __init__(self, hosts=2, *, networks=USUAL, ssh_over="mgmt0", controller_on=("mgmt0",)):
        if isinstance(hosts, int):
            hosts = [Host(f"n{number}") for number in range(1, hosts + 1)]
        self.networks = {network.name: network for network in networks}
        self.specs = {host.name: host for host in hosts}
        self.hosts = list(self.specs)
        laptop = Host(self.controller, ssh="none", networks=tuple(controller_on))
        self.specs[self.controller] = laptop
        self.numbers = {name: number for number, name in enumerate(self.specs, 1)}
        self.folder = Path(tempfile.mkdtemp(prefix="muster-lab-"))
        self.home, self.shared = self.folder / "home", self.folder / "shared"
        self.ssh_over, self.house, self.daemons = ssh_over, None, {}
        try:
            self._write()
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # What a test asks.

    def root(self, host):
        """Return the folder, seen from outside, of what a host has of its own."""
        return self.folder / "hosts" / host

    def address(self, host, network):
        """Return the address of a host on the network of this name."""
        return self.networks[network].address(self.numbers[host])

    @property
    def ssh(self):
        """Return the words of the controller's ssh."""
        return ["ssh", "-F", str(self.folder / "ssh" / "config")]

    def environment(self, host):
        """Return the environment of a shell on a host."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_OURS)}
        mine = {
            "HOME": str(self.home),
            "PATH": host_files.path_of(self, host),
            "OMP_NUM_THREADS": "1",
        }
        return kept | mine | {"USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash"}

    def start(self, host, argv, *, env=None, cwd=None, uid=0, **options):
        """Start a command on a host; killing the process that is returned kills the command.

        Args:
            host: Its name, or `controller`.
            argv: The command and its arguments.
            env: Added to `environment`.
            cwd: Default `home`.
            uid: Who runs it.
            options: Those of `subprocess.Popen`.
        """
        enter = [*namespaces.ENTER, str(self.pids[host])]
        words = [*enter, str(uid), str(cwd or self.home), *map(str, argv)]
        return Child(words, env=self.environment(host) | (env or {}), **options)

    def run(self, host, argv, *, limit_s=60.0, **options):
        """Run a command on a host and return its `CompletedProcess` (text); see `start`."""
        return finished(self.start, host, argv, limit_s=limit_s, **options)

    def processes(self, host):
        """Return what runs on a host: command lines by pid (of the machine), the holder apart."""
        space = self._space(self.pids[host], "pid_for_children")
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                status = (folder / "status").read_text()
                inner = status.partition("NSpid:")[2].partition("\n")[0].split()
                dead = status.partition("State:")[2].split()[0] in "ZX"
                if self._space(folder.name, "pid") == space and inner[-1] != "1" and not dead:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                    found[int(folder.name)] = " ".join(map(os.fsdecode, words)).strip()
        return found

    def leftovers(self):
        """Return what runs on each host, sshd and the controller apart: {} when nothing is left."""
        running = {host: list(self.processes(host).values()) for host in self.hosts}
        mine = {
            host: [line for line in lines if "sshd" not in line] for host, lines in running.items()
        }
        return {host: lines for host, lines in mine.items() if lines}

    # What a test does to hosts.

    def cut(self, host, *, interface=None):
        """Drop all that a host sends and gets, without a word; on one interface, or on all but lo."""
        which = '!= "lo"' if interface is None else f'"{interface}"'
        self._filter(host, f"iifname {which} drop", f"oifname {which} drop")

    def deny(self, host, match, *, verdict="drop"):
        """Add a rule for what a host sends and gets: `deny("n1", "tcp dport 29500", verdict="reject")`.

        With verdict "drop" and "ip daddr ..." that address becomes a black hole for the host.
        """
        self._filter(host, f"{match} {verdict}", f"{match} {verdict}")

    def heal(self, host):
        """Remove all that `cut` and `deny` have done to a host."""
        self._done(host, ["nft", "delete", "table", "inet", "lab"])

    def limit(self, host, interface, rate):
        """Let no more than `rate` ("50mbit") leave a host on this interface."""
        words = ["tc", "qdisc", "replace", "dev", interface, "root", "tbf", "rate", rate]
        self._done(host, [*words, "burst", "128kb", "latency", "100ms"])

    def kill(self, host, *, unplug=False):
        """Kill all processes of a host, as a crash does; sshd too.

        Args:
            host: Its name.
            unplug: Cut it off first: its peers then see silence, as when a power supply dies.
        """
        if unplug:
            self.cut(host)

        def dead():
            found = self.processes(host)
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not found

        wait_until(dead, f"the end of {host}'s processes")

    def start_sshd(self, host):
        """Start a host's sshd, as `Host.ssh` says; return when it can be called."""
        if host in self.daemons:
            self.daemons[host].wait(READY_LIMIT_S)
        daemon = lab_ssh.start(self, host)
        if daemon is not None:
            self.daemons[host] = daemon

    def pause_sshd(self, host):
        """Stop the sshd that takes calls: the kernel goes on accepting, and nobody says a word."""
        self._signal_sshd(host, signal.SIGSTOP)

    def resume_sshd(self, host):
        """End what `pause_sshd` did."""
        self._signal_sshd(host, signal.SIGCONT)

    def _signal_sshd(self, host, signum):
        pids = [pid for pid, line in self.processes(host).items() if "[listener]" in line]
        assert pids, f"no sshd takes calls on {host}"
        for pid in pids:
            os.kill(pid, signum)

    def reset(self):
        """Heal all hosts, end what runs on them and start each sshd that has ended."""
        for host in self.specs:
            if "inet lab" in self._done(host, ["nft", "list", "tables"]):
                self.heal(host)
        for host in [*self.leftovers(), self.controller]:
            self.kill(host)
        for host, daemon in self.daemons.items():
            if daemon.poll() is not None:
                self.start_sshd(host)

    # How it is made.

    def _write(self):
        self.folder.chmod(0o755)
        for folder in (self.home, self.shared, self.folder / "ssh"):
            folder.mkdir()
        for host in self.specs.values():
            host_files.write(self, host)
        lab_ssh.write(self)
        joined = [n for n in self.networks.values() if n.kind != "identical"]
        lab = {
            "bridges": [(network.name, BRIDGE_MTU) for network in joined],
            "hosts": [host_files.description(self, host) for host in self.specs.values()],
        }
        (self.folder / "lab.json").write_text(json.dumps(lab))

    def _start(self):
        self.house = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "net_house.py"), str(self.folder)],
            stdin=subprocess.PIPE,  # the lifeline: the kernel closes it when we end
            stdout=subprocess.PIPE,
            cwd="/",
            env={"PATH": os.environ["PATH"]},
            start_new_session=True,
        )
        said = self.house.stdout.readline()
        assert said, "the namespaces of the lab did not come up"
        told = json.loads(said)
        self.first, self.pids = told["first"], told["hosts"]
        for host in self.specs.values():
            for network in self.networks.values():
                if network.rate and (host.networks is None or network.name in host.networks):
                    self.limit(host.name, network.name, network.rate)
        for name in self.hosts:
            self.start_sshd(name)

    def _filter(self, host, entering, leaving):
        lines = ["add table inet lab"]
        for chain, hook, rule in (("i", "input", entering), ("o", "output", leaving)):
            lines += [f"add chain inet lab {chain} {{ type filter hook {hook} priority 0; }}"]
            lines += [f"add rule inet lab {chain} {rule}"]
        self._done(host, ["nft", "-f", "-"], stdin="".join(f"{line}\n" for line in lines))

    def _done(self, host, argv, stdin=None):
        done = self.run(host, argv, cwd="/", stdin=stdin)
        assert done.returncode == 0, f"{' '.join(argv)} on {host}: {done.stderr}"
        return done.stdout

    @staticmethod
    def _space(pid, kind):
        return os.readlink(f"/proc/{pid}/ns/{kind}")

    def logs(self, num_lines=30):
        """Return the last lines of what each sshd has written."""
        found = []
        for host in self.hosts:
            path = self.root(host) / "ssh" / "log"
            lines = path.read_text(errors="replace").splitlines() if path.exists() else []
            found += [f"--- sshd on {host}", *lines[-num_lines:]]
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
