"""Going to other nodes by ssh and pdsh, as mpirun, deepspeed and own scripts do.

Sources: OpenSSH 7 to 10 ssh.c, sshconnect.c, packet.c; pdsh 2.3x; PAM modules of Slurm.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_ssh = partial(
    KnownMessage,
    source="OpenSSH 7 to 10; pdsh 2.33 to 2.35",
    tells=Tells.PROVES,
    cause="launch-failed",
)

ENTRIES: tuple[KnownMessage, ...] = (
    _ssh(
        name="ssh.host-key",
        wordings=(
            r"Host key verification failed",
            r"REMOTE HOST IDENTIFICATION HAS CHANGED",
            r"No \S+ host key is known for (?P<host>\S+) and you have requested strict checking",
            r"Host key for (?P<host2>\S+) has changed",
        ),
        error="ssh does not know, or no longer knows, the key of a machine {host}{host2}",
        advice="ssh-keygen -R NODE; then ssh-keyscan NODE >> ~/.ssh/known_hosts, for each node",
        advice_in={
            "slurm": "srun and torchrun need no ssh: start with srun; for ssh: ssh-keyscan NODE >> ~/.ssh/known_hosts for each node",
        },
        confirm="ssh NODE true",
    ),
    _ssh(
        name="ssh.no-login",
        wordings=(
            r"^(?!git@).*Permission denied \((?:publickey|gssapi|hostbased|password|keyboard)[^)]*\)",
            r"Too many authentication failures",
        ),
        error="ssh did not accept your key on another machine",
        advice="make a key without a passphrase and allow it: ssh-keygen; cat ~/.ssh/id_*.pub >> ~/.ssh/authorized_keys; homes that others may write are refused",
        confirm="ssh -o BatchMode=yes NODE true",
    ),
    _ssh(
        name="ssh.no-job-there",
        wordings=(
            r"[Aa]ccess denied(?: by pam_slurm\S*)?: (?:user \S+ \(uid=\d+\) )?(?:.*has )?no active jobs on this node",
            r"pam_slurm_adopt",
        ),
        error="a node lets you in by ssh only while a job of yours runs there",
        advice="go only to nodes of the job, from within it; srun needs no ssh",
        confirm="squeue -u $USER -o '%i %N'",
    ),
    _ssh(
        name="ssh.bad-key-file",
        wordings=(
            r"UNPROTECTED PRIVATE KEY FILE",
            r"Bad owner or permissions on (?P<path>\S+)",
            r"[Ll]oad key \"(?P<path2>[^\"]+)\": (?:bad permissions|error in libcrypto|invalid format|Permission denied)",
            r"Authentication refused: bad ownership or modes",
        ),
        error="ssh does not use a key or configuration that others may read {path}{path2}",
        advice="chmod 700 ~/.ssh; chmod 600 ~/.ssh/id_* ~/.ssh/config ~/.ssh/authorized_keys",
        advice_in={
            "kubernetes": "mount the secret with defaultMode: 0600, and own it by the user of the container",
        },
    ),
    _ssh(
        name="ssh.refused",
        wordings=(r"ssh: connect to host (?P<host>\S+) port (?P<port>\d+): Connection refused",),
        error="no ssh server listens on {host}, port {port}",
        advice="start sshd there, or use the scheduler's launcher (srun, mpiexec, pbsdsh), which needs none",
        advice_in={
            "container": "start sshd in the container of each node, on the port that ~/.ssh/config names",
            "kubernetes": "start sshd in every worker's container before the launcher begins",
        },
        confirm="nc -vz {host} {port}",
    ),
    _ssh(
        name="ssh.unreachable",
        wordings=(
            r"ssh: connect to host (?P<host>\S+) port \d+: (?P<why>Connection timed out|Operation timed out|No route to host|Network is unreachable)",
        ),
        tells=Tells.NAMES,
        error="{host} does not answer to ssh: {why}",
        advice="see whether the node is up; a firewall that drops packets looks the same",
        confirm="ping -c 3 {host}",
        rivals=("node-failed", "firewall", "no-route"),
    ),
    _ssh(
        name="ssh.unknown-name",
        wordings=(r"(?:ssh|pdsh|scp): Could not resolve hostname (?P<host>\S+?)(?:: |$)",),
        cause="name-not-resolved",
        error="ssh does not know the name {host}",
        advice="correct it in the hostfile, or give its address in ~/.ssh/config or /etc/hosts",
        confirm="getent hosts {host}",
        advice_in={
            "kubernetes": "let the launcher wait until all workers are ready: a headless service (clusterIP: None, publishNotReadyAddresses: true) has to give {host} its address before mpirun starts; kubectl get pods shows whether that worker runs",
        },
    ),
    _ssh(
        name="ssh.closed-early",
        wordings=(
            r"(?:kex|ssh)_exchange_identification: ",
            r"Connection closed by (?P<host>\S+) port \d+",
            r"Connection reset by (?P<host2>\S+) port 22\b",
        ),
        tells=Tells.NAMES,
        error="the ssh server of {host}{host2} closed the connection before the login",
        advice="open fewer connections at once (MaxStartups of sshd), and ask the site whether the node lets you in",
        rivals=("ssh-login", "firewall"),
    ),
    _ssh(
        name="ssh.pdsh-no-rcmd",
        wordings=(
            r"pdsh@\S+: .*(?:rcmd module|module .*(?:ssh|rsh)).*(?:not|unable|invalid)",
            r"pdsh@\S+: (?P<host>\S+): (?:ssh exited with exit code 255|connect: Connection refused|rcmd: socket: Permission denied)",
        ),
        tells=Tells.NAMES,
        error="pdsh could not go to a node {host}",
        advice="PDSH_RCMD_TYPE=ssh, with ssh that needs no password",
        confirm="PDSH_RCMD_TYPE=ssh pdsh -w NODE hostname",
        rivals=("ssh-login",),
    ),
    _ssh(
        name="ssh.pdsh-missing",
        wordings=(
            r"cannot execute pdsh|(?:launcher|backend) '(?P<name>pdsh|openmpi|mvapich|mpich|slurm|impi)' not installed",
        ),
        cause="command-missing",
        error="the launcher {name} is not installed on this machine",
        advice="install it (apt install pdsh), choose another (deepspeed --launcher openmpi), or start torchrun on each node (deepspeed --no_ssh)",
        confirm="which pdsh",
    ),
    _ssh(
        name="ssh.stale-shell-output",
        wordings=(r"protocol error: (?:bad mode|mtime|unexpected|lost)",),
        tells=Tells.HINTS,
        error="scp was disturbed by what a login script prints",
        advice="let ~/.bashrc print nothing when it is not interactive",
    ),
    KnownMessage(
        name="openmpi.openmpi-no-tcp",
        wordings=(
            r"unable to complete a TCP connection|failed to TCP connect to a peer|unable to reach the remote (?:node|daemon)",
            r"ORTE .*(?:lost|unable to establish) (?:a )?(?:communication|connection)",
        ),
        source="Open MPI 2 to 5, help-oob-tcp.txt and help-mpi-btl-tcp.txt",
        tells=Tells.NAMES,
        cause="firewall",
        rivals=("link-local-address", "no-route"),
        error="Open MPI could not connect to another node by TCP",
        advice="open the ports between the nodes, or name the network that they share: --mca oob_tcp_if_include and btl_tcp_if_include SUBNET",
        confirm="nc -vz OTHER_NODE 22; ip -br addr   on both nodes",
    ),
)
