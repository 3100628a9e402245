"""Which programs the folder KUBE_BIN has to hold, and what lacks on this machine for a cluster."""

import shutil
from pathlib import Path

from kit.namespaces import why_not as why_no_namespaces
from kit.world import MACHINE

PROGRAMS = {
    "the control plane": (
        "etcd",
        "kube-apiserver",
        "kube-controller-manager",
        "kube-scheduler",
        "kubectl",
    ),
    "the nodes": (
        "kubelet",
        "kube-proxy",
        "containerd",
        "containerd-shim-runc-v2",
        "ctr",
        "runc",
        "nft",
    ),
    "the pods' network (CNI)": ("bridge", "host-local", "loopback"),
}
OF_THE_MACHINE = ("ip", "nsenter", "openssl", "mount", "umount")


def why_not():
    """Return all that lacks here for a cluster, a line for each; None where nothing does."""
    found = [_why_no_folder(MACHINE.get("KUBE_BIN", ""))]
    found.append(
        why_no_namespaces(
            "a cluster in namespaces",
            OF_THE_MACHINE,
            "mnpui",
            "ip link add lab0 type bridge",
            install="iproute2 util-linux openssl mount",
        )
    )
    return "\n".join(filter(None, found)) or None


def _why_no_folder(name):
    if not name:
        return f"KUBE_BIN is not set: it names a folder with these programs, for {_names(PROGRAMS)}"
    folder = Path(name)
    if not folder.is_dir():
        return f"KUBE_BIN is {name}, which is not a folder: it has to hold these programs, for {_names(PROGRAMS)}"
    missing = {
        what: [n for n in names if shutil.which(n, path=str(folder.resolve())) is None]
        for what, names in PROGRAMS.items()
    }
    missing = {what: names for what, names in missing.items() if names}
    return f"KUBE_BIN ({name}) lacks programs, for {_names(missing)}" if missing else None


def _names(programs):
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in programs.items())


def folder():
    """Return the folder of the programs."""
    return Path(MACHINE["KUBE_BIN"]).resolve()
