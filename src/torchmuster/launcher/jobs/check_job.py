"""The one-node test job of `muster engines check`: follow it, and read its findings.

`muster run` submits it like any other run; this module handles only what comes after.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, last_lines
from torchmuster.core.model.verdict import Result
from torchmuster.core.owner.record import read_result
from torchmuster.launcher.jobs.never import NeverStartsWatch
from torchmuster.launcher.model.job import JobView, describe_job

FINDINGS = "check.json"
_LOOK_S = 0.2
_SETTLE_S = 10.0  # from the job's end to its result, which a shared file system may show late
_LOG_LINES = 8
_pause = threading.Event().wait


@dataclass(frozen=True, slots=True, kw_only=True)
class JobCheck:
    """The outcome of a test job.

    Attributes:
        waited_s: Seconds from the submission to the first sign of the job, as seen from here.
        found: What the probe wrote; None if it wrote nothing.
        view: The scheduler's last answer.
        log: The last lines of the job's log.
        in_time: Whether it ended within the limit.
    """

    waited_s: float | None
    found: dict[str, Any] | None
    result: Result | None
    view: JobView | None
    log: str
    in_time: bool


def probe_path() -> str:
    """Return the path of the script that the test job runs."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "check_probe.py")


def findings_path(run_dir: RunDir) -> str:
    """Return the path of the test job's findings."""
    return os.path.join(run_dir.path, FINDINGS)


@dataclass(slots=True)
class JobWatch:
    """Watches a test job until it has a result, is gone, or its time is up.

    Attributes:
        look: Returns the scheduler's view of a run's job.
        say: Called with every new state of the job.
        submitted_at: Time of the submission, on the monotonic clock.
        timeout_s: The longest wait from then on, in seconds.
    """

    run_dir: RunDir
    look: Callable[[RunDir], JobView | None]
    say: Callable[[str], None]
    submitted_at: float
    timeout_s: float
    _view: JobView | None = None
    _waited_s: float | None = None
    _gone_at: float | None = None
    _never: NeverStartsWatch = field(default_factory=NeverStartsWatch)

    def follow(self) -> JobCheck:
        """Wait for the job; return its outcome."""
        in_time = True
        while (result := read_result(self.run_dir)) is None:
            now = time.monotonic()
            self._see(now)
            self._never.cancel_if_hopeless(self.run_dir)
            if self._gone_at is not None and now - self._gone_at > _SETTLE_S:
                break
            if now - self.submitted_at > self.timeout_s:
                in_time = False
                break
            _pause(_LOOK_S)
        self._see_start(time.monotonic())
        found = atomic.read_json(findings_path(self.run_dir))
        return JobCheck(
            waited_s=self._waited_s,
            found=found if isinstance(found, dict) else None,
            result=result,
            view=self._view,
            log=_last_words(self.run_dir.job_log),
            in_time=in_time,
        )

    def _see(self, now: float) -> None:
        self._see_start(now)
        seen = self.look(self.run_dir)
        if seen is not None and seen != self._view:
            self.say(describe_job(seen))
            self._view = seen
        if seen is None or seen.state.is_final:
            self._gone_at = self._gone_at or now

    def _see_start(self, now: float) -> None:
        if self._waited_s is None and _has_begun(self.run_dir):
            self._waited_s = now - self.submitted_at


def _has_begun(run_dir: RunDir) -> bool:
    """Return whether the job's head has written its first event."""
    try:
        return os.path.getsize(run_dir.events) > 0
    except OSError:
        return False


def _last_words(path: str) -> str:
    lines = last_lines(path, 8192, 8192)
    return "\n".join([line for line in lines if line.strip()][-_LOG_LINES:])
