"""Engines and clusters in Python: vLLM and SGLang, Ray and Ray Train, Horovod.

Sources: vLLM 0.4 to 0.11, SGLang 0.3 to 0.5, Ray 2.5 to 2.50, Horovod 0.21 to 0.28.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_engine = partial(
    KnownMessage,
    source="vLLM 0.4 to 0.11, SGLang 0.3 to 0.5",
    tells=Tells.PROVES,
    cause="config-refused",
)
_ray = partial(KnownMessage, source="Ray 2.5 to 2.50", tells=Tells.NAMES)
_horovod = partial(KnownMessage, source="Horovod 0.21 to 0.28", tells=Tells.PROVES)

ENTRIES: tuple[KnownMessage, ...] = (
    _engine(
        name="vllm.no-room-for-cache",
        wordings=(
            r"No available memory for the cache blocks",
            r"Not enough memory\. Please try to increase --mem-fraction-static",
        ),
        cause="cuda-out-of-memory",
        error="after the model no GPU memory is left for the engine's cache of keys and values",
        advice="--gpu-memory-utilization 0.95 (SGLang: --mem-fraction-static), a smaller --max-model-len, or more tensor parallelism; see who else uses the GPU",
        confirm="nvidia-smi",
    ),
    _engine(
        name="vllm.gpu-not-free",
        wordings=(
            r"Free memory on device \S* ?\((?P<free>[\d.]+)/(?P<total>[\d.]+) GiB\) on startup is less than desired GPU memory utilization",
        ),
        tells=Tells.NAMES,
        cause="gpu-memory-taken",
        error="when the engine started, before it loaded anything, only {free} of the {total} GiB of a GPU were free, less than the share that it wants",
        advice="other processes hold the rest of the GPU: end them (nvidia-smi names them), or ask the scheduler for a GPU of your own",
        advice_in={
            "anywhere": "other processes hold the rest of the GPU: end them (nvidia-smi names them), ask the scheduler for a GPU of your own, or take only what is free: --gpu-memory-utilization {free_share}"
        },
        confirm="nvidia-smi",
    ),
    _engine(
        name="vllm.context-too-long",
        wordings=(
            r"max seq len \((?P<size>\d+)\) is larger than the maximum number of tokens that can be stored in KV cache",
            r"To serve at least one request with the models?'s max seq len \((?P<size2>\d+)\)",
            r"User-specified max_model_len \((?P<size3>\d+)\) is greater than the derived max_model_len",
        ),
        tells=Tells.NAMES,
        error="the context of {size}{size2}{size3} tokens does not fit the cache, or is longer than the model's",
        advice="set a smaller --max-model-len, or use more GPUs",
        advice_in={
            "anywhere": (
                "--max-model-len {cache_tokens}, what the cache has room for, or more GPUs (--tensor-parallel-size); a larger --gpu-memory-utilization makes the cache larger"
            ),
        },
    ),
    _engine(
        name="vllm.parallel-size",
        wordings=(
            r"[Tt]otal number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<tp>\d+)\)",
            r"[Ww]orld size \((?P<size>\d+)\) is larger than the number of available GPUs \((?P<have>\d+)\)",
            r"(?:tp_size|tensor_parallel_size).*(?:must be|should be|is not|cannot be) (?:divisible|larger|greater)",
            r"The number of required GPUs exceeds the total number of available GPUs",
        ),
        cause="parallel-sizes",
        error="the parallel sizes do not fit the model or the GPUs: {words:.200}",
        advice="choose a tensor parallel size that divides the heads and is no more than the GPUs that there are",
        advice_in={
            "anywhere": (
                "the sizes {tensor_sizes} divide the {heads} heads: --tensor-parallel-size with one of them, and no more than the GPUs that there are",
                "--tensor-parallel-size x --pipeline-parallel-size of at most {have}, the GPUs that the process sees (nvidia-smi -L, CUDA_VISIBLE_DEVICES)",
            ),
        },
    ),
    _engine(
        name="vllm.dtype",
        wordings=(
            r"Bfloat16 is only supported on GPUs with compute capability of at least 8\.0",
            r"(?:The quantization method|quantization) \S+ is not supported for the current GPU\. Minimum capability: (?P<need>\d+)",
        ),
        cause="gpu-not-supported",
        error="this GPU is too old for the precision or quantization that was asked for {need}",
        advice="--dtype half, another quantization, or a newer GPU",
    ),
    _engine(
        name="vllm.architecture",
        wordings=(
            r"Model architectures \[(?P<name>[^\]]+)\] (?:are not supported|failed to be inspected)",
            r"Unrecognized model in .*Should have a `?model_type`? key",
            r"The checkpoint you are trying to load has model type `(?P<name2>[^`]+)` but Transformers does not recognize",
        ),
        cause="versions-differ",
        error="this release does not know the model's architecture {name}{name2}",
        advice="use a newer release of transformers (and vLLM); --trust-remote-code for models that bring their own code",
    ),
    _engine(
        name="vllm.executor-died",
        wordings=(
            r"Engine core initialization failed\. See root cause above",
            r"EngineDeadError|EngineCore (?:encountered|failed|died|hit an exception)",
            r"WorkerProc initialization failed due to an exception in a background process",
            r"Worker (?:VllmWorker)?\S* ?(?:pid \d+ )?(?:died|proc .* died unexpectedly)",
            r"Initialization failed\. Please see the error messages above",
            r"Received sigquit from a child process\. It usually means the child failed",
        ),
        tells=Tells.ECHO,
        cause="",
    ),
    _engine(
        name="vllm.other-worker-fork",
        wordings=(r"We must use the `?spawn`? multiprocessing start method",),
        tells=Tells.NOISE,
        cause="",
    ),
    # Ray.
    _ray(
        name="ray.out-of-memory",
        wordings=(
            r"^(?!.*will be retried).*(?:Task|Actor|[Ww]orkers?(?:\(s\))?) (?:was|were) killed due to (?:the node running low on memory|memory pressure)",
            r"ray\.exceptions\.OutOfMemoryError",
            r"Memory on the node \(IP: .*\) was .* which exceeds the memory usage threshold",
        ),
        tells=Tells.PROVES,
        cause="out-of-memory",
        error="Ray ended a worker: the memory of its node was nearly used up",
        advice="ask for more memory per worker (num_cpus or memory= of the actor), use fewer of them per node, or raise RAY_memory_usage_threshold",
        advice_in={
            "anywhere": "one worker alone holds {ray_share}: take a node with more memory, or let it hold less (no offload to the CPU, the model in bf16 and in one copy); a higher threshold does not help"
        },
        confirm="ray memory; free -g   on that node",
    ),
    _ray(
        name="ray.actor-died",
        wordings=(
            r"(?:RayActorError|ActorDiedError|The actor died unexpectedly|The actor is dead because)",
            r"Worker unexpectedly exits with a connection error code (?P<code>\d+)",
            r"A worker died or was killed while executing a task by an unexpected system error",
            r"WorkerCrashedError|LocalRayletDiedError",
        ),
        tells=Tells.HINTS,
        cause="killed",
        error="a process of Ray ended and Ray does not know why: {words:.160}",
        advice="look into its own log: /tmp/ray/session_latest/logs/worker-*.err on its node, and dmesg for the memory killer",
        confirm="ray logs cluster --tail 200 'worker-*.err'",
    ),
    _ray(
        name="ray.node-died",
        wordings=(
            r"(?:The node|Node) .{0,80}(?:has been marked dead|was terminated|is dead|died)(?: because the detector has missed too many heartbeats)?",
            r"NodeDiedError|missed too many heartbeats from it",
        ),
        cause="node-failed",
        error="Ray lost a node: {words:.160}",
        advice="see what happened on it; the raylet is often the first that the memory killer takes",
        confirm="ray status; ray list nodes",
        rivals=("out-of-memory", "firewall"),
    ),
    _ray(
        name="ray.compiled-graph",
        wordings=(r"increase RAY_CGRAPH_get_timeout which is currently (?P<s>\d+) seconds",),
        cause="rank-missing-in-collective",
        error="a step of Ray's compiled graph took longer than its limit of {s} s: it is slow, or a worker hangs",
        advice="RAY_CGRAPH_get_timeout=300 in the environment of the driver; if it then waits as long, a worker hangs: read its log in /tmp/ray/session_latest/logs",
        confirm="py-spy dump --pid PID   of the workers, while it waits",
    ),
    _ray(
        name="ray.placement",
        wordings=(
            r"Cannot provide a placement group of (?P<why>.{1,200}?) within (?P<s>\d+) seconds",
        ),
        cause="no-capacity",
        error="the Ray cluster did not give the GPUs that were asked for within {s} s: {why}",
        advice="see what is free with `ray status`: end what holds the GPUs, let missing nodes join, or lower --tensor-parallel-size to what is there",
        confirm="ray status",
        rivals=("launcher-on-too-few-nodes",),
    ),
    _ray(
        name="ray.no-device-here",
        wordings=(r"Current node has no (?P<name>\w+) available",),
        cause="no-capacity",
        error="the node of the driver offers Ray no {name}",
        advice="start the driver on a node that has one; if this one does, Ray did not see it: ray stop; ray start --head --resources='{{\"{name}\": N}}' (GPUs: --num-gpus=N)",
        confirm="ray status; python -c 'import ray; ray.init(); print(ray.cluster_resources())'",
    ),
    _ray(
        name="ray.raylet-exit",
        wordings=(r"raylet (?:\[exit code=|exited with exit code )(?P<code>-?\d+)",),
        cause="exit-code",
        error="Ray's daemon of {here} (raylet) ended with exit code {code}",
        advice="its own words are in /tmp/ray/session_latest/logs/raylet.err and raylet.out of that node: mostly too few files or processes (ulimit -n, -u), a full /dev/shm, or --num-cpus that are not there",
        confirm="tail /tmp/ray/session_latest/logs/raylet.err   on that node",
    ),
    KnownMessage(
        name="tensorflow.out-of-memory",
        wordings=(
            r"ResourceExhaustedError|OOM when allocating tensor with shape\[(?P<shape>[\d,]+)\] .*GPU",
        ),
        source="TensorFlow 1.15 to 2.18, core/framework",
        tells=Tells.NAMES,
        cause="cuda-out-of-memory",
        error="TensorFlow ran out of GPU memory: {words:.200}",
        advice="a smaller batch_size in model.fit, or mixed precision (keras.mixed_precision); where other programs use the GPU: TF_FORCE_GPU_ALLOW_GROWTH=true",
        confirm="nvidia-smi   on that node",
    ),
    _ray(
        name="ray.cannot-connect",
        wordings=(
            r"Failed to connect to GCS(?: at address (?P<host>\S+))?",
            r"Failed to get cluster ID from GCS server|Timed out while waiting for GCS to become available",
            r"Unable to connect to GCS|Could not find any running Ray instance",
            r"This node has an IP address of (?P<host2>[\d.]+), (?:and|while|but) .*cannot find a matching Ray node",
            r"Ray cluster at \S+ .*could not be (?:reached|found)",
        ),
        cause="launch-failed",
        error="this node could not join the head of Ray {host}{host2}",
        advice="start ray start --head on the first node, with --node-ip-address of the common network, and wait for it before the others join; open port 6379 and 10000-19999",
        advice_in={
            "anywhere": "it was told to join an existing cluster at {existing_cluster}, whose head does not answer: if that one has ended, ray stop --force; unset RAY_ADDRESS, and start anew; if it runs, open its ports between the nodes",
        },
        confirm="ray status --address HEAD:6379",
        rivals=("firewall", "different-endpoints"),
    ),
    _ray(
        name="ray.versions",
        wordings=(
            r"Version mismatch: The cluster was started with",
            r"The cluster was started with:? *Ray: ",
        ),
        tells=Tells.PROVES,
        cause="versions-differ",
        error="nodes of the Ray cluster have different versions of Ray or Python",
        advice="use one environment on all nodes",
        confirm="ray --version; python --version   on every node",
    ),
    _ray(
        name="ray.cannot-schedule",
        wordings=(
            r"(?:cannot be scheduled right now|[Nn]o available node types can fulfill resource request) ?(?P<why>.*)",
            r"Error: No available node types|The following resource request cannot be scheduled",
            r"(?:Placement group|placement group) .*(?:timed out|not ready|cannot be (?:created|provisioned|scheduled)|infeasible)",
        ),
        cause="no-capacity",
        error="the Ray cluster has not the resources that were asked for {why}",
        advice="ask for no more GPUs and CPUs than ray status shows; a node may not have joined",
        confirm="ray status",
        rivals=("launcher-on-too-few-nodes",),
    ),
    _ray(
        name="ray.object-store",
        wordings=(
            r"ObjectStoreFullError|object store memory .*(?:full|exceeded)",
            r"The object store is using /tmp instead of /dev/shm because /dev/shm has only (?P<size>\d+)",
        ),
        tells=Tells.HINTS,
        cause="small-dev-shm",
        error="Ray's store of objects lacks shared memory {size}",
        advice="--shm-size=30% of the memory for the container, or ray start --object-store-memory",
        confirm="df -h /dev/shm",
    ),
    _ray(
        name="ray.session-folder",
        wordings=(
            r"OSError: AF_UNIX path length cannot exceed \d+ bytes: (?P<path>\S+)",
            r"(?:ray/session_latest|/tmp/ray).*(?:Permission denied|is not writable)",
        ),
        tells=Tells.NAMES,
        cause="name-too-long",
        error="Ray's folder of temporary files has too long a path, or belongs to another user {path}",
        advice="ray start --temp-dir=/tmp/r$UID",
    ),
    # Horovod.
    _horovod(
        name="horovod.stalled",
        wordings=(
            r"One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks",
            r"Stalled (?:tensor|ranks|ops)",
        ),
        tells=Tells.HINTS,
        cause="rank-missing-in-collective",
        error="Horovod waits for ranks that have not submitted a tensor that others have",
        advice="all ranks have to make the same number of steps; look at what the missing ranks do",
    ),
    _horovod(
        name="horovod.mismatch",
        wordings=(
            r"Mismatched (?:allreduce|allgather|broadcast|data|alltoall)\S* (?:tensor|type|shape|operation|root)",
            r"Mismatched (?:data types|MPI operations|CPU/GPU device selection)",
        ),
        cause="collectives-differ",
        error="ranks gave Horovod different tensors under one name: {words:.200}",
        advice="build the same model with the same sizes on all ranks; drop_last=True for the last batch",
    ),
    _horovod(
        name="horovod.shutdown",
        wordings=(
            r"Horovod has been shut down\. This was caused by an exception on one of the ranks",
            r"HorovodInternalError",
        ),
        tells=Tells.ECHO,
    ),
    _horovod(
        name="horovod.extension",
        wordings=(
            r"Extension horovod\.torch has not been built",
            r"Horovod has not been (?:built|compiled) with (?P<name>\S+)",
        ),
        cause="extension-build",
        error="Horovod was installed without support for torch {name}",
        advice="HOROVOD_WITH_PYTORCH=1 HOROVOD_GPU_OPERATIONS=NCCL pip install --no-cache-dir --force-reinstall horovod",
        confirm="horovodrun --check-build",
    ),
    KnownMessage(
        name="serving.flashinfer-workspace",
        wordings=(r"Failed to allocate memory for batch_prefill_tmp_v",),
        source="flashinfer 0.1 to 0.3, AlignedAllocator",
        tells=Tells.PROVES,
        is_raised=True,
        cause="bad-setting",
        error="flashinfer's workspace buffer is too small for this batch",
        advice="a larger buffer: SGLANG_FLASHINFER_WORKSPACE_SIZE, or a smaller chunk of prefill (--chunked-prefill-size)",
    ),
    KnownMessage(
        name="serving.horovod-shut-down",
        wordings=(
            r"Horovod has been shut down\. This was caused by an exception",
            r"process(?:es)? returned a non-zero exit code.{0,80}aborted",
        ),
        source="Horovod 0.16 to 0.28; Open MPI's help-prte",
        tells=Tells.ECHO,
    ),
    KnownMessage(
        name="serving.dask-memory",
        wordings=(
            r"Worker exceeded \d+% memory budget",
            r"Worker is at \d+% memory usage\. (?:Paus|Restart)ing",
        ),
        source="dask.distributed 2021 to 2025, worker_memory.py",
        tells=Tells.NAMES,
        cause="out-of-memory",
        error="a dask worker used more memory than its budget, and its nanny restarted it",
        advice="more memory per worker (memory_limit, --mem), fewer workers per node, smaller partitions",
    ),
)
