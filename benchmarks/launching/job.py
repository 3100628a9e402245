"""One run of a launcher: started in a folder of its own, watched, and ended with all below it."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from launching import processes
from launching.sides import Shape, Side, side_environment

DEADLINE_S = 120.0
LOG_TAIL_LINES = 15
POLL_S = 0.05


class LostError(Exception):
    """A job did not do what was measured; the message says why, as far as the job did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """When a rank got somewhere, and the process that it was."""

    attempt: int
    rank: int
    time_s: float
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The launchers of one run.

    Attributes:
        folder: Where the stamps, the log and all files of the launcher are.
        started_s: CLOCK_MONOTONIC just before the first launcher was started.
    """

    shape: Shape
    folder: Path
    launchers: list[subprocess.Popen[bytes]]
    started_s: float

    def stamps(self, name: str) -> list[Stamp]:
        """Return the stamps of this name, of all attempts and ranks."""
        return [_read_stamp(path) for path in sorted(self.folder.glob(f"{name}.*"))]

    def wait_exit(self) -> None:
        """Return when every launcher has ended well.

        Raises:
            LostError: One ended with another exit code than 0, or not within `DEADLINE_S`.
        """
        deadline_s = time.monotonic() + DEADLINE_S
        for launcher in self.launchers:
            try:
                exit_code = launcher.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise LostError(f"not ended after {DEADLINE_S:.0f} s") from None
            if exit_code != 0:
                raise LostError(f"exit code {exit_code}")

    def wait_idle(self) -> list[Stamp]:
        """Return the stamps of all workers once each has done its first all-reduce.

        Raises:
            LostError: The job ended, or a rank was missing after `DEADLINE_S`.
        """
        deadline_s = time.monotonic() + DEADLINE_S
        while len(stamps := self.stamps("reduced")) < self.shape.num_workers:
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise LostError(f"{len(stamps)} of {self.shape.num_workers} ranks came")
            time.sleep(POLL_S)
        return stamps

    def check_alive(self) -> None:
        """Raise LostError when a launcher has ended."""
        for launcher in self.launchers:
            if launcher.poll() is not None:
                raise LostError(f"ended too early with exit code {launcher.returncode}")

    def check_alive_for(self, duration_s: float) -> None:
        """Return after `duration_s`, or raise LostError when the first launcher ends before."""
        with suppress(subprocess.TimeoutExpired):
            self.launchers[0].wait(duration_s)
        self.check_alive()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a folder for one run; at the end kill what the run started and remove its files."""
    folder = Path(tempfile.mkdtemp(prefix="launch-"))
    try:
        yield folder
    finally:
        try:
            processes.kill_descendants()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def started(side: Side, shape: Shape, mode: str) -> Iterator[Job]:
    """Start a job with the worker in `mode`, and leave nothing of it behind."""
    with scratch_folder() as folder:
        job = _start(side, shape, [str(shape.worker), str(folder), mode], folder)
        try:
            yield job
        except LostError as lost:
            said = (folder / "log").read_text(errors="replace")
            raise lost_with(str(lost), said) from lost


def time_command(command: list[str], environment: dict[str, str]) -> float:
    """Return the wall time of a command that must succeed, in seconds."""
    started_s = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise LostError(f"not ended after {DEADLINE_S:.0f} s") from None
    elapsed_s = time.monotonic() - started_s
    if done.returncode != 0:
        raise lost_with(f"exit code {done.returncode}", done.stderr.decode(errors="replace"))
    return elapsed_s


def lost_with(what: str, said: str) -> LostError:
    """Return that a job was lost, with the line of its output that says most, after showing the end of it."""
    lines = [line for line in said.splitlines() if line.strip()]
    print(
        f"{what}. The end of what it said:", *lines[-LOG_TAIL_LINES:], sep="\n  ", file=sys.stderr
    )
    errors = [line for line in lines if "error:" in line.lower()]
    telling = (errors[:1] or lines[-1:] or ["it said nothing"])[0].strip()
    return LostError(f"{what}: {telling[:200]}")


def _start(side: Side, shape: Shape, worker: list[str], folder: Path) -> Job:
    environment = side_environment(side, folder)
    commands = side.commands(shape, worker)
    with (folder / "log").open("wb") as log:
        started_s = time.monotonic()
        launchers = [
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for command in commands
        ]
    return Job(shape=shape, folder=folder, launchers=launchers, started_s=started_s)


def _read_stamp(path: Path) -> Stamp:
    _, attempt, rank = path.name.split(".")
    time_s, pid = path.read_text().split()
    return Stamp(attempt=int(attempt), rank=int(rank), time_s=float(time_s), pid=int(pid))
