"""A snapshot of a live run: one value, from which views are drawn without further queries."""

import re
from dataclasses import dataclass
from statistics import median

from torchmuster.launcher.model.progress import RankSample

# Progress bars in a log: `37%|###7  | 369/1000 [00:12<00:21, 30.1it/s]`.
#
# A script without the training library does not report its progress, but its own bar may show it.
# We parse only the form of tqdm and of libraries that imitate it: a count, a total and a speed in
# one line.


_BAR = re.compile(
    r"(?P<done>\d{1,15})/(?P<total>\d{1,15})\s*\[(?P<spent>[\d:]+)<(?P<left>[\d:?]+),"
    r"\s*(?P<rate>[\d.]+|\?)\s?(?P<unit>[^\s,\]/]{1,12}/s|s/[^\s,\]/]{1,12})"
)
_MAX_LINES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressBar:
    """The state that a progress bar shows.

    Attributes:
        speed: `30.1it/s`, as the bar shows it; empty if unknown.
        left: `00:21`, as the bar shows it; empty if unknown.
    """

    done: int
    total: int
    speed: str
    left: str


def read_bar(text: str) -> ProgressBar | None:
    """Return the state of the last bar near the end of a log; None if there is none."""
    lines = re.split(r"[\r\n]", text)[-_MAX_LINES:]
    for line in reversed(lines):
        found = _BAR.search(line)
        if found is not None and 0 < int(found["total"]) >= int(found["done"]):
            left, rate = found["left"], found["rate"]
            return ProgressBar(
                done=int(found["done"]),
                total=int(found["total"]),
                speed="" if rate == "?" else f"{rate}{found['unit']}",
                left="" if "?" in left else left,
            )
    return None


STALE_S = 15.0  # agents report every 2 s, and the record gets a line every 10 s at first


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveAttempt:
    """One attempt.

    Attributes:
        began_at: Seconds since 1970, like all times here.
        ended_at: None while it runs.
        why: Why it was started: `start`, `after SIGKILL`.
        ended_by: Why it ended; empty while it runs, or if unknown.
        cause_rank: The rank whose failure ended it; None if no rank's did, or if unknown.
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
    """The record of the training library; numbers may be nan or infinite.

    Attributes:
        total_steps: Steps of the whole run, over all attempts; None if the library can't know.
        epoch: Number of the last epoch that has ended.
        values: The newest value of each metric, the loss first.
        not_finite: The metrics that are not finite, and the step since which they are not.
        curve_of: The name of the first metric, whose history is `curve`; empty without metrics.
        curves: Names and histories of the next metrics.
        saved_at: When the last snapshot was complete.
        saved_bytes: Its size; None if it can't be seen from here.
        saving_since: When the snapshot that is being written was ordered; None if there is none.
        saving_step: The step of that snapshot.
        saving_bytes: How much of it is written; None if it can't be seen from here.
    """

    step: int
    total_steps: int | None = None
    epoch: int | None = None
    values: tuple[tuple[str, float], ...] = ()
    not_finite: tuple[tuple[str, int], ...] = ()
    curve_of: str = ""
    curve: tuple[float, ...] = ()
    curves: tuple[tuple[str, tuple[float, ...]], ...] = ()
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
        folder: Run directory of its training; empty if it has none.
        log: Path of the log of its first process.
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
    """The state of a run at one moment, as far as it is known.

    Attributes:
        now: When this was read.
        place: Where it runs: `slurm 17`, `local`.
        elapsed_s: None while it waits in a queue.
        num_attempts: Number of all attempts; `attempts` has the last ones.
        sample: The state of the ranks; None if unknown.
        sample_at: Time of the sample; older than `now` if it comes from the record, not from the
            head.
        unheard: Why the head has not sent the sample; empty when it has, or when the run is over.
        waits: What it waits for, with the time that is left.
        job: Its job's position in the queue, with the scheduler's estimate.
        ends_at: The end of its job's time limit.
        said: The last notices of its head, the newest last.
        bar: The state of rank 0's own progress bar.
        ended_by: How it ended.
        problems: Parts of the record that can't be read, and why.
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
    bar: ProgressBar | None = None
    tasks: tuple[LiveTask, ...] = ()
    ended_by: str = ""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """A run in the list of all live runs.

    Attributes:
        step: The last step that the slowest rank has reported; None without the training library.
        left_s: Seconds until its last step, at the current speed.
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
    """Return the seconds until the last step at the ranks' median speed; None if unknown.

    It is unknown if the sample is stale: a sample describes the interval before it, and is stale
    once the next one is overdue.
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
