"""The engine of plain hosts: one ssh session for each, a courier at its end, an agent below it.

The client owns the run: when it dies, or a connection, what runs on the other side ends. Nothing here becomes a subreaper
or ends children that are not its own: the master of a user's ControlPersist is one.
"""

import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torchmuster import proc
from torchmuster.engines.local import HEAD, AgentEnd
from torchmuster.engines.ssh_back import OutputBack, RecordBack, Relay, collect, own_paths
from torchmuster.engines.ssh_command import HostProblem, SshHost
from torchmuster.engines.ssh_places import Places, SshWishes, bad_hosts, workers_of
from torchmuster.engines.ssh_session import HostError, Luggage, SshSession
from torchmuster.engines.ssh_setup import TOKEN_FILE, CodeArchive, prepare
from torchmuster.errors import MusterError
from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.plan import RunPlan
from torchmuster.model.verdict import Result
from torchmuster.net import frames
from torchmuster.net.frames import FrameError, Kind

_LOST = 255  # what ssh exits with when a connection breaks
_DEAF_S = 6.0
_MAX_THREADS = 256


class SshEngine:
    """The agents of one run on hosts that ssh reaches."""

    def __init__(
        self,
        plan: RunPlan,
        run_dir: RunDir,
        wishes: SshWishes,
        luggage: Luggage,
        say: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self._wishes = wishes
        self._luggage = luggage
        self._say = say
        self._token = secrets.token_hex(16)
        self._code = CodeArchive(plan.program, run_dir, say)
        self._places = Places(wishes.hosts, plan.max_nodes)
        self._sessions: dict[int, SshSession] = {}
        self._coming: set[int] = set()
        self._opening: set[SshSession] = set()
        self._ends: queue.SimpleQueue[AgentEnd] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._heads: list[tuple[str, int]] = []
        self._record = RecordBack(run_dir)
        self._outputs: dict[int, OutputBack] = {}
        self._said_bad: set[str] = set()
        self._closing = False
        self._relay = Relay(lambda: self._sessions.get(HEAD))
        with open(os.path.join(run_dir.path, TOKEN_FILE), "w") as file:
            file.write(self._token + "\n")

    @property
    def address(self) -> tuple[str, int]:
        """Return where the coordinator can be called from here."""
        return ("127.0.0.1", self._relay.port)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The head's addresses for other machines: none, its way leads through this one."""
        return ()

    @property
    def head_state(self) -> str | None:
        """Return None: the head is a process of another machine."""
        return None

    @property
    def pids(self) -> list[int]:
        """Return the ssh processes at whose other end an agent runs."""
        return [session.pid for session in self._alive() if session.holds_agent]

    @property
    def used_names(self) -> tuple[str, ...]:
        """Return the hosts on which the run has begun; a range may have left some of them out."""
        used = [self._sessions[place] for place in sorted(self._sessions)]
        return tuple(session.host.name for session in used if session.problem is None)

    def localized(self, result: Result) -> Result:
        """Return the result with paths of this machine: hosts that share nothing have other run directories."""
        plain = before = codec.to_plain(result)
        placed = [session.placed for session in self._sessions.values() if session.placed]
        for path, copied in {one["run_dir"]: one["copied"] for one in placed}.items():
            code = self._code.base if copied else None
            plain = own_paths(plain, path, self.run_dir.path, code)
        if plain != before:
            atomic.write_json(self.run_dir.result, plain)
        return codec.from_plain(Result, plain)

    def _alive(self) -> list[SshSession]:
        with self._lock:
            return [session for session in self._sessions.values() if not session.is_lost]

    # Starting.

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start an agent on every place, the head first.

        Raises:
            ChannelError: Hosts can't be used; all of them are named, and the others were stopped.
        """
        try:
            if not self._sessions:
                self._connect_all()
            self._open_missing_head()
            self._start_head(first_attempt, restarts_spent)
            self._in_parallel(self._start_other, [p for p in sorted(self._sessions) if p != HEAD])
        except BaseException:
            self.abandon()
            raise

    def _connect_all(self) -> None:
        """Connect to as many hosts as the run has places; spare hosts stand in for those that don't answer."""
        good: list[SshSession] = []
        bad: list[HostProblem] = []
        wanted = self.plan.max_nodes
        waiting = list(self._wishes.hosts)
        while waiting and len(good) < wanted:
            wave, waiting = waiting[: wanted - len(good)], waiting[wanted - len(good) :]
            if bad:
                for problem in bad:
                    self._say_bad(problem)
                names = ", ".join(host.name for host in wave)
                self._say(f"spare hosts take the place: {names}")
            for outcome in self._in_parallel(self._open, wave):
                if isinstance(outcome, SshSession):
                    good.append(outcome)
                else:
                    bad.append(outcome)
        self._sessions = dict(enumerate(good))
        needed = self.plan.min_nodes
        if len(good) < needed:
            raise bad_hosts(bad, needed, self._wishes.where)
        for problem in bad if len(good) < wanted else []:
            self._say(f"{problem.line()}: the run begins without it ({problem.fix})")
            self._said_bad.add(problem.host)
        self._settle([session.host for session in good])

    def _settle(self, hosts: Sequence[SshHost]) -> None:
        """Only now the places have names; agents read them from the plan."""
        self._places.settle(hosts)
        for place, session in self._sessions.items():
            session.place = place
        workers = self.plan.workers_per_node
        if self._wishes.by_slots:
            gpus = {s.host.name: int(s.facts.get("gpus", 0)) for s in self._sessions.values()}
            workers = workers_of(self._places.hosts, gpus, self.plan)
        self.plan = replace(self.plan, node_names=self._places.names, workers_per_node=workers)
        atomic.write_json(self.run_dir.plan, codec.to_plain(self.plan))

    def _open(self, host: SshHost) -> "SshSession | HostProblem":
        folder = os.path.join(self.run_dir.path, "logs", "ssh")
        session = SshSession(host, self._luggage, os.path.join(folder, f"{host.name}.log"))
        session.on_frame = self._take
        session.on_lost = self._lose
        with self._lock:
            self._opening.add(session)
        try:
            session.open()
        except HostError as error:
            return error.problem
        except MusterError as error:
            return HostProblem(host=host.name, words=f"{error.what}: {error.why}", fix="")
        finally:
            with self._lock:
                self._opening.discard(session)
        if self._closing:
            session.abandon()
        return session

    def _in_parallel(self, action: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        if not items:
            return []
        with ThreadPoolExecutor(min(len(items), _MAX_THREADS), "ssh") as pool:
            return list(pool.map(action, items))

    def _open_missing_head(self) -> None:
        if not self._sessions[HEAD].is_lost:
            return
        before = self._places.names[HEAD]
        problems: list[HostProblem] = []
        for host in self._places.candidates(HEAD):
            opened = self._open(host)
            if isinstance(opened, HostProblem):
                problems.append(opened)
                continue
            if self._places.take(HEAD, host):
                self._move_head(host, before)
            self._adopt(HEAD, opened)
            return
        raise bad_hosts(problems, 1, self._wishes.where)

    def _move_head(self, host: SshHost, before: str) -> None:
        """A spare host becomes the head; what shared the run directory of the old one gets its own."""
        self._say(
            f"the spare host {host.name} takes the place 0; snapshots that only {before} has are not there"
        )
        self.plan = replace(self.plan, node_names=self._places.names)
        atomic.write_json(self.run_dir.plan, codec.to_plain(self.plan))
        self._record.append_from(host.name)
        for session in self._sessions.values():
            if session.placed.get("with_head"):
                session.placed = {}

    def _adopt(self, place: int, session: SshSession) -> None:
        session.place = place
        with self._lock:
            self._sessions[place] = session

    def _start_head(self, first_attempt: int, restarts_spent: int) -> None:
        head = self._sessions[HEAD]
        others = [session for place, session in self._sessions.items() if place != HEAD]
        with ThreadPoolExecutor(2, "ssh") as pool:
            self._prepare(head)
            # What the others need travels while the head's agent starts.
            preparing = pool.submit(self._in_parallel, self._prepare_quietly, others)
            start = {"is_head": True, "first_attempt": first_attempt, "place": HEAD, "heads": []}
            try:
                head.holds_agent = True
                started = head.ask(
                    Kind.START, {**start, "restarts_spent": restarts_spent}, Kind.STARTED
                )
            except HostError as error:
                raise bad_hosts([error.problem], 1, self._wishes.where) from error
            port = int(started["port"])
            self._heads = [(str(a), port) for a in started["addresses"]] or [("127.0.0.1", port)]
            problems = [problem for problem in preparing.result() if problem is not None]
        if len(self._sessions) - len(problems) < self.plan.min_nodes:
            raise bad_hosts(problems, self.plan.min_nodes, self._wishes.where)
        self._code.say_once(list(self._sessions.values()))

    def _prepare(self, session: SshSession) -> None:
        try:
            prepare(session, self.plan, self._request(session), self._code, self._say)
        except HostError as error:
            raise bad_hosts([error.problem], 1, self._wishes.where) from error

    def _prepare_quietly(self, session: SshSession) -> HostProblem | None:
        if session.is_lost:
            return None
        try:
            prepare(session, self.plan, self._request(session), self._code, self._say)
        except HostError as error:
            session.abandon()
            return error.problem
        return None

    def _request(self, session: SshSession) -> dict[str, Any]:
        head = self._sessions[HEAD]
        return {
            "token": self._token,
            "run_dir": self.run_dir.path,
            "head_run_dir": head.placed.get("run_dir") if session is not head else None,
            "head_mark": head.placed.get("mark"),
            "may_share": self._wishes.may_share,
        }

    def _start_other(self, place: int) -> None:
        session = self._sessions[place]
        if session.is_lost or session.problem is not None:
            return
        session.holds_agent = True
        start = {"is_head": False, "place": place, "heads": [list(a) for a in self._heads]}
        try:
            session.ask(Kind.START, start, Kind.STARTED)
        except HostError as error:
            session.holds_agent = False
            self._say_bad(error.problem)

    def _say_bad(self, problem: HostProblem) -> None:
        if problem.host not in self._said_bad:
            self._said_bad.add(problem.host)
            self._say(f"{problem.line()} ({problem.fix})" if problem.fix else problem.line())

    def start_place(self, place: int) -> None:
        """Start an agent on one place, first or replacement; it comes in the background."""
        with self._lock:
            if place in self._coming or self._closing:
                return
            self._coming.add(place)
        threading.Thread(target=self._bring, args=(place,), name=f"place {place}").start()

    def _bring(self, place: int) -> None:
        try:
            session = self._sessions.get(place)
            if session is None or session.is_lost or session.problem is not None:
                session = self._reopen(place)
            if session is not None and not session.holds_agent:
                self._start_other(place)
        finally:
            with self._lock:
                self._coming.discard(place)

    def _reopen(self, place: int) -> SshSession | None:
        """Connect to the host of a place again, else to a spare one."""
        for host in self._places.candidates(place):
            opened = self._open(host)
            if isinstance(opened, HostProblem):
                self._say_bad(opened)
                continue
            if self._places.take(place, host):
                self._say(f"the spare host {host.name} takes the place {place}")
                self.plan = replace(self.plan, node_names=self._places.names)
                atomic.write_json(self.run_dir.plan, codec.to_plain(self.plan))
            problem = self._prepare_quietly(opened)
            if problem is not None:
                self._say_bad(problem)
                continue
            self._adopt(place, opened)
            return opened
        return None

    def holds(self, place: int) -> bool:
        """Say whether an agent of this place runs, or is on its way."""
        with self._lock:
            session = self._sessions.get(place)
            runs = session is not None and session.holds_agent and not session.is_lost
            return runs or place in self._coming

    # What hosts say.

    def _take(self, session: SshSession, kind: int, payload: bytes) -> None:
        match kind:
            case Kind.FILE:
                self._record.take(payload, session.host.name)
            case Kind.RELAY_DATA | Kind.RELAY_CLOSE:
                self._relay.take(session, kind, payload)
            case Kind.ENDED:
                self._note_end(session, payload)
            case Kind.OUTPUT if session.place is not None:
                back = self._outputs.get(session.place)
                if back is not None:
                    back.take(payload)
            case _:
                raise FrameError(f"kind {kind}")

    def _note_end(self, session: SshSession, payload: bytes) -> None:
        status = int(frames.read_json(payload)["status"])
        if status != 0 and (words := session.last_words()):
            self._say(f"the agent of {session.host.name} says: {words}")
        session.holds_agent = False
        if session.place is not None:
            self._ends.put(AgentEnd(place=session.place, status=status))

    def _lose(self, session: SshSession) -> None:
        self._relay.drop(session)
        if session.holds_agent:
            session.holds_agent = False
            if not self._closing and session.problem is not None:
                self._say(f"the connection to {session.problem.line()}")
            if session.place is not None:
                self._ends.put(AgentEnd(place=session.place, status=_LOST))

    def poll(self) -> list[AgentEnd]:
        """Return the agents that have ended."""
        found: list[AgentEnd] = []
        while not self._ends.empty():
            found.append(self._ends.get())
        return found

    def has_orphans(self) -> bool:
        """Say whether hosts are still being reached; couriers end what agents leave."""
        return bool(self._coming)

    # The end.

    def kill_all(self) -> None:
        """End every agent at once; a host that gives no sign of life loses its session, and so its agent."""
        now = time.monotonic()
        with self._lock:
            opening = list(self._opening)
        for session in opening:
            proc.kill_quietly(session.pid)
        for session in self._alive():
            session.send(Kind.KILL)
            if now - session.last_heard > _DEAF_S:
                proc.kill_quietly(session.pid)

    def cut_lifeline(self) -> None:
        """Let the agents end themselves; the sessions stay."""
        for session in self._alive():
            session.send(Kind.CUT)

    def finish(self) -> None:
        """Take back what the run has made on hosts that share nothing, and leave them."""
        self._closing = True
        try:
            self._in_parallel(self._collect, self._alive())
            self._in_parallel(SshSession.close, self._alive())
        finally:
            self.abandon()

    def _collect(self, session: SshSession) -> None:
        if session.place is None or session.placed.get("shared") or session.placed.get("with_head"):
            return
        back = OutputBack(self.run_dir, session.host.name)
        self._outputs[session.place] = back
        collect(session, back, self._say)

    def abandon(self) -> None:
        """End all sessions now; couriers end what is below them."""
        self._closing = True
        self._in_parallel(SshSession.abandon, self._alive())
        self._relay.close()
        self._code.remove()
