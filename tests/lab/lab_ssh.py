"""The sshd of each host of a network lab and the controller's ssh: keys, configurations, start.

All keys are made for one lab and lie in its folder. The client's configuration names every host,
knows its key, and asks nothing.
"""

import shutil
import subprocess

from kit.waiting import wait_until
from lab import host_files

#: How a host answers calls of ssh.
KINDS = {
    "normal": "sshd takes the user's key",
    "none": "no sshd: calls are refused",
    "silent": "calls are accepted and nobody says a word",
    "password": "sshd takes no key and asks for a password",
    "unknown_key": "sshd has a key that the client's known_hosts lacks",
    "changed_key": "sshd has another key than the client's known_hosts says",
}
PORT = 22
SSHD_CONFIG = """\
Port {port}
HostKey {root}/ssh/host_key
AuthorizedKeysFile {root}/ssh/authorized_keys
PidFile none
UsePAM no
UseDNS no
StrictModes no
PermitRootLogin {root_login}
PubkeyAuthentication {by_key}
PasswordAuthentication {by_password}
KbdInteractiveAuthentication no
PrintMotd no
MaxStartups 200
LogLevel VERBOSE
Subsystem sftp internal-sftp
SetEnv PATH={path} OMP_NUM_THREADS=1
"""
CLIENT_CONFIG = """\
Host *
  User root
  IdentityFile {folder}/ssh/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/ssh/known_hosts
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking {checking}
"""


def write(lab):
    """Make the keys and configurations of a lab whose hosts have their folders."""
    key = new_key(lab.folder / "ssh" / "key")
    known, blocks = [], []
    for host in lab.hosts:
        spec, root = lab.specs[host], lab.root(host)
        assert spec.ssh in KINDS, f"{spec.ssh!r} is none of {', '.join(KINDS)}"
        own = new_key(root / "ssh" / "host_key")
        shown = new_key(root / "ssh" / "former_key") if spec.ssh == "changed_key" else own
        (root / "ssh" / "authorized_keys").write_text(key)
        by_key = spec.ssh != "password"
        text = SSHD_CONFIG.format(
            port=PORT,
            root=root,
            path=host_files.path_of(lab, host),
            root_login="prohibit-password" if by_key else "yes",
            by_key="yes" if by_key else "no",
            by_password="no" if by_key else "yes",
        )
        (root / "ssh" / "sshd_config").write_text(text)
        address = lab.address(host, lab.ssh_over)
        known += [] if spec.ssh == "unknown_key" else [f"{address} {shown}"]
        blocks.append(f"Host {host}\n  HostName {address}\n")
    (lab.folder / "ssh" / "known_hosts").write_text("".join(known))
    # The question that ssh asks at an unknown key is what a user meets; nobody can answer it here.
    config = CLIENT_CONFIG.format(folder=lab.folder, checking="ask")
    (lab.folder / "ssh" / "config").write_text("".join([*blocks, config]))


def new_key(path):
    """Make a key without a pass phrase; return its public half, a line."""
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(path)]
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL)
    return path.with_name(f"{path.name}.pub").read_text()


def start(lab, host):
    """Start a host's sshd and wait until it listens; None where the host has none."""
    spec, root = lab.specs[host], lab.root(host)
    if spec.ssh == "none":
        return None
    words = [shutil.which("sshd"), "-D", "-e", "-f", str(root / "ssh" / "sshd_config")]
    with open(root / "ssh" / "log", "ab") as log:
        daemon = lab.start(host, words, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    wait_until(lambda: listens(lab, host) or daemon.poll() is not None, f"sshd on {host}")
    assert daemon.poll() is None, lab.logs()
    if spec.ssh == "silent":
        lab.pause_sshd(host)
    return daemon


def listens(lab, host):
    """Return whether something on a host takes calls of ssh."""
    with open(f"/proc/{lab.pids[host]}/net/tcp") as file:
        lines = [line.split() for line in file]
    return any(words[1].endswith(f":{PORT:04X}") and words[3] == "0A" for words in lines)
