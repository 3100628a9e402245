"""Hosts of ssh for a workflow: a session each, and agents of tasks at their other ends.

The heads of the groups are processes of this machine. For each agent elsewhere one of their children places an order at
our desk (`net/orders.py`); a training task's run does so on its own host, from where the order comes in a frame. Every
host must see the run directory: data goes from task to task through it.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from torchmuster.engines.ssh_command import HostProblem, SshHost
from torchmuster.engines.ssh_places import bad_hosts
from torchmuster.engines.ssh_session import HostError, Luggage, SshSession
from torchmuster.engines.ssh_setup import TOKEN_FILE
from torchmuster.errors import MusterError, UsageError
from torchmuster.files.layout import RunDir
from torchmuster.net import frames
from torchmuster.net.frames import FIRST_CALL_BACK, FrameError, Kind
from torchmuster.net.orders import GONE, OrderDesk, StartOrder

_DEAF_S = 10.0
_CALL_S = 5.0
_MAX_THREADS = 64
_MAX_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """What a host has for tasks; `slots` is None where nobody said how many tasks it takes."""

    name: str
    num_cpus: int
    num_gpus: int = 0
    memory_bytes: int = 0
    slots: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskNeeds:
    """What every host of a workflow must have and do.

    Attributes:
        folders: Folders that it must see beside the run directory.
        min_hosts: With fewer the workflow does not begin.
        lines: The site's setup lines; `environment` its variables, `origin` where they stand.
    """

    folders: tuple[str, ...] = ()
    min_hosts: int = 1
    lines: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    origin: str = ""


@dataclass(slots=True)
class _Agent:
    session: SshSession
    end: Callable[[int, str | None], None]


class TaskHosts:
    """The hosts of one workflow.

    Args:
        where: Who named the hosts, for messages.
        may_share: Look for a shared file system; else no host can be used.
    """

    def __init__(
        self,
        run_dir: RunDir,
        hosts: Sequence[SshHost],
        luggage: Luggage,
        needs: TaskNeeds,
        say: Callable[[str], None],
        *,
        where: str,
        may_share: bool = True,
    ) -> None:
        self._run_dir = run_dir
        self._hosts = {host.name: host for host in hosts}
        self._luggage = luggage
        self._needs = needs
        self._say = say
        self._where = where
        self._may_share = may_share
        self._token = secrets.token_hex(16)
        self._sessions: dict[str, SshSession] = {}
        self._opening: dict[str, threading.Lock] = {name: threading.Lock() for name in self._hosts}
        self._lock = threading.Lock()
        self._agents: dict[int, _Agent] = {}
        self._num_agents = 0
        self._numbers: dict[StartOrder, int] = {}
        self._asked: dict[tuple[SshSession, int], int | None] = {}
        self._ports: set[int] = set()
        self._calls: dict[tuple[SshSession, int], socket.socket] = {}
        self._closing = False
        with open(os.path.join(run_dir.path, TOKEN_FILE), "w") as file:
            file.write(self._token + "\n")
        self._desk = OrderDesk(self._take_order, self._withdraw_order)

    @property
    def desk(self) -> str:
        """Return where orders are placed."""
        return self._desk.name

    @property
    def facts(self) -> tuple[HostFacts, ...]:
        """Return what the hosts that can be used have, in the order of the list."""
        return tuple(
            HostFacts(
                name=name,
                num_cpus=int(self._sessions[name].facts.get("cpus", 1)),
                num_gpus=int(self._sessions[name].facts.get("gpus", 0)),
                memory_bytes=int(self._sessions[name].facts.get("memory", 0)),
                slots=host.slots,
            )
            for name, host in self._hosts.items()
            if name in self._sessions
        )

    # Sessions.

    def open(self) -> None:
        """Connect to all hosts, and see that the workflow can run there.

        Raises:
            ChannelError: Too few hosts answer; those that don't are named.
            UsageError: Hosts don't see the run directory, or a folder of training scripts.
        """
        with ThreadPoolExecutor(min(len(self._hosts), _MAX_THREADS), "ssh") as pool:
            outcomes = list(pool.map(self._connect, self._hosts.values()))
        bad = [outcome for outcome in outcomes if isinstance(outcome, HostProblem)]
        self._sessions = {s.host.name: s for s in outcomes if isinstance(s, SshSession)}
        lacking = {
            name: str(session.placed["lacks"][0])
            for name, session in self._sessions.items()
            if session.placed["lacks"]
        }
        if lacking:
            raise self._not_shared(lacking)
        if len(self._sessions) < self._needs.min_hosts:
            raise bad_hosts(bad, self._needs.min_hosts, self._where)
        for problem in bad:
            self._say(f"{problem.line()}: the workflow begins without it ({problem.fix})")

    def _not_shared(self, lacking: Mapping[str, str]) -> UsageError:
        names = list(lacking)
        shown = ", ".join(names[:_MAX_SHOWN]) + (" ..." if len(names) > _MAX_SHOWN else "")
        folder = lacking[names[0]]
        whose = f"the hosts {shown} don't" if len(names) > 1 else f"the host {shown} doesn't"
        is_run = folder == self._run_dir.path
        what = f"{whose} see the {'run directory' if is_run else 'folder of the workflow'}"
        why = "tasks pass their data on through it: a workflow over ssh needs a shared file system"
        fix = "MUSTER_HOME=/shared/folder" if is_run else "start in a folder that all hosts see"
        if not self._may_share:
            fix = f"{fix}, and MUSTER_SSH_SHARED unset"
        return UsageError(what, where=folder, why=why, fix=f"{fix}, as user of the same number")

    def _connect(self, host: SshHost) -> "SshSession | HostProblem":
        path = os.path.join(self._run_dir.path, "logs", "ssh", f"{host.name}.log")
        session = SshSession(host, self._luggage, path)
        session.on_frame = self._take
        session.on_lost = self._lose
        needs = self._needs
        value = {
            "host": host.name,
            "token": self._token,
            "run_dir": self._run_dir.path,
            "may_share": self._may_share,
            "folders": list(needs.folders),
            "lines": list(needs.lines),
            "environment": [list(pair) for pair in needs.environment],
            "origin": needs.origin,
        }
        try:
            session.open()
            session.placed = session.ask(Kind.TASKS, value, Kind.PLACED)
        except HostError as error:
            session.abandon()
            return error.problem
        except MusterError as error:
            return HostProblem(host=host.name, words=f"{error.what}: {error.why}", fix="")
        if self._closing:
            session.abandon()
        return session

    def _session(self, name: str) -> SshSession:
        """Return a session with a host; a lost one is opened again, which takes up to 10 s.

        Raises:
            HostError: The host can't be used now.
        """
        with self._opening[name]:
            session = self._sessions.get(name)
            if session is not None and self._is_well(session):
                return session
            if session is not None and not session.is_lost:
                session.abandon()
            opened = self._connect(self._hosts[name])
            if isinstance(opened, HostProblem):
                raise HostError(opened)
            if opened.placed["lacks"]:
                opened.abandon()
                words = "it doesn't see the run directory any more"
                raise HostError(HostProblem(host=name, words=words, fix=""))
            self._sessions[name] = opened
            return opened

    def _session_or_other(self, name: str, *, may_move: bool) -> SshSession:
        """Return a session with a host, or with the one that has the fewest agents when it can't be reached.

        Raises:
            HostError: It can't, and the agent may not go elsewhere.
        """
        try:
            return self._session(name)
        except HostError as error:
            others = [s for s in list(self._sessions.values()) if self._is_well(s)]
            if not may_move or not others:
                raise
            with self._lock:
                at = [agent.session for agent in self._agents.values()]
            chosen = min(others, key=at.count)
            self._say(f"{error.problem.line()}: its task goes to {chosen.host.name}")
            return chosen

    def _is_well(self, session: SshSession) -> bool:
        silent_s = time.monotonic() - session.last_heard
        return not session.is_lost and session.problem is None and silent_s < _DEAF_S

    # Orders.

    def _take_order(self, order: StartOrder) -> None:
        """Take the order of a group's head; this thread is the order's own."""
        number = self._start(order.request, order.end)
        if number is not None:
            with self._lock:
                self._numbers[order] = number

    def _withdraw_order(self, order: StartOrder) -> None:
        with self._lock:
            number = self._numbers.pop(order, None)
        if number is not None:
            self._withdraw(number)

    def _start(
        self, request: Mapping[str, Any], end: Callable[[int, str | None], None]
    ) -> int | None:
        """Start an agent and return its number; None when that can't be, which `end` has heard."""
        host = request.get("host")
        if self._closing or host not in self._hosts:
            end(GONE, f"`{str(host)[:80]}` is no host of this workflow")
            return None
        if request.get("kind") == "task":
            self._ports.add(int(request["port"]))
        try:
            session = self._session_or_other(str(host), may_move=bool(request.get("may_move")))
        except HostError as error:
            end(GONE, error.problem.line())
            return None
        with self._lock:
            self._num_agents += 1
            number = self._num_agents
            self._agents[number] = _Agent(session, end)
        session.send(Kind.SPAWN, {**request, "id": number})
        if session.is_lost:
            self._end_agent(number, GONE, f"the connection to {host} is lost")
        return number

    def _withdraw(self, number: int) -> None:
        with self._lock:
            agent = self._agents.pop(number, None)
        if agent is not None:
            agent.session.send(Kind.WITHDRAW, {"id": number})

    def _end_agent(self, number: int, status: int, why: str | None) -> None:
        with self._lock:
            agent = self._agents.pop(number, None)
        if agent is not None:
            agent.end(status, why)

    # What hosts say.

    def _take(self, session: SshSession, kind: int, payload: bytes) -> None:
        match kind:
            case Kind.GONE:
                value = frames.read_json(payload)
                self._end_agent(int(value["id"]), int(value["status"]), value.get("why"))
            case Kind.ASK:
                value = frames.read_json(payload)
                # It may have to connect to the other host again: the reader of this one can't wait.
                args = (session, int(value["id"]), dict(value["request"]))
                threading.Thread(target=self._answer_ask, args=args, daemon=True).start()
            case Kind.UNASK:
                self._drop_ask(session, int(frames.read_json(payload)["id"]))
            case Kind.CALL_OPEN:
                self._open_call(session, frames.read_json(payload))
            case Kind.RELAY_DATA | Kind.RELAY_CLOSE:
                self._pass_on(session, kind, *frames.read_relay(payload))
            case _:
                raise FrameError(f"kind {kind}")

    def _answer_ask(self, session: SshSession, asked: int, request: dict[str, Any]) -> None:
        key = (session, asked)

        def end(status: int, why: str | None) -> None:
            with self._lock:
                self._asked.pop(key, None)
            session.send(Kind.ANSWER, {"id": asked, "status": status, "why": why})

        if request.get("kind") != "node":  # hosts may ask for nodes of a training task only
            end(GONE, "that is not for a host to order")
            return
        with self._lock:
            self._asked[key] = None
        number = self._start(request, end)
        with self._lock:
            is_wanted = key in self._asked
            if is_wanted:
                self._asked[key] = number
        if number is not None and (not is_wanted or session.is_lost):
            self._withdraw(number)

    def _drop_ask(self, session: SshSession, asked: int) -> None:
        with self._lock:
            number = self._asked.pop((session, asked), None)
        if number is not None:
            self._withdraw(number)

    def _lose(self, session: SshSession) -> None:
        with self._lock:
            numbers = [n for n, agent in self._agents.items() if agent.session is session]
            asked = [number for of, number in self._asked if of is session]
            calls = [number for of, number in self._calls if of is session]
        if numbers and not self._closing and session.problem is not None:
            self._say(f"the connection to {session.problem.line()}")
        for number in numbers:
            self._end_agent(number, GONE, f"the connection to {session.host.name} is lost")
        for number in asked:
            self._drop_ask(session, number)
        for number in calls:
            self._hang_up(session, number)

    # Calls of agents to the heads of their groups.

    def _open_call(self, session: SshSession, value: Mapping[str, Any]) -> None:
        number, port = int(value["number"]), int(value["port"])
        call = None
        # A host may call the heads of this workflow, and nothing else that listens here.
        if port in self._ports and number >= FIRST_CALL_BACK:
            with contextlib.suppress(OSError):
                call = socket.create_connection(("127.0.0.1", port), timeout=_CALL_S)
        if call is None:
            session.send_frame(frames.pack_relay(Kind.RELAY_CLOSE, number))
            return
        with self._lock:
            self._calls[session, number] = call
        args = (session, number, call)
        threading.Thread(target=self._read_call, args=args, daemon=True).start()

    def _read_call(self, session: SshSession, number: int, call: socket.socket) -> None:
        while True:
            try:
                data = call.recv(1 << 16)
            except TimeoutError:
                continue
            except OSError:
                break
            frame = frames.pack_relay(Kind.RELAY_DATA, number, data)
            if not data or not session.send_frame(frame, bulk=True):
                break
        if self._hang_up(session, number):
            session.send_frame(frames.pack_relay(Kind.RELAY_CLOSE, number))
        call.close()

    def _pass_on(self, session: SshSession, kind: int, number: int, data: bytes) -> None:
        with self._lock:
            call = self._calls.get((session, number))
        if call is None:
            return
        try:
            if kind == Kind.RELAY_DATA:
                call.sendall(data)
                return
        except OSError:
            session.send_frame(frames.pack_relay(Kind.RELAY_CLOSE, number))
        self._hang_up(session, number)

    def _hang_up(self, session: SshSession, number: int) -> bool:
        """End a call; say whether it was still open."""
        with self._lock:
            call = self._calls.pop((session, number), None)
        if call is not None:
            with contextlib.suppress(OSError):
                call.shutdown(socket.SHUT_RDWR)
        return call is not None

    # The end.

    def close(self) -> None:
        """Leave all hosts; couriers end what still runs there."""
        self._closing = True
        self._desk.close()
        sessions = [session for session in self._sessions.values() if not session.is_lost]
        if sessions:
            with ThreadPoolExecutor(min(len(sessions), _MAX_THREADS), "ssh") as pool:
                list(pool.map(SshSession.close, sessions))
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._run_dir.path, TOKEN_FILE))
