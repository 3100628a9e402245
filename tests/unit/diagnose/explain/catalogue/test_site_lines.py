"""Lines of schedulers, launchers, containers, frameworks and storage are found as the messages that they are."""

from torchmuster.diagnose.explain.reading.patterns import match

# A line without its prefixes (an exception with its type), and the entry or kind of event that it is.
# fmt: off
SITE_LINES = (
    # Slurm.
    ("State: TIMEOUT (exit code 0)", "time_limit"),
    ("srun: error: Unable to create step for job 77120: More processors requested than permitted", "slurm.too-many-cpus"),
    ("sbatch: error: Invalid generic resource (gres) specification", "slurm.gres"),
    ("90113.0        python  NODE_FAIL      1:0", "node_failed"),
    ("srun: Job 3177 step creation temporarily disabled, retrying (Requested nodes are busy)", "srun.nodes-busy"),
    ("slurmstepd: error: Some of your processes may have been killed by the cgroup out-of-memory handler.", "oom_proof"),
    ("srun: First task exited 60s ago", "srun.first-task-exited"),
    # PBS.
    # MPI and ssh.
    ("mpirun noticed that process rank 5 with PID 4411 on node cn8 exited on signal 9 (Killed).", "signal_received"),
    # Kubernetes and containers.
    ("0/12 nodes are available: 4 Insufficient nvidia.com/gpu, 8 node(s) didn't match Pod's node affinity/selector.", "k8s.no-gpus"),
    ("0/3 nodes are available: 3 Insufficient memory. preemption: 0/3 nodes are available", "k8s.no-cpu-or-memory"),
    ("0/6 nodes are available: 6 node(s) had untolerated taint {nvidia.com/gpu: present}.", "k8s.taints"),
    ("Warning  FailedScheduling  3m  default-scheduler  pod has unbound immediate PersistentVolumeClaims", "k8s.volume-binding"),
    ("pods \"ddp-worker-3\" is forbidden: exceeded quota: gpu-team, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=28, limited: requests.nvidia.com/gpu=32", "k8s.quota"),
    ("pods \"t-0\" is forbidden: violates PodSecurity \"restricted:latest\": allowPrivilegeEscalation != false (container \"t\" must set it)", "k8s.pod-security"),
    ("admission webhook \"validate.kyverno.svc\" denied the request: resource limits are required", "k8s.webhook"),
    ("MountVolume.SetUp failed for volume \"data\" : mount failed: exit status 32", "k8s.mount"),
    ("Error: secret \"hf-token\" not found", "k8s.missing-config"),
    ("Failed to pull image \"registry.example.org/llm:7\": rpc error: code = Unknown desc = failed to authorize: 401 Unauthorized", "k8s.image-login"),
    ("The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 3Gi.", "k8s.evicted-memory"),
    ("Container train failed liveness probe, will be restarted", "k8s.liveness"),
    ("Warning  Unhealthy  20s  kubelet  Readiness probe failed: connection refused", "k8s.unhealthy"),
    ("Job was active longer than specified deadline", "time_limit"),
    ("Back-off restarting failed container trainer in pod t-0_default", "k8s.crash-loop"),
    ("couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor h100, 8 more needed", "k8s.kueue"),
    # DeepSpeed and Megatron.
    ("AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 128 != 4 * 4 * 6", "deepspeed.batch-sizes"),
    ("ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments values:", "deepspeed.config-conflict"),
    ("Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.", "deepspeed.loss-scale"),
    ("RuntimeError: still have inflight params [{'id': 12}]", "deepspeed.zero3-in-flight"),
    ("RuntimeError: Using hostfile at /job/hostfile but host=w2 was not reachable via ssh.", "deepspeed.passwordless"),
    ("Unable to find hostfile, will proceed with training with local resources only.", "deepspeed.no-hostfile"),
    ("CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 12.4 does not match the version torch was compiled with 11.8", "deepspeed.cuda-versions"),
    ("Killing subprocess 30112", "deepspeed.subprocess-died"),
    ("AssertionError: world_size (12) is not divisible by 8", "megatron.world-size"),
    ("AssertionError: global batch size (100) is not divisible by micro batch size (4) times data parallel size (8)", "megatron.global-batch"),
    # Engines and Ray.
    ("ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.", "vllm.no-room-for-cache"),
    ("ValueError: To serve at least one request with the models's max seq len (131072), 16.0 GiB KV cache is needed", "vllm.context-too-long"),
    ("RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}", "vllm.executor-died"),
    ("ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.", "ray.out-of-memory"),
    ("RuntimeError: Version mismatch: The cluster was started with:", "ray.versions"),
    # What frightens and is nothing.
    ("Lmod is automatically replacing \"gcc/12\" with \"nvhpc/24\".", "noise.lmod-notes"),
    ("wandb: Network error (ConnectionError), entering retry loop.", "noise.wandb-notes"),
    ("sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.6", "noise.deepspeed-notes"),
)
# fmt: on


def test_a_line_of_the_site_is_the_message_that_its_program_prints():
    wrong = []
    for line, name in SITE_LINES:
        found = match(line, is_raised=_is_exception(line))
        if found is None or found.kind not in (f"told:{name}", name):
            wrong.append(f"{line}: {found.kind if found else None}, not {name}")
    assert wrong == []


def _is_exception(line):
    """Say whether a line of the table is an exception with its type."""
    return (
        line.partition(":")[0]
        .rpartition(".")[2]
        .endswith(("Error", "Exception", "Failure", "File"))
    )
