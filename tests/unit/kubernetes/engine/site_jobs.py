"""Jobs as sites of all kinds ask for them, by what their manifest is to show."""

from dataclasses import replace

from torchmuster.kubernetes.engine.dialect import DIALECT
from torchmuster.launcher.model.job import JobArray, JobRequest, NodeChunk

NODE = NodeChunk(num_nodes=2, cpus=16, gpus=4, memory_bytes=64 << 30)
DEFAULT = JobRequest(
    name="run-7f3a",
    chunks=(NodeChunk(num_nodes=2),),
    head=(),
    log_path="",
    python="python3",
    run_id="20261123-150000-train-7f3a",
    own_keys=(
        ("image", "example.com/team/train:1"),
        ("context", "lab"),
        ("namespace", "research"),
    ),
)


def site(*, job=DEFAULT, lines=(), **keys):
    """Return the job of a site with these keys more; `lines` are its directives."""
    return replace(job, own_keys=(*job.own_keys, *keys.items()), directives=tuple(lines))


JOBS = {
    "default": DEFAULT,
    "gpus_shm_rdma": site(
        job=replace(DEFAULT, chunks=(NODE,)),
        shm="32Gi",
        devices="rdma/ib=1",
        lock_memory="yes",
        scratch_size="100Gi",
        node_selector="gpu=h100",
        tolerations="team=ml:NoSchedule\nspot",
        priority_class="high",
        pull_policy="IfNotPresent",
        pull_secrets="registry",
        service_account="trainer",
    ),
    "claims_and_home": site(claims="team-home:/home/team\nimagenet:/data:ro", home="/home/team/m"),
    "restricted": site(pod_security="restricted", run_as="4242"),
    "kueue": site(
        job=replace(DEFAULT, queue="team", time_limit_s=3600.0),
        queue_priority="urgent",
        topology="rack",
    ),
    "members_of_a_sweep": replace(DEFAULT, array=JobArray(size=5, parallel=2)),
    "kinds": site(
        job=replace(
            DEFAULT,
            chunks=(
                NodeChunk(memory_bytes=1 << 30),
                replace(NODE, extra=(("image", "other/y:2"),)),
            ),
            queue="team",
        ),
        queue_priority="urgent",
    ),
    "volcano": site(job=replace(DEFAULT, queue="team"), gang="volcano"),
    "kai": site(job=replace(DEFAULT, queue="team"), gang="kai"),
    "native": site(gang="native"),
    "host_network": site(host_network="yes"),
    "directives": site(
        lines=(
            "spec.template.spec.runtimeClassName=nvidia",
            "spec.template.metadata.annotations[k8s.v1.cni.cncf.io/networks]=rail-0,rail-1",
            'spec.template.spec.volumes.-={"name": "ib", "hostPath": {"path": "/dev/infiniband"}}',
            'spec.template.spec.containers.0.volumeMounts.-={"name": "ib", "mountPath": "/dev/infiniband"}',
            "spec.template.spec.enableServiceLinks=null",
        )
    ),
}


def manifest_of(name):
    """Return the text of a manifest, its Secret with a key alone."""
    return DIALECT.with_files(JOBS[name], {"key": b"ABC"})
