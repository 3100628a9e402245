"""What is measured: each case has rows, each row is one job in which all sides take turns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from training import jobs
from training.jobs import Values

OURS = "torchmuster"
HAND = "by hand"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How a figure of ours is set beside another's, and what it should be.

    Attributes:
        others: Sides; of several, the highest figure counts.
        kind: `more` (ours is so many % more), `share` (ours is so many % of theirs), or `times`
            (theirs is so many times ours).
        text: The goal in words; empty for a figure without one.
    """

    row: str
    others: tuple[str, ...]
    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One table of the report.

    Attributes:
        rows: Each measures all sides once.
    """

    title: str
    rows: Mapping[str, Callable[[], Values]]
    goals: tuple[Goal, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured in one round.

    Attributes:
        blocks: Pairs of blocks of a row.
        short_steps: In a block, where a step takes some milliseconds.
        long_steps: In a block, where a step takes some tens of them; saves fall in their middle.
        writes: Of `state_mb`, of each side.
        state_mb: What `stall` and `write` save.
    """

    blocks: int
    short_steps: int
    long_steps: int
    writes: int
    state_mb: int


FULL = Sizes(
    blocks=4,
    short_steps=100,
    long_steps=30,
    writes=1,
    state_mb=1000,
)
# Shows that everything works; the figures mean little.
QUICK = Sizes(
    blocks=1,
    short_steps=10,
    long_steps=10,
    writes=1,
    state_mb=20,
)


def all_cases(sizes: Sizes) -> dict[str, Case]:
    """Return the cases by name."""
    return {
        "overhead": _overhead(sizes),
        "metrics": _metrics(sizes),
        "stall": _stall(sizes),
        "every10": _every10(sizes),
        "memory": _memory(sizes),
        "verify": _verify(sizes),
        "write": _write(sizes),
    }


def _overhead(sizes: Sizes) -> Case:
    shapes = {
        "1 worker": (1, False),
        "2 workers": (2, False),
        "2 workers, dataset of samples": (2, True),
    }

    def row(name: str) -> Callable[[], Values]:
        num_workers, one_by_one = shapes[name]
        what = {"case": "overhead", "name": name, "one_by_one": one_by_one}
        what |= {"steps": sizes.short_steps, "blocks": sizes.blocks}
        return partial(jobs.measure, "steps.py", num_workers, what)

    return Case(
        title="Time of a step of about 10 ms: DataLoader, DistributedSampler and DDP by hand, and"
        " the same loop with torchmuster, no saves",
        rows={name: row(name) for name in shapes},
        goals=tuple(
            Goal(row=name, others=(HAND,), kind="more", text="at most 1 % more") for name in shapes
        ),
    )


def _metrics(sizes: Sizes) -> Case:
    name = "4 workers"
    what = {"case": "metrics", "name": name}
    sized = {"steps": 2 * sizes.short_steps, "blocks": sizes.blocks}
    return Case(
        title="Time of a step of a small model that logs loss and accuracy",
        rows={name: partial(jobs.measure, "steps.py", 4, what | sized)},
        goals=(
            Goal(row=name, others=("as in tutorials",), kind="times", text="at least 1.3 times"),
            Goal(row=name, others=("by hand, best",), kind="more"),
        ),
    )


def _stall(sizes: Sizes) -> Case:
    name = f"{_size(sizes.state_mb)} of state, 1 worker"
    what = {"case": "stall", "name": name, "saves": sizes.writes, "state_mb": sizes.state_mb}
    return Case(
        title="How long the loop stands still for a save (not the first one)",
        rows={name: partial(jobs.measure, "saves.py", 1, what)},
        goals=(
            Goal(row=name, others=("torch.save + fsync",), kind="share", text="at most 15 %"),
            Goal(row=name, others=("plain copy",), kind="more"),
            Goal(row=name, others=("DCP async_save",), kind="share"),
        ),
    )


def _every10(sizes: Sizes) -> Case:
    shapes = {
        "a save every 10 steps": (1, 20, 10),
        "a save every step": (1, 20, 1),
        "2 workers, a save every 10 steps": (2, 20, 10),
        "200 MB (180 frozen), a save every 10 steps": (1, 200, 10),
    }

    def row(name: str) -> Callable[[], Values]:
        num_workers, state_mb, every = shapes[name]
        what = {"case": "saving", "name": name, "state_mb": state_mb}
        what |= {"every": every, "steps": sizes.long_steps, "blocks": (sizes.blocks + 1) // 2}
        return partial(jobs.measure, "saves.py", num_workers, what)

    first, *_ = shapes
    return Case(
        title="Time of a step of about 50 ms with and without saves; 1 worker and 20 MB of state"
        " if nothing else is said",
        rows={name: row(name) for name in shapes},
        goals=tuple(
            Goal(
                row=name,
                others=("no saves",),
                kind="more",
                text="at most 2 % more" if name == first else "",
            )
            for name in shapes
        ),
    )


def _memory(sizes: Sizes) -> Case:
    shapes = {
        "20 MB, every step": (1, 20, 1, 2.0),
        "2 workers, 20 MB, every step": (2, 20, 1, None),
        "200 MB (180 frozen), every 10 steps": (1, 200, 10, 3.0),
        "100 MB (80 frozen), every 10 steps": (1, 100, 10, None),
    }

    def row(name: str) -> Callable[[], Values]:
        num_workers, state_mb, every, _ = shapes[name]
        what = {"case": "memory", "name": name, "state_mb": state_mb, "loads": 5}
        what |= {"every": every, "steps": sizes.long_steps, "blocks": sizes.blocks}
        return partial(jobs.measure, "saves.py", num_workers, what)

    return Case(
        title="Time of a step of about 50 ms without and with snapshots in memory that outlives the worker; their load",
        rows={name: row(name) for name in shapes},
        goals=tuple(
            Goal(
                row=name,
                others=("no saves",),
                kind="more",
                text=f"at most {limit:g} % more" if limit is not None else "",
            )
            for name, (*_, limit) in shapes.items()
        ),
    )


def _verify(sizes: Sizes) -> Case:
    name = "2 workers, 20 MB"
    what = {"case": "verify", "name": name, "steps": sizes.long_steps, "blocks": sizes.blocks}
    return Case(
        title="Time of a step of about 50 ms that is made again on the other rank, and of one that is not",
        rows={name: partial(jobs.measure, "saves.py", 2, what)},
        goals=(Goal(row=name, others=("none verified",), kind="more"),),
    )


def _size(megabytes: int) -> str:
    return f"{megabytes // 1000} GB" if megabytes >= 1000 else f"{megabytes} MB"


def _write(sizes: Sizes) -> Case:
    name = _size(sizes.state_mb)
    what = {"case": "write", "name": name, "writes": sizes.writes, "state_mb": sizes.state_mb}
    dd = ("dd conv=fsync", "dd conv=fsync oflag=direct")
    return Case(
        title="Writing to the disk: a snapshot with checksum, fsync and commit, and dd",
        rows={name: partial(jobs.measure, "saves.py", 1, what)},
        goals=(
            Goal(row=name, others=dd[:1], kind="share", text="at least 80 %"),
            Goal(row=name, others=dd, kind="share"),
        ),
    )
