"""The sessions of this user: which there are, and which of them live."""

import os
import re
from dataclasses import dataclass

from torchmuster.engines.session import HeldSession
from torchmuster.errors import ChannelError, NotFoundError
from torchmuster.files.layout import RunDir, runs_dir
from torchmuster.model.display.text import did_you_mean
from torchmuster.node.door import messages
from torchmuster.node.door.call import SESSION_FILE, ask, door_file, read_setup
from torchmuster.owner.create import owner_process_lives

PREFIX = "session-"
_STEM = re.compile(r"\d{8}-\d{6}-session-(.+)-[0-9a-f]{4}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session as its run directory and its doors show it.

    Attributes:
        state: What the door of its first node says; None when that does not answer.
        is_open: All doors have opened, so runs can begin.
    """

    setup: messages.SessionSetup
    run_dir: RunDir
    state: messages.DoorState | None
    is_open: bool

    @property
    def run_id(self) -> str:
        """Return the run that is the session."""
        return os.path.basename(self.run_dir.path)


def lives(run_dir: RunDir) -> bool:
    """Say whether the run that is a session has an owner and no end."""
    return owner_process_lives(run_dir) and not os.path.exists(run_dir.result)


def session_dirs(name: str | None = None) -> list[RunDir]:
    """Return the run directories of all sessions, or of those of a name; the newest first."""
    try:
        entries = sorted(os.listdir(runs_dir()), reverse=True)
    except OSError:
        return []
    found = []
    for entry in entries:
        match = _STEM.match(entry)
        if match is not None and name in (None, match[1]):
            path = os.path.join(runs_dir(), entry)
            if os.path.isfile(os.path.join(path, SESSION_FILE)):
                found.append(RunDir(path))
    return found


def living_sessions() -> list[RunDir]:
    """Return the run directories of the sessions that live, the newest first."""
    return [run_dir for run_dir in session_dirs() if lives(run_dir)]


def name_of_session(run_dir: RunDir) -> str:
    """Return the name that its folder tells."""
    match = _STEM.match(os.path.basename(run_dir.path))
    return match[1] if match is not None else ""


def find_session(name: str) -> HeldSession:
    """Return the session of this name.

    Raises:
        NotFoundError: There is none, or it has ended.
    """
    folders = session_dirs(name)
    newest = next((one for one in folders if lives(one)), None)
    if newest is not None:
        return HeldSession(name=name, run_dir=newest, lives=lambda: lives(newest))
    if folders:
        over = os.path.exists(folders[0].result)
        why = "its result is recorded" if over else "its owner has gone without a result"
        raise NotFoundError(
            f"the session {name} has ended",
            where=folders[0].path,
            why=why,
            fix=f"muster session start --name {name}",
        )
    known = [name_of_session(one) for one in living_sessions()]
    hint = did_you_mean(name, known, f"muster session start --name {name}")
    raise NotFoundError(f"there is no session `{name}`", where=runs_dir(), fix=hint)


def view_session(run_dir: RunDir) -> SessionView:
    """Return what is known of a session."""
    setup = read_setup(run_dir)
    is_open = all(os.path.isfile(door_file(run_dir, place)) for place in range(setup.nodes))
    state = None
    if is_open:
        try:
            answer = ask(run_dir, 0, messages.AskDoor())
        except ChannelError:
            answer = None
        state = answer if isinstance(answer, messages.DoorState) else None
    return SessionView(setup=setup, run_dir=run_dir, state=state, is_open=is_open)
