"""The engine of plain hosts: one ssh session for each, with an agent at its remote end.

The client owns the run: if it dies, or a connection, everything on the other side ends. This
process never becomes a subreaper and never ends processes that aren't its children: the user's
ControlPersist master is such a process.
"""

import contextlib
import itertools
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torchmuster.core.engines.local import HEAD, AgentEnd
from torchmuster.core.files import atomic
from torchmuster.core.files.layout import RunDir, trained_last
from torchmuster.core.model import codec
from torchmuster.core.model.plan import RunPlan
from torchmuster.core.model.text import few_of, show_size, show_transfer
from torchmuster.core.model.verdict import Result
from torchmuster.errors import ChannelError
from torchmuster.launcher.engines.ssh_command import CONNECT_LIMIT_S, HostProblem, SshHost
from torchmuster.launcher.engines.ssh_files import FetchedFiles, check_free, go_back, with_own_paths
from torchmuster.launcher.engines.ssh_host import (
    Bundle,
    CodeArchive,
    HostError,
    RemoteHost,
    in_parallel,
    order_to_set_up,
    share_token,
)
from torchmuster.launcher.files.environment import PackedEnvironment, ParcelError, ParcelFile
from torchmuster.launcher.net import remote_messages as messages
from torchmuster.launcher.net.relay import Relay, RelayPort


@dataclass(frozen=True, slots=True, kw_only=True)
class SshOptions:
    """How to use the hosts.

    Attributes:
        hosts: All hosts that may be used; those beyond the plan's nodes are spare.
        where: What named them, for messages.
        by_slots: Whether the list of hosts gives the workers of each node.
        may_share: Look for a shared file system; else everything is copied.
        head_port: Loopback port for calls to the head; 0 for any.
        code_root: The folder of the code; None for the work tree that contains the program.
        environment: Waits for the workers' environment, which is packed meanwhile; None if hosts
            have their own.
        spares_first: Replace a lost host by a spare one at once, because it may take minutes to
            come back.
        passes_on: Whether a client gets the hosts' files next, and reports where they are.
        output: A folder on each host whose content is fetched into ours instead of the code
            folder's; empty for none.
    """

    hosts: tuple[SshHost, ...]
    where: str
    by_slots: bool = True
    may_share: bool = True
    head_port: int = 0
    code_root: str | None = None
    environment: Callable[[], PackedEnvironment] | None = None
    spares_first: bool = False
    passes_on: bool = False
    output: str = ""


class HostPlaces:
    """The hosts of a run: the first ones are its places, the others are spare."""

    def __init__(
        self, hosts: Sequence[SshHost], max_nodes: int, *, spares_first: bool = False
    ) -> None:
        self._spares_first = spares_first
        self._all = list(hosts)
        self._max_nodes = max_nodes
        self._at: list[SshHost] = list(hosts[:max_nodes])

    @property
    def hosts(self) -> tuple[SshHost, ...]:
        """The host of each place."""
        return tuple(self._at)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the places in messages."""
        return tuple(host.name for host in self._at)

    def settle(self, good: Sequence[SshHost]) -> None:
        """Make the hosts that answered the first places, followed by the others."""
        others = [host for host in self._all if host not in good]
        self._at = [*good, *others][: self._max_nodes]

    def candidates(self, place: int) -> list[SshHost]:
        """Return the hosts that may hold a place, its own and the spare ones, the best first."""
        spare = [host for host in self._all if host not in self._at]
        own = self._at[place : place + 1]
        return [*spare, *own] if self._spares_first else [*own, *spare]

    def take(self, place: int, host: SshHost) -> bool:
        """Give a place to a host; return whether the host is new there."""
        if place >= len(self._at) or self._at[place] == host:
            return False
        self._at[place] = host
        return True

    def exchange(self, one: int, other: int) -> None:
        """Exchange the hosts of two places."""
        self._at[one], self._at[other] = self._at[other], self._at[one]


def place_to_free(living: Collection[int], trained: Collection[int], plan: RunPlan) -> int | None:
    """Return the place whose host the head may get when its own is lost; None if there is none.

    Args:
        living: The places whose hosts answer, without the head's.
        trained: The places that had ranks in the last attempt.
        plan: Gives the number of nodes that an attempt needs.
    """
    spare = [place for place in living if place not in trained]
    if len(living) < plan.min_nodes:
        return None
    return max(spare or living, default=None)


def workers_of(hosts: Sequence[SshHost], gpus: Mapping[str, int], plan: RunPlan) -> tuple[int, ...]:
    """Return the workers of each place: the list's slots, else its GPUs, else the plan's."""
    return tuple(
        host.slots or gpus.get(host.name) or plan.num_workers(place)
        for place, host in enumerate(hosts)
    )


def bad_hosts(problems: Sequence[HostProblem], needed: int, where: str) -> ChannelError:
    """Return an error that names all hosts that can't be used."""
    names = ", ".join(problem.host for problem in problems)
    number = len(problems)
    what = f"{number} host{'s' if number != 1 else ''} can't be used: {names}"
    if needed > 1:
        what += f"; the run needs {needed}"
    fixes = list(dict.fromkeys(problem.fix for problem in problems if problem.fix))
    why = "\n".join(problem.line() for problem in problems) or None
    return ChannelError(what, where=where, why=why, fix="; ".join(fixes) or None)


# An environment travels to a run's hosts once from here, then from host to host while it still
# arrives.
#
# So the client's link carries it only once. A host that its predecessor can't reach, or whose
# predecessor is gone, gets the missing rest from here.


_SAY_EVERY_S = 5.0
_LIST = -1


@dataclass(slots=True)
class EnvironmentTransfer:
    """One environment on its way to the hosts.

    Attributes:
        pack: Waits for the archive, which is packed while hosts are called.
        say: Prints a message to the user.
        scratch: The site's folder for it on each host; None for the host's own.
    """

    pack: Callable[[], PackedEnvironment]
    say: Callable[[str], None]
    scratch: str | None = None
    _packed: PackedEnvironment = field(init=False)
    _hold: int = -1
    _secret: str = field(default_factory=lambda: secrets.token_hex(32))
    _after: dict[RemoteHost, RemoteHost] = field(default_factory=dict)
    _there: set[RemoteHost] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sent: int = 0

    def bring(self, hosts: Sequence[RemoteHost]) -> list[HostProblem]:
        """Bring it to all hosts; return the problems of those that can't have it."""
        wanted = [host for host in hosts if host not in self._there and host.is_usable]
        if not wanted:
            return []
        self._take_archive()
        answers = in_parallel(self._offer, wanted)
        problems = [answer for answer in answers if isinstance(answer, HostProblem)]
        if problems:  # hosts that can't have it are reported before anything is sent
            return problems
        lacking = [
            (host, answer)
            for host, answer in zip(wanted, answers, strict=True)
            if isinstance(answer, messages.EnvironmentPlaced) and not answer.has
        ]
        self._there.update({*wanted} - {host for host, _ in lacking})
        if not lacking:
            return []
        began = time.monotonic()
        for (host, _), (after, place) in itertools.pairwise(lacking):
            with self._lock:
                self._after[host] = after
            host.send(messages.PassEnvironment(addresses=place.addresses, port=place.port))
        lacking[-1][0].send(messages.PassEnvironment())
        self._send_from_here(lacking[0][0], tries=True)
        is_over = threading.Event()
        names = [host.host.name for host, _ in lacking]
        threading.Thread(target=self._tell, args=(names, is_over), daemon=True).start()
        try:
            ends = in_parallel(self._wait, [host for host, _ in lacking])
        finally:
            is_over.set()
        problems = [end for end in ends if end is not None]
        came = len(lacking) - len(problems)
        if came:
            size = show_size(self._packed.needs.size_bytes)
            number = f"{came} host{'s' if came != 1 else ''}"
            took_s = time.monotonic() - began
            self.say(f"the environment ({size}) has come to {number} in {took_s:.1f} s")
        return problems

    def _take_archive(self) -> None:
        """On the first call, wait for the archive and hold it open."""
        with self._lock:
            if self._hold < 0:
                self._packed = self.pack()
                # Open while the run lives: `muster prune` can then only unlink its name.
                self._hold = os.open(self._packed.path, os.O_RDONLY | os.O_CLOEXEC)

    def _offer(self, host: RemoteHost) -> messages.EnvironmentPlaced | HostProblem:
        offer = messages.OfferEnvironment(
            needs=self._packed.needs, secret=self._secret, scratch=self.scratch
        )
        try:
            return host.ask(offer, messages.EnvironmentPlaced)
        except HostError as error:
            return error.problem

    def _send_from_here(self, host: RemoteHost, *, tries: bool = False) -> None:
        threading.Thread(target=self._send, args=(host, tries), daemon=True).start()

    def _send(self, host: RemoteHost, tries: bool) -> None:
        """Send the pieces that a host lacks."""
        packed = self._packed
        try:
            with contextlib.closing(
                ParcelFile(f"/proc/self/fd/{self._hold}", packed.needs.sha, packed.needs.num_pieces)
            ) as parcel:
                question = messages.BringEnvironment(tries=tries)
                first = host.ask(question, messages.EnvironmentWants).index
                for index in range(max(first, _LIST), packed.needs.num_pieces):
                    data = parcel.list_bytes if index == _LIST else parcel.piece(index)
                    piece = messages.EnvironmentPiece(index=index, data=data)
                    if not host.send(piece, bulk=True):
                        return
                    self._sent = max(self._sent, parcel.offset(index + 1))
        except HostError:
            return  # the thread that waits for this host gets the error, too
        except (ParcelError, OSError) as error:
            with contextlib.suppress(OSError):
                os.unlink(packed.path)
            words, fix = f"{error}: {packed.path}", "it is removed; type the command again"
            for one in {host, *self._after, *self._after.values()}:
                one.refuse(HostProblem(host=one.host.name, words=words, fix=fix))

    def _tell(self, names: Sequence[str], is_over: threading.Event) -> None:
        """Report every few seconds which hosts are still waiting."""
        size, began_at = self._packed.needs.size_bytes, time.monotonic()
        while not is_over.wait(_SAY_EVERY_S):
            with self._lock:
                there = {host.host.name for host in self._there}
            missing = few_of([name for name in names if name not in there], 8)
            how = show_transfer(self._sent, size, time.monotonic() - began_at)
            self.say(f"the environment comes to {missing}: {how}")

    def _wait(self, host: RemoteHost) -> HostProblem | None:
        try:
            done = host.expect(messages.EnvironmentDone)
        except HostError as error:
            self.take_failed_hop(host, "it is lost")
            return error.problem
        if done.why is not None:
            host.abandon()
            self.take_failed_hop(host, "it has failed")
            return HostProblem(host=host.host.name, words=done.why, fix="")
        with self._lock:
            self._there.add(host)
        return None

    def take_failed_hop(self, host: RemoteHost, why: str) -> None:
        """Send the rest from here, after a host failed to pass it on to the next."""
        with self._lock:
            after = self._after.pop(host, None)
        if after is None or after in self._there or not after.is_usable:
            return
        names = host.host.name, after.host.name
        self.say(f"{names[1]} gets the environment from here: not from {names[0]} ({why})")
        self._send_from_here(after)


_DEAF_S = 6.0


class SshEngine:
    """The agents of a run on ssh hosts."""

    keeps_agents: ClassVar[bool] = True
    head_place: int = HEAD

    def __init__(
        self,
        plan: RunPlan,
        run_dir: RunDir,
        wishes: SshOptions,
        bundle: Bundle,
        say: Callable[[str], None],
    ) -> None:
        self.plan = plan
        self.run_dir = run_dir
        self._wishes = wishes
        self._bundle = bundle
        self._say = say
        self._token = share_token(run_dir)
        self._code = CodeArchive(plan.program, run_dir, wishes.code_root)
        self._places = HostPlaces(wishes.hosts, plan.num_places, spares_first=wishes.spares_first)
        self._hosts: dict[int, RemoteHost] = {}
        self._coming: set[int] = set()
        self._opening: set[RemoteHost] = set()
        self._ends: queue.SimpleQueue[AgentEnd] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._heads: tuple[str, ...] = ()
        self._head_port = 0
        self._files = FetchedFiles(run_dir, self._say)
        self._said_bad: set[str] = set()
        self._closing = False
        self._port = RelayPort(self._pick_head, wishes.head_port)
        pack, scratch = wishes.environment, plan.node_setup.scratch
        self._environment = EnvironmentTransfer(pack, say, scratch) if pack is not None else None

    @property
    def address(self) -> tuple[str, int]:
        """Where this machine can call the head."""
        return ("127.0.0.1", self._port.port)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The head's addresses for other machines: none, since they go through this one."""
        return ()

    @property
    def head_state(self) -> str | None:
        """None: the head is a process of another machine."""
        return None

    @property
    def pids(self) -> list[int]:
        """The ssh processes whose remote end runs an agent."""
        return [host.pid for host in self._alive() if host.num_agents and host.pid]

    @property
    def used_names(self) -> tuple[str, ...]:
        """The hosts on which the run began; a range of nodes may have left some out."""
        used = (host for _, host in sorted(self._hosts.items()) if host.problem is None)
        return tuple(host.host.name for host in used)

    def localized(self, result: Result) -> Result:
        """Return the result with this machine's paths; hosts may have their own directories."""
        placed = [host.placed for host in self._hosts.values() if host.placed is not None]
        return with_own_paths(result, self.run_dir, placed, self._code.base)

    def _alive(self) -> list[RemoteHost]:
        with self._lock:
            return [host for host in self._hosts.values() if not host.is_lost]

    def _pick_head(self) -> tuple[Relay, int] | None:
        head = self._hosts.get(HEAD)
        return None if head is None or head.is_lost else (head.relay, self._head_port)

    # Connecting.

    def start_all(self, *, first_attempt: int = 0, restarts_spent: int = 0) -> None:
        """Start an agent on every place, the head first.

        Raises:
            ChannelError: Hosts can't be used; the error names all of them, and the others were
                stopped.
        """
        try:
            if not self._hosts:
                self._connect_all()
            self._start_head(first_attempt, restarts_spent)
            in_parallel(self._start_other, [p for p in sorted(self._hosts) if p != HEAD])
        except BaseException:
            self.abandon()
            raise

    def _connect_all(self) -> None:
        """Connect to a host for each place; spare hosts replace those that don't answer."""
        good: list[RemoteHost] = []
        bad: list[HostProblem] = []
        wanted = self.plan.num_places
        waiting = list(self._wishes.hosts)
        while waiting and len(good) < wanted:
            wave, waiting = waiting[: wanted - len(good)], waiting[wanted - len(good) :]
            if bad:
                for problem in bad:
                    self._say_bad(problem)
                names = ", ".join(host.name for host in wave)
                self._say(f"spare hosts replace them: {names}")
            for outcome in in_parallel(self._open, wave):
                if isinstance(outcome, RemoteHost):
                    good.append(outcome)
                else:
                    bad.append(outcome)
        self._hosts = dict(enumerate(good))
        check_free(good, self.plan, self.run_dir)
        needed = self.plan.min_nodes
        if len(good) < needed:
            raise bad_hosts(bad, needed, self._wishes.where)
        for problem in bad if len(good) < wanted else []:
            self._say(f"{problem.line()}: the run begins without it ({problem.fix})")
            self._said_bad.add(problem.host)
        self._settle([host.host for host in good])

    def _settle(self, hosts: Sequence[SshHost]) -> None:
        """Give the places their hosts' names; agents read them from the plan."""
        self._places.settle(hosts)
        for place, host in self._hosts.items():
            host.place = place
        workers = self.plan.workers_per_node
        if self._wishes.by_slots:
            gpus = {host.host.name: host.facts.num_gpus for host in self._hosts.values()}
            workers = workers_of(self._places.hosts, gpus, self.plan)
        self._write_plan(replace(self.plan, workers_per_node=workers))

    def _write_plan(self, plan: RunPlan) -> None:
        """Record in the plan which host is which node."""
        self.plan = replace(plan, node_names=self._places.names)
        atomic.write_json(self.run_dir.plan, codec.to_plain(self.plan))

    def _open(self, ssh_host: SshHost, limit_s: float | None = None) -> RemoteHost | HostProblem:
        bundle = self._bundle
        if limit_s is not None:
            bundle = replace(bundle, connect_limit_s=min(limit_s, bundle.connect_limit_s))
        host = RemoteHost(ssh_host, bundle, self.run_dir)
        host.on_message = self._take
        host.on_lost = self._lose
        with self._lock:
            self._opening.add(host)
        try:
            host.open()
        except HostError as error:
            return error.problem
        finally:
            with self._lock:
                self._opening.discard(host)
        if self._closing:
            host.abandon()
        return host

    def _reopen(self, place: int) -> list[HostProblem]:
        """Connect to a place's host again, else to a spare one; return the hosts' problems."""
        problems: list[HostProblem] = []
        candidates = self._places.candidates(place)
        for candidate in candidates:
            # If there is another host, don't wait for one that has to be created first.
            opened = self._open(candidate, None if candidate is candidates[-1] else CONNECT_LIMIT_S)
            if isinstance(opened, HostProblem):
                problems.append(opened)
                continue
            before = self._places.names[place : place + 1]
            if self._places.take(place, candidate):
                self._note_spare(place, candidate.name, *before)
            problem = self._try_set_up(opened) if place != HEAD else None
            if problem is None:
                opened.place = place
                with self._lock:
                    self._hosts[place] = opened
                break
            problems.append(problem)
        return problems

    def _reopen_elsewhere(self) -> list[HostProblem]:
        """Move the head to the host of a spare node, or of one that attempts can do without."""
        living = {place for place, host in self._hosts.items() if not host.is_lost}
        place = place_to_free(living, trained_last(self.plan, self.run_dir), self.plan)
        if place is None:
            return []
        before = self._places.names[HEAD]
        self._hosts[place].abandon()
        with self._lock:
            self._hosts[HEAD], self._hosts[place] = self._hosts[place], self._hosts[HEAD]
        self._hosts[place].place = place
        self._places.exchange(HEAD, place)
        if not (problems := self._reopen(HEAD)):  # else no host, or a spare one already recorded
            self._note_spare(HEAD, self._places.names[HEAD], before, "host")
        return problems

    def _note_spare(self, place: int, name: str, before: str, kind: str = "spare host") -> None:
        """Record a place's new host; hosts that shared a lost head's directory get their own."""
        lost = f"; snapshots that only {before} has are not there" if place == HEAD else ""
        self._say(f"the {kind} {name} takes place {place}{lost}")
        self._write_plan(self.plan)
        if place == HEAD:
            self._files.append_from(name)
            for other in self._hosts.values():
                if other.placed is not None and other.placed.with_head:
                    other.placed = None

    # Starting.

    def _start_head(self, first_attempt: int, restarts_spent: int) -> None:
        problems = self._reopen(HEAD) if self._hosts[HEAD].is_lost else []
        if self._hosts[HEAD].is_lost:
            problems += self._reopen_elsewhere()
        head = self._hosts[HEAD]
        if head.is_lost:
            raise bad_hosts(problems, 1, self._wishes.where)
        others = [host for place, host in self._hosts.items() if place != HEAD]
        message = messages.StartNode(
            place=HEAD, first_attempt=first_attempt, restarts_spent=restarts_spent
        )
        is_first = not self._heads
        if self._environment is not None:  # before it is sent: fail if too few can have it
            problems = self._environment.bring([self._hosts[p] for p in sorted(self._hosts)])
            if len(self._hosts) - len(problems) < self.plan.min_nodes or head.problem:
                raise bad_hosts(problems, self.plan.min_nodes, self._wishes.where)
        with ThreadPoolExecutor(1, "ssh") as pool:
            try:
                self._set_up(head)
                # While the head's agent starts, the other hosts get what they need.
                preparing = pool.submit(in_parallel, self._try_set_up, others)
                started = head.start(message, lambda *end: self._note_end(head, *end))
            except HostError as error:
                raise bad_hosts([error.problem], 1, self._wishes.where) from error
            self._head_port = started.port
            self._heads = tuple(f"{a}:{started.port}" for a in started.addresses or ["127.0.0.1"])
            problems = [problem for problem in preparing.result() if problem is not None]
        if len(self._hosts) - len(problems) < self.plan.min_nodes:
            raise bad_hosts(problems, self.plan.min_nodes, self._wishes.where)
        placed = [host.placed for host in self._hosts.values() if host.placed is not None]
        copied = self._code.describe(sum(one.is_copied for one in placed))
        if is_first and copied is not None:
            self._say(copied)

    def _set_up(self, host: RemoteHost) -> None:
        """Set up the run on a host, unless that was done."""
        if host.placed is not None:
            return
        if self._environment is not None and (problems := self._environment.bring([host])):
            raise HostError(problems[0])
        head = self._hosts[HEAD]
        of_head = head.placed if host is not head else None
        message = order_to_set_up(
            self.plan,
            self.run_dir,
            token=self._token,
            may_share=self._wishes.may_share,
            code_root=self._code.base,
            of_head=of_head,
        )
        go_back(host, self._files.copy_of(host.host.name))
        note = host.set_up(message, self._code.path, self._code.telling(host.host.name, self._say))
        if note is not None:
            self._say(f"{host.host.name}: {note}")

    def _try_set_up(self, host: RemoteHost) -> HostProblem | None:
        if host.is_lost:
            return None
        try:
            self._set_up(host)
        except HostError as error:
            host.abandon()
            return error.problem
        return None

    def _start_other(self, place: int) -> bool:
        """Start an agent on a host that has a session; return whether it runs."""
        host = self._hosts[place]
        if not host.is_usable:
            return False
        try:
            message = messages.StartNode(place=place, heads=self._heads)
            host.start(message, lambda *end: self._note_end(host, *end))
        except HostError as error:
            self._say_bad(error.problem)
            return False
        return True

    def _say_bad(self, problem: HostProblem) -> None:
        if problem.host not in self._said_bad:
            self._said_bad.add(problem.host)
            self._say(f"{problem.line()} ({problem.fix})" if problem.fix else problem.line())

    def start_place(self, place: int) -> None:
        """Start an agent on one place, the first or a replacement, in the background."""
        with self._lock:
            if place in self._coming or self._closing:
                return
            self._coming.add(place)
        threading.Thread(target=self._bring, args=(place,), name=f"place {place}").start()

    def _bring(self, place: int) -> None:
        try:
            host = self._hosts.get(place)
            is_there = host is not None and host.is_answering
            has_agent = host is not None and host.num_agents > 0
            if is_there and (has_agent or self._start_other(place)):
                return
            if host is not None:
                host.abandon()  # e.g. the host is shutting down
            for problem in self._reopen(place):
                self._say_bad(problem)
            if self._hosts.get(place, host) is not host:
                self._start_other(place)
        finally:
            with self._lock:
                self._coming.discard(place)

    def holds(self, place: int) -> bool:
        """Return whether an agent of this place runs, or is being started."""
        with self._lock:
            host = self._hosts.get(place)
            if host is not None and host.is_answering and not host.is_lost and host.num_agents:
                return True
            return place in self._coming

    # Messages of hosts.

    def _take(self, host: RemoteHost, message: messages.RemoteMessage) -> None:
        match message:
            case messages.RemoteNote(text=text):
                if text not in self._said_bad:
                    self._said_bad.add(text)
                    self._say(text)
            case messages.EnvironmentHopFailed(why=why) if self._environment is not None:
                self._environment.take_failed_hop(host, why)
            case messages.CopyOf(mark=mark):
                self._files.copy_of(host.host.name).begin(mark)
            case messages.FilePiece():
                self._files.take(message, host)
            case _:
                raise messages.FrameError(f"{type(message).__name__} is not for a run")

    def _note_end(self, host: RemoteHost, status: int, why: str | None) -> None:
        if why is None and status != 0 and (words := host.last_words()):
            self._say(f"the agent of {host.host.name} says: {words}")
        if host.place is not None:
            self._ends.put(AgentEnd(place=host.place, status=status))

    def _lose(self, host: RemoteHost) -> None:
        if host.num_agents and not self._closing and host.problem is not None:
            self._say(f"the connection to {host.problem.line()}")

    def poll(self) -> list[AgentEnd]:
        """Return the agents that have ended since the last call."""
        found: list[AgentEnd] = []
        while not self._ends.empty():
            found.append(self._ends.get())
        return found

    def has_orphans(self) -> bool:
        """Return whether places are being started; remote ends clean up after agents."""
        return bool(self._coming)

    # Head and end.

    def start_head(self, *, first_attempt: int, restarts_spent: int) -> None:
        """Start only the head's agent, on its host or a spare one; tell the others its address."""
        try:
            self._start_head(first_attempt, restarts_spent)
        except BaseException:
            self.abandon()
            raise
        for host in self._alive():
            host.send(messages.HeadMoved(heads=self._heads))

    def kill_head(self) -> None:
        """End the head's agent at once."""
        self._kill(self._hosts[HEAD])

    def kill_all(self) -> None:
        """End every agent at once."""
        with self._lock:
            for host in self._opening:
                host.cut_off()
        for host in self._alive():
            self._kill(host)

    def _kill(self, host: RemoteHost) -> None:
        """Kill the agents of a host; if it gives no sign of life, cut its session."""
        host.kill_all()
        if time.monotonic() - host.last_heard > _DEAF_S:
            host.cut_off()

    def cut_lifeline(self) -> None:
        """Let the agents end by themselves; the sessions stay."""
        for host in self._alive():
            host.send(messages.CutLifeline())

    def finish(self) -> None:
        """Fetch the run's files from hosts that share nothing, and close all sessions."""
        self._closing = True
        try:
            in_parallel(self._collect, self._alive())
            in_parallel(RemoteHost.close, self._alive())
        finally:
            self.abandon()

    def _collect(self, host: RemoteHost) -> None:
        placed = host.placed
        if placed is None or not (placed.is_shared or placed.with_head):
            self._files.collect(host, self._wishes.output, passes_on=self._wishes.passes_on)

    def abandon(self) -> None:
        """End all sessions now; remote ends end everything below them."""
        self._closing = True
        in_parallel(RemoteHost.abandon, self._alive())
        self._port.close()
        self._code.remove()
