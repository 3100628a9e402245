"""torch.distributed: its store, rendezvous, launcher and process groups, Gloo among them.

Sources: torch 1.12 to 2.9 torch/csrc/distributed/c10d, torch/distributed/elastic, run.py, rendezvous.py; gloo/transport/tcp.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_store = partial(
    KnownMessage, source="torch 1.12 to 2.9, csrc/distributed/c10d/TCPStore.cpp, socket.cpp"
)
_launcher = partial(
    KnownMessage, source="torch 1.12 to 2.9, distributed/run.py, launcher/, elastic/"
)
_group = partial(
    KnownMessage, source="torch 1.12 to 2.9, csrc/distributed/c10d, distributed_c10d.py"
)

ENTRIES: tuple[KnownMessage, ...] = (
    # The store.
    _store(
        name="c10d.no-libuv",
        wordings=(r"use_libuv was requested but PyTorch was built without libuv support",),
        tells=Tells.PROVES,
        cause="builds-differ",
        error="this build of torch has no libuv, which the store should use",
        advice="USE_LIBUV=0 in the environment of all nodes, or the same build of torch on all",
    ),
    _store(
        name="c10d.bind-address",
        wordings=(
            r"server socket .*(?:failed to (?:bind|listen)|cannot be initialized).*(?:errno: 99|EADDRNOTAVAIL|[Cc]annot assign requested address)",
        ),
        tells=Tells.NAMES,
        cause="endpoint-not-here",
        rivals=("bridge-address",),
        error="{here} should host the store on an address that is not its own",
        advice="let MASTER_ADDR or --rdzv-endpoint name the first node, as all others reach it, and start node rank 0 there",
        confirm="getent hosts $MASTER_ADDR; ip -br addr   on the first node",
    ),
    _store(
        name="c10d.port-forbidden",
        wordings=(
            r"server socket .*(?:failed to (?:bind|listen)|cannot be initialized).*(?:errno: 13|EACCES|[Pp]ermission denied)",
        ),
        tells=Tells.PROVES,
        cause="bad-setting",
        error="{here} may not listen on that port: permission denied",
        advice="choose a port between 1024 and 32767, such as MASTER_PORT=29500",
    ),
    _store(
        name="c10d.port-value",
        wordings=(
            r"port must have value from 0 to 65535 but was (?P<port>-?\d+)",
            r"OverflowError: (?:bind\(\)|getsockaddrarg): port must be 0-65535",
            r"port number of the (?:TCP store|rendezvous endpoint) '?(?P<port2>\S*?)'? must be an integer",
        ),
        tells=Tells.PROVES,
        is_raised=True,
        cause="bad-setting",
        error="the port {port}{port2} cannot be: it has to be between 1 and 65535",
        advice="set MASTER_PORT to a number between 1024 and 32767; one made of a job id needs a modulo: $((20000 + JOB % 10000))",
    ),
    _store(
        name="c10d.missing-ranks",
        wordings=(
            r"(?P<op>gather|barrier|all_gather) failed -- missing ranks: (?P<ranks>\[?[\d, .]+\]?)",
        ),
        tells=Tells.NAMES,
        cause="ranks-missing-at-barrier",
        error="the ranks {ranks} did not come to a {op} of the store",
        advice="look at what the named ranks did: `muster stacks RUN`, or `py-spy dump --pid PID` on their nodes",
    ),
    _store(
        name="c10d.store-broken",
        wordings=(
            r"recvValue(?:WithTimeout)? failed on \S+: (?P<how>.*)",
            r"Failed to (?:recv|send), (?:got|sent) 0 bytes",
        ),
        tells=Tells.ECHO,
        kind="peer_lost",
    ),
    _store(
        name="c10d.uv-loop-close",
        wordings=(r"uv_loop_close failed with:-?\d+ errn:EBUSY",),
        tells=Tells.NOISE,
    ),
    _store(
        name="c10d.socket-timeout",
        wordings=(r"RuntimeError: Socket Timeout",),
        tells=Tells.ECHO,
        is_raised=True,
        kind="store_wait",
    ),
    _store(
        name="c10d.store-answer",
        wordings=(r"(?:Stop_waiting|wait_canceled|ready or not_ready) response (?:is )?expected",),
        tells=Tells.ECHO,
        is_raised=True,
        kind="peer_lost",
    ),
    # The launcher.
    _launcher(
        name="c10d.different-torch",
        wordings=(r"The (?:rendezvous state|state object) is corrupt",),
        tells=Tells.NAMES,
        cause="torch-versions-differ",
        error="a node could not read the state of the rendezvous: the nodes run different versions of torch or Python",
        advice="use one environment on all nodes",
        confirm="python -c 'import sys, torch; print(sys.version, torch.__version__)'   on every node",
    ),
    _launcher(
        name="c10d.backend-unknown",
        wordings=(
            r"The rendezvous backend '(?P<backend>[^']*)' is not registered",
            r"No rendezvous handler for (?P<scheme>\S*)://",
            r"[Uu]nknown rendezvous backend",
        ),
        tells=Tells.PROVES,
        is_raised=True,
        cause="bad-arguments",
        error="there is no way to meet that is called {backend}{scheme}",
        advice="--rdzv-backend=c10d for torchrun, or init_method='env://'",
    ),
    _launcher(
        name="c10d.nproc-value",
        wordings=(
            r"Unsupported nproc_per_node value: (?P<value>\S+)",
            r"ValueError: (?:Cuda|Xpu) is not available\.",
        ),
        tells=Tells.NAMES,
        is_raised=True,
        cause="bad-arguments",
        rivals=("no-gpu",),
        error="--nproc-per-node asks {who} for something that it does not have: {words:.120}",
        advice="--nproc-per-node=gpu needs a GPU and a CUDA build of torch; else write the number",
        confirm="nvidia-smi -L   on that node",
    ),
    _launcher(
        name="c10d.healthcheck",
        wordings=(
            r"(?:agent|local_elastic_agent).*(?:[Ff]ailed to (?:create|start) (?:the )?(?:health check|TimerServer|timer server))",
            r"Environment variable TORCHELASTIC_HEALTH_CHECK_PORT not found",
            r"log directory set to: |Environment variable 'TORCHELASTIC_ENABLE_FILE_TIMER' not found",
        ),
        tells=Tells.NOISE,
    ),
    _launcher(
        name="c10d.log-dir",
        wordings=(r"NotADirectoryError: log_dir: (?P<path>.+) is a file",),
        tells=Tells.PROVES,
        is_raised=True,
        cause="bad-arguments",
        error="--log-dir names a file: {path}",
        advice="name a folder that does not exist yet, or remove the file",
    ),
    _launcher(
        name="c10d.deprecated-launch",
        wordings=(
            r"module torch\.distributed\.launch is deprecated",
            r"`--local[-_]rank` argument to be set, please",
        ),
        tells=Tells.NOISE,
    ),
    _launcher(
        name="c10d.local-rank-argument",
        wordings=(r"error: unrecognized arguments: .*--local[-_]rank[= ](?P<local_rank>\d+)",),
        tells=Tells.PROVES,
        cause="local-rank-argument",
        error="torch.distributed.launch hands --local-rank to the script, and the script does not take it",
        advice="start it with torchrun and read int(os.environ['LOCAL_RANK']), or add parser.add_argument('--local-rank', '--local_rank', type=int)",
    ),
    _launcher(
        name="c10d.restart-membership",
        wordings=(
            r"Detected \d+ new nodes from group_rank=\d+; will restart worker group",
            r"(?:Stopping|Restarting|Starting) worker group",
        ),
        tells=Tells.FACT,
    ),
    # Process groups.
    _group(
        name="c10d.env-value",
        wordings=(
            r"Error initializing torch\.distributed using \w+:// rendezvous: (?P<why>(?:rank|world size|port number) (?:parameter )?missing)",
            r"ValueError: invalid literal for int\(\) with base 10: '(?P<value>[^']*)'.*(?:RANK|WORLD_SIZE|MASTER_PORT)",
        ),
        tells=Tells.PROVES,
        is_raised=True,
        cause="no-launcher",
        error="{who} does not know its rank or the number of ranks: {why}{value}",
        advice="start it with torchrun or `muster run`, which set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
    ),
    _group(
        name="c10d.no-process-group",
        wordings=(r"Default process group has not been initialized",),
        tells=Tells.PROVES,
        is_raised=True,
        cause="no-process-group",
        error="{who} uses torch.distributed before init_process_group, or after destroy_process_group",
        advice="call torch.distributed.init_process_group() first, in every rank; where one process is enough, ask torch.distributed.is_initialized()",
    ),
    _group(
        name="c10d.debug-level",
        wordings=(r"The value of TORCH_DISTRIBUTED_DEBUG must be OFF, INFO, or DETAIL",),
        tells=Tells.PROVES,
        cause="bad-setting",
        error="TORCH_DISTRIBUTED_DEBUG has a value that torch does not know",
        advice="set it to OFF, INFO or DETAIL",
    ),
    _group(
        name="c10d.heartbeat",
        wordings=(
            r"ProcessGroupNCCL's watchdog got stuck for (?P<s>\d+) ?(?:seconds|milliseconds)",
            r"HeartbeatMonitor::\w+.*Could not acquire GIL within",
        ),
        tells=Tells.ECHO,
        kind="watchdog_stuck",
    ),
    _group(
        name="c10d.flight-recorder",
        wordings=(
            r"(?:Dumping|Finished writing) .*(?:Flight ?Recorder|debug info|nccl_trace)",
            r"Received a dump signal (?:due to a collective timeout |from )",
            r"Observed flight recorder dump signal from another rank",
            r"Stack trace of the failed collective not found, potentially because FlightRecorder is disabled",
            r"(?:broadcasting|sending) .*(?:dump|exception) signal",
        ),
        tells=Tells.ECHO,
    ),
    _group(
        name="c10d.first-watchdog",
        wordings=(
            r"First PG on this rank to signal dumping",
            r"Timeout at NCCL work: \d+, last enqueued",
            r"ProcessGroupNCCL's watchdog detected (?:an exception|a collective timeout) from the local rank",
        ),
        tells=Tells.ECHO,
    ),
    _group(
        name="c10d.nccl-async-error",
        wordings=(
            r"NCCL communicator was aborted on rank (?P<rank>\d+)",
            r"Connection reset by the peer.*ncclCommAbort",
            r"NCCL communicator (?:encountered error set by|was aborted)",
        ),
        tells=Tells.ECHO,
        kind="watchdog_abort",
    ),
    _group(
        name="c10d.uneven-inputs",
        wordings=(
            r"Detected at least one rank that exhausted inputs",
            r"[Uu]neven inputs? (?:detected|across)",
        ),
        tells=Tells.NAMES,
        is_raised=True,
        cause="rank-ended-early",
        error="the ranks have different numbers of batches, and one ran out of them",
        advice="DistributedSampler(drop_last=True) with drop_last=True in the DataLoader, or `with model.join():`",
    ),
    _group(
        name="c10d.object-not-picklable",
        wordings=(
            r"(?:broadcast_object_list|all_gather_object|gather_object|scatter_object\w*).*(?:[Pp]ickl|serializ)",
        ),
        tells=Tells.NAMES,
        is_raised=True,
        cause="not-picklable",
        error="{who} sent an object to other ranks that cannot be pickled",
        advice="send plain dictionaries, lists, numbers and CPU tensors",
    ),
    _group(
        name="c10d.nccl-number",
        wordings=(r"NCCL [Ee]rror (?P<number>\d+): ",),
        tells=Tells.ECHO,
        is_raised=True,
        kind="nccl_envelope",
    ),
    # Gloo.
    _group(
        name="c10d.gloo-too-many",
        wordings=(r"gloo/transport/tcp/\S+:\d+\].*(?P<why>Too many open files)",),
        tells=Tells.PROVES,
        cause="open-files",
        error="Gloo could not open a socket on {here}: {why}",
        advice="ulimit -n 65536 in the job: each group takes a socket for each pair of ranks",
        advice_in={"container": "docker run --ulimit nofile=65536:65536"},
        confirm="ulimit -n   in the job",
    ),
    _group(
        name="c10d.gloo-closed",
        wordings=(
            r"gloo/transport/tcp/\S+:\d+\].*(?P<how>Read timeout|Write timeout|Socket unexpectedly closed|Connect timeout)",
        ),
        tells=Tells.ECHO,
        kind="peer_lost",
    ),
    _group(
        name="c10d.gloo-tensor",
        wordings=(
            r"ProcessGroupGloo::\w+: (?P<why>(?:unsupported|invalid|requires|cannot).*)",
            r"Cannot use ReduceOp\.(?P<op>\w+) with (?:non-integral|Gloo)",
            r"ReduceOp\.(?:AVG|PREMUL_SUM) .*(?:only|not) .*(?:supported|available|NCCL)",
        ),
        tells=Tells.PROVES,
        is_raised=True,
        cause="invalid-collective",
        error="Gloo does not do what {who} asked it for: {words:.160}",
        advice="Gloo takes CPU tensors and SUM, MIN, MAX, PRODUCT; divide by the world size in place of AVG",
    ),
    KnownMessage(
        name="c10d.etcd-refused",
        wordings=(
            r"HTTPConnectionPool\(host='(?P<host>[^']+)', port=(?P<port>\d+)\).*(?:/v2/(?:machines|keys)|/version)",
        ),
        source="python-etcd 0.4 under torch's etcd rendezvous",
        tells=Tells.NAMES,
        cause="store-refused",
        error="no etcd answers at {host}:{port}, where the rendezvous is to be",
        advice="start etcd there, correct --rdzv-endpoint, or use the c10d rendezvous, which needs no server",
        confirm="curl http://{host}:{port}/version   from every node",
        advice_in={
            "anywhere": "start etcd on {host} (etcd --listen-client-urls http://0.0.0.0:{port} --advertise-client-urls http://{host}:{port}), or do without it: --rdzv-backend=c10d --rdzv-endpoint={host}:29500",
        },
    ),
    KnownMessage(
        name="c10d.etcd-list",
        wordings=(r"EtcdException: Could not get the list of servers",),
        source="python-etcd 0.4 client.py",
        tells=Tells.NAMES,
        is_raised=True,
        cause="store-refused",
        error="no etcd answers at the rendezvous endpoint",
        advice="start etcd there, correct --rdzv-endpoint, or use the c10d rendezvous, which needs no server",
        confirm="curl http://ENDPOINT/version   from every node",
    ),
)
