"""The files and interfaces of one host of a network lab: /etc, HOME, PATH, and what is mounted where."""

import sys
import sysconfig
from pathlib import Path

TESTS = Path(__file__).parents[1]
ETC = ("hosts", "hostname", "resolv.conf", "nsswitch.conf", "passwd", "shadow")


def write(lab, host):
    """Make the folders of a host and what lies in them at the start."""
    root = lab.root(host.name)
    for name in ("etc", "home", "tmp", "shared", "bin", "ssh"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "home").chmod(0o700)
    files = {
        "hosts": "".join(f"{line}\n" for line in names_known(lab, host)),
        "hostname": f"{host.name}\n",
        # No name server can be asked from here: a look-up fails at once instead of after 10 s.
        "resolv.conf": "",
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
        "passwd": passwd(lab),
        "shadow": "root:*:19000:0:99999:7:::\n",
    }
    for name, text in files.items():
        (root / "etc" / name).write_text(text)
    (root / "home" / ".bashrc").write_text(
        f"echo '{host.shell_noise}'\n" if host.shell_noise else ""
    )
    write_python(lab, host)


def names_known(lab, host):
    """Return the lines of a host's /etc/hosts."""
    if host.hosts is not None:
        return ["127.0.0.1 localhost", *host.hosts]
    first = next(iter(lab.networks))
    others = [f"{lab.address(name, first)} {name}" for name in lab.hosts if name != host.name]
    return ["127.0.0.1 localhost", f"127.0.1.1 {host.name}", *others]


def passwd(lab):
    """Return the machine's users, with another home for root."""
    others = Path("/etc/passwd").read_text().splitlines()
    kept = [line for line in others if not line.startswith("root:")]
    return "\n".join([f"root:x:0:0:root:{lab.home}:/bin/bash", *kept, ""])


def write_python(lab, host):
    """Fill the host's own folder of programs: python3 as asked, or all but python."""
    programs = lab.root(host.name) / "bin"
    if host.python == "none":
        for path in [*Path("/usr/bin").iterdir(), *Path("/usr/sbin").iterdir()]:
            if "python" not in path.name and not (programs / path.name).is_symlink():
                (programs / path.name).symlink_to(path)
    elif host.python == "venv":
        write_venv(lab.root(host.name) / "venv")
    elif host.python != "usual":
        for name in ("python", "python3"):
            (programs / name).write_text(f'#!/bin/sh\nexec {host.python} "$@"\n')
            (programs / name).chmod(0o755)


def write_venv(folder):
    """Make a virtual environment with the packages of the tests' own, but not those that are installed as links."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    base = Path(sys.base_prefix) / "bin" / version
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(base)
    (packages / "other.pth").write_text(f"{sysconfig.get_path('purelib')}\n")


def path_of(lab, host):
    """Return the PATH of shells on a host, given by name."""
    programs = lab.root(host) / "bin"
    kind = lab.specs[host].python
    if kind == "none":
        return str(programs)
    known = {"usual": Path(sys.executable).parent, "venv": lab.root(host) / "venv" / "bin"}
    first = known.get(kind, programs)
    return f"{first}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"


def description(lab, host):
    """Return what `net_house.py` has to know of a host."""
    root = lab.root(host.name)
    etc = Path("/etc")
    binds = [(root / "etc" / name, etc / name) for name in ETC if (etc / name).exists()]
    binds += [(root / "home", lab.home)]
    binds += [] if host.shared else [(root / "shared", lab.shared)]
    needed = {lab.folder, Path(sys.prefix), Path(sys.base_prefix), TESTS.parent}
    wanted = host.networks or tuple(lab.networks)
    links = [link_of(lab, n, host) for n in lab.networks.values() if n.name in wanted]
    return {
        "name": host.name,
        "binds": [(str(a), str(b)) for a, b in binds],
        "tmp": str(root / "tmp"),
        "keep": sorted(str(path) for path in needed if path.is_relative_to("/tmp")),
        "hide": [str(path) for path in host.hide],
        "links": links,
    }


def link_of(lab, network, host):
    address = f"{network.address(lab.numbers[host.name])}/{network.prefix}"
    isolated = network.kind == "isolated" and host.name != lab.controller
    fields = {"name": network.name, "kind": network.kind, "mtu": network.mtu}
    return fields | {"address": address, "isolated": isolated}
