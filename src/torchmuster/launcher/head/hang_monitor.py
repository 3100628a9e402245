"""The head's side of the hang watch: asks agents for stacks, keeps what they say, and says what follows.

`hang_watch` decides and compares; here is what they need: one question at a time to all agents, for the
watch or for a client of `muster stacks`, a file for the answers, and an event for the user.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchmuster.core.model.events import RecordEvent
from torchmuster.core.model.failure import EndKind, PythonError, WorkerEnd, describe
from torchmuster.core.model.plan import Limits
from torchmuster.core.model.ranks import name_ranks
from torchmuster.core.net import messages
from torchmuster.launcher.facts import stacks as reading
from torchmuster.launcher.facts.stacks import RankActivity, StackReading
from torchmuster.launcher.head import hang_watch
from torchmuster.launcher.model.events import HangEvent, StartWaitEvent, StragglerEvent
from torchmuster.launcher.model.progress import RankStack, StoreCall
from torchmuster.launcher.net import part_messages

# A wait at the start of training, in one sentence: who waits where, for whom, and at which store.


# Where ranks wait until all have come, before the first collective.
_MEETINGS = ("init_process_group", "rendezvous", "TCPStore")
_MAX_GROUPS = 3
_MAX_SOURCE = 60
_MAX_LINES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLook(hang_watch.Seen):
    """One rank in one look.

    Attributes:
        rest_s: How long it has used no processor and moved no data.
        source: The line of the script where it stands.
        imports: It imports a library.
        store: Of a rank that makes a store: what it is connected to.
    """

    rest_s: float
    source: str = ""
    imports: bool = False
    store: StoreCall | None = None

    @classmethod
    def of(cls, rank: int, node: str, stack: RankStack, *, rest_s: float) -> "StartLook":
        """Return what a stack shows."""
        return cls(
            rank=rank,
            node=node,
            standing=standing_of(stack),
            rest_s=rest_s,
            kernel=stack.kernel,
            source=stack.source,
            imports=reading.is_importing(stack.text),
            store=stack.store,
        )

    @property
    def meets(self) -> bool:
        """Say whether it waits for the others to come."""
        return self.standing.doing is RankActivity.WAITS and self.standing.what in _MEETINGS


def is_elsewhere(call: StoreCall, store: str, relay_port: int = 0) -> bool:
    """Say whether a rank that makes a store is not at that of its run.

    An open connection counts by its port alone: the address may be another one of the same host. `relay_port` is the
    head's, where callers of the store are passed on to it; 0 where they are not.
    """
    port = store.rpartition(":")[2]
    ports = (port, str(relay_port)) if relay_port else (port,)
    if not port or any(end.rpartition(":")[2] in ports for end in call.connected):
        return False
    return store not in (*call.calling, call.named)


def tell_start(
    waiting: Sequence[StartLook],
    missing: Sequence[StartLook],
    ended: Mapping[int, str],
    store: str,
    relay_port: int = 0,
) -> str:
    """Return the sentence.

    Args:
        waiting: Ranks that wait for others to come; at least one.
        missing: The other ranks that live.
        ended: Rank -> how it has ended.
        store: `HOST:PORT` of the run's store.
        relay_port: A port of the head that leads to it, too; 0 without.
    """
    calls = [(one, one.store) for one in waiting if one.store is not None]
    away = [one for one, call in calls if is_elsewhere(call, store, relay_port)]
    parts = [_who_waits(waiting) + _for_whom(missing, ended)]
    if away:
        parts.append(_at_which_store(away, store))
    elif not missing and not ended:
        if len(waiting) > 1:
            parts[0] += ", though all of this attempt have come"
        parts.append(
            "do rank= and world_size= there agree with RANK and WORLD_SIZE, and do the nodes reach each other?"
        )
    return "; ".join(parts)


def _who_waits(waiting: Sequence[StartLook]) -> str:
    first, single = waiting[0].standing, len(waiting) == 1
    since_s = max(one.rest_s for one in waiting)
    place = f" ({first.place})" if first.place else ""
    verb = "waits" if single else "wait"
    ranks = name_ranks(one.rank for one in waiting)
    return f"{ranks} {verb} in {first.what}{place} since {since_s:.0f} s"


def _for_whom(missing: Sequence[StartLook], ended: Mapping[int, str]) -> str:
    groups: dict[str, list[StartLook]] = {}
    for one in missing:
        groups.setdefault(_does(one, single=True), []).append(one)
    groups_shown = [_tell_group(group) for group in list(groups.values())[:_MAX_GROUPS]]
    rest = list(groups.values())[_MAX_GROUPS:]
    if rest:
        groups_shown.append(f"for {sum(map(len, rest))} more")
    hows: dict[str, list[int]] = {}
    for rank, how in ended.items():
        hows.setdefault(how, []).append(rank)
    for how, ranks in list(hows.items())[:_MAX_GROUPS]:
        has = "has" if len(ranks) == 1 else "have"
        groups_shown.append(f"for {name_ranks(ranks)}, which {has} ended ({how})")
    return (" " + ", and ".join(groups_shown)) if groups_shown else ""


def _tell_group(group: Sequence[StartLook]) -> str:
    single = len(group) == 1
    at = f" on {group[0].node}" if single else ""
    return (
        f"for {name_ranks(one.rank for one in group)}{at}, which {_does(group[0], single=single)}"
    )


def _does(one: StartLook, *, single: bool) -> str:
    standing = one.standing
    if standing.doing is RankActivity.WORKS and standing.what.startswith("<") and one.source:
        line = (
            one.source if len(one.source) <= _MAX_SOURCE else f"{one.source[: _MAX_SOURCE - 3]}..."
        )
        return f"{'is' if single else 'are'} at `{line}` ({standing.place})"
    return hang_watch.describe_standing(standing, one.kernel, single=single)


def _at_which_store(away: Sequence[StartLook], store: str) -> str:
    calls = [one.store for one in away if one.store is not None]
    single = len(away) == 1
    ranks = name_ranks(one.rank for one in away)
    where = next((end for call in calls for end in (*call.calling, call.named) if end), "")
    if where:
        does = f"{ranks} {'calls' if single else 'call'} {where}, where no store answers"
    else:
        does = f"{ranks} {'has' if single else 'have'} no connection to the store of this run"
    ours = f"the store of this run is at {store} (MASTER_ADDR, MASTER_PORT): does the script set its own?"
    lines = _telling(next((call.lines for call in calls if call.lines), ()), where)
    return "; ".join([does, " ".join([ours, *(f"`{line}`" for line in lines)])])


def _telling(lines: Sequence[str], where: str) -> Sequence[str]:
    """Return the lines of the script that name the address; the first ones where none does."""
    host, _, port = where.rpartition(":")
    words = [word for word in (host, port) if word]
    naming = [line for line in lines if any(word in line.partition(": ")[2] for word in words)]
    return (naming or lines)[:_MAX_LINES]


# Do ranks wait at the start of training for one that does not come? A sentence, never an end; no clock, no I/O.
#
# Nothing is looked at before a rank has done nothing for 10 s in an attempt without steps. Two looks must show all ranks
# in the same functions. That is enough where those that are waited for have rested as long, as the kernel counts, and one
# look where a rank calls a store that is not the run's. Who works is told of after three times that. Who imports a
# library, compiles or sits in a debugger will come: nothing is said.


_PATIENCE = 3.0  # times the limit, for what may end by itself
_MAX_PAUSE = 12.0  # times the limit
_MAX_LOOKS = 10  # eleven minutes: a look disturbs a rank a little
_AGAIN_S = 2.5  # the kernel's counters are read every two seconds
_MAY_TAKE_LONG = (RankActivity.SAVES, RankActivity.EVALUATES, RankActivity.UNKNOWN)
_WILL_COME = (RankActivity.COMPILES, RankActivity.DEBUGGED)


@dataclass(slots=True)
class StartWatch:
    """Watches the start of one attempt, and speaks at most once.

    Args:
        limit_s: How long ranks may wait in silence.
        store: `HOST:PORT` of the attempt's store.
        relay_port: A port of the head that leads to it, too; 0 without.
    """

    limit_s: float
    store: str = ""
    relay_port: int = 0
    _is_over: bool = False
    _ask_at: float = 0.0
    _asked_at: float = 0.0
    _is_again: bool = False
    _num_looks: int = 0
    _places: dict[int, tuple[str, str]] = field(default_factory=dict)

    def must_ask(self, now: float, rests: Mapping[int, float], *, moves: bool) -> bool:
        """Say whether the stacks of all ranks are wanted now.

        Args:
            now: The time.
            rests: Rank -> how many seconds it has done nothing; empty where that is not known yet.
            moves: A rank has done a step.
        """
        if moves:
            self._is_over = True
        if self._is_over or now < self._ask_at or max(rests.values(), default=0.0) < self.limit_s:
            return False
        self._num_looks += 1
        self._is_over = self._num_looks >= _MAX_LOOKS
        pause = 2.0 ** max(self._num_looks - 3, 0)  # soon at first: most starts are short
        self._asked_at = now
        self._ask_at = now + self.limit_s * min(pause, _MAX_PAUSE)
        return True

    def judge(self, looks: Sequence[StartLook], ended: Mapping[int, str]) -> str:
        """Return the sentence, or nothing.

        Args:
            looks: The ranks that live.
            ended: Rank -> how it has ended.
        """
        before, self._places = self._places, {one.rank: _place(one) for one in looks}
        waiting = [one for one in looks if one.meets]
        missing = [one for one in looks if not one.meets]
        if not waiting or any(one.imports or one.standing.doing in _WILL_COME for one in missing):
            return ""
        away = self._away(waiting)
        if max(one.rest_s for one in waiting) < self._limit_of(missing, ended, away=away):
            return ""
        if (missing or not away) and before != self._places:
            self._look_again()
            return ""
        self._is_over = True
        return tell_start(waiting, missing, ended, self.store, self.relay_port)

    def _look_again(self) -> None:
        """Ask soon once more: in this look some may just have moved on, and others not yet."""
        self._is_again = not self._is_again
        if self._is_again:
            self._ask_at = self._asked_at + _AGAIN_S

    def _away(self, waiting: Sequence[StartLook]) -> bool:
        """Say whether a rank has tried long enough to reach another store than that of its run."""
        return any(
            one.store is not None
            and is_elsewhere(one.store, self.store, self.relay_port)
            and one.rest_s >= self.limit_s
            for one in waiting
        )

    def _limit_of(
        self, missing: Sequence[StartLook], ended: Mapping[int, str], *, away: bool
    ) -> float:
        """Return how long they may wait: longer when it may end by itself."""
        works = any(
            one.rest_s < self.limit_s or one.standing.doing in _MAY_TAKE_LONG for one in missing
        )
        may_end = works or not (missing or ended)
        return _PATIENCE * self.limit_s if may_end and not away else self.limit_s


def _place(one: StartLook) -> tuple[str, str]:
    """Return the function in which a rank stands: a loop moves between its lines."""
    frame = one.standing.frame
    return (frame.file, frame.name) if frame is not None else ("", "")


_LEAST_START_S = 3.0
_LOOK_EVERY_S = 0.5
_ANSWER_LIMIT_S = 5.0  # stacks take one second, with py-spy three more
_MAX_LINES_BYTES = 512 << 10
_MAX_CHUNKS = 8
_MAX_LINE = 2000
_MAX_FILES = 100
_MAX_CLIENTS = 16
_MAX_SHOWN_FRAMES = 12


class Surroundings(Protocol):
    """What the monitor needs of the head."""

    def send_to_nodes(self, message: messages.Message) -> set[int]:
        """Send to all agents of the attempt; return their places."""

    def event(self, event: RecordEvent) -> object:
        """Write an event."""

    def append_file(self, path: str, text: str) -> None:
        """Write a file of the run directory, without waiting for it."""


@dataclass(slots=True)
class _Question:
    number: int
    asked_at: float
    missing: set[int]
    for_watch: bool = False
    for_start: bool = False
    clients: dict[str, Callable[[messages.Message], None]] = field(default_factory=dict)
    stacks: list[RankStack] = field(default_factory=list)


class HangMonitor:
    """The watch of one attempt.

    Args:
        attempt: Its number.
        ranks: Rank -> node.
        limits: When a rank that stands is a hang; None: nobody watches, but clients may ask.
        folder: Of the attempt's logs.
        store: `HOST:PORT` of the attempt's store; empty when it has none.
        relay_port: A port of the head that leads to it, too; 0 without.
    """

    def __init__(
        self,
        attempt: int,
        ranks: Mapping[int, str],
        limits: hang_watch.WatchLimits | None,
        folder: str,
        around: Surroundings,
        now: float,
        store: str = "",
        relay_port: int = 0,
    ) -> None:
        self.attempt = attempt
        self._ranks = dict(ranks)
        self._began_at = self._look_at = now
        self._folder = folder
        self._around = around
        self._watch = self._start = None
        if limits is not None:
            self._watch = hang_watch.HangWatch(limits=limits, ranks=self._ranks, began_at=now)
            self._start = StartWatch(limit_s=limits.start_s, store=store, relay_port=relay_port)
        self._stragglers = hang_watch.Stragglers(nodes=dict(self._ranks))
        self._question: _Question | None = None
        self._number = 0
        self._num_files = 0
        self._num_ends = 0

    # What comes in.

    def take_progress(self, now: float, progress: part_messages.Progress) -> None:
        """Take an agent's digest."""
        if self._watch is None:
            return
        self._watch.take(now, progress.ranks)
        for one in self._stragglers.take(now, progress.ranks):
            self._around.event(
                StragglerEvent(rank=one.rank, node=one.node, part=one.part, text=one.tell())
            )

    def take_stacks(self, place: int, said: part_messages.Stacks) -> None:
        """Take an agent's answer."""
        question = self._question
        if question is None or said.number != question.number or place not in question.missing:
            return
        question.stacks += [one for one in said.stacks if one.rank in self._ranks]
        if said.is_last:
            question.missing.discard(place)

    def note_ends(self, ends: Sequence[WorkerEnd]) -> None:
        """Note which workers have ended: all that the attempt knows, in the order of their ends."""
        for end in ends[self._num_ends :]:
            if self._watch is not None and end.rank >= 0:
                self._watch.note_end(end.rank, describe(end))
        self._num_ends = len(ends)

    def lose(self, place: int) -> None:
        """Wait no more for the agent of a place."""
        if self._question is not None:
            self._question.missing.discard(place)

    def ask_for(self, now: float, ask_id: str, send: Callable[[messages.Message], None]) -> None:
        """Ask all agents for a client."""
        question = self._question or self._ask(now)
        if len(question.clients) < _MAX_CLIENTS:
            question.clients[ask_id] = send

    # What is due.

    def advance(self, now: float, *, held: bool) -> WorkerEnd | None:
        """Do what is due; return the end of the rank that has to be taken for the cause.

        Args:
            now: The time.
            held: Somebody sits in a debugger, or the run is being stopped: nothing is a hang.
        """
        if held and self._watch is not None:
            self._watch.hold(now)
        question = self._question
        if question is not None:
            if question.missing and now - question.asked_at < _ANSWER_LIMIT_S:
                return None
            self._question = None
            self._answer(question)
            if question.for_start and not held:
                self._judge_start(now, question)
            return self._judge(now, question) if question.for_watch and not held else None
        if now < self._look_at:
            return None
        # It looks at all ranks, and every agent's report leads here.
        self._look_at = now + _LOOK_EVERY_S
        if self._watch is not None and not held and self._watch.must_ask(now):
            self._ask(now).for_watch = True
        elif self._starts_late(now, held=held):
            self._ask(now).for_start = True
        return None

    def _starts_late(self, now: float, *, held: bool) -> bool:
        if self._start is None or self._watch is None or held:
            return False
        return self._start.must_ask(now, self._watch.rests(now), moves=self._watch.has_steps)

    def _ask(self, now: float) -> _Question:
        self._number += 1
        order = part_messages.TakeStacks(number=self._number, attempt=self.attempt)
        places = self._around.send_to_nodes(order)
        self._question = _Question(self._number, now, set(places))
        return self._question

    def _answer(self, question: _Question) -> None:
        if not question.clients:
            return
        sentence = hang_watch.tell(self._seen(question))
        chunks = _chunks(self._lines(question))
        for ask_id, send in question.clients.items():
            for chunk in chunks:
                report = part_messages.StacksReport(
                    ask_id=ask_id,
                    sentence=sentence,
                    lines=tuple(chunk),
                    is_last=chunk is chunks[-1],
                )
                send(report)

    def _seen(self, question: _Question) -> list[hang_watch.Seen]:
        found = {one.rank: one for one in question.stacks}
        seen = []
        for rank, node in sorted(self._ranks.items()):
            one = found.get(rank)
            standing = standing_of(one) if one else StackReading(doing=RankActivity.UNKNOWN)
            kernel = one.kernel if one else "its agent did not answer"
            seen.append(hang_watch.Seen(rank=rank, node=node, standing=standing, kernel=kernel))
        return seen

    def _lines(self, question: _Question) -> list[str]:
        texts = [
            (f"rank {one.rank} on {self._ranks[one.rank]}", shown(one))
            for one in sorted(question.stacks, key=lambda one: one.rank)
        ]
        silent = sorted(set(self._ranks) - {one.rank for one in question.stacks})
        lines = hang_watch.group_texts(texts)
        if silent:
            lines.append(f"no answer for {name_ranks(silent)}")
        return lines

    # What follows.

    def _judge(self, now: float, question: _Question) -> WorkerEnd | None:
        if self._watch is None:
            return None
        standings = {one.rank: (standing_of(one), one.kernel) for one in question.stacks}
        judgement = self._watch.judge(now, standings)
        if judgement.verdict is hang_watch.HangVerdict.NOTHING:
            return None
        path = self._write(judgement, question)
        ends = judgement.verdict is hang_watch.HangVerdict.END
        self._around.event(
            HangEvent(
                attempt=self.attempt,
                rank=judgement.rank,
                node=judgement.node,
                silent_s=round(judgement.silent_s, 1),
                limit_s=round(judgement.limit_s, 1),
                ended=ends,
                stacks=path,
                sentence=judgement.sentence,
                text=_judgement_text(judgement, path),
            )
        )
        return self._end(now, judgement, question, path) if ends else None

    def _judge_start(self, now: float, question: _Question) -> None:
        if self._start is None or self._watch is None:
            return
        rests, stacks = self._watch.rests(now), {one.rank: one for one in question.stacks}
        looks = [
            StartLook.of(rank, node, stacks[rank], rest_s=rests[rank])
            for rank, node in sorted(self._ranks.items())
            if rank in stacks and rank in rests
        ]
        text = self._start.judge(looks, self._watch.ended())
        if text:
            self._around.event(StartWaitEvent(attempt=self.attempt, text=text))

    def _write(self, judgement: hang_watch.Judgement, question: _Question) -> str:
        path = os.path.join(self._folder, f"stacks-{min(self._num_files, _MAX_FILES)}.txt")
        self._num_files += 1
        text = "\n".join([judgement.sentence, "", *self._lines(question)])
        self._around.append_file(path, text + "\n")
        return path

    def _end(
        self, now: float, judgement: hang_watch.Judgement, question: _Question, path: str
    ) -> WorkerEnd:
        rank = judgement.rank if judgement.rank is not None else -1
        mine = [one for one in question.stacks if one.rank == rank]
        trace = [judgement.sentence, *_short(mine), f"the stacks of all ranks: {path}"]
        frame = judgement.standing.frame if judgement.standing is not None else None
        where = f"{frame.file}:{frame.line} in {frame.name}" if frame is not None else None
        error = PythonError(
            type_name="Hang",
            message=judgement.headline,
            where=where,
            traceback="\n".join(trace),
            bases=("Hang", *(("TimeoutError",) if judgement.may_pass else ())),
        )
        return WorkerEnd(
            attempt=self.attempt,
            rank=rank,
            local_rank=0,
            node=judgement.node,
            kind=EndKind.HANG,
            asked=False,
            elapsed_s=round(now - self._began_at, 3),
            error=error,
            detail=judgement.headline,
        )


def watch_limits(limits: Limits) -> hang_watch.WatchLimits | None:
    """Return the limits of a run's watch; None: it is off."""
    if not limits.hang_s:
        return None
    return hang_watch.WatchLimits(
        floor_s=limits.hang_s,
        ceiling_s=limits.hang_most_s,
        blind_s=limits.hang_blind_s,
        start_s=min(max(limits.hang_s / 6, _LEAST_START_S), hang_watch.START_S),
    )


def _chunks(lines: list[str]) -> list[list[str]]:
    """Return the lines in pieces that a message can hold, and no more than a few of them."""
    chunks: list[list[str]] = [[]]
    room = _MAX_LINES_BYTES
    for line in lines:
        size = 6 * len(line) + 4  # as JSON writes it, at worst
        if size > room:
            if len(chunks) == _MAX_CHUNKS:
                chunks[-1].append("(cut here: too long)")
                break
            chunks.append([])
            room = _MAX_LINES_BYTES
        chunks[-1].append(line[:_MAX_LINE])
        room -= min(size, _MAX_LINES_BYTES)
    return chunks


def standing_of(one: RankStack) -> StackReading:
    """Return what a rank does, by its stack."""
    return reading.judge(
        one.text,
        state=one.state,
        source=one.source,
        children=one.children,
        uses_gpu=one.uses_gpu,
    )


def shown(one: RankStack) -> str:
    """Return the text of one rank for a file or a terminal."""
    parts = [one.text.strip("\n")] if one.text else []
    if one.why_not:
        parts.append(f"no Python stack: {one.why_not}")
    if one.state in ("T", "D") or not one.text:
        parts.append(f"state {one.state or 'gone'}, in the kernel at {one.kernel or '?'}")
    parts += [f"a process of its loader:\n{text.strip()}" for text in one.children]
    return "\n".join(parts)


def _short(stacks: list[RankStack]) -> list[str]:
    """Return the frames of the rank that stands, the innermost last, as a traceback has them."""
    if not stacks:
        return []
    one = stacks[0]
    busy = next(
        (text for text in one.children if reading.user_frame(reading.main_frames(text))), ""
    )
    frames = reading.main_frames(busy or one.text)
    chosen = list(reversed(frames[:_MAX_SHOWN_FRAMES]))
    lines = [f'  File "{frame.file}", line {frame.line}, in {frame.name}' for frame in chosen]
    head = f"rank {one.rank} stood here:" if lines else f"rank {one.rank}: {one.why_not}"
    return [head, *lines]


def _judgement_text(judgement: hang_watch.Judgement, path: str) -> str:
    if judgement.verdict is hang_watch.HangVerdict.END:
        return f"{judgement.sentence}: the attempt is ended; stacks in {path}"
    return (
        f"{judgement.sentence}: if nothing moves, the attempt ends in {judgement.left_s:.0f} s"
        f" (--hang-timeout); stacks in {path}"
    )
