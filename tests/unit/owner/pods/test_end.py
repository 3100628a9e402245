"""The end of groups in pods, as a client brings it about whose owner was killed."""

import os

from torchmuster.files import atomic
from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.owner.pods.end import remove_groups
from unit.owner.pods.conftest import order_of

JOBS = ["lab/research/two-work-a-0", "lab/research/two-work-b-0"]


def left(folder, **noted):
    """Return a workflow whose group has not ended, with what its owner had noted of its Jobs."""
    run_dir = RunDir(str(folder / "home" / "runs" / "two"))
    group = run_dir.group("work")
    os.makedirs(os.path.join(group.path, "pods"))
    order = codec.to_plain(order_of(group="work"))
    atomic.write_json(os.path.join(group.path, "pods", "order.json"), order)
    noted = {"engine": "kubernetes", "job_id": JOBS[0], "more": JOBS[1:], **noted}
    atomic.write_json(group.job, noted)
    return run_dir


def test_a_jobset_is_removed_as_one(tmp_path, cluster):
    run_dir = left(tmp_path, set="lab/research/two-work")
    assert remove_groups(run_dir) == JOBS
    (asked,) = cluster.asked
    assert asked.split()[:3] == [
        "delete",
        "jobsets.jobset.x-k8s.io/two-work",
        "secrets/two-work",
    ]


def test_jobs_are_removed_one_by_one(tmp_path, cluster):
    assert remove_groups(left(tmp_path, set=None)) == JOBS
    assert [line.split()[1] for line in cluster.asked] == [
        f"jobs.batch/{job.rpartition('/')[2]}" for job in JOBS
    ]
