"""Remote end of an ssh session: starts agents, relays connections, sends files back, and ends all when the client is gone.

Messages of `net/remote_messages.py` come on standard input and go to standard output. The end of input, or silence for 20 s,
is the end of the run on this host: the agents' lifeline is cut, after 5 s everything below is killed, the secret is removed.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files.layout import RunDir
from torchmuster.model import contract
from torchmuster.model.codec import from_words
from torchmuster.net import remote_messages as messages
from torchmuster.net.frames import FrameReader, FrameWriter
from torchmuster.net.relay import Relay
from torchmuster.net.replica import Copy, CopyState, Feed, Scope
from torchmuster.node.door.messages import DoorNode
from torchmuster.node.leftovers import sweep_beside
from torchmuster.node.remote.agents import RemoteAgents
from torchmuster.node.remote.door import WARM_VARIABLE, RemoteDoor, WarmDoor, importable
from torchmuster.node.remote.environment import EnvironmentPlace, prune
from torchmuster.node.remote.files import RUN_RECORD, mark_of, send_made
from torchmuster.node.remote.loader import num_gpus
from torchmuster.node.remote.proxy import BROKER_VARIABLE, HOST_VARIABLE
from torchmuster.node.remote.setup import RemotePlace, do_setup_lines, lacking_folders
from torchmuster.node.shipping.shelf import VARIABLE

SILENCE_S = 20.0
_BROUGHT = Scope((messages.CODE_FILE, messages.CALL_FILE))
_SWEEP_LIMIT_S = 5.0  # a folder of staged data takes longer: the next run goes on with it


class RemoteEnd:
    """One host's side of one session."""

    def __init__(self, session: FrameWriter, door: RemoteDoor | None = None) -> None:
        self._session = session
        self._relay = Relay(session, first_id=2)
        self.agents = RemoteAgents(session, self._relay, self._send_record, door)
        if door is not None:
            door.say = self._say
        self._door = door
        self._place: RemotePlace | None = None
        self._brought: Copy | None = None  # the code and the call
        self._known = CopyState()
        self._record: Feed | None = None
        self._environment: EnvironmentPlace | None = None
        self._lock = threading.Lock()  # over writing the secret and leaving
        self._is_leaving = False

    def _say(self, text: str) -> None:
        self._session.send(messages.RemoteNote(text=text))

    def serve(self, reader: FrameReader) -> None:
        """Do what the client says until it is gone."""
        self._session.send(messages.RemoteReady(protocol=messages.PROTOCOL))
        with contextlib.suppress(TimeoutError, messages.FrameError, OSError):
            while (message := reader.read(SILENCE_S)) is not None:
                if isinstance(message, messages.LeaveHost):
                    return
                self.take(message)

    def take(self, message: messages.RemoteMessage) -> None:
        """Do one thing; what may take longer goes on in a thread, since pings must be answered."""
        match message:
            case messages.RemotePing():
                self._session.send(messages.RemotePong())
            case messages.SetUpRun():
                self._in_background(lambda: self._set_up_run(message))
            case messages.SetUpTasks():
                self._in_background(lambda: self._set_up_tasks(message))
            case messages.FilePiece():
                if self._brought is not None and not self._brought.take(message):
                    self._fail_to_take(self._brought)
            case messages.CopyHas():
                if self._known.take(message) and self._record is not None:
                    self._record.go_back(self._known)
            case messages.OfferEnvironment():
                self._in_background(lambda: self._take_environment(message))
            case (
                messages.PassEnvironment()
                | messages.BringEnvironment()
                | messages.EnvironmentPiece()
            ):
                if self._environment is not None:
                    self._environment.take(message)
            case messages.PruneEnvironments():
                self._in_background(lambda: self._prune(message))
            case messages.CodeSent():
                self._in_background(self._unpack_code)
            case messages.StartNode() | messages.StartTask():
                if self._door is None:
                    self.agents.start(message)
                else:  # it may have to import first
                    self._in_background(lambda: self.agents.start(message))
            case messages.AgentEnded():
                self.agents.answer(message)
            case messages.KillAgent(agent_id=agent_id):
                self.agents.kill(agent_id)
            case messages.HeadMoved(heads=heads):
                self.agents.move(heads)
            case messages.CutLifeline():
                self.agents.cut_lifeline()
            case messages.Collect(output=output):
                self._in_background(lambda: self._collect(output))
            case _ if isinstance(message, messages.OfRelay):
                self._relay.take(message)

    def _in_background(self, action: Callable[[], None]) -> None:
        threading.Thread(target=self._report_failure, args=(action,), daemon=True).start()

    def _report_failure(self, action: Callable[[], None]) -> None:
        try:
            action()
        except MusterError as error:
            failed = messages.RemoteFailed(
                what=error.what, where=error.where, why=error.why, fix=error.fix
            )
            self._session.send(failed)
        except (OSError, ValueError, KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            self._session.send(messages.RemoteFailed(what="the run can't be set up there", why=why))

    def _fail_to_take(self, copy: Copy) -> None:
        """Say why what the client brings can't be written: the first time, what follows has no place then."""
        if (trouble := copy.trouble) is not None:
            what = "what the run needs can't be written there"
            failed = messages.RemoteFailed(what=what, where=copy.root, why=trouble.strerror)
            self._session.send(failed)
            self._brought = None

    # What runs here.

    def _set_up_run(self, message: messages.SetUpRun) -> None:
        place = self._place = RemotePlace(message)
        self.agents.run_dir = place.run_dir
        with contextlib.suppress(OSError):
            os.unlink(place.run_dir.moved)  # that of an earlier session is past
        if place.is_own:
            self._brought = Copy(place.run_dir.path, _BROUGHT, mode=0o600)
        placed = place.answer()
        self._session.send(placed)
        if not placed.wants_code:
            self._finish_run(place)

    def _take_environment(self, offer: messages.OfferEnvironment) -> None:
        place = self._environment = EnvironmentPlace(offer, self._session)
        self.agents.environment[VARIABLE] = place.path
        place.answer()

    def _prune(self, message: messages.PruneEnvironments) -> None:
        self._session.send(prune(message))

    def _unpack_code(self) -> None:
        if self._place is not None and self._place.code is not None:
            self._place.code.unpack()
            self._finish_run(self._place)

    def _finish_run(self, place: RemotePlace) -> None:
        note = None
        if place.is_own:
            with self._lock:
                if self._is_leaving:
                    return
                note = place.write_run()
            root = place.run_dir.path
            mark = mark_of(root)
            self._session.send(messages.CopyOf(mark=mark))
            known = self._known if self._known.mark == mark else None
            self._record = Feed(root, RUN_RECORD, self._session, known)
            self._record.start()
        self._session.send(messages.SetUpDone(note=note))

    def _set_up_tasks(self, message: messages.SetUpTasks) -> None:
        lacks = lacking_folders(message)
        if not lacks:
            agents = self.agents
            names = {BROKER_VARIABLE: agents.open_broker(), HOST_VARIABLE: message.host}
            setting_up = do_setup_lines(message, {**agents.environment, **names})
            agents.environment = asyncio.run(setting_up)
            agents.run_dir = RunDir(message.run_dir)
        self._session.send(messages.Placed(run_dir=message.run_dir, lacks=lacks))
        self._session.send(messages.SetUpDone())

    # What goes back.

    def _send_record(self) -> None:
        if self._record is not None:
            self._record.look(is_over=True)

    def _collect(self, output: str) -> None:
        """Send what the run has made in the copied code folder, or in this one."""
        self._send_record()
        stay: list[str] = []
        root = snapshots = ""
        if output:
            root = output
            stay = send_made(self._session, output, {})
        elif self._place is not None and self._place.code is not None:
            root = self._place.code.root
            stay = self._place.code.send(self._session)
        if self._place is not None and self._place.is_own:
            folder = self._place.run_dir.snapshots
            snapshots = folder if os.path.isdir(folder) else ""
        said = messages.Collected(
            num_stay=len(stay),
            stay=tuple(stay[:20]),
            root=root,
            snapshots=snapshots,
            unread=self._record.told_unread() if self._record is not None else (),
        )
        self._session.send(said)

    def shut_down(self) -> None:
        """Let the agents tell the head that this machine, or pod, shuts down; leave when they have ended."""
        self.agents.pass_on(signal.SIGTERM)
        self._in_background(self._leave_behind_agents)

    def _leave_behind_agents(self) -> None:
        self.agents.wait_for_ends()
        self.leave()
        os._exit(0)

    def leave(self) -> None:
        """End the agents and all below them, and take the secret away."""
        self.agents.leave()
        if self._environment is not None:
            self._environment.close()
        if self._record is not None:
            self._record.stop()
        with self._lock:
            self._is_leaving = True
            if self._place is not None:
                self._place.remove_secret()
        self._session.drain(1.0)
        # What killed agents have left: there may be no other run here to remove it.
        sweep_beside(None).join(_SWEEP_LIMIT_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOrder:
    """The command line of `remote`, which `loader.py` writes.

    Attributes:
        root: Where this torchmuster is.
        importable: Let the script import it from there.
        temporary: Remove it at the end.
    """

    root: str
    importable: bool = False
    temporary: bool = False


def main(arguments: list[str]) -> None:
    """Serve one session."""
    order = from_words(RemoteOrder, arguments)
    incoming, outgoing = _take_streams()
    if order.importable:  # by the script: the folder holds only this torchmuster
        os.environ["PYTHONPATH"] = importable(os.environ.get("PYTHONPATH"), order.root)
    warm = os.environ.get(WARM_VARIABLE)
    door = WarmDoor(warm) if warm is not None else None
    try:
        _serve(RemoteEnd(FrameWriter(outgoing), door), incoming)
    finally:
        if order.temporary:
            shutil.rmtree(order.root, ignore_errors=True)
    os._exit(0)


def serve_beside_door(session: RunDir, place: int, node: DoorNode) -> None:
    """Serve the owner of a run in a session; the door of this place has forked us, and forks the agents."""
    incoming, outgoing = _take_streams()
    writer = FrameWriter(outgoing)
    facts = messages.RemoteFacts(
        has_package=True,
        num_cpus=len(os.sched_getaffinity(0)),
        num_gpus=num_gpus(),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    writer.send(facts)
    door = RemoteDoor(session, place, node)
    writer.send(door.state())
    _serve(RemoteEnd(writer, door), incoming)
    os._exit(0)


def _serve(end: RemoteEnd, incoming: int) -> None:
    signal.signal(signal.SIGTERM, lambda *_: end.shut_down())
    signal.signal(contract.OVERUSED_SIGNAL, lambda signum, _: end.agents.pass_on(signum))
    try:
        end.serve(FrameReader(incoming))
    finally:
        end.leave()


def _take_streams() -> tuple[int, int]:
    """Return our input and output; nothing that is started here may write between our messages, or read them."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    proc.become_subreaper()
    incoming, outgoing = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    return incoming, outgoing
