"""Receivers of `--notify`: where they are written, what each is, and how a notice is delivered.

A file has one receiver per line: an address (`https://...`), `mailto:NAME@HOST`, or a command. It is
a secret: an address of Slack needs no other key. So it must be readable by its owner only, and its
text goes nowhere but into the run's folder, 0600.
"""

import base64
import contextlib
import json
import os
import shlex
import shutil
import socket
import stat
import tomllib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchmuster.core import proc
from torchmuster.core.model.contract import describe_exit
from torchmuster.core.model.text import did_you_mean
from torchmuster.core.plainfile import open_plain
from torchmuster.core.spec.problems import parse_timeout
from torchmuster.errors import UsageError
from torchmuster.launcher.spec.site_files import project_file, user_file, why_not_used

TABLE = "notify"
WAIT_S = 1800.0
_MAX_BYTES = 1 << 14
_MAX_RECEIVERS = 8
_REACH_S = 5.0
_ANSWER_S = 10.0
_COMMAND_S = 60.0
_MAX_SAID = 200
_MAX_TEXT = 1 << 14
_SENDMAIL_PATH = "/usr/sbin:/usr/lib"  # outside most users' PATH
_FIX_FILE = "write it into a file, chmod 600 FILE, then: --notify @FILE"


@dataclass(frozen=True, slots=True)
class Receiver:
    """One receiver, as its line says."""

    line: str

    @property
    def scheme(self) -> str:
        """`http`, `https`, `mailto`, or empty for a command."""
        scheme = self.line.partition(":")[0]
        return scheme if scheme in ("http", "https", "mailto") else ""

    @property
    def label(self) -> str:
        """A name that may be shown: the host of an address, never its path."""
        if self.scheme == "mailto":
            name, _, host = self.address.partition("@")
            return f"{name[:1]}...@{host}"
        if self.scheme:
            return urllib.parse.urlsplit(self.line).hostname or ""
        return os.path.basename(shlex.split(self.line)[0])

    @property
    def address(self) -> str:
        """The mail address."""
        return self.line.partition(":")[2]

    def unreachable(self) -> str:
        """Return why this machine can't deliver; empty if it probably can. It takes up to 5 s."""
        if not self.scheme:
            program = shlex.split(self.line)[0]
            return "" if shutil.which(program) else f"there is no `{os.path.basename(program)}`"
        if self.scheme == "mailto":
            return "" if _mail_command(self.address) else "there is neither `sendmail` nor `mail`"
        where = urllib.parse.urlsplit(self.line)
        proxy = urllib.request.getproxies().get(self.scheme)
        if proxy and not urllib.request.proxy_bypass(where.netloc.rpartition("@")[2]):
            where = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        port = where.port or (443 if where.scheme == "https" else 80)
        try:
            socket.create_connection((where.hostname or "", port), _REACH_S).close()
        except OSError as error:
            return error.strerror or str(error)
        return ""

    def deliver(self, notice: "Mapping[str, Any]") -> str:
        """Deliver a notice with `id` and `text`; return why it was not taken, empty if it was."""
        try:
            if self.scheme in ("http", "https"):
                return _post(self.line, notice)
            if self.scheme == "mailto":
                command = _mail_command(self.address)
                if not command:
                    return "there is neither `sendmail` nor `mail`"
                is_whole = command[0].endswith("sendmail")  # it takes headers, too
                text = _mail(self.address, notice) if is_whole else notice["text"]
                return _run(command, text, notice)
            return _run(shlex.split(self.line), notice["text"], notice)
        except Exception as error:  # noqa: BLE001 - whatever a receiver does, others get theirs
            # Its message may hold the address.
            return getattr(error, "strerror", None) or type(error).__name__


@dataclass(frozen=True, slots=True)
class Receivers:
    """All receivers, and after how many seconds of waiting they hear of it."""

    all: tuple[Receiver, ...]
    wait_s: float = WAIT_S

    def as_text(self) -> str:
        """Return the file that `parse` reads."""
        return "".join(f"{one.line}\n" for one in self.all) + f"wait={self.wait_s:.3f}s\n"


def find(word: str, cwd: str, environment: Mapping[str, str]) -> Receivers:
    """Return the receivers that `--notify` names: `@FILE`, or a key of `[notify]` in a site file.

    Raises:
        UsageError: There are none, or others can read them.
    """
    if word.startswith("@"):
        return _of_file(word[1:])
    if ":" in word or "/" in word:
        raise UsageError(
            "--notify takes a name or @FILE, not the receiver itself",
            where="--notify",  # not the word: errors end up in logs
            why="everybody on this machine can read a command line",
            fix=_FIX_FILE,
        )
    known: dict[str, tuple[str, Any, int]] = {}
    unused: list[str] = []
    for path in (user_file(environment), project_file(cwd)):
        if path is not None:
            known |= _of_site(path, environment, unused)
    if word not in known:
        fix = did_you_mean(word, known, _FIX_FILE)
        what = f"no muster.toml has `{word}` in [{TABLE}]"
        raise UsageError(what, where=f"--notify {word}", why="\n".join(unused) or None, fix=fix)
    path, value, mode = known[word]
    where = f"{path} {TABLE}.{word}"
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) for one in values):
        raise UsageError("a receiver is a text, or a list of texts", where=where)
    found: list[str] = []
    wait_s = None
    for one in values:
        if one.startswith("@"):
            base = os.path.join(os.path.dirname(path), os.path.expanduser(one[1:]))
            of_file = _of_file(base)
            found += [receiver.line for receiver in of_file.all]
            wait_s = of_file.wait_s
        elif "://" in one and mode & (stat.S_IRGRP | stat.S_IROTH):
            raise _is_open(where, path)
        else:
            found.append(one)
    of_files = [f"wait={wait_s:.3f}s"] if wait_s is not None else []
    return parse("\n".join([*of_files, *found]), where)


def parse(text: str, where: str) -> Receivers:
    """Return the receivers in the text of a file.

    Raises:
        UsageError: There are none or too many, or a line can't be read; `where` names the file.
    """
    found, wait_s = [], WAIT_S
    for number, line in enumerate(map(str.strip, text.splitlines()), 1):
        at = f"{where}:{number}"
        if line.startswith("wait="):
            said = parse_timeout(line.removeprefix("wait="))
            if said is None or said <= 0:
                raise UsageError("this is no time", where=at, fix="wait=30m")
            wait_s = said
        elif line and not line.startswith("#"):
            found.append(_receiver(line, at))
    if not found or len(found) > _MAX_RECEIVERS:
        what = f"there are {len(found)} receivers" if found else "there is no receiver"
        fix = "one line for each, at most 8: https://..., mailto:NAME@HOST, or a command"
        raise UsageError(what, where=where, fix=fix)
    return Receivers(tuple(dict.fromkeys(found)), wait_s)


def _receiver(line: str, where: str) -> Receiver:
    try:
        if line.isprintable() and _is_good(Receiver(line)):
            return Receiver(line)
    except ValueError:  # quotes that do not close, a port that is no number
        pass
    fix = "https://..., mailto:NAME@HOST, or a command with its arguments"
    why = "it is neither an address nor a program that is here"  # it may be a secret: not repeated
    raise UsageError("this line is no receiver", where=where, why=why, fix=fix)


def _is_good(receiver: Receiver) -> bool:
    if receiver.scheme == "mailto":
        return _is_mail_address(receiver.address)
    if receiver.scheme:
        return bool(receiver.label) and urllib.parse.urlsplit(receiver.line).port != 0
    program = shlex.split(receiver.line)[0]
    # A bare name may be a program of the nodes alone.
    return bool(receiver.label) and ("/" not in program or shutil.which(program) is not None)


def _is_mail_address(text: str) -> bool:
    name, _, host = text.partition("@")
    return bool(name and host) and not set(text) & set(" ,;<>\"'\\") and text[0] != "-"


def _of_file(path: str) -> Receivers:
    path = os.path.expanduser(path)
    try:
        with open_plain(path) as file:
            mode = os.fstat(file.fileno())
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(
            "the receivers can't be read", where=f"--notify @{path}", why=why
        ) from None
    if mode.st_uid not in (0, os.getuid()) or mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise _is_open(f"--notify @{path}", path)
    try:
        text = data[:_MAX_BYTES].decode()
    except UnicodeDecodeError:
        raise UsageError("this is no text file", where=f"--notify @{path}") from None
    return parse(text, path)


def _is_open(where: str, path: str) -> UsageError:
    return UsageError(
        "others can read the receivers",
        where=where,
        why="whoever knows the address can write to it",
        fix=f"chmod 600 {path}",
    )


def _of_site(
    path: str, environment: Mapping[str, str], unused: list[str]
) -> dict[str, tuple[str, Any, int]]:
    try:
        with open_plain(path) as file:
            status = os.fstat(file.fileno())
            if (why := why_not_used(path, status, environment)) is not None:
                unused.append(f"{path} is not used: {why}")
                return {}
            table = tomllib.load(file).get(TABLE, {})
    except (OSError, ValueError) as error:
        unused.append(f"{path} can't be read: {error}")
        return {}
    if not isinstance(table, dict):
        return {}
    return {name: (path, value, status.st_mode) for name, value in table.items()}


# Delivery.


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Another address is not the one that the user wrote; and a POST would become a GET."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _post(address: str, notice: Mapping[str, Any]) -> str:
    body = json.dumps(notice).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "torchmuster"}
    where = urllib.parse.urlsplit(address)
    login, _, host = where.netloc.rpartition("@")
    if login:  # urllib takes none in an address
        word = base64.b64encode(urllib.parse.unquote(login).encode()).decode()
        headers["Authorization"] = f"Basic {word}"
        address = where._replace(netloc=host).geturl()
    request = urllib.request.Request(address, body, headers, method="POST")
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=_ANSWER_S):
            return ""
    except urllib.error.HTTPError as error:
        with contextlib.closing(error):
            return f"it answered {error.code} {error.reason}"[:_MAX_SAID]
    except urllib.error.URLError as error:
        return str(getattr(error.reason, "strerror", None) or error.reason)[:_MAX_SAID]


def _run(command: Sequence[str], text: str, notice: Mapping[str, Any]) -> str:
    environment = {**os.environ, "MUSTER_NOTICE_ID": str(notice["id"])}
    read_end, write_end = os.pipe()
    try:
        os.write(write_end, f"{text}\n".encode(errors="replace")[:_MAX_TEXT])  # a pipe holds it
        os.close(write_end)
        out = proc.NOWHERE
        child = proc.start(command, env=environment, stdin=read_end, stdout=out, stderr=out)
    finally:
        os.close(read_end)
    status = child.wait(_COMMAND_S)
    if status is None:
        proc.kill_session(child.pid)
        child.wait(_REACH_S)
        return f"it took more than {_COMMAND_S:.0f} s"
    return describe_exit(status) if status else ""


def _mail_command(address: str) -> list[str]:
    """Return the machine's own program for mail that is read from standard input; [] if none."""
    path = f"{os.environ.get('PATH', os.defpath)}:{_SENDMAIL_PATH}"
    if (program := shutil.which("sendmail", path=path)) is not None:
        return [program, "-i", "-t"]  # to the address in the text
    if (program := shutil.which("mail", path=path)) is not None:
        return [program, "-s", "torchmuster", "--", address]
    return []


def _mail(address: str, notice: Mapping[str, Any]) -> str:
    first = str(notice["text"]).partition("\n")[0]
    head = {
        "To": address,
        "Subject": first.encode("ascii", "replace").decode()[:_MAX_SAID],
        "Message-ID": f"<{notice['id'].replace('/', '.')}@torchmuster>",
        "Content-Type": "text/plain; charset=utf-8",
    }
    lines = "".join(f"{name}: {value}\n" for name, value in head.items())
    return f"{lines}\n{notice['text']}"
