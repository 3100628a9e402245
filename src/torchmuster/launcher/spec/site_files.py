"""Find site files, check whether they are trusted, and parse host lists, all without pydantic.

Host lists are DeepSpeed's and OpenMPI's `node1 slots=4`, MPICH's `node1:4`, and plain names.
"""

import os
import pwd
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchmuster.core.plainfile import open_plain
from torchmuster.errors import ManyErrors, UsageError

PROJECT_FILE = "muster.toml"
_MOST_BYTES = 1 << 20  # of the list of trusted files
_said: set[str] = set()


def user_file(environment: Mapping[str, str]) -> str | None:
    """Return the user's file, if any."""
    folder = _own_folder(environment)
    path = os.path.join(folder, "config.toml") if folder is not None else None
    return path if path is not None and os.path.lexists(path) else None


def _own_folder(environment: Mapping[str, str]) -> str | None:
    base = environment.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):  # the XDG specification ignores relative paths
        try:
            home = environment.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:  # an account without an entry, as in some containers
            return None
        base = os.path.join(home, ".config")
    return os.path.join(base, "muster")


def project_file(cwd: str) -> str | None:
    """Return the nearest `muster.toml` from this folder up to the root, if any."""
    folder = os.path.abspath(cwd)
    while True:
        path = os.path.join(folder, PROJECT_FILE)
        if os.path.lexists(path):
            return path
        if folder == os.path.dirname(folder):
            return None
        folder = os.path.dirname(folder)


def is_new(note: str) -> bool:
    """Return whether this command has not printed the note yet: its parts read the same files."""
    said = note in _said
    _said.add(note)
    return not said


def why_not_used(path: str, status: os.stat_result, environment: Mapping[str, str]) -> str | None:
    """Return why a file that another user could have written is ignored; None if it is trusted.

    Its lines go into our jobs. Trusted are our own files and root's (root can do what we can),
    reached through links that are ours or root's, and the files listed in `trusted` next to our own
    settings, like git's safe.directory.

    Raises:
        OSError: The file is gone.
    """
    if status.st_mode & stat.S_IWOTH:
        return f"everybody can write to it: chmod o-w {path}"
    link = os.lstat(path)
    ours = (0, os.getuid())
    if status.st_uid in ours and link.st_uid in ours:
        return None
    folder = _own_folder(environment)
    if os.path.abspath(path) in _trusted(folder):
        return None
    what, uid = "its target", status.st_uid
    if link.st_uid not in ours:
        what, uid = "it" if link.st_uid == status.st_uid else "the link", link.st_uid
    owner = _name_of(uid)
    cure = f"read it, then: echo {os.path.abspath(path)} >> {folder}/trusted" if folder else ""
    return f"{what} belongs to another user ({owner})" + (f"; {cure}" if cure else "")


def _trusted(folder: str | None) -> frozenset[str]:
    """Return other users' files that the user trusts, one per line; the list must be ours."""
    if folder is None:
        return frozenset()
    try:
        with open(os.path.join(folder, "trusted")) as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.getuid()) or status.st_mode & stat.S_IWOTH:
                return frozenset()
            return frozenset(line.strip() for line in file.read(_MOST_BYTES).splitlines())
    except (OSError, UnicodeDecodeError):
        return frozenset()


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"


_MAX_SIZE_BYTES = 4 << 20
_MAX_HOSTS = 65_536
_MAX_SLOTS = 4096
# A name, an IPv4 address, or an IPv6 address in brackets; never anything that ssh parses as an
# option.
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}|\[[0-9A-Fa-f:.]+(?:%[A-Za-z0-9_.-]+)?\])"
    r"(?::(?P<slots>\d{1,9}))?"
)
_SLOTS = ("slots", "cpu", "count")  # OpenMPI accepts all three
_WITHOUT_EFFECT = ("max_slots", "max-slots")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of a list.

    Attributes:
        slots: Its number of workers; None if not given.
        user: The account there; None for that of the site or of ssh.
    """

    name: str
    slots: int | None = None
    user: str | None = None


def parse_host(line: str) -> Host:
    """Parse the host of one line.

    Raises:
        UsageError: The line is invalid.
    """
    words = line.split()
    match = _HOST.fullmatch(words[0]) if words else None
    if match is None:
        raise UsageError(
            f"`{line.strip()[:80]}` is not a valid host", fix="node1, node1 slots=4 or me@node1"
        )
    slots = match["slots"]
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key in _WITHOUT_EFFECT and equals:
            continue
        if key not in _SLOTS or not equals:
            from torchmuster.core.model.text import did_you_mean  # late: each run finds its site

            fix = did_you_mean(key, _SLOTS, "node1 slots=4")
            raise UsageError(f"`{word[:80]}` is not a setting of a host", fix=fix)
        if slots is not None:
            raise UsageError(f"`{line.strip()[:80]}` gives the number of slots twice")
        slots = value
    return Host(name=match["name"].strip("[]"), slots=_number_of(slots), user=match["user"])


def join_hosts(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Merge repeated hosts, keeping the order; OpenMPI repeats a name for each further slot."""
    found: dict[str, Host] = {}
    for host in hosts:
        known = found.get(host.name)
        if known is None:
            found[host.name] = host
        else:
            slots = (known.slots or 1) + (host.slots or 1)
            found[host.name] = Host(name=host.name, slots=slots, user=known.user or host.user)
    return tuple(found.values())


def parse_hostfile(text: str, where: str) -> tuple[Host, ...]:
    """Parse the hosts of a hostfile; `#` begins a comment.

    Raises:
        ManyErrors: Lines are invalid, or there is no host.
    """
    hosts: list[Host] = []
    errors: list[UsageError] = []
    for number, line in enumerate(text.splitlines(), start=1):
        bare = line.partition("#")[0].strip()
        if not bare:
            continue
        try:
            hosts.append(parse_host(bare))
        except UsageError as error:
            errors.append(UsageError(error.what, where=f"{where}:{number}", fix=error.fix))
    if not hosts and not errors:
        errors.append(UsageError("the hostfile names no host", where=where, fix="node1 slots=4"))
    if len(hosts) > _MAX_HOSTS:
        what = f"the hostfile has {len(hosts)} hosts; at most {_MAX_HOSTS} are allowed"
        errors.append(UsageError(what, where=where))
    if errors:
        raise ManyErrors(errors)
    return join_hosts(hosts)


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read the hosts of a file.

    Raises:
        ManyErrors: The file can't be read or has invalid lines.
    """
    try:
        with open_plain(path, or_descriptor=True) as file:
            text = file.read(_MAX_SIZE_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        problem = UsageError("the hostfile can't be read", where=os.fspath(path), why=why)
        raise ManyErrors([problem]) from error
    if len(text) > _MAX_SIZE_BYTES:
        raise ManyErrors([UsageError("the hostfile is larger than 4 MiB", where=path)])
    return parse_hostfile(text, path)


def _number_of(slots: str | None) -> int | None:
    if slots is None:
        return None
    if not re.fullmatch(r"\d{1,9}", slots) or not 1 <= int(slots) <= _MAX_SLOTS:
        raise UsageError(f"`{slots[:40]}` is not a valid number of slots", fix=f"1 to {_MAX_SLOTS}")
    return int(slots)
