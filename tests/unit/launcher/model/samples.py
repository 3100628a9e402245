"""Runs as values, for the views."""

from dataclasses import replace

from torchmuster.launcher.model.live import LiveAttempt, LiveRun, LiveTraining
from torchmuster.launcher.model.progress import RankSample

NOW = 1_800_000_000.0


def sample_of(num_ranks=4, slow=None, plain=False, **changed):
    """Return a sample of ranks that make 20 steps a second; one may be slow in its data."""
    ranks = range(num_ranks)
    sample = RankSample(
        time="2027-01-15T08:00:00.000Z",
        attempt=1,
        over_s=10.0,
        nodes=tuple(f"n{rank // 2 + 1}" for rank in ranks),
        states=("S",) * num_ranks,
        report_ages_s=(1.0,) * num_ranks,
        cpus=(0.5,) * num_ranks,
        rss_mib=tuple(260 + rank for rank in ranks),
        io_mib=(0.1,) * num_ranks,
    )
    if not plain:
        own = [6.0 if rank == slow else 2.0 for rank in ranks]
        waits = tuple(max(own) - one for one in own)
        sample = replace(
            sample,
            steps=(350,) * num_ranks,
            steps_here=(200,) * num_ranks,
            ages_s=(0.5,) * num_ranks,
            phases=("data",) * num_ranks,
            steps_per_s=(20.0,) * num_ranks,
            median_s=(0.05,) * num_ranks,
            data_s=tuple(own),
            forward_s=(1.0,) * num_ranks,
            rest_s=tuple(3.0 + wait for wait in waits),
            wait_s=waits,
        )
    return replace(sample, **changed)


def run_of(sample=None, **changed):
    """Return a run in its second attempt."""
    return LiveRun(
        **{
            "run_id": "20270115-080000-train-3f2a",
            "state": "running",
            "is_final": False,
            "now": NOW,
            "command": "train.py --epochs 4",
            "place": "slurm 17",
            "elapsed_s": 761.0,
            "num_attempts": 2,
            "attempts": (
                LiveAttempt(
                    number=0,
                    num_workers=4,
                    num_nodes=2,
                    began_at=NOW - 761,
                    ended_at=NOW - 700,
                    why="start",
                    ended_by="SIGKILL in rank 1 on n1",
                ),
                LiveAttempt(
                    number=1, num_workers=4, num_nodes=2, began_at=NOW - 700, why="after SIGKILL"
                ),
            ),
            "sample": sample,
            "sample_at": NOW - 1 if sample is not None else None,
            "ends_at": NOW + 4800,
            "network": "eth0 (10.0.0.0/24), 2 nodes, 9.4 Gbit/s, 0.1 ms",
            "training": LiveTraining(
                step=350,
                total_steps=500,
                values=(("loss", 0.1312), ("accuracy", 0.97)),
                curve_of="loss",
                curve=(0.9, 0.6, 0.4, 0.3, 0.2, 0.15, 0.13),
                saved_step=300,
                saved_at=NOW - 12,
                saved_bytes=1_258_291,
                saving_since=NOW - 2,
                saving_step=350,
                saving_bytes=838_860,
            ),
            **changed,
        }
    )
