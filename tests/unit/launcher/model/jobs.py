"""Jobs that the tests of several engines use."""

from torchmuster.launcher.model.job import AfterKind, JobDependency, JobRequest, NodeChunk

GIB = 1 << 30
ODD_PATH = "/scratch/my runs/it's #1 100%j.log"


def request(**given):
    given.setdefault("chunks", (NodeChunk(num_nodes=2, cpus=8, gpus=4, memory_bytes=64 * GIB),))
    given.setdefault(
        "head", ("$PYTHON", "/opt/muster/programs/__main__.py", "conduct-group", "--group", "g")
    )
    return JobRequest(**{"name": "train", "log_path": "/runs/r1/job.log", **given})


JOBS = {
    "plain": request(),
    "everything": request(
        name="7 days' run",
        about="The head of group g.",
        time_limit_s=3601,
        queue="gpu",
        account="proj-1",
        qos="high",
        constraint="[a100|h100]&ib",
        nodes_excluded=("n3", "n[7-8]"),
        directives=("--reservation=maintenance",),
        setup=("module load cuda/12.6", "source '/home/me/my env/bin/activate'"),
        requeue=False,
        warn_s=120.0,
        python="/opt/my python/bin/python3",
        head=("$PYTHON", "-c", "print('$HOME')", "a b"),
    ),
    "unequal_nodes": request(
        chunks=(
            NodeChunk(cpus=16, gpus=8, memory_bytes=GIB, storage_bytes=10 * GIB),
            NodeChunk(num_nodes=3, cpus=4, extra=(("sales_op", "blanca"),)),
        ),
        time_limit_s=86400,
    ),
    "range_of_nodes": request(min_nodes=2, max_nodes=4, chunks=(NodeChunk(num_nodes=4, cpus=1),)),
    "odd_log_path": request(log_path=ODD_PATH),
}
AFTER = request(
    after=(
        JobDependency(job_id="1.ctl"),
        JobDependency(job_id="2.ctl"),
        JobDependency(job_id="3.ctl", kind=AfterKind.ANY),
    )
)
