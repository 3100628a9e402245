"""A run as it is seen while it lives: one value, from which views are drawn without asking anybody."""

import re
from dataclasses import dataclass
from statistics import median

from torchmuster.launcher.model.progress import RankSample

# What a progress bar says, in its own words: `37%|###7  | 369/1000 [00:12<00:21, 30.1it/s]`.
#
# A script without the training library does not say how far it is, but its own bar may. Only tqdm's form, and that of
# the libraries that imitate it, is understood: a count, a total and a speed that stand in one line. Anything else is
# no progress.


_BAR = re.compile(
    r"(?P<done>\d{1,15})/(?P<total>\d{1,15})\s*\[(?P<spent>[\d:]+)<(?P<left>[\d:?]+),"
    r"\s*(?P<rate>[\d.]+|\?)\s?(?P<unit>[^\s,\]/]{1,12}/s|s/[^\s,\]/]{1,12})"
)
_MAX_LINES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class BarWords:
    """What a bar says.

    Attributes:
        speed: `30.1it/s`, as it stands there.
        left: `00:21`, as it stands there; empty where the bar does not know.
    """

    done: int
    total: int
    speed: str
    left: str


def read_bar(text: str) -> BarWords | None:
    """Return the state of the last bar at the end of a log; None where there is none."""
    lines = re.split(r"[\r\n]", text)[-_MAX_LINES:]
    for line in reversed(lines):
        found = _BAR.search(line)
        if found is not None and 0 < int(found["total"]) >= int(found["done"]):
            left, rate = found["left"], found["rate"]
            return BarWords(
                done=int(found["done"]),
                total=int(found["total"]),
                speed="" if rate == "?" else f"{rate}{found['unit']}",
                left="" if "?" in left else left,
            )
    return None


STALE_S = 15.0  # agents report every two seconds, and a line of the record comes every ten at first


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAttempt:
    """One attempt.

    Attributes:
        began_at: Seconds since 1970, as all times here.
        ended_at: None while it runs.
        why: What it follows: `start`, `after SIGKILL`.
        ended_by: Why it ended; empty while it runs, or where nobody says.
        cause_rank: The rank whose failure ended it; None where it was none, or nobody says.
    """

    number: int
    num_workers: int
    num_nodes: int
    began_at: float | None
    ended_at: float | None = None
    why: str = ""
    ended_by: str = ""
    cause_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTraining:
    """What the training library has recorded; numbers may be nan or infinite.

    Attributes:
        total_steps: Of the whole run, over all attempts; None where the library can't know.
        epoch: Number of the last that has ended.
        values: The newest value of each metric, the loss first.
        not_finite: Those of them that are not finite, and the step since which they are not.
        curve_of: The name of the first of them, whose history is `curve`; empty without metrics.
        saved_at: When the last snapshot was whole.
        saved_bytes: Its size; None where it can't be seen from here.
        saving_since: When the snapshot was ordered that is being written; None without one.
        saving_step: Its step.
        saving_bytes: What is written of it; None where it can't be seen from here.
    """

    step: int
    total_steps: int | None = None
    epoch: int | None = None
    values: tuple[tuple[str, float], ...] = ()
    not_finite: tuple[tuple[str, int], ...] = ()
    curve_of: str = ""
    curve: tuple[float, ...] = ()
    saved_step: int | None = None
    saved_at: float | None = None
    saved_bytes: int | None = None
    saving_since: float | None = None
    saving_step: int | None = None
    saving_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTask:
    """A task of a workflow, or a member of a sweep.

    Attributes:
        folder: The run directory of its training; empty where it has none.
        log: The path of what its first process writes.
    """

    group: str
    name: str
    state: str
    attempt: int
    why: str
    folder: str = ""
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """A run at one moment, as far as it is known.

    Attributes:
        now: When this was read.
        place: Where it runs: `slurm 17`, `local`.
        elapsed_s: None while it waits in a queue.
        num_attempts: So many there were; `attempts` has the last of them.
        sample: How the ranks stand; None where nobody has said.
        sample_at: When that was; older than `now` where it comes from the record, not from the head.
        unheard: Why the head itself does not say it; empty when it does, or when the run is over.
        waits: What it waits for, with the time that is left.
        job: Where its job stands in the queue, with the scheduler's estimate.
        ends_at: The end of its job's time.
        said: What its head has noticed last, the newest at the end.
        bar: What rank 0's own progress bar says.
        ended_by: How it ended.
        problems: What of the record can't be read, and why.
    """

    run_id: str
    state: str
    is_final: bool
    now: float
    command: str = ""
    place: str = ""
    elapsed_s: float | None = None
    num_attempts: int = 0
    attempts: tuple[LiveAttempt, ...] = ()
    sample: RankSample | None = None
    sample_at: float | None = None
    unheard: str = ""
    waits: str = ""
    job: str = ""
    ends_at: float | None = None
    network: str = ""
    said: tuple[str, ...] = ()
    training: LiveTraining | None = None
    bar: BarWords | None = None
    tasks: tuple[LiveTask, ...] = ()
    ended_by: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """A run in the list of all live ones.

    Attributes:
        step: The last that the slowest rank has told; None without the training library.
        left_s: Until its last step, at the speed of now.
        why: What it waits for, or how it ended.
    """

    run_id: str
    state: str
    place: str
    num_workers: int | None
    step: int | None
    left_s: float | None
    elapsed_s: float | None
    why: str


def left_s(
    training: LiveTraining | None,
    sample: RankSample | None,
    *,
    sample_at: float | None,
    now: float,
    is_final: bool,
) -> float | None:
    """Return the seconds until the last step at the ranks' median speed; None where nobody knows.

    Nor does anybody from old numbers: a sample tells of the interval before it, and is old when another should have
    come meanwhile.
    """
    if is_final or training is None or training.total_steps is None or sample is None:
        return None
    if sample_at is None or now - sample_at > STALE_S + sample.over_s:
        return None
    rates = [rate for rate in sample.steps_per_s if rate]
    step = max([training.step, *(step for step in sample.steps if step is not None)])
    if not rates or training.total_steps < step:
        return None
    return (training.total_steps - step) / median(rates)
