"""Read the story of a run from its directory; tolerate missing, torn, older or hostile files."""

import json
import os
import pwd
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torchmuster
from torchmuster.core import plugs
from torchmuster.core.files.layout import RunDir, short_id
from torchmuster.core.model import codec
from torchmuster.core.model.events import AttemptNode
from torchmuster.core.model.failure import RanCode, WorkerEnd
from torchmuster.core.model.narration import narrate
from torchmuster.core.model.states import RunState
from torchmuster.core.model.text import HIDDEN, hide_secrets, is_secret_name
from torchmuster.core.model.verdict import Report
from torchmuster.core.owner.record import DAMAGED, RecordTail
from torchmuster.core.plainfile import open_plain
from torchmuster.errors import MusterError
from torchmuster.launcher.model.run import (
    WHOLE_FIRST,
    WHOLE_LAST,
    AttemptRecord,
    LibraryStart,
    RunRecord,
    TrainingState,
    frequent_causes,
    lines,
    listed,
    mapped,
    number,
    several,
    text,
    whole,
)
from torchmuster.launcher.owner.origin import CodeVersion, Origin
from torchmuster.launcher.views.account import Account, account_of, how_to_go_on
from torchmuster.launcher.views.run_view import RunView
from torchmuster.launcher.views.training import TrainingReader
from torchmuster.report.story import (
    AttemptStory,
    Cost,
    Ending,
    NetworkStory,
    NodePair,
    Story,
    WhatRan,
)
from torchmuster.report.training import SampleRecord, read_samples, training_story, when_reached

# The attempts of a training run: the head's record joined with the training library's.


_MAX_NODES = 64
_MAX_NETWORK, _MAX_PAIRS = 256, 4096


def attempt_stories(
    record: RunRecord,
    attempts: Sequence[AttemptRecord],
    training: TrainingState | None,
    saved_step: int | None,
) -> tuple[AttemptStory, ...]:
    """Return all attempts, joined with what the training library has recorded for each.

    Args:
        record: The head's record.
        attempts: The attempts in that record.
        training: The training library's record, if any.
        saved_step: The step from which a restart would continue after the last attempt.
    """
    starts = training.starts if training is not None else []
    found: list[AttemptStory] = []
    place = 0
    for index, attempt in enumerate(attempts):
        is_last = index + 1 == len(attempts)
        ends = float("inf") if is_last else attempts[index + 1].began
        while place < len(starts) and starts[place].at < attempt.began:
            place += 1
        start = starts[place] if place < len(starts) and starts[place].at < ends else None
        following = next((s for s in starts[place + 1 :] if s.at >= ends), None) if start else None
        kept = following.step if following is not None else None
        if is_last:
            kept = saved_step
        state = record.result.state.value if is_last and record.result is not None else ""
        one = _attempt_story(attempt, start, state)
        if training is not None and start is not None and kept is not None:
            kept = min(kept, start.last_step)
            one = replace(one, kept_step=kept, kept_at=when_reached(training, start, kept))
        found.append(one)
    return tuple(found)


def _attempt_story(attempt: AttemptRecord, start: LibraryStart | None, state: str) -> AttemptStory:
    failure, cause, nodes = attempt.failure, attempt.cause, attempt.start.nodes
    ended_by = text(failure.what, 500) if failure is not None else text(attempt.stop, 300)
    if not ended_by and attempt.ended is not None:
        ended_by = "all workers ended well" if state == "succeeded" else state
    last_step = cause.step if cause is not None else None
    return AttemptStory(
        number=attempt.number,
        began=attempt.began,
        ended=attempt.ended,
        workers_at=attempt.workers_at,
        training_at=start.at if start is not None else None,
        why=text(attempt.start.why, 300),
        ended_by=ended_by,
        has_failed=failure is not None,
        cause_rank=whole(cause.rank) if cause is not None else None,
        cause_node=text(cause.node, 80) if cause is not None else "",
        world_size=attempt.num_workers or 0,
        nodes=tuple(
            AttemptNode(node=text(n.node, 80), host=text(n.host, 80), ranks=text(n.ranks, 80))
            for n in nodes[:_MAX_NODES]
        ),
        num_nodes=attempt.start.num_nodes or len(nodes),
        first_step=start.step if start is not None else None,
        last_step=start.last_step if start is not None else last_step,
        evidence=_evidence(cause) if cause is not None else (),
        ends=tuple(
            replace(one, node=text(one.node, 80), what=text(one.what, 300)) for one in attempt.ends
        ),
        num_ends=attempt.num_ends,
    )


def _evidence(cause: WorkerEnd) -> tuple[str, ...]:
    found = lines(cause.error.traceback if cause.error is not None else list(cause.tail), 30)
    more = (cause.detail, cause.memory_evidence)
    return (*found, *(text(one) for one in more if one is not None))


def network_story(record: RunRecord) -> NetworkStory | None:
    """Return the network of a run: what its workers used, or what the preflight has measured."""
    network, looked = record.network, record.preflight
    if network is not None:
        nodes, pairs, sentence = network.nodes, network.pairs, text(narrate(network))
    elif looked is not None and looked.pairs:
        nodes = tuple(str(row.get("node", "")) for row in looked.nodes)
        pairs, sentence = looked.pairs, ""
    else:
        return None
    return NetworkStory(
        sentence=sentence,
        nodes=tuple(text(name, 80) for name in nodes[:_MAX_NETWORK]),
        pairs=tuple(
            NodePair(
                source=source,
                target=target,
                why=text(why, 200) or None,
                latency_us=number(latency_us),
                mb_per_s=number(mb_per_s),
            )
            for source, target, why, latency_us, mb_per_s in pairs[:_MAX_PAIRS]
            if min(source, target) >= 0
        ),
    )


def few_attempts(attempts: Sequence[AttemptStory]) -> tuple[AttemptStory, ...]:
    """Return the attempts; if there are very many, the first and the last."""
    if len(attempts) <= WHOLE_FIRST + WHOLE_LAST:
        return tuple(attempts)
    return (*attempts[:WHOLE_FIRST], *attempts[-WHOLE_LAST:])


# The cost of a run: node hours, time lost to failures and restarts, goodput.
#
# A node second is one second in which one node was held. Every second between the start of the run
# and its end is of one kind:
#
#     starting      before the first training step: nodes, imports, loading
#     kept          training of steps that count
#     lost          training of steps that were done again, or never saved when the run ended badly
#     restarting    between the end of an attempt and the first training step of the next
#
# Goodput is `kept / all`. If a script saves by itself, it is unknown what a failed attempt has
# saved: then there are two numbers, for nothing and for everything.


def cost_of(
    attempts: Sequence[AttemptStory],
    *,
    blocked_s: float | None,
    began: float | None,
    ended: float | None,
    went_well: bool,
) -> Cost:
    """Return the cost of a run.

    Args:
        attempts: All attempts.
        blocked_s: How long the loop waited for snapshots; None without the training library.
        began: When the run began.
        ended: When it ended (its last event), or the current time.
        went_well: Whether the work of the last attempt counts to its end.
    """
    if not attempts or began is None or ended is None:
        return Cost()
    starting = kept = unsure = lost = restarting = workers = 0.0
    before = began
    for place, attempt in enumerate(attempts):
        is_last = place + 1 == len(attempts)
        over = max(attempt.began, attempt.ended if attempt.ended is not None else ended)
        over = min(over, attempts[place + 1].began) if not is_last else over
        trains = min(attempt.training_at or attempt.workers_at or over, over)
        nodes = max(attempt.num_nodes, 1)
        idle = nodes * max(0.0, trains - before)
        if place:
            restarting += idle
        else:
            starting += idle
        trained = nodes * (over - trains)
        counts = went_well if is_last else not attempt.has_failed and attempt.training_at is None
        if counts:
            kept += trained
        elif blocked_s is not None and attempt.training_at is not None:
            part = nodes * _kept_s(attempt, trains, over)
            kept += part
            lost += trained - part
        else:
            unsure += trained
        workers += max(attempt.world_size, 1) * (over - before)
        before = over
    nodes = max(attempts[-1].num_nodes, 1)
    restarting += nodes * max(0.0, ended - before)
    held = starting + kept + unsure + lost + restarting
    return Cost(
        held_s=held,
        worker_s=workers + max(attempts[-1].world_size, 1) * max(0.0, ended - before),
        starting_s=starting,
        kept_s=kept,
        lost_s=lost + unsure,
        restarting_s=restarting,
        saving_s=nodes * (blocked_s or 0.0),
        most_kept_s=kept + unsure,
        goodput=kept / held if held > 0 else None,
        most_goodput=(kept + unsure) / held if held > 0 else None,
    )


def _kept_s(attempt: AttemptStory, trains: float, over: float) -> float:
    """Return how long an attempt's training counts: up to the step from which the next resumed."""
    if attempt.kept_at is None:
        return 0.0
    return min(max(0.0, attempt.kept_at - trains), over - trains)


def read_run_story(view: RunView) -> Story:
    """Return the story of a training run."""
    return _Reading(view).story()


def object_in(path: str) -> tuple[dict[str, Any], str]:
    """Return the object in a JSON file, or why there is none; both empty if the file is missing.

    The file may be of another version, half written or hostile.
    """
    try:
        with open_plain(path) as file:
            found = json.loads(file.read(64 << 20))
    except FileNotFoundError:
        return {}, ""
    except OSError as error:
        return {}, error.strerror or str(error)
    except (ValueError, RecursionError):
        return {}, "it is not complete JSON"
    return (found, "") if isinstance(found, dict) else ({}, "it is no object")


def owner_of(path: str) -> str:
    """Return the name of the account that owns a folder."""
    try:
        uid = os.stat(path).st_uid
        return pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        return "another user"


_MAX_CAUSES = 20


class _Reading:
    """Reads all files of one training run into a story."""

    def __init__(self, view: RunView) -> None:
        self.view = view
        self.run_dir = view.run_dir
        self.gaps: list[str] = []
        self.plan = self._object(self.run_dir.plan, "what was started is not known")
        self.result = self._object(self.run_dir.result, "how the run ended is not known")

    def story(self) -> Story:
        events, path = self.view.record, self.run_dir.events
        if not self._note_gaps(path, events.why_not, events.num_torn) and not events.began:
            what = "the run never began, or its head has written nothing"
            self.gaps.append(f"events.jsonl has no event: {what}")
        recorded = self.view.attempts
        training = self._training()
        samples = self._samples()
        ending = self._ending(events)
        saved = self._saved_step(training)
        attempts = attempt_stories(events, recorded, training, saved)
        causes = frequent_causes(recorded, _MAX_CAUSES)
        ended = events.last_at if ending.is_final else time.time()
        cost = cost_of(
            attempts,
            blocked_s=training.blocked_s if training is not None else None,
            began=events.began,
            ended=ended,
            went_well=ending.state == RunState.SUCCEEDED.value or not ending.is_final,
        )
        return Story(
            made=time.time(),
            made_by=torchmuster.__version__,
            kind="run",
            run_id=text(self.view.run_id, 200),
            name=text(short_id(self.view.run_id), 200),
            folder=text(self.run_dir.path),
            what=read_what(self.view, self.plan, events, self.gaps),
            ending=ending,
            began=events.began,
            ended=events.last_at if ending.is_final else None,
            attempts=few_attempts(attempts),
            num_attempts=len(attempts),
            causes=tuple((text(what, 300), num) for what, num in causes),
            moments=tuple(events.moments),
            num_moments=events.num_moments,
            training=training_story(training) if training is not None else None,
            ranks=samples.summary() if samples is not None else None,
            network=network_story(events),
            cost=cost,
            gaps=tuple(self.gaps),
        )

    def _object(self, path: str, gap: str) -> dict[str, Any]:
        found, why = object_in(path)
        if why:
            self.gaps.append(f"{os.path.basename(path)} can't be read ({why}): {gap}")
        elif not found and path == self.run_dir.plan:
            self.gaps.append(f"{os.path.basename(path)} is missing: {gap}")
        return found

    def _training(self) -> TrainingState | None:
        if not os.path.exists(self.run_dir.training):
            self.gaps.append(
                "there is no training.jsonl: the script does not use torchmuster.train, or its first step never began;"
                " so metrics, saves and samples are not known"
            )
            return None
        reader = TrainingReader(self.run_dir)
        training = reader.read()
        self._note_gaps(self.run_dir.training, reader.why_not, reader.num_torn)
        return training

    def _note_gaps(self, path: str, why_not: str, num_bad: int) -> bool:
        """Note which part of a record could not be read; return whether there was any."""
        name = os.path.basename(path)
        if why_not:
            self.gaps.append(f"{name} can't be read: {why_not}")
        elif num_bad:
            what = "torn by a crash, or not complete yet"
            self.gaps.append(f"{several(num_bad, 'line')} of {name} can't be read: {what}")
        return bool(why_not or num_bad)

    def _samples(self) -> SampleRecord | None:
        if not os.path.exists(self.run_dir.samples):
            self.gaps.append(
                "there is no samples.jsonl: how each rank stood over time is not known"
            )
            return None
        tail = RecordTail(self.run_dir.samples)
        samples = read_samples(tail.read()[0])
        self._note_gaps(self.run_dir.samples, tail.why_not, tail.num_torn)
        if samples.num_bad:
            self.gaps.append(
                f"{several(samples.num_bad, 'line')} of samples.jsonl can't be understood"
            )
        return samples

    def _saved_step(self, training: TrainingState | None) -> int | None:
        of_result = whole(self.result.get("saved_step"))
        if of_result is not None or training is None:
            return of_result
        done = [save.step for save in training.saves if save.done_at is not None]
        return max(done, default=None)

    def _ending(self, events: RunRecord) -> Ending:
        state = self.view.state.value
        state_text = text(self.result.get("state"), 40)
        known = {one.value: one for one in RunState}
        if state_text and self.view.result is None:  # it is of another version, or half written
            state = state_text
        report = mapped(self.result.get("report"))
        because = lines(report.get("because"))
        sentence, at, hint = (text(report.get(name)) for name in ("error", "at", "hint"))
        more = listed(report.get("more"))[:4]
        result = self.view.result
        if result is not None and result.state is RunState.FAILED:
            explained = plugs.find("ends", "explain")
            better: Report | None = explained(result, self.run_dir) if explained else None
            if better is not None:
                sentence, because = text(better.error), lines(list(better.because))
                at, hint, more = text(better.at or ""), text(better.hint or ""), list(better.more)
        is_final = known[state].is_final if state in known else True
        if not sentence and is_final and state != RunState.SUCCEEDED.value:
            account = known_account(self.view)
            sentence = text(account.ended_by or "") if account is not None else ""
        elapsed = number(self.result.get("elapsed_s"))
        if events.began is not None and events.last_at is not None:
            until = events.last_at if is_final else time.time()
            elapsed = max(elapsed or 0.0, until - events.began)
        return Ending(
            state=state,
            is_final=is_final,
            exit_code=whole(self.result.get("exit_code")),
            elapsed_s=elapsed,
            sentence=sentence,
            at=at,
            because=because,
            hint=hint,
            notes=tuple(text(note) for note in (*listed(self.result.get("notes"))[:20], *more)),
            go_on=self._go_on(is_final=is_final, state=state),
            restarts_spent=whole(self.result.get("restarts_spent")) or 0,
        )

    def _go_on(self, *, is_final: bool, state: str) -> str:
        if not is_final or state == RunState.SUCCEEDED.value:
            return ""
        try:
            return text(how_to_go_on(self.run_dir, self.view.result) or "")
        except DAMAGED:  # the training record is damaged, which is noted where it is read
            return ""


def read_what(
    view: RunView, plan: Mapping[str, Any], events: RunRecord, gaps: list[str]
) -> WhatRan:
    """Return what ran, from the plan, the recorded origin, and the reports of the nodes."""
    program, limits = mapped(plan.get("program")), mapped(plan.get("limits"))
    setup = mapped(plan.get("node_setup"))
    origin, code, why = _origin(view.run_dir, gaps)
    ran = events.code or RanCode(files=())
    account = known_account(view)
    words = [
        text(word)
        for word in (program.get("target"), *listed(program.get("args")))
        if isinstance(word, str)
    ]
    if program.get("kind") == "module":
        words.insert(0, "-m")
    return WhatRan(
        command=hide_in_arguments(words[:500]),
        folder=text(program.get("cwd")),
        interpreter=" ".join(text(word) for word in listed(program.get("python"))[:20]),
        engine=text(plan.get("engine"), 80),
        jobs=tuple(text(job, 80) for job in account.jobs[-20:]) if account is not None else (),
        user=text(origin.get("user"), 80) or owner_of(view.run_dir.path),
        host=text(origin.get("host"), 200)
        or text(object_in(view.run_dir.owner)[0].get("host"), 200),
        submitted=view.submitted or None,
        num_nodes=_num_nodes(plan),
        workers_per_node=tuple(
            n for n in map(whole, listed(plan.get("workers_per_node"))[:64]) if n is not None
        ),
        torchmuster=text(origin.get("torchmuster"), 40),
        software=tuple(_software(row) for row in _rows(events)[:8]),
        environment=tuple(_variables(setup)),
        setup=tuple(
            hide_secrets(text(line))
            for line in (*listed(setup.get("lines")), *listed(setup.get("before")))
        )[:100],
        limits=tuple(
            (text(name, 40), f"{value:g}")
            for name in limits
            if (value := number(limits[name])) is not None
        ),
        code=code,
        why_no_code=why,
        ran=tuple((text(f.path, 300), text(f.sha256, 64), f.changed) for f in ran.files[:200]),
        num_ran_left_out=ran.num_left_out,
        packages=tuple(text(one, 200) for one in listed(origin.get("packages"))[:2000]),
    )


def _rows(record: RunRecord) -> tuple[dict[str, Any], ...]:
    """Return the software that nodes have reported, one row for each kind of node or each node."""
    return (record.preflight.software or record.preflight.nodes) if record.preflight else ()


def _origin(run_dir: RunDir, gaps: list[str]) -> tuple[dict[str, Any], CodeVersion | None, str]:
    found, why = object_in(run_dir.origin)
    if not found:
        why = (
            why
            or "origin.json is missing: the run was started by an older version, or a moment ago"
        )
        return {}, None, why
    try:
        origin = codec.from_plain(Origin, found)
    except codec.CodecError as error:
        gaps.append(
            f"origin.json is of another form ({text(str(error), 200)}): the version of the code is not known"
        )
        return found, None, "origin.json is of another form"
    return found, _clean(origin.code), origin.why_no_code


def _clean(code: CodeVersion | None) -> CodeVersion | None:
    """Return the version with printable text: file names and diff lines can contain anything."""
    if code is None:
        return None
    return CodeVersion(
        root=text(code.root),
        commit=text(code.commit, 80),
        branch=text(code.branch, 200),
        changed=tuple(text(name, 300) for name in code.changed[:100]),
        num_changed=code.num_changed,
        untracked=tuple(text(name, 300) for name in code.untracked[:100]),
        num_untracked=code.num_untracked,
        difference=text(hide_secrets(code.difference), 300_000),
        left_out=text(code.left_out, 300),
    )


def known_account(view: RunView) -> Account | None:
    """Return a run in brief; None if its record is damaged."""
    try:
        return account_of(view, time.time())
    except (*DAMAGED, MusterError):
        return None


def _num_nodes(plan: Mapping[str, Any]) -> str:
    least, most = whole(plan.get("min_nodes")), whole(plan.get("max_nodes"))
    if least is None or most is None:
        return ""
    return str(most) if least == most else f"{least} to {most}"


_SOFTWARE = (
    *("node", "nodes", "python", "torch", "cuda", "nccl", "driver", "num_gpus", "gpu"),
    *("num_cpus", "machine", "kernel"),
)


def _software(row: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SOFTWARE:
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            found[name] = text(str(value), 200)
        elif isinstance(value, list):
            found[name] = text(", ".join(map(str, value[:16])), 300)
    memory = number(row.get("memory_bytes"))
    if memory:
        found["memory"] = f"{memory / 2**30:.0f} GiB"
    return found


def _variables(setup: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = []
    for pair in listed(setup.get("environment"))[:500]:
        if isinstance(pair, list) and len(pair) == 2:
            name, value = text(pair[0], 200), text(pair[1])
            found.append((name, HIDDEN if is_secret_name(name) else hide_secrets(value)))
    return found


def hide_in_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line without the values of options that name a secret."""
    found: list[str] = []
    follows = False
    for word in words:
        name, is_pair, _ = word.partition("=")
        if follows and not word.startswith("-"):
            found.append(HIDDEN)
        elif is_pair and is_secret_name(name):
            found.append(f"{name}={HIDDEN}")
        else:
            found.append(hide_secrets(word))
        follows = word.startswith("-") and not is_pair and is_secret_name(word)
    return tuple(found)
