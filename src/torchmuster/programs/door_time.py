"""When a session ends: its time limit, its idle time, or that of its first node's door, which decides for all."""

import os
import time

from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model.display.text import in_minutes
from torchmuster.node.door.call import client_lives
from torchmuster.node.door.messages import SessionSetup

_WARN_S = 300.0
_CLIENT_ENDED = "the command that it was started for has ended"
_END_FILE = "session-end.json"


class SessionTime:
    """The clock of a session, at one of its doors.

    Attributes:
        began_at: In seconds since 1970; `used_at`: the end of the last run.
        ends: Why it ends now; None while it does not.
        warned: The user was told that it ends soon.
    """

    def __init__(self, setup: SessionSetup, run_dir: RunDir, place: int) -> None:
        self.began_at = self.used_at = time.time()
        self.ends: str | None = None
        self.warned = False
        self._setup, self._place = setup, place
        self._end_file = os.path.join(run_dir.path, _END_FILE)

    def left(self, run_id: str) -> tuple[float | None, str]:
        """Return how long the session lives if no run begins, and what ends it then; `run_id` is in it now."""
        now, setup = time.time(), self._setup
        ends: list[tuple[float, str]] = []
        if setup.limit_s is not None:
            limit = in_minutes(setup.limit_s)
            ends.append((self.began_at + setup.limit_s - now, f"its time limit of {limit}"))
        if setup.idle_s is not None:
            since = now if run_id else self.used_at
            idle = in_minutes(setup.idle_s)
            ends.append((since + setup.idle_s - now, f"no run began for {idle}"))
        return min(ends) if ends else (None, "")

    def look(self, run_id: str) -> str | None:
        """Return why the session is to end now; warn before."""
        if self._place != 0:
            told = atomic.read_json(self._end_file)
            return str(told.get("why", "")) if isinstance(told, dict) else None
        if client_lives(self._setup) is False:
            self.tell_others(_CLIENT_ENDED)
            return _CLIENT_ENDED
        left_s, why = self.left(run_id)
        if left_s is not None and left_s <= 0:
            self.tell_others(why)
            return why
        if left_s is not None and left_s < self._warn_s() and not self.warned:
            self.warned = True
            name = self._setup.name
            print(f"muster: the session {name} ends in {in_minutes(left_s)}: {why}", flush=True)
        return None

    def hear_warning(self, signum: int, frame: object) -> None:
        """Say that the time of the job is nearly over."""
        del signum, frame
        if self._place == 0:
            print(f"muster: the session {self._setup.name} ends soon, with its job", flush=True)

    def _warn_s(self) -> float:
        limits = [x for x in (self._setup.idle_s, self._setup.limit_s) if x is not None]
        return min(_WARN_S, min(limits, default=0.0) / 2)

    def tell_others(self, why: str) -> None:
        """Leave a word for the doors of the other nodes."""
        if self._place == 0:
            atomic.write_json(self._end_file, {"why": why})
