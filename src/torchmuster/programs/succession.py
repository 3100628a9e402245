"""One agent's part when its head is lost: it votes, asks the engine, and becomes the head (`docs/succession.md`)."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from torchmuster import proc
from torchmuster.errors import MusterError
from torchmuster.files.claims import Claims
from torchmuster.model.liveness.succession import Heir, Move, Sight, Term
from torchmuster.node.head_link import HeadLink

_LOOK_EVERY_S = 0.5
_SELDOM_S = 10.0  # while the head is there: to know its term when it is lost
_ASK_LIMIT_S = 8.0
_SAY_EVERY_S = 30.0
_GONE_S = 2.0  # its machine runs, and nothing listens there


class Succession:
    """What one agent does about a head that it may replace.

    Args:
        claims: Of the run.
        place: The agent's own.
        node: Its machine, as the engine calls it.
        link: To the head.
        is_idle: Says whether no worker of this node lives.
        take_over: Makes this agent's process the head; it has claimed a term.
        ask: Returns the command that ends with 0 where the engine says that a machine is lost.
        say: Tells the user of this node.
    """

    def __init__(
        self,
        claims: Claims,
        *,
        place: int,
        node: str,
        link: HeadLink,
        is_idle: Callable[[], bool],
        take_over: Callable[[Term], Awaitable[None]],
        ask: Callable[[str], list[str]],
        say: Callable[[str], None],
    ) -> None:
        self._claims, self._node, self._link = claims, node, link
        self._heir = Heir(place)
        self._is_idle, self._take_over, self._ask, self._say = is_idle, take_over, ask, say
        self._proved = -1
        self._say_at = self._seldom_at = 0.0
        self._failure = ""
        self._damaged: str | None = None
        self._asking: asyncio.Task[None] | None = None

    def has_proof_of(self, term: int) -> bool:
        """Say whether the engine has said that the machine of this term's head is lost."""
        return self._proved == term

    async def watch(self) -> None:
        """Look until this agent has become the head, or ends."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            try:
                if await self._look():
                    return
            except OSError as error:
                why = error.strerror or str(error)  # the path is another one each time
                if why != self._failure:
                    self._failure = why
                    where = self._claims.folder
                    self._say(
                        f"whether another node becomes the head can't be seen: {where}: {why}"
                    )

    async def _look(self) -> bool:
        """Look, and do what follows; say whether this agent has become the head."""
        now, silent = self._link.clock(), self._link.silent_s() is not None
        if not silent and not self._heir.has_voted and now < self._seldom_at:
            return False
        self._seldom_at = now + _SELDOM_S
        newest, votes = await asyncio.to_thread(self._read, silent or self._heir.has_voted)
        sight = Sight(
            newest=newest,
            votes=votes,
            is_silent=silent and self._link.silent_s() is not None,
            is_idle=self._is_idle(),
            is_proved=newest is not None
            and (self._proved == newest.number or self._link.gone_s > _GONE_S),
        )
        if self._claims.damaged is not None and self._claims.damaged != self._damaged:
            self._damaged = self._claims.damaged
            self._say(f"{self._damaged} is no claim: it counts as nobody's")
        move = self._heir.look(self._link.clock(), sight)
        return newest is not None and await self._do(move, newest, votes)

    def _read(self, fresh: bool) -> tuple[Term | None, frozenset[int]]:
        newest = self._claims.newest(fresh=fresh)
        votes = self._claims.votes(newest.number) if newest is not None and fresh else frozenset()
        return newest, votes

    async def _do(self, move: Move, newest: Term, votes: frozenset[int]) -> bool:
        place = self._heir.place
        match move:
            case Move.VOTE:
                self._say(f"this node has lost the head on {newest.node}: has another one, too?")
                await asyncio.to_thread(self._claims.vote, newest.number, place)
            case Move.WITHDRAW:
                self._say("the head is there again")
                await asyncio.to_thread(self._claims.withdraw, newest.number, place)
            case Move.ASK:
                if self._asking is None or self._asking.done():
                    self._asking = asyncio.create_task(self._ask_engine(newest, votes))
            case Move.CLAIM:
                claim = self._heir.next_claim(votes, secrets.token_hex(8), self._node)
                if await asyncio.to_thread(self._claims.take, claim):
                    await self._take_over(claim)
                    return True
            case _:
                pass
        return False

    async def _ask_engine(self, newest: Term, votes: frozenset[int]) -> None:
        argv = self._ask(newest.node)
        try:
            answer = await asyncio.to_thread(proc.ask_beside, argv, _ASK_LIMIT_S)
        except MusterError:
            return  # it can't be asked now
        if answer.status == 0:
            self._proved = newest.number
            self._say(answer.stdout.decode(errors="replace").strip())
        elif self._link.clock() >= self._say_at:
            self._say_at = self._link.clock() + _SAY_EVERY_S
            lost = len(votes & set(newest.members))
            self._say(
                f"{lost} of {len(newest.members)} nodes have lost the head on {newest.node}: more than half must have, or the"
                " scheduler say that its machine is lost, before another node becomes the head"
            )
