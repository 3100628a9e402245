"""Replace a lost head: an agent votes, asks the engine, becomes the head (`docs/succession.md`).

The new head runs in the agent's process and listens on a new socket; its owner is a separate
process.
"""

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, field

from torchmuster.core import proc
from torchmuster.core.files.claims import Claims, Term
from torchmuster.core.files.disk import DiskWriter
from torchmuster.core.files.layout import RunDir, last_lines, size_of
from torchmuster.core.head.attempt import EndRun
from torchmuster.core.head.membership import deposed
from torchmuster.core.head.options import HeadCredentials, TrainingHeadOptions
from torchmuster.core.head.training_head import TrainingHead
from torchmuster.core.head.training_policy import HEAD_IS_SILENT
from torchmuster.core.model.codec import to_arguments
from torchmuster.core.model.events import AttemptFailedEvent
from torchmuster.core.model.failure import EndKind, WorkerEnd
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report
from torchmuster.core.net.address import bind, split_endpoint
from torchmuster.core.node.agent import Agent
from torchmuster.core.node.head_link import HeadLink
from torchmuster.core.node.options import AgentOptions
from torchmuster.core.programs.head_host import HeadHost
from torchmuster.core.programs.main import began_at, machines_left_out
from torchmuster.errors import MusterError
from torchmuster.launcher.model.events import HeadReplacedEvent
from torchmuster.launcher.model.succession import Heir, HeirView, Move, NodeLostOrder, SucceedOrder
from torchmuster.launcher.net.interfaces import own_endpoints

_LOOK_EVERY_S = 0.5
_SELDOM_S = 10.0  # while the head is present, to know its term if it is lost
_ASK_LIMIT_S = 8.0
_SAY_EVERY_S = 30.0
_GONE_S = 2.0  # how long the head's machine must run with nothing listening there


@dataclass(slots=True)
class SuccessionWatch:
    """One agent's part in replacing a lost head.

    Attributes:
        claims: The run's claims.
        place: The agent's place.
        node: The engine's name for its machine.
        link: The link to the head.
        is_idle: Returns whether no worker of this node is alive.
        take_over: Makes this agent's process the head, once it has claimed a term.
        ask: Returns a command that exits with 0 if the engine says that a machine is lost.
        say: Shows a sentence to the user on this node.
    """

    claims: Claims
    _: KW_ONLY
    place: int
    node: str
    link: HeadLink
    is_idle: Callable[[], bool]
    take_over: Callable[[Term], Awaitable[None]]
    ask: Callable[[str], list[str]]
    say: Callable[[str], None]
    _heir: Heir = field(init=False)
    _proved: int = -1
    _say_at: float = 0.0
    _seldom_at: float = 0.0
    _failure: str = ""
    _damaged: str | None = None
    _asking: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._heir = Heir(self.place)

    def has_proof_of(self, term: int) -> bool:
        """Return whether the engine has said that the machine of this term's head is lost."""
        return self._proved == term

    async def watch(self) -> None:
        """Watch the head until this agent has become the head."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                if await self._look():
                    return
            except OSError as error:
                why = error.strerror or str(error)  # without the path, which differs each time
                if why != self._failure:
                    self._failure = why
                    where = self.claims.folder
                    self.say(f"whether another node becomes the head can't be seen: {where}: {why}")

    async def _look(self) -> bool:
        """Check the head and make one move; return whether this agent has become the head."""
        now, silent = self.link.clock(), self.link.silent_s() is not None
        if not silent and not self._heir.has_voted and now < self._seldom_at:
            return False
        self._seldom_at = now + _SELDOM_S
        newest, votes = await asyncio.to_thread(self._read, silent or self._heir.has_voted)
        sight = HeirView(
            newest=newest,
            votes=votes,
            is_silent=silent and self.link.silent_s() is not None,
            is_idle=self.is_idle(),
            is_proved=newest is not None
            and (self._proved == newest.number or self.link.gone_s > _GONE_S),
        )
        if self.claims.damaged is not None and self.claims.damaged != self._damaged:
            self._damaged = self.claims.damaged
            self.say(f"{self._damaged} is no claim: it counts as nobody's")
        move = self._heir.look(self.link.clock(), sight)
        return newest is not None and await self._do(move, newest, votes)

    def _read(self, fresh: bool) -> tuple[Term | None, frozenset[int]]:
        newest = self.claims.newest(fresh=fresh)
        votes = self.claims.votes(newest.number) if newest is not None and fresh else frozenset()
        return newest, votes

    async def _do(self, move: Move, newest: Term, votes: frozenset[int]) -> bool:
        place = self.place
        match move:
            case Move.VOTE:
                self.say(f"this node has lost the head on {newest.node}: has another one, too?")
                await asyncio.to_thread(self.claims.vote, newest.number, place)
            case Move.WITHDRAW:
                self.say("the head is there again")
                await asyncio.to_thread(self.claims.withdraw, newest.number, place)
            case Move.ASK:
                if self._asking is None or self._asking.done():
                    self._asking = asyncio.create_task(self._ask_engine(newest, votes))
            case Move.CLAIM:
                claim = self._heir.next_claim(votes, secrets.token_hex(8), self.node)
                if await asyncio.to_thread(self.claims.take, claim):
                    await self.take_over(claim)
                    return True
            case _:
                pass
        return False

    async def _ask_engine(self, newest: Term, votes: frozenset[int]) -> None:
        argv = self.ask(newest.node)
        try:
            answer = await asyncio.to_thread(proc.ask_spared, argv, _ASK_LIMIT_S)
        except MusterError:
            return  # it can't be asked now
        if answer.status == 0:
            self._proved = newest.number
            self.say(answer.stdout.decode(errors="replace").strip())
        elif self.link.clock() >= self._say_at:
            self._say_at = self.link.clock() + _SAY_EVERY_S
            lost = len(votes & set(newest.members))
            self.say(
                f"{lost} of {len(newest.members)} nodes have lost the head on {newest.node}: more than half must have, or the"
                " scheduler say that its machine is lost, before another node becomes the head"
            )


_SUCCESSOR_LOOK_EVERY_S = 2.0
_OWNER_ENDS_S = 90.0  # the owner may have to submit a job
_END_LOOK_S = 0.05
_LINES = 200
_MOST_OWNERS = 5


class Successor:
    """Watches the head for one agent, and makes the agent the head when the head is lost.

    Args:
        options: The agent's options.
        agent: The agent of this process.
        host: Runs the head in this process.
        disk: Writes the record.
    """

    def __init__(
        self, options: AgentOptions, agent: Agent, host: HeadHost, disk: DiskWriter
    ) -> None:
        place = options.place
        if options.run_dir is None or place is None:
            raise ValueError("only agents of a run with a directory may become the head")
        self._options, self._agent, self._host, self._disk = options, agent, host, disk
        self._run_dir = RunDir(options.run_dir)
        self._claims = Claims(self._run_dir.succession)
        self._credentials: HeadCredentials | None = None
        self._owner: proc.Child | None = None
        self._owner_order: tuple[int, int] | None = None
        self._owners_left = _MOST_OWNERS
        self._succession = SuccessionWatch(
            self._claims,
            place=place,
            node=options.plan.node_name(place),
            link=agent.link,
            is_idle=lambda: agent.is_idle,
            take_over=self._take_over,
            ask=self._node_lost_argv,
            say=agent.voice.say,
        )

    def _node_lost_argv(self, node: str) -> list[str]:
        words = NodeLostOrder(run_dir=self._run_dir.path, node=node)
        return proc.node_program("node-lost", *to_arguments(words))

    async def watch(self) -> None:
        """Wait until the head is lost; as the head, wait until another one replaces it."""
        await self._succession.watch()
        while self._credentials is not None:
            await asyncio.sleep(_SUCCESSOR_LOOK_EVERY_S)
            if self._owner is not None and self._owner.poll() is not None:
                self._replace_owner(self._owner)
            try:
                newest = await asyncio.to_thread(self._claims.newest)
            except OSError:
                continue  # the next look shows it
            if newest is not None and newest.holder != self._credentials.holder:
                self._agent.fail(deposed(self._credentials))
                return

    async def _take_over(self, claim: Term) -> None:
        """Become the head, with a claim that this agent has made."""
        run_dir, before = self._run_dir, await asyncio.to_thread(self._before, claim)
        lost = before.node if before is not None else "another node"
        expected = frozenset(before.members) - {before.place} if before is not None else frozenset()
        listening = bind("0.0.0.0", 0)
        listening.setblocking(False)
        port = int(listening.getsockname()[1])
        self._credentials = credentials = HeadCredentials(
            claims=self._claims,
            term=claim.number,
            holder=claim.holder,
            place=claim.place,
            node=claim.node,
        )
        options = TrainingHeadOptions(
            plan=self._options.plan,
            run_dir=run_dir,
            first_attempt=claim.next_attempt,
            restarts_spent=claim.restarts_spent,
            why=f"the head on {lost} was lost",
            samples_bytes=size_of(run_dir.samples),
            has_owner=True,
            credentials=credentials,
            left_out=machines_left_out(run_dir),
            expected=expected,
            began_at=began_at(run_dir),
        )
        endpoints = own_endpoints(port)
        await asyncio.to_thread(self._claims.announce, claim.number, endpoints)
        newest = await asyncio.to_thread(self._claims.newest)
        if newest != claim:  # another claim was made while this node was suspended
            listening.close()
            raise deposed(credentials)
        head = self._host.begin(options, listening, self._options.head, self._agent)
        if before is not None:
            is_gone = self._succession.has_proof_of(before.number)
            head.policy.head_was_lost(before.place, before.node, is_gone=is_gone)
        most = self._options.plan.limits.max_restarts
        self._tell(head, claim, before, most)
        if claim.restarts_spent > most:
            head.policy.finish(EndRun(RunState.FAILED, 7, _spent(lost, most, run_dir)))
        address, others = ("127.0.0.1", port), tuple(split_endpoint(word) for word in endpoints)
        self._agent.become_head(address, others, claim.number)
        self._start_owner(claim.place, port)

    def _tell(self, head: TrainingHead, claim: Term, before: Term | None, most: int) -> None:
        """Write what the lost head could not: how its attempt ended, and which node continues."""
        if before is None:
            return
        attempt, path = before.next_attempt - 1, self._run_dir.events
        known = f'"event":"attempt_failed","attempt":{attempt},'
        noted = any(known in line for line in last_lines(path, _LINES, _LINES << 10))
        if attempt >= 0 and not noted:
            end = WorkerEnd(
                attempt=attempt,
                rank=0,
                local_rank=0,
                node=before.node,
                kind=EndKind.NODE_LOST,
                asked=False,
                elapsed_s=0.0,
                detail=HEAD_IS_SILENT,
            )
            head.event(
                AttemptFailedEvent(
                    attempt=attempt,
                    what=f"{before.node}: {end.detail}",
                    cause=end,
                    restarts_left=max(0, most - claim.restarts_spent),
                )
            )
        head.event(
            HeadReplacedEvent(node=claim.node, before=before.node, attempt=claim.next_attempt)
        )

    def _before(self, claim: Term) -> Term | None:
        try:
            return self._claims.read(claim.number - 1)
        except OSError:
            return None

    def _start_owner(self, place: int, port: int) -> None:
        """Start an owner to start agents, watch the time and end the job; the old one was lost."""
        self._owner_order = (place, port)
        words = SucceedOrder(
            run_dir=self._run_dir.path, place=place, head_pid=os.getpid(), head_port=port
        )
        argv = proc.node_program("succeed", *to_arguments(words))
        try:
            log = os.open(self._run_dir.job_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError:
            log = os.open(os.devnull, os.O_WRONLY)
        try:
            self._owner = proc.start_spared(argv, stdout=log, stderr=log)
        except MusterError as error:
            self._agent.tell(f"nobody starts lost agents again, or ends the job: {error.what}")
        finally:
            os.close(log)

    async def end(self) -> None:
        """Wait for the owner, which continues the run or ends the job; it ends with us, too."""
        until = time.monotonic() + _OWNER_ENDS_S
        while self._owner is not None and time.monotonic() < until:
            if self._owner.poll() is None:
                await asyncio.sleep(_END_LOOK_S)
            elif not self._replace_owner(self._owner):
                return

    def _replace_owner(self, owner: proc.Child) -> bool:
        """Start the owner again if it was killed: without one the job would outlive its run."""
        proc.let_go(owner)
        self._owner = None
        status, self._owners_left = owner.poll(), self._owners_left - 1
        if status is None or status >= 0 or self._owners_left < 0 or self._owner_order is None:
            return False
        self._start_owner(*self._owner_order)
        return self._owner is not None


def _spent(lost: str, most: int, run_dir: RunDir) -> Report:
    return Report(
        error=f"the head on {lost} was lost, and no restart is left",
        at=lost,
        because=(f"all {most} restarts of `--max-restarts` are spent",),
        hint=f"go on from the last snapshot: muster restart {os.path.basename(run_dir.path)}",
    )
