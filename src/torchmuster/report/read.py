"""Read the story of a run from its directory: once, tolerant of every file that is missing, torn, older or hostile."""

import os
import pwd
import time
from collections.abc import Mapping
from typing import Any

import torchmuster
from torchmuster.errors import MusterError
from torchmuster.files.layout import RunDir, short_id
from torchmuster.files.origin import CodeVersion, Origin
from torchmuster.model import codec
from torchmuster.model.display.secrets import HIDDEN, hide_in_words, hide_secrets, is_secret_name
from torchmuster.model.failure import RanCode
from torchmuster.model.record.loose import lines, listed, mapped, number, several, text, whole
from torchmuster.model.record.run import RunRecord, frequent_causes
from torchmuster.model.record.training import TrainingState
from torchmuster.model.states import RunState
from torchmuster.owner.views.account import account_of, how_to_go_on
from torchmuster.owner.views.record import DAMAGED
from torchmuster.owner.views.run_view import RunView
from torchmuster.owner.views.training import TrainingReader
from torchmuster.report.attempts import (
    few_attempts,
    told_attempts,
    told_network,
)
from torchmuster.report.cost import cost_of
from torchmuster.report.loose import LooseRecord, object_in
from torchmuster.report.ranks import SampleRecord, read_samples
from torchmuster.report.story import Ending, Story, WhatRan
from torchmuster.report.training import told_training

# What a value of another form than expected raises where a reader of other commands meets it.
MALFORMED = DAMAGED


def read_run_story(view: RunView) -> Story:
    """Return the story of a training run."""
    return _Reading(view).story()


def owner_of(path: str) -> str:
    """Return the account to which a folder belongs."""
    try:
        uid = os.stat(path).st_uid
        return pwd.getpwuid(uid).pw_name
    except (OSError, KeyError):
        return "another user"


_MAX_CAUSES = 20


class _Reading:
    """All files of one training run."""

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
        attempts = told_attempts(events, recorded, training, saved)
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
            training=told_training(training) if training is not None else None,
            ranks=samples.told() if samples is not None else None,
            network=told_network(events),
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
        """Note what could not be read of a record; say whether that was something."""
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
        record = LooseRecord(self.run_dir.samples)
        samples = read_samples(record)
        self._note_gaps(record.path, record.why_not, record.num_bad)
        if samples.num_bad:
            self.gaps.append(
                f"{several(samples.num_bad, 'line')} of samples.jsonl can't be understood"
            )
        return samples

    def _saved_step(self, training: TrainingState | None) -> int | None:
        told = whole(self.result.get("saved_step"))
        if told is not None or training is None:
            return told
        done = [save.step for save in training.saves if save.done_at is not None]
        return max(done, default=None)

    def _ending(self, events: RunRecord) -> Ending:
        state = self.view.state.value
        told = text(self.result.get("state"), 40)
        known = {one.value: one for one in RunState}
        if told and self.view.result is None:  # of another version, or half written
            state = told
        report = mapped(self.result.get("report"))
        because = lines(report.get("because"))
        sentence, at, hint = (
            text(report.get("error")),
            text(report.get("at")),
            text(report.get("hint")),
        )
        if self.view.result is not None and self.view.result.state is RunState.FAILED:
            better = self._explained()
            if better is not None:
                sentence, because = text(better.error), lines(list(better.because))
                at, hint = text(better.at or ""), text(better.hint or "")
        is_final = known[state].is_final if state in known else True
        if not sentence and is_final and state != RunState.SUCCEEDED.value:
            sentence = text(self._account_end())
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
            notes=tuple(text(note) for note in listed(self.result.get("notes"))[:20]),
            go_on=self._go_on(is_final=is_final, state=state),
            restarts_spent=whole(self.result.get("restarts_spent")) or 0,
        )

    def _explained(self) -> Any:
        from torchmuster.diagnose.explain.end_of_run import explained

        return explained(self.view.result, self.run_dir) if self.view.result is not None else None

    def _account_end(self) -> str:
        try:
            return account_of(self.view, time.time()).ended_by or ""
        except (*MALFORMED, MusterError):
            return ""

    def _go_on(self, *, is_final: bool, state: str) -> str:
        if not is_final or state == RunState.SUCCEEDED.value:
            return ""
        try:
            return text(how_to_go_on(self.run_dir, self.view.result) or "")
        except MALFORMED:  # the record of the training is damaged, which is said where it is read
            return ""


def read_what(
    view: RunView, plan: Mapping[str, Any], events: RunRecord, gaps: list[str]
) -> WhatRan:
    """Return what ran: from the plan, from the note of its origin, and from what the nodes have reported."""
    program, limits = mapped(plan.get("program")), mapped(plan.get("limits"))
    setup = mapped(plan.get("node_setup"))
    origin, code, why = _origin(view.run_dir, gaps)
    ran = events.code or RanCode(files=())
    engine, jobs = text(plan.get("engine"), 80), _jobs(view)
    words = [
        text(word)
        for word in (program.get("target"), *listed(program.get("args")))
        if isinstance(word, str)
    ]
    if program.get("kind") == "module":
        words.insert(0, "-m")
    return WhatRan(
        command=hide_in_words(words[:500]),
        folder=text(program.get("cwd")),
        interpreter=" ".join(text(word) for word in listed(program.get("python"))[:20]),
        engine=engine,
        jobs=jobs,
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
    """Return what the nodes have reported of their software, one row for each kind of node, or for each node."""
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
    """Return the version with all text printable: names of files and lines of a difference can hold anything."""
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


def _jobs(view: RunView) -> tuple[str, ...]:
    try:
        return tuple(text(job, 80) for job in account_of(view, time.time()).jobs[-20:])
    except (*MALFORMED, MusterError):
        return ()


def _num_nodes(plan: Mapping[str, Any]) -> str:
    least, most = whole(plan.get("min_nodes")), whole(plan.get("max_nodes"))
    if least is None or most is None:
        return ""
    return str(most) if least == most else f"{least} to {most}"


def _software(row: Mapping[str, Any]) -> dict[str, str]:
    wanted = (
        "node",
        "nodes",
        "python",
        "torch",
        "cuda",
        "nccl",
        "driver",
        "num_gpus",
        "gpu",
        "num_cpus",
        "machine",
        "kernel",
    )
    found = {}
    for name in wanted:
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
