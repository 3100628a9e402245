"""`torchmuster.launch`: run `muster run` for a function or a script in a background process."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import linecache
import os
import shutil
import site
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from torchmuster.core import proc
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import Kind, RunDir, runs_dir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.plan import FunctionCall
from torchmuster.core.model.states import RunState
from torchmuster.core.node.options import world_of_one
from torchmuster.core.spec.launch import LaunchOrder
from torchmuster.errors import MusterError, NotFoundError
from torchmuster.launcher.api import keywords
from torchmuster.launcher.api.failures import NotLaunchedError, merged, read_errors
from torchmuster.launcher.api.run import RunHandle, RunStatus
from torchmuster.launcher.model import carried
from torchmuster.launcher.views import find

# The call file of a function: by name where workers can import it, else by value.


_MAX_SOURCE_CHARS = 1 << 18


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function for messages."""
    inner = _inner(function)
    whole: str = getattr(inner, "__qualname__", type(inner).__qualname__)
    return whole.rpartition("<locals>.")[2]


def _write_call(
    path: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    members: Sequence[Mapping[str, Any]],
) -> tuple[str, FunctionCall]:
    """Write the call file of a function; return `module:function` and what the plan says of it.

    Import paths below the project of the working directory are sent relative to it.

    Args:
        path: The file.
        function: From an importable module, from `__main__` or from a notebook.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        members: In a sweep, the further keyword arguments of each member.

    Raises:
        CarryError: The function or an argument can't be sent; the message names the variable.
    """
    name, cwd = name_of(function), os.getcwd()
    given = {f"args[{number}]": value for number, value in enumerate(args)}
    varied = {key: [member[key] for member in members] for key in (members[0] if members else ())}
    parts = {"": function, **given, **kwargs, **varied}
    call = (function, tuple(args), dict(kwargs))
    whole = carried.Named((*call, [dict(member) for member in members]) if members else call, parts)
    pickled = carried.pack_value(whole, f"the call of `{name}`", "", carried.MAX_CALL_BYTES)
    by_value = b"cloudpickle" in pickled
    inner = _inner(function)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    has_module = module is not None and _is_of(module, inner)
    head = carried.CallHead(
        name=name,
        python=carried.own_python(),
        cloudpickle=importlib.metadata.version("cloudpickle") if by_value else "",
        paths=tuple(_paths(cwd)),
        sources=dict(_sources(inner)),
    )
    data = carried.pack_call(head, pickled)
    atomic.replace_file(path, data, mode=0o600)
    return f"{inner.__module__ if has_module else '__main__'}:{name}", FunctionCall(
        source=path,
        sha256=hashlib.sha256(data).hexdigest(),
        module_file=_own_file(module, cwd) if has_module else None,
    )


def _inner(function: Callable[..., Any]) -> Any:
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    return inner.__func__ if isinstance(inner, types.MethodType) else inner


def _is_of(module: types.ModuleType, inner: Any) -> bool:
    """Return whether pickle's lookup by name finds this very object in an importable module."""
    if module.__name__ == "__main__" or getattr(module, "__spec__", None) is None:
        return False
    found: Any = module
    for part in getattr(inner, "__qualname__", "").split("."):
        found = getattr(found, part, None)
    return found is inner


def _paths(cwd: str) -> Iterator[str]:
    """Yield the entries of `sys.path` that another Python lacks, without the working directory."""
    root = _root(cwd)
    for entry in sys.path:
        path = os.path.realpath(entry or cwd)
        if path == os.path.realpath(cwd) or not os.path.isdir(path) or _comes_with_python(path):
            continue
        yield os.path.relpath(path, os.path.realpath(cwd)) if _is_below(path, root) else path


def _own_file(module: types.ModuleType | None, cwd: str) -> str | None:
    """Return the module's file if it is in the user's code, which travels; None if installed."""
    path = os.path.realpath(getattr(module, "__file__", None) or os.devnull)
    return path if _is_below(path, _root(cwd)) and not _comes_with_python(path) else None


def _comes_with_python(path: str) -> bool:
    own = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    own |= {*site.getsitepackages(), site.getusersitepackages()}
    return any(_is_below(path, os.path.realpath(folder)) for folder in own)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(f"{folder}{os.sep}")


def _root(cwd: str) -> str:
    """Return the folder around `cwd` with `.git`, else `cwd`: what is copied to hosts."""
    folder = start = os.path.realpath(cwd)
    while not os.path.exists(os.path.join(folder, ".git")):
        if folder == os.path.dirname(folder):
            return start
        folder = os.path.dirname(folder)
    return folder


def _sources(inner: Any) -> Iterator[tuple[str, str]]:
    """Yield the notebook cell that defines a function, for the workers' tracebacks."""
    code = getattr(inner, "__code__", None)
    name = getattr(code, "co_filename", "")
    text = "".join(linecache.getlines(name)) if name else ""
    entry = linecache.cache.get(name)
    is_lazy = entry is not None and (len(entry) == 1 or entry[1] is None)  # not read from a file
    if text and len(text) <= _MAX_SOURCE_CHARS and (is_lazy or not os.path.exists(name)):
        yield name, text


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
        raise as_error(text, status, f"muster {name}")
    _pass_on(text)
    return lines[-1]


def _pass_on(notes: str) -> None:
    """Show the notes of a command that has started a run, e.g. about a disk that is nearly full."""
    if notes and sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(notes)


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
    run_dir = start_order(
        lambda words: _start(begin, ["run", *words]), function, args, options, LaunchOrder()
    )
    return RunHandle(run_dir)


def start_order(
    start: Callable[[list[str]], str],
    function: Callable[..., Any] | str | os.PathLike[str],
    args: Sequence[Any],
    options: Mapping[str, Any],
    order: LaunchOrder,
    *,
    of: str = "launch",
    members: Sequence[Mapping[str, Any]] = (),
) -> RunDir:
    """Start a command with the order to call a function or to run a script.

    Args:
        start: Starts the command with these arguments; returns the run id.
        function: A function or the path of a script.
        args: Its positional arguments.
        options: Options of the command, and the function's own keywords.
        order: What else it says.
        of: `launch` or `sweep`.
        members: The further keyword arguments of each member of a sweep.

    Raises:
        NotLaunchedError: A keyword, a value or the function can't be used.
    """
    folder = tempfile.mkdtemp(prefix=f"muster-{of}-")
    try:
        if callable(function):
            name, member = name_of(function), members[0] if members else None
            ours, theirs = keywords.split(options, function, args, name, of=of, member=member)
            words = keywords.words(ours, of)
            order = replace(order, environment=keywords.environment(ours, of))
            target, call = _write_call(
                os.path.join(folder, "call"), function, args, theirs, members
            )
            if not {"name", "run_id"} & ours.keys():
                words += ["--name", _as_name(target)]
            words, order = [*words, "--", target], replace(order, call=call)
        else:
            keywords.check(options, "a script", of)
            words = [*keywords.words(options, of), "--", os.fspath(function)]
            environment = keywords.environment(options, of)
            order = replace(order, args=tuple(map(str, args)), environment=environment)
        path = os.path.join(folder, "order")
        atomic.replace_file(path, json.dumps(codec.to_plain(order)).encode(), mode=0o600)
        return RunDir(os.path.join(runs_dir(), start(["--launched", path, *words])))
    except NotLaunchedError:
        raise
    except MusterError as error:
        raise NotLaunchedError(
            error.what, where=error.where, why=error.why, fix=error.fix
        ) from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _as_name(target: str) -> str:
    """Return the function's name in a form that can begin a run id."""
    name = "".join(c if c.isalnum() and c.isascii() else "-" for c in target.partition(":")[2])
    return name.strip("-")[:24].strip("-") or "function"


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
    _pass_on(text)
    return run_id


def as_error(text: str, status: int | None, command: str = "muster run") -> NotLaunchedError:
    """Merge the errors that a command printed into one."""
    what = f"`{command}` ended with {status} and started nothing"
    return merged(read_errors(text) or [NotLaunchedError(what, why=text.strip() or None)])


def runs() -> list[RunHandle]:
    """Return all runs of this user, newest first, including those of the CLI and other processes.

    Workflows, sweeps and sessions are not runs; `torchmuster.sessions()` returns the live sessions.

    Raises:
        torchmuster.errors.NotFoundError: The folder of all runs can't be read.
    """
    runs = [view for view in reversed(find.all_runs()) if view.kind is Kind.RUN]
    return [RunHandle(view.run_dir) for view in runs]


def find_run(word: str) -> RunHandle:
    """Return the run with this id, unambiguous part of an id, or `last`, as for every command.

    Raises:
        torchmuster.errors.NotFoundError: No run matches, several do, or the match is a workflow.
    """
    view = find.find_run(word)
    if view.kind is Kind.WORKFLOW:
        name = short_id(view.run_id)
        raise NotFoundError(f"{name} is a workflow, not a run", fix=f"muster status {name}")
    return RunHandle(view.run_dir)


# With `inline=True`: rank 0 of 1 in this very process, for a debugger or a test.


# What is the same in one process, or changes only names and retries.
_MEANT = frozenset({"inline", "name", "env", "max_restarts"})


class InlineRun(RunHandle):
    """A call that has returned: it has no folder, no log and no other process."""

    def __init__(self, value: Any) -> None:
        super().__init__(RunDir("inline"))
        self._value = value

    def __repr__(self) -> str:
        return "<torchmuster.Run inline: succeeded>"

    def status(self) -> RunStatus:
        """Return the state of a run that has succeeded."""
        return RunStatus(
            run_id=self.run_id,
            state=RunState.SUCCEEDED.value,
            is_final=True,
            num_attempts=1,
            elapsed_s=None,
            waits_for="",
            exit_code=0,
        )

    def logs(self, rank: int = 0, *, attempt: int | None = None) -> str:
        """Refuse: it has printed on this process's own output.

        Raises:
            NotFoundError: Always.
        """
        raise NotFoundError("a call in this process has no log: it has printed here")

    def wait(self, timeout_s: float | None = None) -> RunHandle:
        """Return the run."""
        return self

    async def wait_async(self, timeout_s: float | None = None) -> RunHandle:
        """Return the run."""
        return self

    def follow(self) -> RunHandle:
        """Return the run."""
        return self

    def cancel(self, *, at_once: bool = False, timeout_s: float = 60.0) -> None:
        """Do nothing: it has ended."""

    def results(self, timeout_s: float | None = None) -> list[Any]:
        """Return what the function has returned."""
        return [self._value]

    async def results_async(self, timeout_s: float | None = None) -> list[Any]:
        """Return the same as `results`."""
        return [self._value]


def call_here(
    function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> InlineRun:
    """Call a function as rank 0 of 1, with torchrun's variables; what it raises is not caught.

    Raises:
        NotLaunchedError: It is a script, or an option needs more than this process.
    """
    if not callable(function):
        fix = f"muster run --inline {function}"
        raise NotLaunchedError("launch(inline=True) calls a function, not a script", fix=fix)
    ours, theirs = keywords.split(options, function, args, name_of(function))
    one = {"nodes": ("1", 1), "nproc_per_node": ("1", 1)}
    more = [
        key for key, value in ours.items() if key not in _MEANT and value not in one.get(key, ())
    ]
    if more:
        what = "this process calls the function itself, as rank 0 of 1"
        fix = "without it, or without inline=True"
        raise merged([NotLaunchedError(what, where=f"launch({key}=...)", fix=fix) for key in more])
    with _set(world_of_one() | keywords.environment(ours)):
        return InlineRun(function(*args, **theirs))


@contextlib.contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
