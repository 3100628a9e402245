"""What single lines mean. Rows are stable fragments of messages, from torch 1.12 to 2.15, never file:line.

A row says what happened, not why: the rules weigh rows against each other. Named groups become fields.
"""

import errno
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells
from torchmuster.diagnose.explain.catalogue.index import CATALOGUE
from torchmuster.diagnose.explain.catalogue.stems import cut_to_few_beginnings
from torchmuster.diagnose.explain.events import LineRole
from torchmuster.diagnose.explain.reading.sentences import SENTENCES

_MAPPED = "(?:::ffff:)?"  # before the IPv4 address that stands in one of IPv6
_ADDRESS = rf"\(?\[?{_MAPPED}(?P<host>[A-Za-z0-9_.:-]+?)(?:\]:|, |:)(?P<port>\d{{2,5}})(?=[\s),;>]|\.(?!\d)|$)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """One row: if `regex` is found in a line, it is an event of this kind."""

    kind: str
    role: LineRole
    regex: re.Pattern[str]


def _row(kind: str, role: LineRole, regex: str, flags: int = 0) -> Pattern:
    return Pattern(kind=kind, role=role, regex=re.compile(regex, flags))


_C, _E, _P, _X = LineRole.CAUSE, LineRole.ECHO, LineRole.CONFIRMS, LineRole.CONTEXT

# Sentences of the C library that mean trouble wherever they stand; the others need a number or an exception.
_TROUBLE = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
    errno.EMFILE,
    errno.ENFILE,
    errno.EIO,
    errno.EROFS,
    errno.ENOTCONN,
    errno.ENOMEM,
    errno.ESHUTDOWN,
)
_SAID = "|".join(re.escape(words) for words, number in SENTENCES.items() if number in _TROUBLE)

_MAX_WORDS = 100_000
_MAX_WORD_BYTES = 64
_MAX_LINE_BYTES = 8000  # of longer lines nothing further is looked at

# The first row that fits wins, so the special stand before the general.
# fmt: off
PATTERNS: tuple[Pattern, ...] = (
    # The scheduler's and the kernel's word.
    _row("time_limit", _C, r"(?:JOB|STEP)\D+(?P<job>[\d.]+).*?(?:ON (?P<node>\S+) )?.*CANCELLED AT .*DUE TO TIME LIMIT"),
    _row("time_limit", _C, r"=>> PBS: job killed: (?:walltime|p?cput) (?P<used>\d+) exceeded limit (?P<limit>\d+)"),
    _row("node_failed", _C, r"=>> PBS: job killed: node \d+ \((?P<host>[^()\s]+)\) requested job die"),
    _row("time_limit", _C, r"TERM_RUNLIMIT|(?:walltime|time limit|h_rt).{0,40}(?:exceeded|reached)|(?:[Rr]eason\W{1,12}|Warning +)DeadlineExceeded\b"),
    _row("preempted", _C, r"CANCELLED AT .*DUE TO PREEMPTION|job preempted(?!.*node fail)|[Pp]reempted by|[Pp]reemption (?:notice|signal) (?:was )?received|(?:[Rr]eceived|[Gg]ot)(?: an?)? preemption (?:notice|signal)"),
    _row("node_failed", _C, r"CANCELLED AT .*DUE TO NODE FAILURE(?:, see)?.*?(?P<node>\S+)?$|[Nn]ode failure on (?P<host>\S+)"),
    _row("cancelled", _C, r"CANCELLED AT \S+|job (?:was )?(?:deleted|cancelled|canceled) (?:by|at)|qdel'?ed"),
    _row("oom_proof", _P, r"[Dd]etected (?P<count>\d+) oom[-_ ]?kill|[Oo]ut [Oo]f [Mm]emory: Killed process (?P<pid>\d+)|[Mm]emory cgroup out of memory|oom-kill:|OOMKilled|exceeded memory limit|memory usage .*exceed|=>> PBS: job killed: (?:mem|vmem)|Out Of Memory$|invoked oom-killer|OUT_OF_MEMORY"),
    _row("pbs_killed", _C, r"=>> PBS: job killed: (?P<why>.+)"),
    _row("evicted", _C, r"(?<![A-Za-z])Evicted(?![A-Za-z])(?! \d)(?!.*(?:orkload|ueue|Ready|cache|entries|blocks))|The node was low on resource: (?P<what>[\w-]+)"),
    _row("image", _C, r"ErrImagePull|ImagePullBackOff|manifest unknown|[Mm]anifest for \S+ not found|[Ff]ailed to pull image|pull access denied|[Ee]rror fetching image|pyxis: failed to import|FATAL:.*\b(?:could not open|[Uu]nable to (?:pull|open|build|handle)|making|while loading) .{0,40}(?:image|container|docker:|oras:)"),
    _row("xid", _C, r"NVRM: Xid \((?P<bus>[^)]*)\): (?P<xid>\d+)"),
    _row("gpu_hardware", _C, r"uncorrectable ECC error|GPU has fallen off the bus|Unable to determine the device handle"),
    _row("fabric_manager", _C, r"system not yet initialized|cudaErrorSystemNotReady|Error 802"),
    _row("srun_launch", _C, r"srun: Job \d+ step creation (?:temporarily|still) disabled|srun: error: (?:Unable to create step|Unable to confirm allocation|Task launch .*failed)(?P<why>.*)|(?:slurmstepd|srun): error: execve\(\): (?P<command>[^:]+): (?P<strerror>.+)"),
    _row("task_exit", _X, r"srun: error: (?P<host>\S+?): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)"),
    _row("teardown", _E, r"srun: (?:Job step aborted|Terminating|got SIGCONT)|Job step aborted|Force Terminated|mpiexec.*killed|STEP .* ON .* CANCELLED"),
    _row("resumed", _X, r"Job executing on host|srun: Step created for|[Jj]ob (?:was )?resumed|[Jj]ob .{0,40}(?:requeued|rescheduled) and (?:is )?(?:runs|running|started)"),
    _row("admitted", _X, r"\bAdmitted\b|Successfully assigned \S+ to|[Qq]uota ?[Rr]eserved|Admitted by (?:cluster)?[Qq]ueue"),
    _row("recovered", _X, r"\bnfs: server \S+ OK\b|\b(?:[Rr]econnected|[Rr]ecovered)\b(?! from checkpoint)|[Cc]onnection (?:was )?restored|\bsucceeded (?:on|after|at) (?:the )?(?:\w+ )?(?:attempt|retry|retries|tries)|\b[Rr]etry (?:\S+ )?succeeded|\bis (?:back|up again)\b|\bis reachable again"),
    _row("ctrl_c", _X, r"^\s*\^C"),
    _row("prompt", _X, r"^(?:\([\w.-]+\) )?[\w.-]+@[\w.-]+:[^$#]{0,200}[$#] \S"),
    # Starting at all.
    _row("pbsdsh_usage", _C, r"pbsdsh: invalid option -- '(?P<letter>.)'"),
    _row("pbs_mpiexec", _C, r"mpiexec:\s+unexpected error - no non-PBS mpiexec in PBS_O_PATH"),
    _row("launch_failed", _C, r"launch failed on (?P<host>[^\s:]+)|Couldn't forward RPC|ORTE was unable to reliably start|Host key verification failed|ssh: connect to host (?P<name>\S+) port \d+: (?P<why>.+)"),
    _row("library", _C, r"version `(?P<version>\w+_[\d.]+)' not found|(?P<library>[\w.+-]+\.so[\w.]*): (?:cannot open shared object file|file too short|invalid ELF header|cannot read file data|failed to map segment|ELF file's phentsize|cannot allocate memory in static TLS)|undefined symbol: (?P<symbol>\w+)|wrong ELF class"),
    _row("not_executable", _C, r"[Ee]xec format error|cannot execute binary file"),
    _row("not_permitted", _C, r"(?:(?:ba|z|k|da|c|tc)?sh|line \d+|env|/bin/\w+|failed to run command|exec|execvp?)(?:: \d+)?:? [\u2018'\"]?(?P<command>[\w./+~-]+)[\u2019'\"]?: (?:(?P<path>[\w./+~-]+): bad interpreter: )?[Pp]ermission denied\s*$|can't open file '(?P<name>[^']+)': \[Errno 13\]"),
    _row("no_command", _C, r"(?:(?:ba|z|k|da|c|tc)?sh|line \d+|env|/bin/\w+)(?:: \d+)?: (?:exec: )?[\u2018'\"]?(?P<command>[\w./+~-]+)[\u2019'\"]?: (?:command not found|(?:(?P<path>[\w./+~-]+): bad interpreter: )?No such file or directory|not found|Permission denied|cannot execute: required file not found)\s*$|(?P<other>[\w./+-]+): (?:command not found|Command not found)|(?:command not found|Unknown command): (?P<name>[\w./+-]+)\s*$|(?:failed to run command|exec:|execvp error on file) ?[\u2018'\"]?(?P<why>[\w./+~-]+)[\u2019'\"]?:? \(?(?:executable file not found|No such file)"),
    _row("no_script", _C, r"can't open file '(?P<path>[^']+)': \[Errno (?P<errno>\d+)\]"),
    _row("no_module_main", _C, r"Error while finding module specification for '(?P<module>[\w.]+)'|No module named '?(?P<name>[\w.]+)'?\s*$"),
    _row("bad_arguments", _C, r"^(?:usage: )?(?P<prog>[\w.-]+): error: (?P<why>(?:unrecognized|the following|argument|invalid|too few|ambiguous).*)|^Error: (?P<other>(?:No such (?:option|command)|Invalid value|Missing (?:argument|option|parameter|command)|Got unexpected extra arg).*)"),
    _row("module_load", _C, r"(?:ModuleCmd_Load|Lmod has detected the following error|Unable to locate a modulefile for) ?'?(?P<module>[\w./+-]*)|module: command not found"),
    _row("env_missing", _C, r"environment variable (?P<variable>RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK) expected, but not set"),
    _row("env_missing", _C, r"^KeyError: '(?P<variable>RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK|LOCAL_WORLD_SIZE)'"),
    # Rendezvous and stores.
    _row("port_taken", _C, r"(?:failed to (?:listen|bind)|EADDRINUSE|[Aa]ddress already in use)(?:.*?(?:port:?|\]:|:) ?(?P<port>\d{2,5}))?"),
    _row("store_clients", _E, r"(?P<joined>\d+)/(?P<wanted>\d+) clients joined"),
    _row("store_wait", _E, r"wait timeout after (?P<ms>\d+)ms, keys: (?P<keys>.+)"),
    _row("store_validate", _E, rf"failed to connect/validate to host \[?{_MAPPED}(?P<host>[^\s\]]+?)\]?:(?P<port>\d+)(?P<rest>.*)"),
    _row("store_connect", _E, r"(?:client socket has (?P<how>timed out|failed)|failed to connect|timed out).*?(?:connect(?:ing)? to|to) "+ _ADDRESS+ r"(?:.*?errno: (?P<errno>\d+))?"),
    _row("store_get", _E, r"retrieving ncclUniqueId from \[(?P<from>\d+)\].*got error: (?P<why>.+)|store->get\('[^']*'\) got error: (?P<other>.+)"),
    _row("exit_barrier", _X, r"Error waiting on exit barrier"),
    _row("rdzv_timeout", _E, r"RendezvousTimeoutError"),
    _row("rdzv_connection", _E, r"RendezvousConnectionError|has failed to send a keep-alive heartbeat|connection to the C10d store has failed"),
    _row("rdzv_closed", _E, r"RendezvousClosedError"),
    _row("rdzv_state", _E, r"RendezvousStateError|RendezvousGracefulExit"),
    _row("endpoint_ignored", _X, r"master_addr is only used for static rdzv_backend"),
    _row("rdzv_complete", _X, r"[Rr]endezvous complete|Rendezvous'?ed? (?:complete|succeeded)"),
    _row("hosts_store", _X, r"hosts the TCP store"),
    _row("no_ipv6", _X, r"IPv6 network addresses of \(?\[?(?P<host>[^\s,\]]+).* cannot be retrieved|hostname of the client socket cannot be retrieved"),
    _row("no_name", _C, r"(?:Name or service not known|Temporary failure in name resolution|nodename nor servname|gai error: -\d+|could not resolve host(?:name)?:? ?(?P<host>\S+)?)"),
    # Gloo.
    _row("gloo_family", _C, r"ss1\.ss_family == ss2\.ss_family"),
    _row("gloo_interface", _C, r"Unable to find (?:address|interface)\D*(?P<name>\S+)|ifa != nullptr"),
    _row("gloo_connect", _E, r"(?:connectFullMesh|Gloo).*?(?P<why>Connection refused|timed out|No route to host|Network is unreachable|no error|[Cc]onnect timeout)?.*?remote=\[?" + _MAPPED + r"(?P<host>[\d.a-fA-F:]+?)\]?:(?P<port>\d+)(?!\d|[:\]]|\.\d)"),
    _row("gloo_connect", _E, r"connectFullMesh failed"),
    _row("gloo_connect", _E, rf"gloo/transport/tcp/\S+\] connect \[{_MAPPED}(?P<host>[\d.a-fA-F:]+)\]:(?P<port>\d+): (?P<why>\w[\w ]*)"),
    _row("peer_lost", _E, r"(?P<how>Connection (?:closed|reset) by (?:remote )?peer)(?:,?\s*\[?" + _MAPPED + r"(?P<host>[\w.:-]*[\w])\]?[:<](?P<port>\d+)>?)?"),
    _row("peer_lost", _E, r"(?P<how>[Bb]roken pipe|sendBytes failed|recvValue(?:WithTimeout)? failed|Connection was likely closed|Application timeout caused pair closure|failed to recv, got 0 bytes)"),
    _row("gloo_timeout", _E, r"Timed out waiting (?P<ms>\d+)ms for (?P<op>recv|send)"),
    # NCCL.
    _row("nccl_duplicate_gpu", _C, r"Duplicate GPU detected ?: ?rank (?P<rank_a>\d+) and rank (?P<rank_b>\d+)"),
    _row("nccl_version", _C, r"[Mm]ismatched NCCL version|NCCL version mismatch with remote peer"),
    _row("nccl_interface", _C, r"no socket interface found|is neither AF_INET\(2\) nor AF_INET6|No interface found"),
    _row("nccl_plugin_absent", _X, r"Could not find: ?\S*libnccl-net"),
    _row("nccl_family", _C, r"NCCL WARN .*Address family not supported"),
    _row("nccl_plugin", _C, r"Couldn't find any optimal provider|network (?P<network>[\w ]+) not found|Only EFA provider is supported"),
    _row("nccl_shm", _C, r"(?:failed to extend|Error while creating shared memory|posix_fallocate failed|shm_open).{0,20}(?P<path>/dev/shm/\S+)?"),
    _row("nccl_memlock", _C, r"ibv_(?:create_cq|reg_mr\S*) failed(?: with error (?P<why>.+))?"),
    _row("nccl_ib", _C, r"ibv_modify_qp failed with (?P<errno>\d+)|NET/IB.*(?:status=|error )(?P<status>\d+)"),
    _row("nccl_mismatch", _C, r"collective mismatch error|Mismatched collective detected"),
    _row("nccl_remote", _E, r"ncclRemoteError|remote process exit|socketProgress|NCCL WARN .*(?:Connection closed|reset by|Broken pipe)|ncclSystemError"),
    _row("nccl_envelope", _E, r"NCCL error in:|DistBackendError|nccl(?:InvalidUsage|InternalError|UnhandledCudaError)\b"),
    _row("watchdog", _E, r"Watchdog caught collective operation timeout.*?SeqNum=(?P<seq>\d+), OpType=(?P<op>\w+)(?:.*?NumelIn=(?P<numel>\d+))?(?:.*?Timeout\(ms\)=(?P<ms>\d+))?"),
    _row("watchdog", _E, r"Watchdog caught collective operation timeout|NCCL operation timed out|Work timed out"),
    _row("watchdog_stuck", _E, r"watchdog got stuck for (?P<s>\d+) seconds"),
    _row("watchdog_abort", _E, r"ProcessGroupNCCL.*(?:abort|taking the (?:entire )?process down)|NCCL watchdog thread terminated with exception(?!.*CUDA error)|[Tt]o avoid data inconsistency"),
    _row("nccl_using", _X, r"Using network (?P<network>\S+)|NET/OFI Selected [Pp]rovider is (?P<provider>\S+)|NCCL version (?P<version>[\d.+cuda]+)|NET/Plugin: (?P<plugin>.+)"),
    _row("nccl_lo", _C, r"Using \[?\d*\]?lo:127\.0\.0\.1"),
    # Collectives that were not the same on all ranks.
    _row("mismatch", _C, r"op\.preamble\.length <= op\.nbytes|Tensor sizes? (?:mis|do(?:es)? not )match.*(?:rank|collective)"),
    _row("mismatch", _C, r"[Dd]etected mismatch between collectives on ranks?\.? Rank (?P<rank_a>\d+) is running collective: (?P<a>.{0,700}?), but Rank (?P<rank_b>\d+)"),
    _row("barrier_missing", _C, r"Ranks? (?P<ranks>[\d, ]+) failed to pass monitoredBarrier"),
    _row("desync", _C, r"ranks? \[?(?P<ranks>[\d, ]+)\]? (?:joined but didn't finish|has(?:n't| not) (?:joined|called))|last enqueued NCCL work: (?P<enqueued>\d+), last completed NCCL work: (?P<completed>\d+)"),
    _row("last_work", _X, r"[Ll]ast enqueued (?:NCCL )?work:? (?P<enqueued>-?\d+)(?:, last started work: .*?)?, last completed (?:NCCL )?work:? (?P<completed>-?\d+)"),
    # The GPU and the program.
    _row("cuda_oom", _C, r"CUDA out of memory|CUDA error: out of memory|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|[Cc]uda failure \d* ?'out of memory'|torch\.(?:cuda\.)?OutOfMemoryError|HIP out of memory"),
    _row("cuda_ordinal", _C, r"invalid device ordinal|You requested gpu: .*|your machine only has: \["),
    _row("no_gpu", _C, r"No CUDA GPUs are available|no (?:CUDA-capable device|GPUs found|NVIDIA driver)|Found no NVIDIA driver|requires at least one CUDA device|Cuda is not available|cudaGetDeviceCount|unsupported display driver|forward compatibility was attempted|(?:not (?:been )?compiled with|doesn't have|without) (?:CUDA|NCCL|GPU)\b(?! errors?\b| graphs?\b)|but torch\.cuda\.is_available\(\) is False|No HIP GPUs are available|CUDA is not available|CUDA driver initialization failed|driver (?:version is insufficient|on your system is too old)"),
    _row("cuda_arch", _C, r"no kernel image is available"),
    _row("cuda_error", _C, r"CUDA error: (?P<text>[^\n.]+)|CUBLAS_STATUS_\w+|CUDNN_STATUS_\w+|device-side assert"),
    _row("shm", _C, r"unable to (?:allocate|open|mmap) shared memory(?!.*(?:open files|denied|annot allocate))|insufficient shared memory|Unexpected bus error"),
    _row("loader_killed", _C, r"DataLoader worker \(pid\(?s?\)? (?P<pid>[\d, ]+)\) (?:is killed by signal: (?P<signal>\w+)|exited unexpectedly)"),
    _row("not_finite", _X, r"loss\w*['\"]?\s*[:=(]?\s*(?:tensor\()?-?(?:nan|inf)\b(?!\s*[=:(])", re.IGNORECASE),
    # Ends of processes.
    _row("child_failed", _X, r"failed \(exitcode: (?P<code>-?\d+)\) local_rank: (?P<local_rank>\d+)"),
    _row("killed_line", _X, r"line \d+: +\d+ (?P<how>Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Terminated)\b"),
    _row("killed_line", _X, r"^(?!\s*(?:Last )?(?:State|Phase|Status|Reason)\b|Fatal Python error).*?(?P<how>Killed|Segmentation fault|Bus error|Aborted|Illegal instruction|Terminated)(?: +\(core dumped\))?\s*(?:(?<=\s\s|\)\s)(?:python|torchrun|srun|mpi|accelerate|deepspeed|\S*/).*|python\S*|torchrun|\S*\.py.*)?$"),
    _row("killed_line", _X, r"(?:^|\d+ +)(?P<how>Speicherzugriffsfehler|Getötet|Erreur de segmentation|Processus arrêté|Violación de segmento|段错误|已杀死)\b"),
    _row("signal_received", _X, r"Signal (?P<signum>\d+) \(SIG(?P<signal>[A-Z]+)\) received by PID|[Rr]eceived (?:Signals\.)?(?P<other>SIG[A-Z]+|\d+ death signal)|Received (?P<number>\d+) death signal"),
    _row("signal_received", _X, r"exited on signal (?P<signum>\d+)|Signal: [A-Z][\w ]+ \((?P<number>\d+)\)|Caught signal (?P<other>\d+)|^\*\*\* (?P<name>SIG[A-Z]+) received (?:at|by) "),
    _row("fatal_python", _C, r"Fatal Python error: (?P<what>.+)|terminate called after throwing an instance of '(?P<type>[^']+)'"),
    _row("final", _E, r"SignalException|ChildFailedError"),
    _row("teardown", _E, r"closing signal SIGTERM|failed to shutdown the rendezvous|Sending process \d+"),
    _row("exit_code", _X, r"(?:[Ee]xit(?:s|ed)?|[Tt]erminated|[Ee]nded|[Rr]eturned)\W{0,2}(?: with)?(?: return| exit| a| non-?zero){0,3} ?(?:status code|[Cc]ode|status)[ =:]+(?P<code>-?(?!0+\b)\d+)|non-?zero exit (?:status|code):? (?P<other>\d+)|\b(?:rc|returncode|return code|exit_code)\W{1,3}(?P<rc>-?(?!0+\b)\d{1,3})\b|\*\*\* \[\S[^\]]*\] Error (?P<make>\d+)|\breturned (?P<returned>[1-9]\d{0,2})(?=[,.;)]|$)"),
    _row("errno", _C, r"\[Errno (?P<errno>\d+)\] (?P<text>[^:]+)(?:: '?(?P<path>/[^']*|[\w./-]+)'?)?"),
    _row("errno", _C, rf"(?:: |^)(?P<text>{_SAID})(?:$| \()", re.IGNORECASE),
    _row("errno", _C, r"(?:\bfork|pthread_create|\bclone|thread).{0,60}: (?P<text>Resource temporarily unavailable|Cannot allocate memory)", re.IGNORECASE),
    # Of any cause: where nothing above fits.
    _row("nccl_warn", _C, r"NCCL WARN (?P<text>.+)"),
    # The last line of a traceback whose frames are not there, or drawn in another way.
    _row("raised_line", _X, r"^(?P<type>(?:\w+\.)*[A-Z]\w*(?:Error|Exception))(?:: (?P<message>.*))?$"),
    _row("raised_line", _X, r"^(?P<type>(?:\w+\.)*[A-Z]\w*(?:Error|Exception))\((?P<quote>['\"])(?P<message>.+)(?P=quote),?\)$"),
    # How it goes on, and what is known of the job.
    _row("root_cause_table", _X, r"Root Cause \(first observed failure\)"),
    _row("table_row", _X, r"^\s*(?P<key>time|host|rank|exitcode|error_file|traceback)\s*: (?P<value>.+)"),
    _row("launch_config", _X, r"^(?:(?:INFO:)?\[?torch\.distributed[\w.]*\]?:? ?(?:\[?INFO\]?)?[ :-]*)?\s*(?P<key>entrypoint|min_nodes|max_nodes|nproc_per_node|run_id|rdzv_backend|rdzv_endpoint|rdzv_configs|max_restarts|log_dir|group_rank|group_world_size|master_addr|master_port|node_rank|role_ranks|global_ranks|world_sizes|global_world_sizes|restart_count)\s*[:=]\s*(?P<value>\S.*)?$"),
    _row("launch_line", _X, r"(?:torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed)\b(?P<options>.*?--?n(?:node|um_machine)s[= ](?P<nnodes>\S+).*)"),
    _row("variable", _X, r"^\s*(?:export |declare -x |\+ )?(?P<name>(?:SLURM|PBS|NCCL|FI|GLOO|TORCH|MASTER|WORLD|CUDA|OMP|LD|UCX|RDZV|NNODES|NODE_RANK)[A-Z0-9_]*)=\"?(?P<value>[^\"]*)\"?"),
    _row("set_by_user", _X, r"(?P<name>NCCL_\w+) set by environment to (?P<value>\S+)"),
    _row("world", _X, r"world[ _]size['\"]?[ :=]+(?P<size>\d+)", re.IGNORECASE),
    _row("world", _X, r"(?<!local)(?<!local[ _])\brank[ :]{1,2}(?P<rank>\d{1,6}) ?(?:/|of) ?(?P<size>\d{1,6})\b", re.IGNORECASE),
    _row("success", _X, r"worker group successfully finished|WorkerState\.SUCCEEDED|\bexits successfully\b|\bState ?[:=] ?COMPLETED\b|[Tt]raining (?:job )?completed|[Ee]xit(?:ed)?(?: with)?(?: status| code)? ?[:=]? ?0\s*$|exit code 0\b"),
    _row("progress", _X, r"\b(?:epochs?|steps?|iter(?:ation)?s?|batch|global_step|update|it)\b\D{0,12}(?P<number>\d+)|(?P<percent>\d{1,3})%\||第 ?(?P<count>\d+) ?(?:轮|步|个)", re.IGNORECASE),
    _row("success", _X, r"^muster: succeeded after \d|^# Out of bounds values +: 0 OK|^\W*Final (?:\w+ )?metrics\W*:"),
    _row("success", _X, r"\b(?:(?:training|fit(?:ting)?) (?:is |has |was )?(?:been )?(?:complete|finished|done|ended|succe)|finished training|all done|(?:finished|completed|ended) successfully|successfully (?:finished|completed|ended)|done in \d|run .* succeeded|100%\|)", re.IGNORECASE),
    # A line that sounds like a failure, whoever wrote it: used where nothing else is known.
    _row("error_line", _X, r"\b(?:fatal|errors?|exception|panic|critical|fail(?:ed|ure|s)?|can(?:no|')t|could(?: no|n')t|unable to|denied|refused|not permitted|invalid|illegal|no such|not found|does not exist|timed out|timeout|exceed(?:ed|s)|killed|abort(?:ed|ing)?|unreachable|corrupt(?:ed)?|rejected|revoked|unsupported|not supported|unrecognized|missing|full|lost|fallen off)\b|[a-z](?:Error|Exception|Failure)\b", re.IGNORECASE),
)
# fmt: on

ROLES = {pattern.kind: pattern.role for pattern in PATTERNS}
_BY_SHAPE = ("raised_line", "error_line")  # these say least
TOLD = "told:"  # before the name of an entry of the catalogue: the kind of an event
_ROLES_BY_TELLS = {
    Tells.NOISE: _X,
    Tells.ECHO: _E,
    Tells.FACT: _X,
    Tells.HINTS: _C,
    Tells.NAMES: _C,
    Tells.PROVES: _C,
}

# A line without any of these means nothing here; looked for before the rows, for speed.
STEMS: tuple[str, ...] = (
    "rror", "RROR", "--- Logging", "xcept", "ailed", "ailure", "imeout", "imed out", "IMEOUT", "TIME LIMIT", "exceeded", "reempt", "PREEMPT",
    "CANCEL", "ancel", "eleted", "oom", "OOM", "ut of memory", "ut Of Memory", "OUT_OF", "Evicted", "low on resource",
    "mage", "anifest", "pull ", "pyxis", "FATAL", "KeyError", "Xid", "ECC", "fallen off", "device", "srun", "slurmstepd", "STEP", "xec format", "cannot", "annot", "not found",
    "No such", "can't", "No module", "usage:", "module", "expected", "EADDRINUSE", "already in use", "clients joined",
    "keys:", "connect", "validate", "got error", "endezvous", "master_addr", "hosts the", "resolve", "not known",
    "servname", "ss_family", "ifa !=", "remote=", "peer", "pipe", "sendBytes", "recv", "Duplicate", "ismatch",
    "interface", "AF_INET", "provider", "rovider", "network", "shm", "/dev/shm", "ibv_", "NET/", "ncclRemote", "socketProgress",
    "Watchdog", "watchdog", "NCCL", "ProcessGroup", "127.0.0.1", "monitoredBarrier", "joined", "enqueued", "CUDA", "HIP",
    "ordinal", "GPU", "NVIDIA", "Cuda", "kernel image", "CUBLAS", "CUDNN", "assert", "shared memory", "us error", "DataLoader",
    "nan", "inf", "NaN", "exitcode", "Killed", "killed", "egmentation", "Aborted", "Illegal", "Terminat", "ignal", "SIG", "Fatal", "pbsdsh",
    "terminate", "what():", "panic", "egmento", "arrêté", "ötet", "griffsfehler", "段错误", "已杀死", "rc=", "returned", "with status", "^C", "ecovered", "econnected", "restored", "ucceeded", " OK", "is back", "is up again", "again", "E0", "E1", "F0", "F1", "Errno", "No space", "quota", "Stale", "open files", "nput/output", "ead-only", "endpoint", "allocate",
    "peicherplatz", "espace dispo", "espacio", "空间", "空き領域", "Root Cause", "exit", "Exit", "orward RPC", "shared object", "undefined symbol", "version `", "ELF", "ermission", "ead-only", "ost key", "reason", "TERM_", "refused", "unreachable", "oute to host", "GLIBC", "raceback", "File \"", "rdzv", "nodes", "entrypoint", "nproc", "run_id", "restart", "log_dir", "group_", "master_",
    "ank ", "ank:", "world", "World", "WORLD", "torchrun", "torch.distributed", "accelerate", "deepspeed", "SLURM", "PBS", "FI_", "GLOO", "TORCH",
    "MASTER", "LD_", "UCX", "NNODES", "set by env", "poch", "POCH", "tep", "iter", "Iter", "atch", "%|", "omplete", "inished", "one", "nknown command", "emporarily", "uccessful", "ucceeded", "$ ", "dmitted", "assigned", "eserved", "executing", "resumed", "equeued", "escheduled", "SUCCEEDED", "COMPLETED", "it=", "it:", "pdate", "第", "TEP", "ITER", "bounds val", "inal ",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What a line means: the kind of event that it is, its role in the story, what it names."""

    kind: str
    role: LineRole
    fields: Mapping[str, str]


# A line without any word of failure, of which its logger says that it is one.
SAID_TO_BE_AN_ERROR = Meaning(kind="error_line", role=_X, fields={})


def match(text: str, *, is_raised: bool = False) -> Meaning | None:
    """Return what a line, or the last line of an exception, means; None when it means nothing.

    What names a cause in the catalogue says more than any row here, and any row more than a hint of the catalogue.
    """
    known = CATALOGUE.find(text, is_raised=is_raised)
    if known is not None and known[0].tells is not Tells.HINTS:
        return _as_meaning(*known)
    # Lines that only the catalogue's words let through are most, where those words are common.
    rows = PATTERNS if is_raised or _ANY_STEM.search(text) is not None else ()
    for pattern in rows:
        found = pattern.regex.search(text)
        if found is not None:
            if known is not None and pattern.kind in _BY_SHAPE:
                break
            return Meaning(kind=pattern.kind, role=pattern.role, fields=fields_of(found))
    return _as_meaning(*known) if known is not None else None


def _as_meaning(entry: KnownMessage, fields: Mapping[str, str]) -> Meaning:
    if entry.kind:
        kind, role = entry.kind, ROLES.get(entry.kind, _ROLES_BY_TELLS[entry.tells])
    else:
        kind, role = f"{TOLD}{entry.name}", _ROLES_BY_TELLS[entry.tells]
    return Meaning(kind=kind, role=role, fields=fields)


def fields_of(found: re.Match[str]) -> dict[str, str]:
    """Return the named groups that took part."""
    return {name: value for name, value in found.groupdict().items() if value}


def one_of(words: Iterable[str]) -> str:
    """Return a regular expression that finds any of the words: as a tree, in which each letter is looked at once."""
    heads: dict[str, list[str]] = {}
    for word in sorted(set(words)):
        heads.setdefault(word[:1], []).append(word[1:])
    if "" in heads:
        return ""  # one ends here: what is longer adds nothing
    parts = [re.escape(head) + one_of(tails) for head, tails in heads.items()]
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"


_ANY_STEM = re.compile(one_of(STEMS))
_ANY_WORD = re.compile(one_of(CATALOGUE.stems))


def may_mean_something(text: str) -> bool:
    """Say whether a line is worth the rows."""
    return _ANY_STEM.search(text) is not None or _ANY_WORD.search(text.lower()) is not None


PROGRESS = next(pattern for pattern in PATTERNS if pattern.kind == "progress")


class _AnyOf:
    """Any of many pieces of words: their ends are looked for first, which is quick and seldom in vain."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self._end = re.compile(one_of(cut_to_few_beginnings(pieces)).encode())
        self._whole = re.compile(one_of(pieces).encode())

    def is_in(self, text: bytes) -> bool:
        """Say whether a text has one."""
        return self._end.search(text) is not None and self._whole.search(text) is not None


@cache
def _any_stem() -> _AnyOf:
    # A stem of several words is told by its longest.
    return _AnyOf({max(stem.split(), key=len) for stem in STEMS})


@cache
def _any_word() -> _AnyOf:
    return _AnyOf(CATALOGUE.stems)


class WordFilter:
    """Knows words that no stem is in: a line of such words only means nothing, and costs no more than its words."""

    def __init__(self) -> None:
        self._harmless: set[bytes] = set()
        self._stems = _any_stem()
        self._words = _any_word()

    def is_harmless(self, shape: bytes) -> bool:
        """Say whether a line, its digits made zeros, can't mean anything."""
        harmless = self._harmless
        words = shape[:_MAX_LINE_BYTES].split()
        if harmless.issuperset(words):
            return True
        unknown = [word for word in words if word not in harmless]
        text = b" ".join(unknown)
        if self._stems.is_in(text) or self._words.is_in(text.lower()):
            return False
        if len(harmless) + len(unknown) > _MAX_WORDS:
            harmless.clear()  # words that come often are soon known again
        harmless.update(word for word in unknown if len(word) <= _MAX_WORD_BYTES)
        return True
