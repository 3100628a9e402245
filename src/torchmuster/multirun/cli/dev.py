"""`muster dev`: run a script again whenever a file of its project is saved, in its own session.

It has one thread and no event loop: each run's client is a fork of this process, which has the
client's imports. The fork ends with this process, and a run with its client.
"""

import contextlib
import fcntl
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any, Self

import click

from torchmuster.core import proc
from torchmuster.core.cli import ending
from torchmuster.core.cli.run import RunCommand, check_debugger, choose_id, request_of, start_run
from torchmuster.core.cli.run import run as run_command
from torchmuster.core.files.layout import muster_home
from torchmuster.core.model.text import span
from torchmuster.core.model.verdict import AT_ONCE
from torchmuster.core.spec.launch import RunRequest, plan_run
from torchmuster.core.spec.problems import Problems
from torchmuster.errors import MusterError
from torchmuster.launcher.files.code_copy import ask_git, walk_code
from torchmuster.multirun.cli.forks import import_for_runs, run_client
from torchmuster.multirun.cli.session import (
    end_session,
    find_session_place,
    start_session,
    wait_until_open,
)
from torchmuster.multirun.server.call import client_lives, read_setup, this_process
from torchmuster.multirun.server.messages import ClientProcess, SessionSetup
from torchmuster.multirun.views.sessions import find_session, living_sessions, plan_of

# Decide what `muster dev` does after a saved file, a key or the end of a run; without I/O.


AGAIN_KEYS = "\r\nr"
QUIT_KEYS = "q\x04"  # and Ctrl-D


class Act(Enum):
    """The next action."""

    START = "start"
    CANCEL = "cancel"
    QUIT = "quit"


@dataclass
class DevLoop:
    """The state of `muster dev`: whether a run is active, and what follows it.

    Attributes:
        until_error: Whether to start the next run after a successful one.
        is_running: Whether a run is active, or being ended.
    """

    until_error: bool = False
    is_running: bool = False
    _next: Act | None = None  # what follows the run that is being ended
    _is_ending: bool = False

    def start(self) -> Act:
        """Record that a run begins."""
        self.is_running, self._is_ending, self._next = True, False, None
        return Act.START

    def saved(self) -> Act | None:
        """Return what to do after a saved file."""
        return self._replace_by(Act.START)

    def pressed(self, keys: str) -> Act | None:
        """Return what to do after keys of a terminal, or letters on stdin."""
        for key in keys:
            if key in QUIT_KEYS:
                return self._replace_by(Act.QUIT)
            if key in AGAIN_KEYS:
                return self._replace_by(Act.START)
        return None

    def end_requested(self) -> Act | None:
        """Return what to do after a signal that ends the command."""
        return self._replace_by(Act.QUIT)

    def ended(self, code: int) -> Act | None:
        """Return what to do after the end of the run."""
        self.is_running = False
        if self._next is not None:
            return self._next
        return Act.START if self.until_error and code == 0 else None

    def _replace_by(self, act: Act) -> Act | None:
        if not self.is_running:
            return act
        if self._next is not Act.QUIT:
            self._next = act
        if self._is_ending:
            return None
        self._is_ending = True
        return Act.CANCEL


def status_of(
    code: int, took_s: float, saved: Sequence[str], saved_at: str, *, has_keys: bool
) -> str:
    """Return the status line below the output of a run.

    Args:
        code: Its exit code.
        took_s: The time from its start to its end.
        saved: The files saved before it, relative to the folder.
        saved_at: The time of day at which they were.
        has_keys: Whether the user can press keys.
    """
    parts = []
    if saved:
        more = f" and {len(saved) - 1} more" if len(saved) > 1 else ""
        parts.append(f"saved {saved[0]}{more} {saved_at}")
    took = span(took_s)
    parts.append(f"ran {took}" if code == 0 else f"failed in {took} (exit code {code})")
    keys = " (Enter: again, q: quit)" if has_keys else ""
    return "; ".join([*parts, f"waiting for a change{keys}"])


def name_for(folder: str, taken: dict[str, str]) -> str:
    """Return the session name for a folder.

    Args:
        folder: The path of the folder.
        taken: The folder of each live session, by its name.
    """
    own = folder.rstrip("/").rpartition("/")[2]
    word = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in own)
    base = f"dev-{word.strip('-')[:24].strip('-') or 'root'}"
    names = [base, *(f"{base}-{number}" for number in range(2, 100))]
    return next((name for name in names if taken.get(name, folder) == folder), base)


_IDLE = "2h"  # ends a session on other machines after the command was killed
_END_S = 20.0
# Options of `muster run` that make no sense for repeated runs, or are about jobs.
_NOT_HERE = frozenset(
    {
        *("detach", "dry_run", "launched", "stdin_rank", "spares", "resubmit", "ship_env"),
        *("run_id", "warn", "grow", "join_timeout", "last_call", "no_preflight"),
    }
)
# Options that the session has already decided when a run starts.
_OF_SESSION = (
    *("engine", "hosts", "hostfile", "queue", "account", "cpus_per_node", "gpus_per_node", "mem"),
    *("time_limit", "here"),
)


@click.command(
    cls=RunCommand,
    context_settings={"allow_interspersed_args": False},
    options_metavar="[OPTIONS]",
    params=[param for param in run_command.params if param.name not in _NOT_HERE],
)
@click.option("--until-error", is_flag=True, help="Run again and again until a run fails.")
def dev(*, until_error: bool, **given: Any) -> int:
    """Run SCRIPT again when a file of its project is saved.

    It runs on a session that is named after the folder, is started when it is missing, and ends
    with this command. Options are those of `muster run`.
    """
    if given["max_restarts"] is None:
        given["max_restarts"] = 0
    asked = request_of({**dict.fromkeys(_NOT_HERE), **_off(), **given})
    _check(asked, given)

    with _Session(asked, given) as held:
        watch = SavedFiles(_folders(asked))
        held.open()
        import_for_runs()
        return _Runner(asked, held, watch, DevLoop(until_error)).run()


def _off() -> dict[str, object]:
    flags = [param.name for param in run_command.params if getattr(param, "is_flag", False)]
    return {str(name): False for name in flags if name in _NOT_HERE}


def _check(request: "RunRequest", given: dict[str, Any]) -> None:
    """Check the command line before a session is started for it.

    Raises:
        ManyErrors: All problems of the command line.
    """
    problems = Problems()
    check_debugger(request, problems)
    if request.session is None:
        find_session_place(given, problems)
    nodes = request.nodes or "1"
    if not nodes.isdecimal():
        most = nodes.rpartition(":")[2]
        fix = f"--nodes {most}" if most.isdecimal() else None
        problems.add(f"a session has a number of nodes, not `{nodes}`", f"--nodes {nodes}", fix=fix)
    workers = request.nproc_per_node
    there = request.session or request.engine or request.hosts or request.hostfile
    local = replace(request, nodes="1", nproc_per_node="1" if there else workers)
    plan = plan_run(local, choose_id(request, problems), [], problems, simulated=not there)
    problems.checked(plan)


def _folders(request: "RunRequest") -> tuple[str, ...]:
    """Return the folders to watch: the script's, the current one, and those on PYTHONPATH.

    Folders with `site-packages` in their path are left out.
    """
    cwd = os.path.realpath(os.getcwd())
    script = os.path.dirname(os.path.realpath(request.script)) if not request.module else cwd
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    more = [path for path in map(os.path.realpath, filter(None, paths)) if os.path.isdir(path)]
    return tuple(dict.fromkeys([script, cwd, *(p for p in more if "site-packages" not in p)]))


class _Session:
    """The session of this command: an existing one, or one that is started and ended here."""

    def __init__(self, request: "RunRequest", given: dict[str, Any]) -> None:
        self._request, self._given = request, given
        self._is_own = False
        self._client: ClientProcess | None = None
        self.name = request.session or ""

    def __enter__(self) -> Self:
        return self

    def without_place(self, request: "RunRequest") -> "RunRequest":
        """Return the request for a run in the session, without the options of the session."""
        none: dict[str, Any] = {name: None for name in _OF_SESSION if name != "here"}
        return replace(request, session=self.name, here=False, stdin_rank=None, **none)

    def open(self) -> None:
        """Start the session unless it is alive.

        Raises:
            NotFoundError: The user has named a session that is not alive.
            click.exceptions.Exit: The session can't be started; the error has been printed.
        """
        if self._request.session is not None:
            find_session(self._request.session)
            return
        with _name_lock() as lock:
            setups = {setup.name: setup for setup in map(read_setup, living_sessions())}
            if self._is_own and self.name in setups:
                return
            taken = {name: self._folder_of(setup) for name, setup in setups.items()}
            self.name = name_for(os.getcwd(), taken)
            if self.name in taken:
                return
            self._warn_of_other_dev(setups.values())
            say("importing torch on the session's nodes")
            self._is_own = True
            self._client = this_process()  # not the fork, which ends
            pid = os.fork()  # otherwise this process would have to reap the session's owner
            if pid == 0:
                run_client(partial(self._start, lock))
        _, status = os.waitpid(pid, 0)
        if status:
            raise click.exceptions.Exit(abs(os.waitstatus_to_exitcode(status)))

    def _folder_of(self, setup: "SessionSetup") -> str:
        """Return the folder whose runs may use a session; empty if it is another's, or ends."""
        lives = client_lives(setup)
        if lives is False:  # on other nodes it stays for a while
            with contextlib.suppress(MusterError):
                lives = plan_of(find_session(setup.name).run_dir).engine == "local"
        return "" if lives else setup.folder

    def _warn_of_other_dev(self, setups: "Iterable[SessionSetup]") -> None:
        for one in setups:
            if one.client is not None and one.folder == os.getcwd() and client_lives(one):
                other = f"another `muster dev` runs in this folder (process {one.client.pid})"
                say(f"{other}; this one has a session of its own, {self.name}")
                return

    def _start(self, lock: int) -> int:
        """Start the session and wait until it is open; release the lock when others can see it."""
        names = (*_OF_SESSION, "nproc_per_node", "preload", "python")
        given = {name: self._given[name] for name in names}
        nodes = int(self._request.nodes) if self._request.nodes else None
        own = {"nodes": nodes, "name": self.name, "idle": _IDLE, "client": self._client}
        held = start_session({**given, **own}, Problems())
        os.close(lock)
        wait_until_open(held, self.name)
        return 0

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._is_own:
            with contextlib.suppress(MusterError):  # it has already ended
                end_session(find_session(self.name).run_dir, self.name)


@contextlib.contextmanager
def _name_lock() -> Iterator[int]:
    """Hold the lock for the choice of a session's name, so that two commands don't choose the same.

    A process forked meanwhile holds it too, until it closes the descriptor. File systems without
    locks get none.
    """
    home = muster_home()
    os.makedirs(home, mode=0o700, exist_ok=True)
    lock = os.open(os.path.join(home, "dev.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(lock)


class _Runner:
    """Starts the runs; waits for their ends, saved files, keys and signals."""

    def __init__(
        self, asked: "RunRequest", held: _Session, watch: "SavedFiles", loop: DevLoop
    ) -> None:
        self._asked, self._held, self._watch, self._loop = asked, held, watch, loop
        self._keys = _Keys(sys.stdin.fileno() if not asked.pdb else 0)
        self._pid = 0
        self._pidfd = -1
        self._code = 0
        self._saved: tuple[str, ...] = ()
        self._saved_at = ""
        self._signum = 0
        self._status = ""
        self._began_at = 0.0
        self._kill_at: float | None = None

    def run(self) -> int:
        """Run until the user quits; return the last run's exit code, or 128 plus the signal."""
        woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, self._hear)
        signal.signal(signal.SIGCONT, self._keys.hear_continued)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        with self._keys.taken():
            act: Act | None = self._loop.start()
            while act is not Act.QUIT:
                if act is Act.START:
                    self._start()
                elif act is Act.CANCEL:
                    self._cancel()
                act = self._wait(woken)
        return 128 + self._signum if self._signum else self._code

    def _hear(self, signum: int, frame: object) -> None:
        self._signum = signum

    def _wait(self, woken: int) -> Act | None:
        """Wait for the next event; return what to do, or None after a timeout."""
        if self._keys.came_back() and self._status:
            say(self._status)  # again, below what the shell has written in between
        poll = select.poll()
        fds = [woken, *([self._pidfd] if self._pid else []), *self._keys.fds(idle=not self._pid)]
        for fd in fds:
            poll.register(fd, select.POLLIN)
        heard = dict(poll.poll(self._watch.pause_s() * 1000))
        if woken in heard:
            os.read(woken, 4096)
            if self._signum:
                return self._loop.end_requested()
        if self._pidfd in heard:
            return self._end()
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            proc.kill_quietly(self._pid)
        saved = self._watch.look()
        if saved:
            self._saved = tuple(os.path.relpath(path) for path in saved)
            self._saved_at = time.strftime("%H:%M:%S")
            return self._noted(self._loop.saved())
        if self._keys.fd in heard:
            return self._noted(self._loop.pressed(self._keys.read()))
        return None

    def _noted(self, act: Act | None) -> Act | None:
        return self._loop.start() if act is Act.START else act

    def _start(self) -> None:
        self._status = ""
        self._held.open()
        if sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb":
            sys.stdout.write("\x1b[H\x1b[2J")  # keeps the scrollback
        sys.stdout.flush()
        sys.stderr.flush()
        request = self._held.without_place(self._asked)
        self._began_at = time.monotonic()
        if self._asked.pdb:
            self._keys.lend()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            proc.die_with_parent(parent)
            run_client(partial(_run, request), 0 if self._asked.pdb else None)
        self._pidfd = os.pidfd_open(self._pid)

    def _cancel(self) -> None:
        """End the run at once."""
        proc.kill_quietly(self._pid, AT_ONCE)
        self._kill_at = time.monotonic() + _END_S

    def _end(self) -> Act | None:
        _, status = os.waitpid(self._pid, 0)
        os.close(self._pidfd)
        self._pid, self._pidfd, self._kill_at = 0, -1, None
        self._keys.take_again()
        code = os.waitstatus_to_exitcode(status)
        self._code = code if code >= 0 else 128 - code
        act = self._loop.ended(self._code)
        if act is Act.START:
            return self._loop.start()
        if act is None:
            took_s, has_keys = time.monotonic() - self._began_at, self._keys.is_terminal
            self._status = status_of(
                self._code, took_s, self._saved, self._saved_at, has_keys=has_keys
            )
            say(self._status)
        return act


def _run(request: "RunRequest") -> int:
    ending.is_brief = True
    return start_run(request)


class _Keys:
    """Reads single keys from a terminal, or letters from a pipe; a pdb run gets the terminal.

    Args:
        fd: The descriptor of stdin.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.is_terminal = os.isatty(fd) and _is_in_front(fd)
        self._is_open = self.is_terminal or not os.isatty(fd)
        self._before: list[Any] | None = None
        self._is_lent = False
        self._was_away = False  # stopped, or in the background

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Read single keys without echo inside this context, then restore the terminal."""
        if self.is_terminal:
            self._before = termios.tcgetattr(self.fd)
            self.take_again()
        try:
            yield
        finally:
            self._give_back()

    def take_again(self) -> None:
        """Set the terminal to single keys, after a run has used it."""
        self._is_lent = False
        if self._before is None:
            return
        if _is_in_front(self.fd):
            tty.setcbreak(self.fd, termios.TCSADRAIN)
        else:  # setting it in the background would stop us (SIGTTOU)
            self._was_away = True

    def hear_continued(self, signum: int, frame: object) -> None:
        """Note that the shell has continued us, with its own terminal settings."""
        self._was_away = True

    def came_back(self) -> bool:
        """Return whether we have the terminal back from the shell; if so, set it to single keys."""
        if self._before is None or self._is_lent:
            return False
        if not _is_in_front(self.fd):
            self._was_away = True
            return False
        if not self._was_away:
            return False
        self._was_away = False
        self.take_again()
        return True

    def _give_back(self) -> None:
        if self._before is not None and _is_in_front(self.fd):
            with contextlib.suppress(termios.error):  # the terminal has gone
                termios.tcsetattr(self.fd, termios.TCSADRAIN, self._before)

    def lend(self) -> None:
        """Give the terminal to the child that is started now."""
        self._is_lent = True
        self._give_back()

    def fds(self, *, idle: bool) -> Sequence[int]:
        """Return the descriptors to poll for keys."""
        is_away = self.is_terminal and self._was_away
        return [self.fd] if self._is_open and not is_away and (idle or not self._is_lent) else []

    def read(self) -> str:
        """Return the typed keys; at the end of a terminal's input, `q`."""
        data = os.read(self.fd, 1024)
        if not data and not self.is_terminal:
            self._is_open = False  # no more keys, but files are still watched
        return data.decode(errors="replace") or ("q" if self.is_terminal else "")


def _is_in_front(fd: int) -> bool:
    """Return whether we are in the terminal's foreground; False if the terminal has gone."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:
        return False


def say(sentence: str) -> None:
    """Print a message on stderr."""
    click.echo(f"muster: {sentence}", err=True)


# The files that were saved since the last check. Polls instead of using inotify, which misses files that
# another host saves on a network file system. One check of 500 files takes 1 ms (docs/design.md).


_CODE = ".py"
_SETTINGS = (".yaml", ".yml", ".toml", ".ini", ".cfg")  # a run may write .json and .txt
_OF_RUNS = frozenset({"runs", "outputs", "wandb", "mlruns", "lightning_logs", "__pycache__"})
_MOST_FILES = 4000
_LIST_AGAIN_S = 0.5
_LOOK_S = 0.04
_MOST_LOOK_S = 0.2
_COST = 20  # polling takes at most a twentieth of a processor
_QUIET_S = 0.02  # for an editor that saves several files, or one file in several steps
_SETTLES_S = 1.0
_GONE: tuple[int, ...] = ()

Facts = Mapping[str, tuple[int, ...]]


class SavedFiles:
    """The watched files below some folders, and which of them were saved.

    Args:
        folders: The folders of the script, of the project and of its modules. If one is in a git
            work tree, the whole tree is watched.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self._folders = tuple(folders)
        self._listed_at = self._took_s = 0.0
        self._paths: list[str] = []
        self._directories: Facts = {}
        self._facts: Facts = {}
        self._list()
        self._facts = facts_of(self._paths)

    @property
    def num_files(self) -> int:
        """Return the number of watched files."""
        return len(self._paths)

    def look(self) -> tuple[str, ...]:
        """Return the files saved since the last call; wait until the editor has finished saving."""
        found = self._poll_once()
        if not found:
            return ()
        saved = dict.fromkeys(found)
        until = time.monotonic() + _SETTLES_S
        quiet_at = time.monotonic() + _QUIET_S
        while time.monotonic() < min(quiet_at, until):
            pause(_QUIET_S / 2)
            if more := self._changed():
                saved |= dict.fromkeys(more)
            facts = (self._facts.get(path, _GONE) for path in saved)
            if more or any(one != _GONE and one[1] == 0 for one in facts):  # being written
                quiet_at = time.monotonic() + _QUIET_S
        return tuple(saved)

    def pause_s(self) -> float:
        """Return how long to wait before the next check."""
        return min(max(_LOOK_S, self._took_s * _COST), _MOST_LOOK_S)

    def _poll_once(self) -> list[str]:
        """Return the known files that were saved; only if there are none, look for new ones.

        Listing asks git, and no run should wait for that.
        """
        began = time.process_time()  # without the time in which other processes ran
        found = self._changed()
        self._took_s = time.process_time() - began
        is_due = time.monotonic() - self._listed_at >= _LIST_AGAIN_S
        if not found and is_due and facts_of(self._directories) != self._directories:
            self._list()
            found = self._changed()
        return found

    def _changed(self) -> list[str]:
        before, self._facts = self._facts, facts_of(self._paths)
        return changed(before, self._facts)

    def _list(self) -> None:
        self._listed_at = time.monotonic()
        self._paths = list_files(self._folders)
        directories = dict.fromkeys([*self._folders, *map(os.path.dirname, self._paths)])
        self._directories = facts_of(directories)


def pause(seconds: float) -> None:
    """Wait; a signal that has a handler ends the wait early."""
    import select

    select.select([], [], [], seconds)


def changed(before: Facts, after: Facts) -> list[str]:
    """Return the files that differ or are new; a removed file does not count as saved."""
    return [path for path, facts in after.items() if facts != _GONE and before.get(path) != facts]


def facts_of(paths: Iterable[str]) -> Facts:
    """Return what shows that a file was saved: its inode number, size and modification time."""
    found: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            status = os.stat(path)
            found[path] = (status.st_ino, status.st_size, status.st_mtime_ns)
        except OSError:
            found[path] = _GONE
    return found


def list_files(folders: Sequence[str]) -> list[str]:
    """Return the files to watch: those of the work trees; in very large ones, of `folders` only."""
    roots = dict.fromkeys(work_tree(folder) or folder for folder in folders)
    found = [path for root in roots for path in _files_below(root)]
    if len(found) > _MOST_FILES:
        near = tuple(f"{folder}{os.sep}" for folder in folders)
        found = [path for path in found if path.startswith(near)][:_MOST_FILES]
    return list(dict.fromkeys(found))


def work_tree(folder: str) -> str | None:
    """Return the root of the git work tree that contains a folder, or None."""
    here = folder
    while not os.path.exists(os.path.join(here, ".git")):
        if here == os.path.dirname(here):
            return None
        here = os.path.dirname(here)
    return here


def _files_below(root: str) -> Iterator[str]:
    home = os.path.join(os.path.realpath(muster_home()), "")
    tracked = ask_git(root, "ls-files", "-t", "-co", "--exclude-standard", "-z")
    if tracked is None:
        names = [name for name in walk_code(root) if not _OF_RUNS & set(name.split(os.sep))]
        wanted = [name for name in names if name.endswith((_CODE, *_SETTINGS))]
    else:
        entries = (os.fsdecode(entry) for entry in tracked.split(b"\0"))
        wanted = [entry[2:] for entry in entries if is_watched(entry[2:], is_new=entry[:1] == "?")]
    for name in wanted:
        path = os.path.join(root, name)
        if not os.path.realpath(path).startswith(home):
            yield path


def is_watched(name: str, *, is_new: bool) -> bool:
    """Return whether to watch a file of a work tree; a run may have written an untracked one."""
    if is_new:
        return name.endswith(_CODE) and not _OF_RUNS & set(name.split("/"))
    return name.endswith((_CODE, *_SETTINGS))
