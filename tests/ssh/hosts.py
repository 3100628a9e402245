"""Real hosts for ssh on this machine: an sshd each, in a mount namespace of its own.

A host has its own home, and sees neither the client's folder nor, when asked for, this torchmuster. Keys, configuration and
ports are private; nothing of the user's ~/.ssh or of /etc/ssh is read. An sshd dies with the process that started it.
"""

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

from kit import namespaces
from kit.command import MUSTER, SOURCE, spawned
from kit.ports import reserve_port
from kit.waiting import wait_until
from kit.world import MACHINE_PATH

_START_LIMIT_S = 15.0
_SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
PrintMotd no
SetEnv HOME={folder}/home
"""


def why_not():
    """Return why hosts can't be made here; None where they can."""
    programs = ("/usr/sbin/sshd", "ssh", "ssh-keygen", "setpriv")
    return namespaces.why_not("a real host for ssh", programs, "m", "true")


def processes_with(text):
    """Return the pids of living processes whose environment or command line holds the text."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            holds = text.encode() in (entry / "cmdline").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if holds and state not in "ZX":
            found.append(int(entry.name))
    return found


class SshHosts:
    """Some hosts and a client's folder; the client is this machine as it is."""

    def __init__(self, folder):
        self.folder = folder
        self.client = folder / "client"
        self.code = self.client / "my code"
        self.code.mkdir(parents=True)
        self.home = self.client / "home"
        self.more = ""  # lines of the client's configuration, for each host
        self._servers = {}
        self._blocks = {}
        key = folder / "key"
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=20
        )

    def add(self, name, *, shares=False, knows_us=True, known=True, blind=False, rc=""):
        """Start a host.

        Args:
            shares: It sees the client's files.
            knows_us: It has our key.
            known: We have its key.
            blind: It does not see this torchmuster either.
            rc: Lines for the start of its shell.
        """
        folder = self.folder / f"host-{name}"
        home = folder / "home"
        home.mkdir(parents=True)
        (home / ".bashrc").write_text(rc)
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / "host_key"],
            check=True,
            timeout=20,
        )
        mine = (self.folder / "key.pub").read_text()
        (folder / "authorized_keys").write_text(mine if knows_us else "")
        port = reserve_port()
        (folder / "sshd_config").write_text(_SERVER.format(port=port, folder=folder))
        seen = [folder, self.client] if shares else [folder]
        script = _view_of(self.folder, seen, [SOURCE] if blind else [])
        self._servers[name] = _start_sshd(folder, script)
        host_key = (folder / "host_key.pub").read_text()
        line = f"[127.0.0.1]:{port} {host_key}" if known else ""
        with (self.folder / "known_hosts").open("a") as file:
            file.write(line)
        self._configure(name, port)
        wait_until(lambda: _answers(port), f"sshd of {name}", _START_LIMIT_S)
        return home

    def add_silent(self, name):
        """Add a host that takes the call and says nothing; return its socket."""
        listening = socket.create_server(("127.0.0.1", 0))
        self._configure(name, listening.getsockname()[1])
        return listening

    def add_closed(self, name):
        """Add a host where no sshd runs."""
        self._configure(name, reserve_port())

    def _configure(self, name, port):
        self._blocks[name] = (
            f"Host {name}\n HostName 127.0.0.1\n Port {port}\n User root\n IdentitiesOnly yes\n"
            f' IdentityFile "{self.folder}/key"\n UserKnownHostsFile "{self.folder}/known_hosts"\n'
            f" GlobalKnownHostsFile /dev/null\n{self.more}"
        )
        (self.folder / "config").write_text("".join(self._blocks.values()))

    def environment(self, **more):
        """Return the environment of the client."""
        dropped = ("SLURM_", "PBS_", "MUSTER", "PYTHONPATH", "SSH_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        words = [shutil.which("ssh", path=MACHINE_PATH), "-F", str(self.folder / "config")]
        return {
            **kept,
            "MUSTER_SSH": " ".join(words),
            "MUSTER_HOME": str(self.home),
            "PYTHONPATH": str(SOURCE),
            **more,
        }

    def start(self, *words, command="run", stderr=subprocess.PIPE, **more):
        """Start `muster run`, or another command, in the code folder."""
        return spawned(
            [*MUSTER, command, *words], cwd=self.code, env=self.environment(**more), stderr=stderr
        )

    def run(self, *words, limit_s=90, **more):
        """Run `muster run`, or another command, to its end; return exit code, stdout and stderr."""
        process = self.start(*words, **more)
        try:
            out, err = process.communicate(timeout=limit_s)
        finally:
            process.kill()
        return process.returncode, out, err

    def must(self, *words, **more):
        """Do as `run`, for a command that has to succeed; return stdout and stderr."""
        code, out, err = self.run(*words, **more)
        assert code == 0, err + out
        return out, err

    def add_all(self, *names, **more):
        """Start some hosts; return their homes."""
        return [self.add(name, **more) for name in names]

    def wait_for_the_end_on(self, *names, limit_s=90):
        """Wait until nothing of a run is left on these hosts."""
        for name in names:
            mine = f"{self.folder}/host-{name}/home/.muster"
            wait_until(lambda mine=mine: not processes_with(mine), f"the end on {name}", limit_s)

    def cut(self, name, *, for_good=False):
        """Kill everything below a host's sshd, and that too when it shall not come again."""
        server = self._servers[name].pid
        for pid in [*([server] if for_good else []), *_session_pids(server)]:
            _kill(pid)

    @contextlib.contextmanager
    def silence(self, name):
        """Let calls of a host go to somebody who says nothing; its sessions go on."""
        block = self._blocks[name]
        with self.add_silent(name):
            yield
        self._blocks[name] = block
        (self.folder / "config").write_text("".join(self._blocks.values()))

    def pids(self):
        """Return the pids of the hosts' sshd."""
        return {server.pid for server in self._servers.values()}

    def close(self):
        """End all hosts."""
        for server in self._servers.values():
            for pid in [*_session_pids(server.pid), server.pid]:
                _kill(pid)
            server.wait(10)


def _session_pids(pid):
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [below for child in children for below in [*_session_pids(int(child)), int(child)]]


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 9)


def _view_of(lab, seen, hidden):
    """Return shell lines that leave only some folders of the lab to be seen."""
    lines = ["mount -t tmpfs none /run", "mkdir -m 755 /run/sshd"]
    for number, path in enumerate(seen):
        lines += [f"mkdir /run/seen-{number}", f'mount --bind "{path}" /run/seen-{number}']
    lines.append(f'mount -t tmpfs none "{lab}"')
    for number, path in enumerate(seen):
        lines += [f'mkdir -p "{path}"', f'mount --bind /run/seen-{number} "{path}"']
    return [*lines, *(f'mount -t tmpfs none "{path}"' for path in hidden)]


def _start_sshd(folder, view):
    script = [*view, 'exec setpriv --pdeathsig KILL /usr/sbin/sshd -D -e -f "$1"']
    with (folder / "sshd.log").open("w") as log:
        return spawned(
            ["unshare", "-m", "sh", "-ec", "\n".join(script), "sh", folder / "sshd_config"],
            stdout=log,
        )


def _answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as call:
            return call.recv(4) == b"SSH-"
    except OSError:
        return False
