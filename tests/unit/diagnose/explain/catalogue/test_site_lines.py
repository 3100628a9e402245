"""Lines of schedulers, launchers, containers, frameworks and storage are found as the messages that they are."""

import pytest

from torchmuster.diagnose.explain.reading.patterns import match

# A line without its prefixes (an exception with its type), and the entry or kind of event that it is.
# fmt: off
SITE_LINES = (
    # Slurm.
    ("sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified", "slurm.account"),
    ("srun: error: invalid partition specified: gpu-long", "slurm.partition"),
    ("sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "slurm.policy"),
    ("   48213      a40 pretrain    lena PD       0:00      4 (QOSMaxGRESPerUser)", "slurm.waits-for-limit"),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "slurm.no-such-nodes"),
    ("srun: error: Unable to create step for job 77120: More processors requested than permitted", "slurm.too-many-cpus"),
    ("sbatch: error: Invalid generic resource (gres) specification", "slurm.gres"),
    ("srun: error: Unable to create step for job 5021: Insufficient GRES available in allocation", "slurm.gres-of-step"),
    ("sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)", "slurm.controller"),
    ("srun: error: If munged is up, restart with --num-threads=10", "slurm.munge"),
    ("slurmstepd: error: Munge decode failed: Expired credential", "slurm.munge-clock"),
    ("sbatch: error: Batch script contains DOS line breaks (\\r\\n)", "slurm.dos-script"),
    ("sbatch: unrecognized option '--gpus-per-noe=4'", "slurm.option"),
    ("(launch failed requeued held)", "slurm.requeued-and-held"),
    ("slurmstepd: error: *** JOB 90112 ON gn07 CANCELLED AT 2025-02-11T08:01:55 DUE TO JOB REQUEUE ***", "slurm.requeued"),
    ("State: TIMEOUT (exit code 0)", "time_limit"),
    ("90113.0        python  NODE_FAIL      1:0", "node_failed"),
    ("srun: Job 3177 step creation temporarily disabled, retrying (Requested nodes are busy)", "srun.nodes-busy"),
    ("srun: Job 3177 step creation temporarily disabled, retrying (PrologSlurmctld is still running)", "srun.prolog-runs"),
    ("srun: fatal: cpus-per-task set by two different environment variables SLURM_CPUS_PER_TASK=8 != SLURM_TRES_PER_TASK=cpu:6", "srun.cpus-per-task-twice"),
    ("srun: error: Task launch for StepId=6001.0 failed on node gn11: Communication connection failure", "srun.node-unreachable"),
    ("srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x000000FF.", "srun.cpu-binding"),
    ("slurmstepd: error: execve(): ./train: Exec format error", "not_executable"),
    ("slurmstepd: error: couldn't chdir to `/scratch/mira/run7': No such file or directory: going to /tmp instead", "slurmd.working-folder"),
    ("slurmstepd: error: *** JOB 1207 STEPD TERMINATED ON gn3 AT 2025-05-02T10:11:12 DUE TO JOB NOT ENDING WITH SIGNALS ***", "slurmd.unkillable"),
    ("slurmstepd: error: Some of your processes may have been killed by the cgroup out-of-memory handler.", "oom_proof"),
    ("srun: error: Invalid MPI type 'pmix_v9', --mpi=list for acceptable types", "slurmplugin.mpi-type"),
    ("srun: error: Couldn't load specified plugin name for mpi/pmix: Plugin init() callback failed", "slurmplugin.load"),
    ("srun: First task exited 60s ago", "srun.first-task-exited"),
    # PBS, LSF, Grid Engine, HTCondor.
    ("qsub: Unknown queue", "pbs.queue"),
    ("qsub: Job violates queue and/or server resource limits", "pbs.limits"),
    ("qsub: would exceed queue small's per-user limit", "pbs.limits"),
    ("qsub: Unknown resource: ngpu", "pbs.resource"),
    ("comment = Can Never Run: Insufficient amount of resource: ngpus (R: 8 A: 4 T: 4)", "pbs.never-run"),
    ("qsub: cannot connect to server pbs02 (errno=15007)", "pbs.server"),
    ("Job exceeded resource walltime", "time_limit"),
    ("Exit_status = -29", "time_limit"),
    ("PBS: Cgroup mem limit exceeded on node x3", "oom_proof"),
    ("TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.", "oom_proof"),
    ("TERM_RUNLIMIT: job killed after reaching LSF run time limit.", "time_limit"),
    ("TERM_OWNER: job killed by owner.", "cancelled"),
    ("User cannot use the queue. Job not submitted.", "lsf.refused"),
    ("failed       26  : opening input/output file", "sge.before-job"),
    ("Job was held.", "condor.held"),
    ("Error from slot1_3@n44: Job has gone over cgroup memory limit of 65536 megabytes. Last measured usage: 65120 megabytes.", "oom_proof"),
    # MPI and ssh.
    ("There are not enough slots available in the system to satisfy the 16", "ompi.no-slots"),
    ("bash: orted: command not found", "ompi.daemon-not-found"),
    ("The application appears to have been direct launched using \"srun\",", "ompi.no-pmi"),
    ("mpirun has detected an attempt to run as root.", "ompi.root"),
    ("At least one pair of MPI processes are unable to reach each other for", "ompi.unreachable"),
    ("WARNING: Open MPI failed to TCP connect to a peer MPI process.  This", "ompi.tcp-connect"),
    ("mpirun noticed that process rank 5 with PID 4411 on node cn8 exited on signal 9 (Killed).", "signal_received"),
    ("Primary job  terminated normally, but 1 process returned", "mpi.aborted-by-another"),
    ("MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD", "mpi.abort-called"),
    ("check_exit_codes (../../src/pm/i_hydra/libhydra/demux/hydra_demux_poll.c:117): unable to run bstrap_proxy on cn12 (pid 991, exit code 65280)", "hydra.no-proxy"),
    ("@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @", "ssh.host-key"),
    ("lena@cn4: Permission denied (publickey,gssapi-keyex,gssapi-with-mic,password).", "ssh.no-login"),
    ("Access denied by pam_slurm_adopt: you have no active jobs on this node", "ssh.no-job-there"),
    ("@         WARNING: UNPROTECTED PRIVATE KEY FILE!          @", "ssh.bad-key-file"),
    ("ssh: connect to host worker-1 port 2222: Connection refused", "ssh.refused"),
    ("ssh: Could not resolve hostname node9: Name or service not known", "ssh.unknown-name"),
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
    ("docker: Error response from daemon: could not select device driver \"\" with capabilities: [[gpu]].", "nvcontainer.select-driver"),
    ("nvidia-container-cli: initialization error: nvml error: driver not loaded: unknown", "nvcontainer.driver-not-loaded"),
    ("nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.6, please update your driver", "nvcontainer.requirement"),
    ("nvidia-container-cli: device error: 5: unknown device: unknown", "nvcontainer.unknown-device"),
    ("Failed to initialize NVML: Unknown Error", "nvcontainer.lost-in-container"),
    ("docker: Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?", "docker.daemon"),
    ("exec: \"torchrunn\": executable file not found in $PATH: unknown", "docker.no-program"),
    ("FATAL:   could not open image /scratch/img/pt.sif: failed to retrieve path for /scratch/img/pt.sif: no such file", "apptainer.no-image"),
    ("FATAL:   the image's architecture (amd64) could not run on the host's (arm64)", "apptainer.architecture"),
    ("ERROR  : Failed to create user namespace: maximum user namespaces exceeded, check /proc/sys/user/max_user_namespaces", "apptainer.user-namespace"),
    ("pyxis: --container-mounts: source path does not exist: /datasets/c4", "pyxis.mount"),
    ("pyxis:     [ERROR] Not enough space left in /tmp/enroot (21000456 KB needed)", "pyxis.space"),
    ("pyxis: importing docker image: nvcr.io/nvidia/pytorch:24.05-py3", "pyxis.progress"),
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
    # Frameworks.
    ("ValueError: You can't train a model that has been loaded with `device_map='auto'` in any distributed mode.", "accelerate.device-map"),
    ("ValueError: You need to use at least 2 processes to use `--multi_gpu`.", "accelerate.launch-options"),
    ("ValueError: You set `devices=8` in Lightning, but the number of tasks per node configured in SLURM `--ntasks-per-node=1` does not match. HINT: Set `devices=1`.", "lightning.slurm-tasks"),
    ("lightning.fabric.utilities.exceptions.MisconfigurationException: No supported gpu backend found!", "no_gpu"),
    ("[rank: 3] Child process with PID 811 terminated with code 1. Forcefully terminating all other processes to avoid zombies", "lightning.other-rank-failed"),
    ("TypeError: TrainingArguments.__init__() got an unexpected keyword argument 'evaluation_strategy'", "transformers.unexpected-argument"),
    ("ImportError: FlashAttention2 has been toggled on, but it cannot be used due to the following error: the package flash_attn seems to be not installed.", "transformers.flash-attention"),
    ("wandb.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])", "wandb.login"),
    # Storage.
    ("OSError: You are trying to access a gated repo.", "hub.gated"),
    ("OSError: acme/no-such-model is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'", "hub.not-found"),
    ("OSError: We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.", "hub.offline"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer", "file.safetensors"),
    ("LustreError: 167-0: scratch-MDT0000-mdc: This client was evicted by scratch-MDT0000; in progress operations using this service will fail.", "lustre.evicted"),
    ("botocore.exceptions.NoCredentialsError: Unable to locate credentials", "cloud.no-credentials"),
    ("botocore.exceptions.ClientError: An error occurred (AccessDenied) when calling the GetObject operation: Access Denied", "cloud.refused"),
    ("requests.exceptions.SSLError: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate in certificate chain", "tls.certificate"),
    # What frightens and is nothing.
    ("WARNING: There was an error initializing an OpenFabrics device.", "noise.openib"),
    ("mca_base_component_repository_open: unable to open mca_btl_openib: librdmacm.so.1: cannot open shared object file", "noise.mca-component"),
    ("PMIX ERROR: ERROR in file gds_ds12_lock_pthread.c at line 168", "noise.pmix-gds"),
    ("3 more processes have sent help message help-mpi-btl-openib.txt / ib port not selected", "noise.help-aggregated"),
    ("* hwloc has encountered what looks like an error from the operating system.", "noise.hwloc"),
    ("Lmod is automatically replacing \"gcc/12\" with \"nvhpc/24\".", "noise.lmod-notes"),
    ("wandb: Network error (ConnectionError), entering retry loop.", "noise.wandb-notes"),
    ("Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0", "noise.amp-notes"),
    ("sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.6", "noise.deepspeed-notes"),
)
# fmt: on


@pytest.mark.parametrize(("line", "name"), SITE_LINES)
def test_a_line_of_the_site_is_the_message_that_its_program_prints(line, name):
    found = match(line, is_raised=_is_exception(line))
    assert found is not None
    assert found.kind in (f"told:{name}", name)


def _is_exception(line):
    """Say whether a line of the table is an exception with its type."""
    return (
        line.partition(":")[0]
        .rpartition(".")[2]
        .endswith(("Error", "Exception", "Failure", "File"))
    )
