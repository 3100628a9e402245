"""The launcher's parts of a head: state of the ranks, hangs, `muster exec`, metrics.

The board collects the agents' reports, serves viewers and Prometheus, and writes the record. A
value of a sample is the change between two reports of a rank. Viewers get a window of ten to
twenty seconds, so that the numbers are steady. The record (`samples.jsonl`) has a line every ten
seconds at first. The interval doubles with every 4 MiB of the file, including what earlier heads
wrote, so its size grows with the logarithm of the run's time: a line for 512 ranks has about 60 KB,
and a week of them about 40 MiB.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torchmuster.core.head.attempt import Attempt
from torchmuster.core.head.head import HeadClient
from torchmuster.core.head.membership import Member
from torchmuster.core.head.training_head import HeadPart, TrainingHead
from torchmuster.core.model import codec
from torchmuster.core.model.codec import utc_now
from torchmuster.core.model.failure import WorkerEnd
from torchmuster.core.model.progress import RankPhase
from torchmuster.core.model.text import name_alone, nearest
from torchmuster.core.net import messages
from torchmuster.core.net.channel import Channel
from torchmuster.core.plainfile import open_plain
from torchmuster.launcher.head.hang_watch import StepParts, per_step, waits_s, was_active
from torchmuster.launcher.model.progress import RankProgress, RankSample, split
from torchmuster.launcher.net import part_messages

if TYPE_CHECKING:
    from torchmuster.launcher.head.hang_monitor import HangMonitor


WRITE_EVERY_S = 10.0
DOUBLE_EVERY_BYTES = 4 << 20
_WINDOW_S = 10.0  # viewers get one to two windows
_FRESH_S = 1.0  # how long one sample serves all viewers
_RANKS_PER_MESSAGE = 1024  # with names of 100 characters still half a frame
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class _RankReport:
    """An agent's report on a rank, and when it came."""

    at: float
    progress: RankProgress


@dataclass(slots=True)
class _Baseline:
    """The earlier reports with which the newest ones are compared."""

    at: float
    ranks: dict[int, _RankReport] = field(default_factory=dict)


class Board:
    """Live state of the ranks of the running attempt.

    Args:
        write: Appends a line to the record.
        has_bytes: Size of the record that earlier heads have written.
    """

    def __init__(self, write: Callable[[bytes], None], has_bytes: int = 0) -> None:
        self._write, self._has_bytes = write, has_bytes
        self.attempt: int | None = None
        self._nodes: tuple[str, ...] = ()
        self._ended: set[int] = set()
        self._num_ends = 0
        self._reports: dict[int, _RankReport] = {}
        self._stepped: dict[int, _RankReport] = {}  # each rank's first report of a step
        self._active_at: dict[int, float] = {}
        self._written = self._older = self._newer = _Baseline(0.0)
        self._is_news = False
        self._shown: tuple[float, RankSample] | None = None

    # Reports.

    def begin(self, now: float, attempt: int, nodes: Mapping[int, str]) -> None:
        """Start an attempt; `nodes` maps each rank to its node."""
        self.end(now)
        self.attempt = attempt
        self._nodes = tuple(nodes[rank] for rank in sorted(nodes))
        self._reports, self._stepped, self._ended, self._num_ends = {}, {}, set(), 0
        self._active_at = {}
        self._written = self._older = self._newer = _Baseline(now)

    def take(self, now: float, progress: Sequence[RankProgress]) -> None:
        """Handle an agent's report."""
        for one in progress:
            if not 0 <= one.rank < len(self._nodes):
                continue
            before = self._reports.get(one.rank)
            if before is None or was_active(before.progress, one, now - before.at):
                self._active_at[one.rank] = now
            report = self._reports[one.rank] = _RankReport(now, one)
            for base in (self._written, self._older, self._newer):
                base.ranks.setdefault(one.rank, report)  # its first report is compared with itself
            if one.steps_here:
                self._stepped.setdefault(one.rank, report)
            self._is_news = True
        if now - self._newer.at >= _WINDOW_S:
            self._older, self._newer = self._newer, _Baseline(now, dict(self._reports))

    def note_ends(self, ends: Sequence[WorkerEnd]) -> None:
        """Record which workers have ended; `ends` are all of the attempt, in order."""
        self._ended.update(end.rank for end in ends[self._num_ends :])
        self._num_ends = len(ends)

    def advance(self, now: float) -> None:
        """Write a line when it is due."""
        every_s = WRITE_EVERY_S * 2 ** (self._has_bytes // DOUBLE_EVERY_BYTES)
        if self._is_news and now - self._written.at >= every_s:
            self._record(now)

    def end(self, now: float) -> None:
        """End the attempt; write what is not written yet."""
        if self.attempt is not None and self._is_news:
            self._record(now)
        self.attempt = self._shown = None

    # Samples.

    def answer(self, now: float, ask_id: str) -> list[part_messages.BoardSample]:
        """Return the answer to a client."""
        sample = self.newest(now)
        parts = [None] if sample is None else split(sample, _RANKS_PER_MESSAGE)
        return [
            part_messages.BoardSample(ask_id=ask_id, sample=part, is_last=part is parts[-1])
            for part in parts
        ]

    def newest(self, now: float) -> RankSample | None:
        """Return the state of all ranks, at most a second old; None while no attempt runs."""
        if self.attempt is None:
            return None
        if self._shown is None or now - self._shown[0] >= _FRESH_S:
            self._shown = (now, self._sample(now, self._older))
        return self._shown[1]

    def _record(self, now: float) -> None:
        sample = self._sample(now, self._written)
        plain = {name: value for name, value in codec.to_plain(sample).items() if value != []}
        line = json.dumps(plain, separators=(",", ":")).encode() + b"\n"
        self._write(line)
        self._has_bytes += len(line)
        self._written, self._is_news = _Baseline(now, dict(self._reports)), False

    def _sample(self, now: float, base: _Baseline) -> RankSample:
        ranks = range(len(self._nodes))
        rows = [self._row(now, rank, base) for rank in ranks]
        steps = {rank: row.parts for rank, row in enumerate(rows) if row.parts is not None}
        waits = waits_s(steps)
        for rank, wait_s in waits.items():
            rows[rank].values["wait_s"] = round(wait_s * rows[rank].num_steps, 3)
        return RankSample(
            time=utc_now(),
            attempt=self.attempt or 0,
            over_s=round(max(now - base.at, 0.0), 3),
            nodes=self._nodes,
            **{name: _column(rows, name) for name in _COLUMNS},
        )

    def _row(self, now: float, rank: int, base: _Baseline) -> "_Row":
        report = self._reports.get(rank)
        if report is None:
            return _Row({"states": "" if rank in self._ended else "?"})
        progress, before = report.progress, base.ranks[rank]
        values: dict[str, Any] = {
            "states": "" if rank in self._ended else progress.state,
            "report_ages_s": round(max(now - report.at, 0.0), 1),
            "still_s": round(report.at - self._active_at[rank], 1),
            "rss_mib": progress.rss_mib,
            "gpu_percent": progress.gpu_percent,
            "gpu_mib": progress.gpu_mib,
            **_of_kernel(before, report),
        }
        if progress.beat_age_s is None:
            return _Row(values)
        values["ages_s"] = round(progress.beat_age_s + max(now - report.at, 0.0), 1)
        # The time before the first step belongs to no step.
        start = before if before.progress.steps_here else self._stepped.get(rank, report)
        values |= _of_library(before.progress, start.progress, progress)
        num_steps = progress.steps_here - start.progress.steps_here
        over_s = progress.step_at - start.progress.step_at
        if num_steps <= 0 or over_s <= 0:
            return _Row(values)
        parts = per_step(start.progress, progress)
        values["steps_per_s"] = round(num_steps / over_s, 4)
        values["rest_s"] = round(parts.rest_s * num_steps, 3)
        return _Row(values, num_steps, parts)


@dataclass(frozen=True, slots=True)
class _Row:
    """The values of one rank, by column; `parts` only if it has made steps."""

    values: dict[str, Any]
    num_steps: int = 0
    parts: StepParts | None = None


def _of_kernel(before: _RankReport, now: _RankReport) -> dict[str, Any]:
    over_s = now.at - before.at
    if over_s <= 0:
        return {}
    busy_s = now.progress.active_s - before.progress.active_s
    io_bytes = now.progress.io_bytes - before.progress.io_bytes
    return {
        "cpus": round(max(busy_s, 0.0) / over_s, 2),
        "io_mib": round(max(io_bytes, 0) / _MIB, 1),
    }


def _of_library(before: RankProgress, start: RankProgress, now: RankProgress) -> dict[str, Any]:
    values: dict[str, Any] = {
        "steps": now.step if now.steps_here else None,
        "steps_here": now.steps_here,
        "phases": now.phase.name.lower(),
        "median_s": now.median_s or None,
    }
    if len(now.seconds) != _NUM_PHASES:
        return values
    for name, (phase, is_of_steps) in _PHASES.items():
        first = start if is_of_steps else before
        if len(first.seconds) == _NUM_PHASES:
            values[name] = round(max(now.seconds[phase] - first.seconds[phase], 0.0), 3)
    return values


_NUM_PHASES = len(RankPhase)
_PHASES = {  # column -> phase, and whether it is part of every step
    "data_s": (RankPhase.DATA, True),
    "forward_s": (RankPhase.FORWARD, True),
    "save_s": (RankPhase.SAVE, False),
    "evaluate_s": (RankPhase.EVALUATE, False),
}
_COLUMNS = tuple(one.name for one in fields(RankSample))[4:]  # behind time, attempt, span and nodes


def _column(rows: Sequence[_Row], name: str) -> tuple[Any, ...]:
    """Return a column; empty where no rank has a value."""
    nothing = "" if name == "phases" else None
    column = tuple(row.values.get(name, nothing) for row in rows)
    return column if any(value is not nothing for value in column) else ()


# Metrics of a run in OpenMetrics 1.0 text, from a sample of all ranks and the library's record.
#
# Names follow its conventions: base units, `_total` for counters, one name for all ranks with labels
# to tell them apart. Source: OpenMetrics 1.0.0, "Text format" and "Metric naming".


CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_MOST_READ = 4 << 20  # bytes of the record in one read
_MOST_VALUES = 200  # metric names of one script


@dataclass(slots=True)
class NewestTraining:
    """The newest values that the training library has written, read as the file grows.

    Attributes:
        values: The last value of every metric, by the script's name for it.
    """

    path: str
    step: int | None = None
    saved_step: int | None = None
    values: dict[str, float] = field(default_factory=dict)
    _position: int = 0

    def read(self) -> None:
        """Read what has been written since the last call; if that is much, only its end."""
        try:
            with open_plain(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._position:
                    self._position = 0  # the file was replaced
                file.seek(max(self._position, size - _MOST_READ))
                data = file.read(_MOST_READ)
                whole = data.rfind(b"\n") + 1
                self._position = file.tell() - len(data) + whole
        except OSError:
            return
        for line in data[:whole].splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue
            if isinstance(event, dict):
                self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        step, values = event.get("step"), event.get("values")
        if isinstance(step, int):
            self.step = step
        if event.get("event") == "saved" and isinstance(event.get("saved"), int):
            self.saved_step = event["saved"]
        if event.get("event") == "metrics" and isinstance(values, dict):
            for name, value in values.items():
                if isinstance(value, int | float) and (
                    name in self.values or len(self.values) < _MOST_VALUES
                ):
                    self.values[name] = float(value)


def render(
    run_id: str, num_attempts: int, sample: RankSample | None, training: NewestTraining
) -> str:
    """Return the whole answer to a scrape.

    Args:
        run_id: The run's id.
        num_attempts: How many attempts have been started.
        sample: The state of all ranks; None while no attempt runs.
        training: The training library's newest values.
    """
    lines = [
        *_family("torchmuster_run", "info", "The run that this head conducts."),
        f"torchmuster_run_info{_labels(run_id=run_id)} 1",
        *_family("torchmuster_attempts", "counter", "Attempts that were started."),
        f"torchmuster_attempts_total {num_attempts}",
    ]
    if sample is not None:
        lines += _of_ranks(sample)
    lines += _of_training(training)
    return "\n".join([*lines, "# EOF", ""])


def _of_ranks(sample: RankSample) -> Iterator[str]:
    up = [None if state == "?" else float(state != "") for state in sample.states]
    steps_s = _sum_of(sample, ("data_s", "forward_s", "rest_s"))
    waits = _ratio(sample.wait_s, steps_s)
    columns: tuple[tuple[str, str, Sequence[float | None]], ...] = (
        ("rank_up", "Whether the process of the rank is there.", up),
        ("rank_step", "Number of the last step, over all attempts.", sample.steps),
        ("rank_step_seconds", "Median of the newest steps.", sample.median_s),
        ("rank_steps_per_second", "Steps, as fast as they come now.", sample.steps_per_s),
        ("rank_wait_ratio", "Share of its steps that it waits for other ranks.", waits),
        ("rank_silence_seconds", "Since the library's last word.", sample.ages_s),
        ("rank_cpu_cores", "Processors in use.", sample.cpus),
        ("rank_resident_memory_bytes", "With what it has started.", _times(sample.rss_mib, _MIB)),
        ("rank_gpu_utilization_ratio", "Of its GPU.", _times(sample.gpu_percent, 0.01)),
        ("rank_gpu_memory_used_bytes", "On its GPU.", _times(sample.gpu_mib, _MIB)),
    )
    for name, means, values in columns:
        if any(value is not None for value in values):
            yield from _family(f"torchmuster_{name}", "gauge", means)
            for rank, (node, value) in enumerate(zip(sample.nodes, values, strict=True)):
                if value is not None:
                    yield f"torchmuster_{name}{_labels(rank=str(rank), node=node)} {_number(value)}"


def _of_training(training: NewestTraining) -> Iterator[str]:
    steps = (
        (
            "training_step",
            "Number of the last step that the library has written of.",
            training.step,
        ),
        ("snapshot_step", "Step of the newest whole snapshot.", training.saved_step),
    )
    for name, means, step in steps:
        if step is not None:
            yield from _family(f"torchmuster_{name}", "gauge", means)
            yield f"torchmuster_{name} {step}"
    if training.values:
        yield from _family(
            "torchmuster_training",
            "gauge",
            "The script's own metrics: means over ranks and samples.",
        )
        for name, value in training.values.items():
            yield f"torchmuster_training{_labels(name=name)} {_number(value)}"


def _family(name: str, kind: str, means: str) -> tuple[str, str]:
    return f"# TYPE {name} {kind}", f"# HELP {name} {means}"


def _labels(**labels: str) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")

    return "{" + ",".join(f'{name}="{escaped(text)}"' for name, text in labels.items()) + "}"


def _number(value: float) -> str:
    """Return a number as Prometheus reads it, which knows `NaN` and `+Inf`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _sum_of(sample: RankSample, names: Iterable[str]) -> list[float | None]:
    columns = [getattr(sample, name) for name in names]
    if not all(columns):
        return [None] * len(sample.nodes)
    return [None if None in row else sum(row) for row in zip(*columns, strict=True)]


def _ratio(parts: Sequence[float | None], wholes: Sequence[float | None]) -> list[float | None]:
    given = parts or [None] * len(wholes)
    return [
        part / whole if part is not None and whole else None
        for part, whole in zip(given, wholes, strict=True)
    ]


def _times(values: Sequence[float | None], factor: float) -> list[float | None]:
    return [value * factor if value is not None else None for value in values]


# The head's part in `muster exec`: route messages between clients and commands on agents.
#
# It stores routes only: the windows of both ends bound the data in flight (`net.messages`).


LOST = 128 + 9
Agent = TypeVar("Agent")


@dataclass(frozen=True, slots=True)
class _Route(Generic[Agent]):
    client: Channel
    agent: Agent


class ExecRelay(Generic[Agent]):
    """Passes messages between clients and agents: those of tasks, or of the nodes of a run.

    Args:
        find: Returns the agent for the target that a client has named; None if there is none now.
        send: Sends a message to an agent, if it is connected.
        why_not: Returns what to tell a client whose target can't be entered now.
    """

    def __init__(
        self,
        find: Callable[[str], Agent | None],
        send: Callable[[Agent, messages.Message], None],
        why_not: Callable[[str], tuple[str, str | None]],
    ) -> None:
        self._find = find
        self._send = send
        self._why_not = why_not
        self._routes: dict[str, _Route[Agent]] = {}

    def from_client(self, client: Channel, message: part_messages.FromExecClient) -> None:
        """Start a client's command, or pass a message on to a command of its own."""
        exec_id = message.exec_id
        route = self._routes.get(exec_id)
        if not isinstance(message, part_messages.ExecStart):
            if route is not None and route.client is client:
                self._send(route.agent, message)
            return
        if route is not None:
            what = "this command has been started already"
            client.send_nowait(part_messages.ExecRefused(exec_id=exec_id, what=what))
        elif (agent := self._find(message.task)) is not None:
            self._routes[exec_id] = _Route(client, agent)
            self._send(agent, message)
        else:
            what, why = self._why_not(message.task)
            client.send_nowait(part_messages.ExecRefused(exec_id=exec_id, what=what, why=why))

    def client_gone(self, client: Channel) -> None:
        """End the commands of a client that has disconnected."""
        for exec_id, route in list(self._routes.items()):
            if route.client is client:
                del self._routes[exec_id]
                self._send(route.agent, part_messages.ExecLeave(exec_id=exec_id))

    def from_agent(self, agent: Agent, message: part_messages.FromExecTask) -> None:
        """Pass an agent's message on to the client of the command."""
        route = self._routes.get(message.exec_id)
        if route is None or route.agent != agent:
            return
        if isinstance(message, part_messages.ExecEnded | part_messages.ExecRefused):
            del self._routes[message.exec_id]
        route.client.send_nowait(message)

    def agent_gone(self, agent: Agent, why: str) -> None:
        """End the commands of a lost agent for their clients."""
        for exec_id, route in list(self._routes.items()):
            if route.agent == agent:
                del self._routes[exec_id]
                end = part_messages.ExecEnded(exec_id=exec_id, code=LOST, why=why)
                route.client.send_nowait(end)


# Find the agent of the rank or the node that `muster exec` names: `rank 3`, or `node n2`.


class NamedAgents:
    """The agents of a run, by the names that clients use.

    Args:
        attempt: Returns the newest attempt; None before the first.
        name: Returns the name of a member.
    """

    def __init__(
        self, attempt: Callable[[], Attempt | None], name: Callable[[Member], str]
    ) -> None:
        self._attempt = attempt
        self._name = name

    def find(self, word: str) -> Member | None:
        """Return the connected agent of the rank or node; None if there is none."""
        attempt = self._attempt()
        kind, _, name = word.partition(" ")
        if attempt is None:
            return None
        for place, member in attempt.members.items():
            if not member.is_present:
                continue
            ranks = attempt.ranks[place]
            if kind == "node" and name in (
                self._name(member),
                name_alone(self._name(member)),
                member.hello.host,
            ):
                return member
            index = int(name) - ranks.first_rank if kind == "rank" and name.isdecimal() else -1
            if 0 <= index < ranks.num_workers:
                return member
        return None

    def why_not(self, word: str) -> tuple[str, str | None]:
        """Return why `find` returned None, and what the run has instead."""
        attempt = self._attempt()
        kind, _, name = word.partition(" ")
        if attempt is None:
            return "no worker of the run has started yet", None
        if kind == "node":
            names = [self._name(member) for member in attempt.members.values()]
            near = nearest(name, names)
            known = f"did you mean {near}?" if near else f"its nodes: {', '.join(names[:12])}"
            return f"the run has no node `{name}` now", known
        total = sum(ranks.num_workers for ranks in attempt.ranks.values())
        return f"the run has no rank {name} now", f"it has ranks 0 to {total - 1}"


class BoardPart(HeadPart):
    """Serves and records the state of all ranks."""

    def __init__(self, head: TrainingHead) -> None:
        super().__init__(head)
        disk, samples = head.disk, head.options.run_dir.samples
        self.board = Board(lambda line: disk.append(samples, line), head.options.samples_bytes)

    def take_word(self, member: Member, message: messages.Message) -> bool:
        """Record the progress of ranks."""
        attempt = self.head.policy.running
        if not isinstance(message, part_messages.Progress):
            return False
        if attempt is None or member.place is None or message.attempt != attempt.number:
            return True
        now = self.head.clock()
        if self.board.attempt != attempt.number:
            self.board.begin(now, attempt.number, self.head.rank_nodes(attempt))
        self.board.take(now, message.ranks)
        return True

    def take_request(self, client: HeadClient, message: messages.Message) -> bool:
        """Answer a viewer."""
        if not isinstance(message, part_messages.AskBoard):
            return False
        for reply in self.board.answer(self.head.clock(), message.ask_id):
            client.channel.send_nowait(reply)
        return True

    def advance(self, now: float) -> None:
        """Write a line of the record when it is due."""
        attempt = self.head.policy.running
        if attempt is None:
            self.board.end(now)
        else:
            self.board.note_ends(attempt.ends)
            self.board.advance(now)


class HangPart(HeadPart):
    """Watches the running attempt for hung ranks, from the first progress report on."""

    def __init__(self, head: TrainingHead) -> None:
        super().__init__(head)
        self._hangs: HangMonitor | None = None

    def take_word(self, member: Member, message: messages.Message) -> bool:
        """Record the progress and the stacks of ranks."""
        attempt = self.head.policy.running
        if not isinstance(message, part_messages.Progress | part_messages.Stacks):
            return False
        if attempt is None or member.place is None:
            return True
        if isinstance(message, part_messages.Stacks):
            if self._hangs is not None:
                self._hangs.take_stacks(member.place, message)
        elif message.attempt == attempt.number:
            self._monitor(attempt).take_progress(self.head.clock(), message)
        return True

    def take_request(self, client: HeadClient, message: messages.Message) -> bool:
        """Start collecting the stacks of all ranks for a client."""
        if not isinstance(message, part_messages.AskStacks):
            return False
        attempt, send, ask_id = self.head.policy.running, client.channel.send_nowait, message.ask_id
        if attempt is None:
            send(part_messages.StacksReport(ask_id=ask_id, sentence="no worker runs now", lines=()))
        else:
            self._monitor(attempt).ask_for(self.head.clock(), ask_id, send)
        return True

    def lose(self, member: Member, why: str) -> None:
        """Stop waiting for the stacks of a lost node."""
        del why
        if member.place is not None and self._hangs is not None:
            self._hangs.lose(member.place)

    def advance(self, now: float) -> None:
        """Judge which ranks hang; report a hang to the policy."""
        policy, hangs = self.head.policy, self._hangs
        attempt = policy.running
        if attempt is None or hangs is None or hangs.attempt != attempt.number:
            return
        hangs.note_ends(attempt.ends)
        if (end := hangs.advance(now, held=policy.is_held)) is not None:
            policy.hung(now, end)

    def _monitor(self, attempt: Attempt) -> "HangMonitor":
        if self._hangs is None or self._hangs.attempt != attempt.number:
            from torchmuster.launcher.head.hang_monitor import HangMonitor, watch_limits

            options = self.head.options
            self._hangs = HangMonitor(
                attempt.number,
                self.head.rank_nodes(attempt),
                watch_limits(self.head.plan.limits),
                options.run_dir.attempt_logs(attempt.number),
                self.head,
                self.head.clock(),
                attempt.store,
                options.relay_port,
            )
            self._hangs.note_ends(attempt.ends)
        return self._hangs


class ExecPart(HeadPart):
    """Passes the messages of `muster exec` between clients and agents."""

    def __init__(self, head: TrainingHead) -> None:
        super().__init__(head)
        policy = head.policy
        agents = NamedAgents(lambda: policy.attempt, policy.members.name)
        self._execs = ExecRelay(agents.find, policy.send, agents.why_not)

    def take_word(self, member: Member, message: messages.Message) -> bool:
        """Pass an agent's message on to the client."""
        if not isinstance(message, part_messages.FromExecTask):
            return False
        self._execs.from_agent(member, message)
        return True

    def take_request(self, client: HeadClient, message: messages.Message) -> bool:
        """Pass a client's message on to the agent."""
        if not isinstance(message, part_messages.FromExecClient):
            return False
        self._execs.from_client(client.channel, message)
        return True

    def client_gone(self, client: HeadClient) -> None:
        """End the commands of a client that has disconnected."""
        self._execs.client_gone(client.channel)

    def lose(self, member: Member, why: str) -> None:
        """End the commands on a lost node for their clients."""
        name = self.head.policy.members.name(member)
        self._execs.agent_gone(member, f"{name} was lost: {why}")


class MetricsPart(HeadPart):
    """Serves metrics for Prometheus, where the plan has a port for them."""

    def __init__(self, head: TrainingHead) -> None:
        super().__init__(head)
        self._training = NewestTraining(head.options.run_dir.training)

    async def serve(self) -> None:
        """Serve the page; if the port is in use, notify the user and continue without."""
        port = self.head.plan.metrics_port
        if port is None:
            return
        from torchmuster.core.net.address import bind
        from torchmuster.launcher.net.scrape import MetricsPage

        try:
            listening = bind("127.0.0.1", port)
        except OSError as error:
            self.head.notice(f"no metrics at 127.0.0.1:{port}: {error.strerror}")
            return
        self.head.notice(f"metrics for Prometheus at http://127.0.0.1:{port}/metrics of this node")
        await MetricsPage(CONTENT_TYPE, self.page).serve(listening)

    def page(self) -> str:
        """Return the page in OpenMetrics text."""
        head, board = self.head, self.head.parts["board"]
        self._training.read()
        attempt = head.policy.attempt
        started = attempt.number + 1 if attempt is not None else head.options.first_attempt
        newest = board.board.newest(head.clock()) if isinstance(board, BoardPart) else None
        return render(head.plan.run_id, started, newest, self._training)
