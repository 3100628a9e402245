"""Records of runs as their processes write them, made by hand."""

import json
import os
from datetime import UTC, datetime

from kit.values import run_plan, run_result, worker_end
from torchmuster.core.files.layout import RunDir
from torchmuster.core.model import codec
from torchmuster.core.model.states import RunState
from torchmuster.core.model.verdict import Report

BEGAN = 1_800_000_000.0
NODES = [
    {"node": "n1", "host": "h1", "ranks": "0-1"},
    {"node": "n2", "host": "h2", "ranks": "2-3"},
]


def stamp(after_s):
    return datetime.fromtimestamp(BEGAN + after_s, UTC).isoformat(timespec="milliseconds")


def event(after_s, name, **fields):
    return {"time": stamp(after_s), "event": name, **fields}


def start(after_s, attempt, why="start", nodes=NODES):
    return event(
        after_s, "attempt_started", attempt=attempt, world_size=4, num_nodes=2, why=why, nodes=nodes
    )


def end_of_rank(rank, attempt=0, **fields):
    """Return the end of a rank on n2 as records have it, a SIGKILL."""
    end = worker_end(rank=rank, local_rank=rank, attempt=attempt, node="n2", signum=9)
    return {**codec.to_plain(end), **fields}


def failure(after_s, attempt, what="SIGKILL in rank 3 on n2", **cause):
    told = end_of_rank(3, attempt, **cause)
    return event(after_s, "attempt_failed", attempt=attempt, what=what, cause=told, restarts_left=2)


def over(after_s, state="succeeded"):
    """Return the event on the end of the run."""
    told = {"run_id": "r", "state": state, "exit_code": 0, "attempts": 2, "restarts_spent": 1}
    return event(after_s, "run_ended", elapsed_s=25.0, **told)


# Attempt 0 trains from 5 s on, saves step 100 at 9 s and is killed at 11 s; attempt 1 trains from 15 s to 25 s.
EVENTS = [
    event(0, "run_started", run_id="r"),
    start(1, 0),
    event(3, "workers_started", attempt=0, restart_s=0.0),
    event(10.9, "worker_ended", attempt=0, rank=3, node="n2", what="SIGKILL", asked=False),
    event(11, "worker_ended", attempt=0, rank=0, node="n1", what="SIGKILL", asked=True),
    failure(11, 0),
    start(11, 1, why="after SIGKILL"),
    event(13, "workers_started", attempt=1, restart_s=2.0),
    over(25),
]
TRAINING = [
    event(
        5,
        "resumed",
        step=0,
        world_size=4,
        folder="/snapshots",
        order={"seed": 0, "num_samples": 40},
    ),
    event(7, "metrics", step=50, values={"loss": 2.0}),
    event(9, "metrics", step=100, values={"loss": 1.0}),
    event(9, "save", step=100, blocked_s=0.5),
    event(9.5, "saved", step=110, saved=100, folder="/snapshots"),
    event(10.9, "metrics", step=150, values={"loss": 0.9}),
    event(15, "resumed", step=100, world_size=4, folder="/snapshots"),
    event(20, "metrics", step=150, values={"loss": 0.8}),
    event(24, "metrics", step=200, values={"loss": 0.5}),
    event(
        24.1,
        "epoch",
        epoch=0,
        step=200,
        elapsed_s=9.0,
        values={"loss": 0.7},
        ledger={"samples": 40, "lost": 0, "twice": 0, "whole": True},
    ),
    event(24.2, "finished", step=200),
]


def sample(after_s, attempt=0, steps=(100, 100), data=(0.1, 0.1), over_s=10.0, **columns):
    from torchmuster.launcher.model.progress import RankSample  # not in the core's own tree

    size = len(steps)
    return codec.to_plain(
        RankSample(
            time=stamp(after_s),
            attempt=attempt,
            over_s=over_s,
            nodes=("n1",) * (size - 1) + ("n2",),
            states=("R",) * size,
            steps=steps,
            steps_here=steps,
            data_s=data,
            forward_s=(1.0,) * size if data else (),
            rest_s=(3.0,) * size if data else (),
            wait_s=(1.0,) * size if data else (),
            **columns,
        )
    )


def lines(path, rows, mode="w"):
    with open(path, mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def result(state=RunState.SUCCEEDED, error=None, **fields):
    report = Report(error=error, because=("it said so",)) if error else None
    given = {"attempts": 2, "restarts_spent": 1, "elapsed_s": 25.0, **fields}
    return codec.to_plain(run_result(state, report=report, **given))


def make_run(folder, events=EVENTS, training=TRAINING, samples=(), ended=None, **plan):
    """Make the directory of a run, with what is given of it."""
    made = RunDir(str(folder))
    os.makedirs(made.logs)
    usual = {"target": "train.py", "args": ("--epochs", "2"), "python": ("/usr/bin/python3",)}
    usual |= {"cwd": "/home/u", "workers_per_node": (2,)}
    with open(made.plan, "w") as file:
        json.dump(codec.to_plain(run_plan(2, **{**usual, **plan})), file)
    lines(made.events, events)
    if training is not None:
        lines(made.training, training)
    if samples:
        lines(made.samples, samples)
    if ended is not None:
        with open(made.result, "w") as file:
            json.dump(ended, file)
    return made


def newest_run(home, name):
    """Return the run directory of that name which was made last: names of the same second end with chance."""
    return max(
        (home / "runs").glob(f"*-{name}-*"), key=lambda run: (run / "plan.json").stat().st_mtime_ns
    )
