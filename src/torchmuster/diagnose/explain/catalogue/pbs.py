"""OpenPBS and Torque with Moab, LSF, Grid Engine, HTCondor.

Sources: OpenPBS 19 to 23.06 src/lib/Liblog/pbs_messages.c, src/resmom, src/cmds; Torque 4 to 6; the manuals of LSF 10
(bjobs, termination reasons), Grid Engine 8 (sge_status, qacct), HTCondor 9 to 24 (hold codes).
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_pbs = partial(
    KnownMessage,
    source="OpenPBS 19 to 23.06, src/lib/Liblog/pbs_messages.c; Torque 4 to 6",
    tells=Tells.PROVES,
)
_lsf = partial(
    KnownMessage,
    source="LSF 9 to 10.1, bjobs and the report of a job",
    tells=Tells.PROVES,
)
_sge = partial(KnownMessage, source="Grid Engine 6 to 8, qsub, qacct, mails", tells=Tells.PROVES)
_condor = partial(
    KnownMessage,
    source="HTCondor 8.8 to 24, job log and HoldReason",
    tells=Tells.PROVES,
)

ENTRIES: tuple[KnownMessage, ...] = (
    # OpenPBS and Torque: what qsub is answered.
    _pbs(
        name="pbs.queue",
        wordings=(
            r"(?:qsub|qmove|qalter|pbs_submit)\S*: .*Unknown queue",
            r"Access to queue is denied",
            r"Queue is not enabled",
            r"(?:qsub|qmove): .*(?:Invalid Account|No default queue specified)",
        ),
        cause="account",
        error="PBS did not take the job: the queue or account is unknown, closed, or not for you: {words:.160}",
        advice="name a queue that is open to you (-q) and your project (-A or -P)",
        confirm="qstat -Qf | grep -E '^Queue|enabled|acl_'",
    ),
    _pbs(
        name="pbs.limits",
        wordings=(
            r"Job violates queue and/or server resource limits",
            r"Job exceeds queue (?:and/or server )?resource limits",
            r"would exceed (?:queue|complex|user|group|project)\S* .*(?:limit|resource)",
            r"Maximum number of jobs (?:for \S+ \S+ )?already in (?:queue|complex)",
            r"Resource limit exceeds allowable",
            r"Maximum number of .*jobs already in",
        ),
        cause="site-limits",
        error="PBS refused the job: it is over a limit of the queue or the user: {words:.160}",
        advice="ask for less walltime or fewer nodes, another queue, or submit fewer jobs",
        confirm="qstat -Qf QUEUE | grep -E 'resources_max|max_'",
    ),
    _pbs(
        name="pbs.resource",
        wordings=(
            r"Unknown resource(?: type)?:? (?P<name>\S+)",
            r"Illegal attribute or resource value(?: for (?P<name2>\S+))?",
            r"Resource invalid in \"?(?P<name3>select|place)",
            r"cannot be used with \"?(?:select|place)",
            r"Cannot be used with select or place",
        ),
        tells=Tells.PROVES,
        cause="bad-arguments",
        error="PBS does not know a resource as it was written {name}{name2}{name3}",
        advice="write -l select=NODES:ncpus=C:ngpus=G:mem=M with the names of this site; -l nodes=..:ppn=.. is Torque's",
        confirm="pbsnodes -a | grep resources_available | sort | uniq -c",
    ),
    _pbs(
        name="pbs.never-run",
        wordings=(
            r"Can Never Run: (?P<why>.+)",
            r"Insufficient amount of (?:resource|server resource|queue resource): (?P<why2>.+)",
            r"cannot locate feasible nodes",
            r"[Nn]o (?:nodes|feasible nodes) (?:can satisfy|available).*(?:request|policy)",
        ),
        tells=Tells.PROVES,
        cause="impossible-request",
        error="PBS finds no nodes that could run the job {why}{why2}",
        advice="lower ncpus, ngpus and mem of one chunk to what one node has, and the number of chunks to the queue's nodes",
        confirm="pbsnodes -aSj; qstat -f JOB | grep comment",
    ),
    _pbs(
        name="pbs.not-running",
        wordings=(r"Not Running: (?P<why>.+)",),
        tells=Tells.HINTS,
        cause="no-capacity",
        error="the job waits: {why}",
        advice="wait, or ask for less",
        confirm="qstat -f JOB | grep -E 'comment|estimated'",
    ),
    _pbs(
        name="pbs.server",
        wordings=(
            r"(?:qsub|qstat|qdel|pbs_\w+): cannot connect to server (?P<host>\S+)",
            r"Communication failure\.\s*(?:qsub|qstat|pbs)",
            r"pbs_iff: (?:cannot|error)",
        ),
        tells=Tells.PROVES,
        cause="scheduler-unreachable",
        error="the server of PBS did not answer {host}",
        advice="try again later, on a machine that may submit; in a container PBS's commands need /etc/pbs.conf and munge",
        confirm="qstat -B; cat /etc/pbs.conf",
    ),
    _pbs(
        name="pbs.dependency",
        wordings=(
            r"Job deleted as result of dependency on job (?P<job>\S+)",
            r"Dependency request for job rejected",
            r"Invalid Job Dependency",
        ),
        cause="dependency",
        error="the job depended on another that did not end as asked {job}",
        advice="look why the other one failed; afterany instead of afterok starts in every case",
        confirm="qstat -xf OTHER | grep Exit_status",
    ),
    _pbs(
        name="pbs.script-too-large",
        wordings=(
            r"(?:qsub: )?(?:script file:|script_file:) ?(?P<path>\S*) ?(?:No such file|.*cannot be loaded)",
            r"qsub: (?:script not a file|illegal -\w value|directive error: (?P<why>.+))",
            r"qsub: unknown option|qsub: invalid option",
        ),
        cause="bad-arguments",
        error="qsub refused the script or an option {path}{why}",
        advice="correct the #PBS line or option that it names",
    ),
    # How PBS and Torque end jobs.
    _pbs(
        name="pbs.walltime",
        wordings=(
            r"Job exceeded resource (?:walltime|cput)",
            r"job violates resource utilization policies.*(?:WALLTIME|walltime)",
            r"(?:MOAB|moab).*(?:wall ?clock|walltime) (?:limit )?(?:exceeded|violation)",
            r"Exit_status ?= ?-29\b",
        ),
        kind="time_limit",
    ),
    _pbs(
        name="pbs.memory",
        wordings=(
            r"Job exceeded resource v?mem",
            r"job violates resource utilization policies.*MEM",
            r"(?:MOAB|moab|Moab).*(?:mem|memory|swap) (?:limit )?(?:exceeded|violation)",
            r"Cgroup (?:mem|memsw) limit exceeded",
            r"Exit_status ?= ?-2[67]\b",
        ),
        kind="oom_proof",
    ),
    _pbs(
        name="pbs.ncpus",
        wordings=(r"Job exceeded resource (?P<why>ncpus.*)",),
        kind="pbs_killed",
    ),
    _pbs(
        name="pbs.requeued",
        wordings=(
            r"Job (?:was )?requeued|[Jj]ob rerun at request",
            r"hook rejected request, requiring job to be rerun",
            r"Exit_status ?= ?-1[14568]\b",
        ),
        tells=Tells.NAMES,
        cause="requeued",
        error="PBS put the job back into the queue: a node failed, a hook refused, or somebody asked for it",
        advice="let it run again and continue from its last checkpoint; tell the site if it repeats",
        confirm="tracejob JOB",
    ),
    _pbs(
        name="pbs.hook",
        wordings=(
            r"hook rejected request, requiring job to be deleted",
            r"request rejected (?:as filter|by filter) hook[^:]*: ?(?P<why>.*)",
            r"execjob_(?:begin|prologue|launch) (?:request|hook).*(?:rejected|failed|error)",
            r"Job (?:held|rejected), too many failed attempts to run",
            r"Job cannot be executed",
            r"prologue? (?:failed|exited|script).*(?:fail|non-?zero|error)",
        ),
        tells=Tells.NAMES,
        cause="node-setup",
        error="a hook or prolog of the site did not let the job start: {words:.160}",
        advice="read the hook's own words in the job's output; else exclude the node and tell the site",
        confirm="qstat -xf JOB | grep -E 'comment|exec_host'; tracejob JOB",
    ),
    _pbs(
        name="pbs.stage",
        wordings=(
            r"Post job file processing error; job (?P<job>\S+) on host (?P<host>\S+)",
            r"Unable to copy file (?P<path>\S+) to",
            r"Stage In of files failed",
        ),
        tells=Tells.HINTS,
        cause="permission",
        error="PBS could not copy files of the job: its output, or what was to be staged {path}",
        advice="write -o and -e to folders that exist and that the node may write; ssh without a password between nodes may be needed",
        advice_in={
            "anywhere": "see whether the job ran on {host} at all (tracejob {job}): if its output was never there, leave the node out and tell the site; else write -o and -e to folders that exist and that the node may write"
        },
    ),
    _pbs(
        name="pbs.tm",
        wordings=(
            r"pbsdsh\S*: .*(?:TM_\w+|tm_init|tm_spawn|error from)",
            r"tm_init failed|tm_spawn failed|tm_poll.*failed",
        ),
        tells=Tells.NAMES,
        cause="launch-failed",
        error="PBS's own launcher could not start a program on a node: {words:.160}",
        advice="start it from inside of the job only, with full paths; exclude a node that fails alone",
        confirm="pbsdsh -- hostname",
    ),
    # LSF.
    _lsf(
        name="lsf.memory",
        wordings=(r"TERM_(?:MEMLIMIT|SWAP)\b", r"job killed after reaching LSF (?:memory|swap)"),
        kind="oom_proof",
    ),
    _lsf(
        name="lsf.time",
        wordings=(
            r"TERM_(?:RUNLIMIT|DEADLINE|CPULIMIT)\b",
            r"job killed after reaching LSF (?:run time|CPU) limit",
        ),
        kind="time_limit",
    ),
    _lsf(name="lsf.preempted", wordings=(r"TERM_PREEMPT\b",), kind="preempted"),
    _lsf(
        name="lsf.cancelled",
        wordings=(
            r"TERM_(?:OWNER|BUCKET_KILL|ADMIN|FORCE_OWNER|FORCE_ADMIN|REQUEUE_OWNER|REQUEUE_ADMIN)\b",
            r"job killed by (?:owner|root or LSF administrator)",
        ),
        kind="cancelled",
    ),
    _lsf(
        name="lsf.node",
        wordings=(r"TERM_(?:ZOMBIE|LOAD|RMS)\b", r"job (?:lost|host).*(?:unreachable|unreach)"),
        tells=Tells.NAMES,
        cause="node-failed",
        error="LSF lost the node of the job, or took it away for its load",
        advice="exclude the host (-R 'select[hname!=NAME]') and start again",
        confirm="bhist -l JOB",
        rivals=("scheduler-ended",),
    ),
    _lsf(
        name="lsf.limits-of-processes",
        wordings=(r"TERM_(?:PROCESSLIMIT|THREADLIMIT|DISK|FILELIMIT)\b",),
        cause="site-limits",
        error="LSF ended the job: it went over a limit of processes, threads or files: {words:.120}",
        advice="use fewer loader workers and threads (OMP_NUM_THREADS=1), or ask the site for a higher limit",
        confirm="bhist -l JOB",
    ),
    _lsf(
        name="lsf.bucket",
        wordings=(r"TERM_(?:PRE_EXEC_FAIL|CWD_NOTEXIST|PROV_FAIL|CSM_ALLOC)\b",),
        cause="node-setup",
        error="LSF could not start the job on its node: {words:.120}",
        advice="check that the working folder exists there; else exclude the host and tell the site",
        confirm="bhist -l JOB",
    ),
    _lsf(
        name="lsf.refused",
        wordings=(
            r"(?:No such queue|User cannot use the queue|Queue (?:has been closed|does not accept)|Bad (?:resource requirement|host) (?:syntax|name)|Project \S+ (?:not|is not)).*Job not submitted",
            r"(?P<why>.+)\. Job not submitted\.?",
        ),
        cause="bad-arguments",
        error="LSF did not take the job: {words:.200}",
        advice="correct the option of bsub that it names; bqueues lists the queues",
        confirm="bqueues -u $USER",
    ),
    # Grid Engine.
    _sge(
        name="sge.no-queue",
        wordings=(
            r"no suitable queues",
            r"job was rejected because .*(?:queue|request|resource|project|because of).*",
        ),
        cause="impossible-request",
        error="Grid Engine has no queue that could ever run the job: {words:.160}",
        advice="correct -q, -pe and -l to names and sizes of this site",
        confirm="qstat -g c; qconf -spl; qsub -w v ...",
    ),
    _sge(
        name="sge.unknown-resource",
        wordings=(
            r"unknown resource \"(?P<name>[^\"]+)\"",
            r"parallel environment \"(?P<name2>[^\"]+)\" does not exist",
            r"queue \"(?P<name3>[^\"]+)\" does not exist",
        ),
        cause="bad-arguments",
        error="Grid Engine does not know {name}{name2}{name3}",
        advice="use a name that exists",
        confirm="qconf -sc; qconf -spl; qconf -sql",
    ),
    _sge(
        name="sge.time",
        wordings=(
            r"(?:exceeded|reached) (?:hard )?(?:wallclock|cpu|h_rt|h_cpu) (?:time|limit)",
            r"failed +(?:37|44) .*(?:qmaster enforced|h_rt|h_cpu)",
            r"assumedly .*because of (?:hard |soft )?(?:h_rt|h_cpu|s_rt|wallclock)",
        ),
        kind="time_limit",
    ),
    _sge(
        name="sge.memory",
        wordings=(
            r"job \S+ exceeds job (?:hard|soft) limit \"?(?:h_vmem|s_vmem|h_rss|m_mem_free)",
            r"exceeds job master hard limit \"?h_vmem",
        ),
        kind="oom_proof",
    ),
    _sge(
        name="sge.before-job",
        wordings=(
            r"failed +\d+ +: (?P<why>(?:before|opening|can't|searching|changing|in|setting|assumedly) .+)",
            r"failed (?P<why2>(?:opening input/output file|changing into working directory|searching requested shell|before (?:job|prolog|pestart|writing)|in (?:prolog|pestart))\b.*)",
            r"error: can't (?:open output file|chdir to|stat) \"?(?P<path>[^\":]+)",
        ),
        tells=Tells.NAMES,
        cause="node-setup",
        error="Grid Engine could not start the job on its node: {why}{why2}{path}",
        advice="check that the working folder, the output's folder and the shell (-S /bin/bash) exist there, and that their file systems are not full",
        confirm="qacct -j JOB | grep -E 'failed|exit_status|hostname'; qstat -j JOB | grep error",
        rivals=("file-missing", "permission", "quota"),
    ),
    # HTCondor.
    _condor(
        name="condor.memory",
        wordings=(
            r"(?:Job|The job|slot) has gone over (?:cgroup )?memory limit",
            r"[Mm]emory usage (?:of \S+ )?(?:has )?(?:exceed\w+|gone over)",
            r"[Jj]ob has gone over memory",
        ),
        kind="oom_proof",
    ),
    _condor(
        name="condor.disk",
        wordings=(
            r"(?:job|disk).{0,20}(?:has )?(?:exceeded|gone over) (?:allocated |requested |its )?disk",
            r"disk usage (?:has )?exceeded request_disk",
            r"DISK_EXCEEDED",
        ),
        cause="quota",
        error="HTCondor held the job: it used more disk than it had asked for",
        advice="raise request_disk in the submit file, or write less into the job's folder",
        confirm="condor_q -hold; condor_history -l JOB | grep -i disk",
    ),
    _condor(
        name="condor.time",
        wordings=(
            r"(?:[Jj]ob|The job) (?:exceeded|has exceeded|ran longer than) (?:allowed|maximum|its).*(?:duration|wall ?time|run ?time)",
            r"allowed_(?:execute|job)_duration",
        ),
        kind="time_limit",
    ),
    _condor(
        name="condor.transfer",
        wordings=(
            r"Transfer (?:input|output) files failure(?P<why>.*)",
            r"(?:SHADOW|STARTER|shadow|starter) (?:at \S+ )?failed to (?:receive|send) file\(?s?\)?",
            r"FILETRANSFER:\d+:.*(?:fail|error)",
        ),
        cause="file-missing",
        error="HTCondor could not bring the job's files in or out {why}",
        advice="correct transfer_input_files and transfer_output_files: each has to exist when it is copied",
        confirm="condor_q -hold",
        tells=Tells.NAMES,
        rivals=("download-failed", "disk-full", "permission"),
    ),
    _condor(
        name="condor.execute",
        wordings=(
            r"(?:STARTER|starter) (?:at \S+ )?failed to execute '(?P<path>[^']+)'",
            r"Failed to execute '(?P<path2>[^']+)'.*: \(errno=(?P<errno>\d+)",
        ),
        cause="command-missing",
        error="HTCondor could not start the program {path}{path2} on its node",
        advice="make it executable, with an interpreter that the node has in its first line; transfer it with the job",
        tells=Tells.NAMES,
        rivals=("wrong-processor", "permission"),
    ),
    _condor(
        name="condor.evicted",
        wordings=(r"Job was evicted", r"Job reconnection failed"),
        tells=Tells.NAMES,
        cause="scheduler-ended",
        error="HTCondor took the job off its machine, or lost it: the event does not say why",
        advice="condor_history -l JOB and the job log name the reason; save checkpoints, HTCondor starts the job again",
    ),
    _condor(
        name="condor.held",
        wordings=(r"(?:Job was held|HoldReason ?= ?\"(?P<why>[^\"]+))",),
        tells=Tells.HINTS,
        cause="scheduler-ended",
        error="HTCondor holds the job {why}",
        advice="read the reason, correct it, then condor_release JOB",
        confirm="condor_q -hold",
    ),
)
