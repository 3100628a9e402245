"""`torchmuster.launch`: run `muster run` for a function or a script in a background process."""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import Kind, RunDir, runs_dir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.plan import FunctionCall
from torchmuster.core.spec.launch import LaunchOrder
from torchmuster.errors import MusterError
from torchmuster.launcher.api import call, keywords
from torchmuster.launcher.api.failures import NotLaunchedError, read_errors
from torchmuster.launcher.api.run import RunHandle

# Runs the same torchmuster as this process; inherits nothing else of it.
_PROGRAM = """\
import sys
sys.path.insert(0, {folder!r})
import torchmuster
del sys.path[0]
from torchmuster.__main__ import main
sys.exit(main())
"""


def command(*words: str) -> list[str]:
    """Return a command line that runs the same torchmuster as this process."""
    package = os.path.dirname(proc.PACKAGE_FOLDER)
    return [sys.executable, "-P", "-c", _PROGRAM.format(folder=package), *words]


def start_command(name: str, words: Sequence[str]) -> str:
    """Run a command that leaves a run in the background; return the run id that it prints.

    Raises:
        NotLaunchedError: The command ended with errors.
    """
    argv = command(name, *words)
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        child = proc.start(argv, stdout=said.fileno(), stderr=errors.fileno())
        try:
            while (status := child.wait(3600.0)) is None:
                continue
        except BaseException:  # interrupted: the caller no longer wants it
            child.send_signal(15)
            child.wait(10.0)
            raise
        said.seek(0)
        errors.seek(0)
        lines = said.read().decode(errors="replace").split()
        text = errors.read().decode(errors="replace")
    if status != 0 or not lines:
        raise _as_error(name, text, status)
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text)  # the command's notes, e.g. about a disk that is nearly full
    return lines[-1]


def _as_error(command: str, text: str, status: int) -> NotLaunchedError:
    found = read_errors(text)
    if not found:
        what = f"`muster {command}` ended with {status} and started nothing"
        return NotLaunchedError(what, why=text.strip() or None)
    first, *others = found
    first.others = tuple(others)
    return first


class RunClient(Protocol):
    """The process that owns a run."""

    def poll(self) -> int | None:
        """Return its exit status; None while it runs, or if this process is not its parent."""

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end, for at most `timeout_s` seconds."""

    def send_signal(self, signum: int) -> None:
        """Send it a signal."""


# Owners of runs that this process launched: their parent must reap them.
_owners: list[RunClient] = []


def launch(
    function: Callable[..., Any] | str | os.PathLike[str], *args: Any, **options: Any
) -> RunHandle:
    """Start a function or a script on one or many nodes; return the run at once.

    Every long option of `muster run` is a keyword here, with the same name, meaning and default:
    `nodes`, `nproc_per_node`, `on`, `hosts`, `name`, `max_restarts`, `env`, `time`, `partition` and
    so on (docs/cli.md). A flag is `True`. An option that repeats takes a list. `env` is a mapping.
    Durations are texts as on the command line (`"30s"`, `"2h"`), or `timedelta`.

    All other keywords go to the function. If the function has a parameter with the name of an
    option, the keyword is refused; pass it with `functools.partial`.

    A function of a module travels by name, with the folder of your code. A function of a notebook,
    of `__main__` or within another function travels by value, with the variables that it uses.
    Function and arguments together may take 64 MiB.

    With `inline=True` the function is called in this very process, as rank 0 of 1, for a debugger
    or a test; what it raises is raised here.

    Args:
        function: The function that every worker calls, or the path of a script (`module=True`: a
            module's name).
        args: Positional arguments; a script gets them as text.
        options: Options of `muster run`, and the function's own keywords.

    Returns:
        The run. It continues when this process ends.

    Raises:
        NotLaunchedError: A keyword, a value or the function can't be used. Nothing was started.
    """
    if options.get("inline"):
        from torchmuster.launcher.api.inline import call_here

        return call_here(function, args, options)  # type: ignore[arg-type]  # it refuses a script
    return launch_by(_begin, function, args, options)


def launch_by(
    begin: Callable[[list[str], int, int], RunClient],
    function: Callable[..., Any] | str | os.PathLike[str],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> RunHandle:
    """Launch as `launch` does, with the given way to start the command.

    Args:
        begin: Starts `muster` with these arguments, standard output and standard error.
        function: A function or the path of a script.
        args: Its positional arguments.
        options: Options of `muster run`, and the function's own keywords.

    Raises:
        NotLaunchedError: As for `launch`.
    """
    if not callable(function) and not isinstance(function, str | os.PathLike):
        raise NotLaunchedError(
            f"launch got {type(function).__name__}: it takes a function, or the path of a script",
            fix="pass the function itself: launch(train, 0.1), not launch(train(0.1))",
        )
    cwd = os.getcwd()
    folder = tempfile.mkdtemp(prefix="muster-launch-")
    try:
        if callable(function):
            words, order = _of_function(function, args, options, cwd, folder)
        else:
            words, order = _of_script(os.fspath(function), args, options)
        path = os.path.join(folder, "order")
        atomic.replace_file(path, json.dumps(codec.to_plain(order)).encode(), mode=0o600)
        return RunHandle(
            RunDir(os.path.join(runs_dir(), _start(begin, ["run", "--launched", path, *words])))
        )
    except NotLaunchedError:
        raise
    except MusterError as error:
        raise NotLaunchedError(
            error.what, where=error.where, why=error.why, fix=error.fix
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _of_function(
    function: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
    cwd: str,
    folder: str,
) -> tuple[list[str], LaunchOrder]:
    ours, theirs = keywords.split(options, function, args, call.name_of(function))
    words, environment = keywords.words(ours), keywords.environment(ours)
    packed = call.pack(function, args, theirs, cwd)
    path = os.path.join(folder, "call")
    atomic.replace_file(path, packed.data, mode=0o600)
    sent = FunctionCall(
        source=path,
        sha256=hashlib.sha256(packed.data).hexdigest(),
        module_file=packed.module_file,
    )
    if not {"name", "run_id"} & ours.keys():
        words += ["--name", _as_name(packed.target)]
    return [*words, "--", packed.target], LaunchOrder(call=sent, environment=environment)


def _as_name(target: str) -> str:
    """Return the function's name in a form that can begin a run id."""
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in target.partition(":")[2])
    return name.strip("-")[:24].strip("-") or "function"


def _of_script(
    script: str, args: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[str], LaunchOrder]:
    keywords.check(options, "a script")
    words = [*keywords.words(options), "--", script]
    environment = keywords.environment(options)
    return words, LaunchOrder(args=tuple(str(arg) for arg in args), environment=environment)


def _begin(words: list[str], stdout: int, stderr: int) -> RunClient:
    return proc.start(command(*words), stdout=stdout, stderr=stderr)


def _start(begin: Callable[[list[str], int, int], RunClient], words: list[str]) -> str:
    """Start the command; return the run id as soon as it prints it.

    Raises:
        NotLaunchedError: The command printed no run id.
    """
    _owners[:] = [owner for owner in _owners if owner.poll() is None]
    said, theirs = os.pipe2(os.O_CLOEXEC)
    with tempfile.TemporaryFile() as errors, open(said) as answer:
        try:
            child = begin(words, theirs, errors.fileno())
        finally:
            os.close(theirs)
        try:
            run_id = answer.readline().strip()
        except BaseException:  # interrupted: the caller no longer wants it
            child.send_signal(15)
            _owners.append(child)
            raise
        if not run_id:
            child.wait(10.0)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    if not run_id:
        raise as_error(text, child.poll())
    _owners.append(child)
    if text:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)  # the command's notes, e.g. about a disk that is nearly full
    return run_id


def as_error(text: str, status: int | None, command: str = "muster run") -> NotLaunchedError:
    """Merge the errors that a command printed into one."""
    found = read_errors(text)
    if not found:
        return NotLaunchedError(
            f"`{command}` ended with {status} and started nothing", why=text.strip() or None
        )
    first, *others = found
    first.others = tuple(others)
    return first


def runs() -> list[RunHandle]:
    """Return all runs of this user, newest first, including those of the CLI and other processes.

    Workflows, sweeps and sessions are not runs; `torchmuster.sessions()` returns the live sessions.

    Raises:
        torchmuster.errors.NotFoundError: The folder of all runs can't be read.
    """
    from torchmuster.launcher.views.find import all_runs

    runs = [view for view in reversed(all_runs()) if view.kind is Kind.RUN]
    return [RunHandle(view.run_dir) for view in runs]


def find_run(word: str) -> RunHandle:
    """Return the run with this id, unambiguous part of an id, or `last`, as for every command.

    Raises:
        torchmuster.errors.NotFoundError: No run matches, several do, or the match is a workflow.
    """
    from torchmuster.errors import NotFoundError
    from torchmuster.launcher.views import find

    view = find.find_run(word)
    if view.kind is Kind.WORKFLOW:
        name = short_id(view.run_id)
        raise NotFoundError(f"{name} is a workflow, not a run", fix=f"muster status {name}")
    return RunHandle(view.run_dir)
