"""Sets up a node before its workers start: setup lines, shipped environment, scratch folder, staging, commands.

In this order: variables and lines in one login shell; the job's interpreter; the spawner starts and imports torch
while the rest goes on; the scratch folder; `--stage`; `--before`. Workers start when all of it is done.

The shell reports over a separate pipe which line it is at, and its variables at the end. Each text
ends with NUL:

    B/usr/bin:/bin    PATH before the first line      F3       the line failed with code 3
    L2                line 2 begins                   E, then NAME=VALUE ..., then Z
"""

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torchmuster.core import proc
from torchmuster.core.model import codec, contract
from torchmuster.core.model.contract import describe_exit
from torchmuster.core.model.plan import Program, ShippedEnvironment, StageOrder, UnpackOrder
from torchmuster.core.model.text import show_transfer
from torchmuster.core.node.setup import NodeWork, StartWith, hold, parent_folder, with_python
from torchmuster.errors import MusterError

FIRST_SAY_S = 4.0
SAY_EVERY_S = 15.0
_MAX_ANSWER_BYTES = 8 << 20
_TAIL_BYTES = 8192
_TAIL_LINES = 12
# The shell itself sets these, not the lines.
_OF_THE_SHELL = ("_", "SHLVL", "PWD", "OLDPWD")


class SetupError(MusterError):
    """A part of a node's setup has failed."""


@dataclass(slots=True)
class CommandWatch:
    """Reads the output of a process without ever blocking.

    Attributes:
        log: Gets all output; None drops it.
        tail: The last output, for errors.
    """

    log: Callable[[bytes], None] | None = None
    tail: bytearray = field(default_factory=bytearray)
    kept: bytearray | None = None
    _fd: int | None = None

    @contextlib.contextmanager
    def listen(self) -> Iterator[int]:
        """Read a new pipe to its end; yield its write end, for a process to be started."""
        self._fd, writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        asyncio.get_running_loop().add_reader(self._fd, self._take)
        try:
            yield writer
        finally:
            os.close(writer)

    def drain(self) -> None:
        """Read what is there now."""
        while self._fd is not None and self._take():
            pass

    def close(self) -> None:
        """Stop reading."""
        if self._fd is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self._fd = None

    def _take(self) -> bool:
        if self._fd is None:
            return False
        try:
            data = os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        if self.log is not None:
            self.log(data)
        self.tail += data
        del self.tail[:-_TAIL_BYTES]
        if self.kept is not None and len(self.kept) < _MAX_ANSWER_BYTES:
            self.kept += data
        return True

    def last_lines(self) -> str:
        """Return the last lines of the output, for the user."""
        text = self.tail.decode(errors="replace").replace("\r", "\n")
        return "\n".join(
            [line.rstrip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]
        )


@dataclass(slots=True)
class Shelled:
    """What a login shell has reported.

    Attributes:
        path_before: PATH before the first line.
        line: The line that began last.
        code: The exit code of the line that failed.
        environment: The variables at its end.
        is_whole: It has come to its end.
    """

    path_before: str = ""
    line: int | None = None
    code: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    is_whole: bool = False


@dataclass(slots=True)
class NodeShell:
    """Runs the setup's commands on this node, one at a time.

    Attributes:
        tell: Shows the user a sentence.
        log: Gets all output.
        pids: The processes that are running.
    """

    node: str
    tell: Callable[[str], None]
    log: Callable[[bytes], None]
    first_say_s: float = FIRST_SAY_S
    say_every_s: float = SAY_EVERY_S
    pids: set[int] = field(default_factory=set)

    async def wait(self, child: proc.Child, what: Callable[[], str]) -> int:
        """Wait for a process, however long; return its status. Tell the user what we wait for."""
        started = time.monotonic()
        say_at = started + self.first_say_s
        self.pids.add(child.pid)
        try:
            while (status := child.poll()) is None:
                now = time.monotonic()
                if now >= say_at:
                    say_at = now + self.say_every_s
                    self.tell(what())
                await asyncio.sleep(0.005 if now - started < 1.0 else 0.05)
        finally:
            self.pids.discard(child.pid)
        return status

    async def run_lines(
        self,
        lines: Sequence[str],
        environment: Mapping[str, str],
        own: Mapping[str, str],
        origin: str,
    ) -> Shelled:
        """Run setup lines in one login shell and return its variables at the end.

        Args:
            lines: The lines, unchanged; the first that fails ends the shell.
            environment: The variables with which the shell starts.
            own: Variables that a login profile must not change.
            origin: Where the lines are defined, for errors.

        Raises:
            SetupError: A line failed.
        """
        shell = self._find_shell(environment)
        answer, output = CommandWatch(kept=bytearray()), CommandWatch(log=self.log)
        with answer.listen() as answer_w, output.listen() as output_w:
            script = _script(lines, environment.get("PATH", ""), own, answer_w)
            child = proc.start(
                [shell, "-l", "-c", script],
                env=environment,
                stdout=output_w,
                stderr=output_w,
                pass_fds=[answer_w],
            )
        try:
            status = await self.wait(child, lambda: _waits_for(_parse(answer), lines))
            answer.drain()
        finally:
            answer.close()
        output.drain()  # a process that a line left running may still write: the pipe stays open
        said = _parse(answer)
        if not said.is_whole or status != 0:
            raise self._failed_line(said, lines, origin, status, output)
        said.environment = _tidy(said, environment)
        return said

    def _find_shell(self, environment: Mapping[str, str]) -> str:
        bash = shutil.which("bash", path=environment.get("PATH")) or shutil.which("bash")
        if bash is not None:
            return bash
        self.tell("there is no bash on this node: setup lines run in sh")
        return "/bin/sh"

    def _failed_line(
        self, said: Shelled, lines: Sequence[str], origin: str, status: int, output: CommandWatch
    ) -> SetupError:
        how = _describe(said.code if said.code is not None else status)
        if said.line is None:
            what = f"the login shell ended before the first setup line on {self.node}"
            return SetupError(what, where=origin, why=output.last_lines() or how)
        if said.code is None and status == 0:
            how = "it ended the shell (`exit`, `exec`?)"
        line = said.line
        return SetupError(
            f"a setup line failed on {self.node}",
            where=f"{origin}, line {line}: {lines[line - 1]}",
            why="\n".join(text for text in (output.last_lines(), how) if text),
            fix=_advice(lines[line - 1]),
        )

    async def run_command(self, command: str, cwd: str, environment: Mapping[str, str]) -> None:
        """Run one command of `--before`.

        Raises:
            SetupError: It failed.
        """
        output = CommandWatch(log=self.log)
        argv = [self._find_shell(environment), "-c", command]
        with output.listen() as writer:
            child = proc.start(argv, env=environment, cwd=cwd, stdout=writer, stderr=writer)
        status = await self.wait(child, lambda: f"--before still runs: {_short(command)}")
        output.drain()
        if status != 0:
            why = "\n".join(text for text in (output.last_lines(), _describe(status)) if text)
            what = f"a command of --before failed on {self.node}"
            raise SetupError(what, where=f"--before {shlex.quote(command)}", why=why)

    async def expand(self, text: str, environment: Mapping[str, str]) -> str:
        """Return a path with the shell's variables filled in.

        Raises:
            SetupError: The shell failed, e.g. for an unset variable, or the path is not absolute.
        """
        if not any(sign in text for sign in "$`~"):
            return text
        answer, output = CommandWatch(kept=bytearray()), CommandWatch()
        inside = f"$HOME{text[1:]}" if text == "~" or text.startswith("~/") else text
        script = 'set -u; printf %s "' + inside.replace('"', '\\"') + '"'
        argv = [self._find_shell(environment), "-c", script]
        with answer.listen() as writer, output.listen() as error_w:
            child = proc.start(argv, env=environment, stdout=writer, stderr=error_w)
        status = await self.wait(child, lambda: f"still fills in {text}")
        for watch in (answer, output):
            watch.drain()
            watch.close()
        found = os.fsdecode(bytes(answer.kept or b""))
        if status != 0 or not found.startswith("/"):
            what = f"the scratch folder can't be found on {self.node}"
            why = output.last_lines() or f"`{text}` stands for `{found}`, no absolute path"
            raise SetupError(what, where=f"scratch = {text}", why=why)
        return found


def _script(lines: Sequence[str], path: str, own: Mapping[str, str], answer_fd: int) -> str:
    to = f">>/dev/fd/{answer_fd}"
    # A login profile resets PATH: put the one that we started with first, then the profile's own.
    script = [f'export PATH={shlex.quote(path)}:"$PATH"' if path else "export PATH"]
    script += [f"export {name}={shlex.quote(text)}" for name, text in own.items()]
    script.append(f"printf 'B%s\\0' \"$PATH\" {to}")
    for number, line in enumerate(lines, 1):
        script.append(f"printf 'L{number}\\0' {to}")
        script.append(f"eval {shlex.quote(line)}")
        script.append(
            f"_muster=$?; [ $_muster = 0 ] || {{ printf 'F%s\\0' $_muster {to}; exit 1; }}"
        )
    script.append("unset _muster")
    env = shutil.which("env", path="/usr/bin:/bin") or "env"
    script.append(f"printf 'E\\0' {to}; {env} -0 {to}; printf 'Z\\0' {to}")
    return "\n".join(script)


def _parse(answer: CommandWatch) -> Shelled:
    said = Shelled()
    in_environment = False
    for raw in bytes(answer.kept or b"").split(b"\0")[:-1]:
        text = os.fsdecode(raw)
        if in_environment and "=" in text:
            name, _, value = text.partition("=")
            said.environment[name] = value
        elif text == "E":
            in_environment = True
        elif text == "Z":
            said.is_whole = True
        elif text.startswith("B"):
            said.path_before = text[1:]
        elif text[:1] == "L" and text[1:].isdigit():
            said.line = int(text[1:])
        elif text[:1] == "F" and text[1:].isdigit():
            said.code = int(text[1:])
    return said


def _tidy(said: Shelled, before: Mapping[str, str]) -> dict[str, str]:
    found = dict(said.environment)
    for name in _OF_THE_SHELL:
        found.pop(name, None)
        if name in before:
            found[name] = before[name]
    if "PATH" in found:
        found["PATH"] = ":".join(dict.fromkeys(found["PATH"].split(":")))
    return found


def _waits_for(said: Shelled, lines: Sequence[str]) -> str:
    if said.line is None:
        return "the login profile (bash -l) still runs, before the setup lines"
    return f"setup line {said.line} still runs: {_short(lines[said.line - 1])}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:97]}..."


def _describe(status: int) -> str:
    return f"ended by signal {-status}" if status < 0 else f"exit code {status}"


def _advice(line: str) -> str | None:
    word = line.split(None, 1)[0] if line.strip() else ""
    if word in ("module", "ml"):
        return "`module avail` and `module spider NAME` on such a node show what there is"
    if word in ("source", ".") and "/activate" in line:
        return "is the environment's folder on a file system that this node has?"
    if word in ("conda", "mamba", "micromamba"):
        return 'write first: eval "$(conda shell.bash hook)", or `python = ["conda", "run", "-n", NAME, "python"]`'
    return None


# A process that moves files for an agent: it can be killed when a file system hangs, and may need
# its own packages.
#
# It writes lines of JSON: {"progress": {...}}, {"note": "..."}, and at the end {"done": {...}} or
# {"error": {...}}.


_MAX_LINE_BYTES = 1 << 20
SAY_OF_TRANSFER_S = 5.0


class Transfer:
    """One process that moves files.

    Args:
        argv: Its command.
        environment: Its variables.
        note: Gets its sentences for the user as they come.
        log: Gets its standard error; None: it shares ours.
        keeps_stdin: Closing its standard input asks it to finish.

    Attributes:
        progress: Its last progress message.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environment: Mapping[str, str],
        note: Callable[[str], None],
        *,
        log: Callable[[bytes], None] | None = None,
        keeps_stdin: bool = False,
    ) -> None:
        self.progress: dict[str, Any] = {}
        self._source: object = None  # the source that is being moved, of several
        self._began_at = time.monotonic()
        self._began_bytes = 0
        self._note = note
        self._stdin: int | None = None
        self._error: dict[str, Any] | None = None
        self._done: dict[str, Any] | None = None
        self._line = b""  # the received part of the next line
        self._said, self._errors = CommandWatch(log=self._take), CommandWatch(log=log)
        with contextlib.ExitStack() as ends:
            out = ends.enter_context(self._said.listen())
            err = ends.enter_context(self._errors.listen()) if log is not None else None
            stdin = None
            if keeps_stdin:
                stdin, self._stdin = os.pipe2(os.O_CLOEXEC)
                ends.callback(os.close, stdin)
            self.child = proc.start(argv, env=environment, stdin=stdin, stdout=out, stderr=err)

    @property
    def words(self) -> str:
        """Return progress, speed and remaining time in words; empty before the first message."""
        if not self.progress:
            return ""
        elapsed_s = time.monotonic() - self._began_at
        done, total = (self.progress.get(name, 0) for name in ("bytes_done", "total_bytes"))
        return show_transfer(done, total, elapsed_s, before_bytes=self._began_bytes)

    async def finish_aloud(
        self, what: str, say_every_s: float = SAY_OF_TRANSFER_S
    ) -> dict[str, Any]:
        """Wait for the end like `finish`, and report the progress regularly.

        Args:
            what: What is moved: `downloading input 0: s3://...`.
            say_every_s: How often to report.

        Raises:
            MusterError: The transfer failed.
        """
        return await self.finish(lambda child: self._wait(child, what, say_every_s))

    async def _wait(
        self, child: proc.Child, what: str = "", say_every_s: float = float("inf")
    ) -> int:
        say_at = time.monotonic() + say_every_s
        while (code := child.poll()) is None:
            if time.monotonic() >= say_at:
                say_at += say_every_s
                self._note(f"{what}: {self.words or 'not begun yet'}")
            await asyncio.sleep(0.01)
        return code

    async def finish(
        self, wait: Callable[[proc.Child], Awaitable[int]] | None = None
    ) -> dict[str, Any]:
        """Wait for the end, by `wait` or silently, and return what was done.

        Raises:
            MusterError: The transfer failed; the message comes from the process.
        """
        try:
            code = await (wait or self._wait)(self.child)
        except BaseException:
            self.child.send_signal(9)
            raise
        finally:
            for watch in (self._said, self._errors):
                watch.drain()
                watch.close()
            self.end_input()
        if code != 0 or self._error is not None or self._done is None:
            raise self._failure(code)
        return self._done

    def end_input(self) -> None:
        """Close the standard input: a checkpoint uploader uploads once more and ends."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def _take(self, data: bytes) -> None:
        *lines, self._line = (self._line + data)[-_MAX_LINE_BYTES:].split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                self._take_message(json.loads(line))

    def _take_message(self, message: Any) -> None:
        match message:
            case {"note": str() as sentence}:
                self._note(sentence)
            case {"progress": dict() as progress}:
                if not self.progress or progress.get("source") != self._source:
                    self._source, self._began_at = progress.get("source"), time.monotonic()
                    self._began_bytes = int(progress.get("bytes_done", 0))
                self.progress = progress
            case {"error": dict() as parts}:
                self._error = parts
            case {"done": dict() as done}:
                self._done = done

    def _failure(self, code: int) -> MusterError:
        if self._error is None:
            why = self._errors.last_lines() or describe_exit(code)
            return MusterError("the process that moves the files ended without a message", why=why)
        parts = {
            name: str(self._error[name])
            for name in ("where", "why", "fix")
            if self._error.get(name)
        }
        return MusterError(str(self._error.get("what", "moving files failed")), **parts)


_MAX_TAKES = 10


# The whole setup, in the order of the module's docstring.


class ShellWork(NodeWork):
    """The setup of a node that runs lines, unpacks an environment or stages files."""

    _shell: NodeShell | None = None

    @property
    def pids(self) -> frozenset[int]:
        """The processes that run for it now."""
        return frozenset(self._shell.pids) if self._shell is not None else frozenset()

    async def run(self, tell: Callable[[str], None], start_with: StartWith) -> None:
        """Do all of it, in the order of the module's docstring."""
        setup, program, environment = self.setup, self.plan.program, self.options.environment
        self._shell = shell = NodeShell(self.options.host, tell, self._log)
        if setup.lines:
            self._log(b"".join(f"+ {line}\n".encode() for line in setup.lines))
            own = dict(setup.environment)
            shelled = await shell.run_lines(setup.lines, environment, own, setup.origin)
            if setup.python_follows:
                program = _follow(program, environment, shelled.path_before, shelled.environment)
            environment = _with_names(environment, shelled.environment)
        if setup.shipped is not None:
            path = await self._unpack(shell, setup.shipped, environment)
            program, environment = _inside(path, program, environment)
        elif program.python != self.plan.program.python:
            tell(f"the interpreter is {program.python[0]}: the setup lines put it on PATH")
        start_with(program, environment)
        parent = parent_folder(environment, setup.scratch)
        self.make_scratch(await shell.expand(parent, environment))
        if setup.stages:
            await self._stage(shell, environment)
        for command in setup.before:
            self._log(f"+ {command}\n".encode())
            extra = {contract.RUN_DIR_VARIABLE: self.run_dir.path, **self.variables}
            await shell.run_command(command, self.plan.program.cwd, {**environment, **extra})
        self.is_done = True

    async def _unpack(
        self, shell: NodeShell, shipped: ShippedEnvironment, environment: Mapping[str, str]
    ) -> str:
        """Unpack the environment of the job, unless it is here; hold it while we live; return its folder."""
        parent = await shell.expand(parent_folder(environment, self.setup.scratch), environment)
        order = UnpackOrder(parent=parent, tries=self.place == 0, shipped=shipped)
        failed = f"{{}} ({self.options.host})"
        for _ in range(_MAX_TAKES):
            done = await self._move(shell, "unpack", order, environment, failed, _unpacking_goes_on)
            path = str(done["path"])
            if hold(path):
                return path  # else somebody has just removed it
        raise SetupError(f"the environment is removed again and again on {self.options.host}")

    def _log(self, data: bytes) -> None:
        self._disk.append(self.run_dir.setup_log(self.options.host), data)

    async def _stage(self, shell: NodeShell, environment: Mapping[str, str]) -> None:
        order = StageOrder(scratch=str(self.scratch), stages=self.setup.stages)
        failed = f"staging failed on {self.options.host}: {{}}"
        await self._move(shell, "stage", order, environment, failed, _staging_goes_on)

    async def _move(
        self,
        shell: NodeShell,
        program: str,
        order: UnpackOrder | StageOrder,
        environment: Mapping[str, str],
        failed: str,
        goes_on: Callable[[Transfer], str],
    ) -> dict[str, Any]:
        """Move files in a process of its own, so that it can hang or be killed without the agent.

        `failed` becomes an error's first sentence, with that of the process filled in.
        """
        argv = proc.node_program(program, codec.to_word(order))
        moving = Transfer(argv, environment, shell.tell, log=self._log)
        try:
            return await moving.finish(lambda child: shell.wait(child, lambda: goes_on(moving)))
        except MusterError as error:
            what = failed.format(error.what)
            raise SetupError(what, where=error.where, why=error.why, fix=error.fix) from error


def _unpacking_goes_on(unpacking: Transfer) -> str:
    return f"unpacking the environment: {unpacking.words or 'not begun yet'}"


def _staging_goes_on(staging: Transfer) -> str:
    if "source" not in staging.progress:
        return "staging has begun"
    return f"staging {staging.progress['source']}: {staging.words}"


def _inside(
    path: str, program: Program, environment: Mapping[str, str]
) -> tuple[Program, dict[str, str]]:
    """Return the program and the variables that use an environment unpacked at `path`."""
    prefix = os.path.join(path, "env")
    name = "CONDA_PREFIX" if os.path.isdir(os.path.join(prefix, "conda-meta")) else "VIRTUAL_ENV"
    dropped = ("PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX")
    after = {key: value for key, value in environment.items() if key not in dropped}
    paths = [os.path.join(prefix, "bin"), environment.get("PATH", "")]
    after |= {name: prefix, "PATH": os.pathsep.join(filter(None, paths))}
    python = (os.path.join(prefix, "bin", "python"), *program.python[1:])
    return replace(program, python=python), after


def _with_names(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """Return the variables after the setup lines; a session also gets the names they changed."""
    names = before.get(contract.SITE_NAMES_VARIABLE)
    if names is None:
        return dict(after)
    changed = {n for n in {*before, *after} if before.get(n) != after.get(n)}
    return {**after, contract.SITE_NAMES_VARIABLE: " ".join(sorted({*names.split(), *changed}))}


def _follow(
    program: Program, before: Mapping[str, str], path_before: str, after: Mapping[str, str]
) -> Program:
    """Return the program with the interpreter that setup lines have put on PATH, if any."""
    changed = any(
        after.get(name) and after.get(name) != before.get(name)
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX")
    )
    path = after.get("PATH", "")
    if not changed and shutil.which("python3", path=path) == shutil.which(
        "python3", path=path_before
    ):
        return program
    found = shutil.which("python", path=path) or shutil.which("python3", path=path)
    return with_python(program, found, *program.python[1:]) if found else program
