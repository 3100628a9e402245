"""What a network lab is made of: its networks and its hosts, as values."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """An interface that hosts have.

    Attributes:
        name: Of the interface, at most 12 characters.
        subnet: The first three numbers, like "10.10.0"; a host's own number is the fourth. With
            kind "identical" the whole address of every host, like "172.17.0.1".
        kind: "joined": all reach each other; "isolated": only the controller reaches the hosts and
            they it; "identical": a bridge inside of each host, like docker's.
        prefix: Length of the network's part of the address, in bits.
        mtu: In bytes, inside the hosts; None for the default of 1500.
        rate: Limit of what leaves a host, as tc writes it ("100mbit"); None for none.
    """

    name: str
    subnet: str
    kind: str = "joined"
    prefix: int = 24
    mtu: int | None = None
    rate: str | None = None

    def address(self, number):
        """Return the address of the host of this number."""
        return self.subnet if self.kind == "identical" else f"{self.subnet}.{number}"


HSN = Network(name="hsn0", subnet="10.10.0")
MGMT = Network(name="mgmt0", subnet="192.168.50", kind="isolated")
DOCKER = Network(name="docker0", subnet="172.17.0.1", kind="identical", prefix=16)
USUAL = (HSN, MGMT, DOCKER)


@dataclass(frozen=True, slots=True)
class Host:
    """One host of a lab.

    Attributes:
        name: Its host name, and what ssh calls it.
        ssh: How its sshd is, see `lab_ssh.KINDS`.
        shared: Whether it sees the files of `lab.shared`; else that folder is its own and empty.
        python: "usual": the interpreter that runs the tests is first on PATH; "none": no python on
            PATH; "venv": another environment of the same version, with torch and without what is
            installed as a link to a source tree; else the path of an interpreter that `python3` and `python` are.
        hide: Folders that are empty on this host, like the source tree.
        networks: Names of the interfaces that it has; None for all.
        hosts: Lines of its /etc/hosts instead of the usual ones, after that of localhost.
        shell_noise: What its shells print when they start.
    """

    name: str
    ssh: str = "normal"
    shared: bool = True
    python: str = "usual"
    hide: tuple[Path, ...] = ()
    networks: tuple[str, ...] | None = None
    hosts: tuple[str, ...] | None = None
    shell_noise: str = ""
