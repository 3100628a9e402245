"""Slurm before a step starts: sbatch, salloc, the controller, reasons of waiting, states in the accounting.

Sources: Slurm 19.05 to 26.05 src/common/slurm_errno.c, job_reason_codes.c, src/sbatch, src/salloc, src/plugins/auth/munge.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_answer = partial(
    KnownMessage,
    source="Slurm 19.05 to 26.05, src/common/slurm_errno.c",
    tells=Tells.PROVES,
)
_option = partial(
    KnownMessage,
    source="Slurm 19.05 to 26.05, src/sbatch, src/common/slurm_opt.c",
    tells=Tells.PROVES,
    cause="bad-arguments",
)
_state = partial(
    KnownMessage,
    source="Slurm 19.05 to 26.05, sacct, scontrol show job, seff",
    tells=Tells.PROVES,
)
_REQUEST = r"(?:submission failed|allocate resources|create step for job|[Aa]llocation failure).*: (?:Job \S+ )?"

ENTRIES: tuple[KnownMessage, ...] = (
    # What the controller answers to a request.
    _answer(
        name="slurm.account",
        wordings=(
            r"Invalid account or account/partition combination",
            r"Invalid or unknown association",
        ),
        cause="account",
        error="Slurm does not know this account, or the account may not use this partition",
        advice="name an account that you belong to, e.g. --account=PROJECT; SLURM_ACCOUNT and SBATCH_ACCOUNT count too",
        confirm="sacctmgr -s show assoc user=$USER format=account,partition,qos",
    ),
    _answer(
        name="slurm.partition",
        wordings=(
            r"[Ii]nvalid partition(?: name)? specified(?:: (?P<name>\S+))?",
            r"No partition specified or system default partition",
        ),
        cause="account",
        error="Slurm has no partition of this name {name}, or none was named and there is no default",
        advice="name one that exists with --partition",
        confirm="sinfo -s",
    ),
    _answer(
        name="slurm.partition-closed-to-you",
        wordings=(
            r"User's group not permitted to use this partition",
            r"\((?:AccountNotAllowed|QOSNotAllowed)\)",
        ),
        cause="account",
        error="your account, group or QOS may not use this partition",
        advice="choose another --partition, or the --account and --qos that the site gave you for it",
        confirm="scontrol show partition NAME   (AllowAccounts, AllowGroups, AllowQos)",
    ),
    _answer(
        name="slurm.partition-down",
        wordings=(
            r"Required partition not available",
            r"Partition in DOWN state",
            r"\((?:PartitionDown|PartitionInactive)\)",
        ),
        cause="no-capacity",
        error="the partition is closed at present",
        advice="wait for the site to open it, or name another with --partition",
        confirm="sinfo -s; scontrol show reservation",
    ),
    _answer(
        name="slurm.qos",
        wordings=(r"Invalid qos specification", r"\(InvalidQOS\)"),
        cause="account",
        error="Slurm does not know this QOS, or the account may not use it",
        advice="name one of your account's with --qos, or leave it out",
        confirm="sacctmgr -s show assoc user=$USER format=account,qos%40",
    ),
    _answer(
        name="slurm.policy",
        wordings=(
            r"Job violates accounting/QOS policy",
            r"MaxJobCount limit reached",
            r"Requested account has breached requested QOS usage threshold",
        ),
        cause="site-limits",
        error="Slurm refused the job: it is over a limit of the account or QOS (jobs submitted, size or time)",
        advice="ask for less time, fewer nodes or GPUs, or submit fewer jobs at a time",
        confirm="sacctmgr show qos format=name,maxwall,maxtrespu%40,maxsubmitpu",
    ),
    _answer(
        name="slurm.waits-for-limit",
        wordings=(
            r"\b(?P<reason>(?:AssocGrp|AssocMax|QOSGrp|QOSMax|QOSMin)\w+|PartitionTimeLimit|PartitionNodeLimit|AssociationJobLimit|AssociationResourceLimit)\b",
            r"\((?P<reason2>QOS\w+Limit\w*)\)",
        ),
        tells=Tells.NAMES,
        cause="site-limits",
        error="the job waits because of a limit of its account, QOS or partition: {reason}{reason2}",
        advice="ask for less, or wait until your other jobs end; Partition*Limit never goes away by waiting",
        confirm="scontrol show job JOB | grep -E 'Reason|TimeLimit|TRES'",
    ),
    _answer(
        name="slurm.time-invalid",
        wordings=(r"Requested time limit is invalid", r"Invalid time-min specification"),
        cause="site-limits",
        error="the time asked for is missing, or longer than the partition allows",
        advice="set --time within the limit of the partition",
        confirm="sinfo -o '%P %l'",
    ),
    _answer(
        name="slurm.no-such-nodes",
        wordings=(
            r"Unable to allocate resources: Requested node configuration is not available",
            r"Batch job submission failed: Requested node configuration is not available",
            r"Requested partition configuration not available now",
        ),
        cause="impossible-request",
        error="no node of this partition has what the job asks for: so many CPUs, GPUs, so much memory, or this feature",
        advice="lower --mem, --cpus-per-task or GPUs per node to what a node has, or choose another partition",
        confirm="sinfo -N -o '%N %c %m %G %f' -p PARTITION",
    ),
    _answer(
        name="slurm.node-count",
        wordings=(r"Node count specification invalid", r"Task count specification invalid"),
        cause="impossible-request",
        error="the number of nodes or tasks does not fit the partition, the job, or each other",
        advice="make --nodes, --ntasks and --ntasks-per-node agree; srun cannot ask for more nodes than its job has",
        confirm="echo $SLURM_JOB_NUM_NODES $SLURM_NTASKS; scontrol show partition NAME | grep -i nodes",
    ),
    _answer(
        name="slurm.node-name",
        wordings=(
            r"Invalid node name specified",
            r"Invalid node list [`'](?P<name>[^'`]+)",
            r"Requested nodes not in this partition",
            r"Requested node(?:list)? \S+ (?:is also|overlaps with) excluded",
        ),
        cause="impossible-request",
        error="a node that was named does not exist, is not in the partition, or is excluded as well {name}",
        advice="correct --nodelist and --exclude",
        confirm="scontrol show hostnames LIST; sinfo -N -p PARTITION",
    ),
    _answer(
        name="slurm.too-many-cpus",
        wordings=(
            r"More processors requested than permitted",
            r"CPU count specification invalid",
        ),
        cause="impossible-request",
        error="more CPUs were asked for than there are: tasks times --cpus-per-task is larger than the job or the node",
        advice="lower --ntasks-per-node or --cpus-per-task; one task per node is enough for torchrun",
        confirm="scontrol show job $SLURM_JOB_ID | grep -E 'NumCPUs|CPUs/Task'",
    ),
    _answer(
        name="slurm.gres",
        wordings=(
            r"Invalid generic resource \(gres\) specification",
            r"Invalid GRES specification",
            r"Invalid Trackable RESource",
            r"Duplicate generic resource",
        ),
        cause="impossible-request",
        error="Slurm does not know the GPUs in the form in which they were asked for",
        advice="write them as the site names them, e.g. --gres=gpu:a100:4 or --gpus-per-node=4, either with or without the type",
        confirm="sinfo -o '%P %G' | sort -u",
    ),
    _answer(
        name="slurm.gres-of-step",
        wordings=(r"Insufficient GRES available in allocation",),
        cause="impossible-request",
        error="srun asked for more GPUs than its job was given on a node",
        advice="ask for the GPUs in the job (#SBATCH --gpus-per-node), and for no more in srun",
        confirm="scontrol -d show job $SLURM_JOB_ID | grep GRES",
    ),
    _answer(
        name="slurm.feature",
        wordings=(
            r"Invalid feature specification",
            r"--batch option is invalid or not a subset of --constraint",
        ),
        cause="impossible-request",
        error="no node has the feature that --constraint names",
        advice="use a feature that exists",
        confirm="sinfo -o '%f' | sort -u",
    ),
    _answer(
        name="slurm.step-memory",
        wordings=(r"Memory required by task is not available",),
        cause="impossible-request",
        error="a step asked for more memory than is left of the job's",
        advice="srun --mem=0 takes what the job has; another step may hold it: add --overlap",
        confirm="scontrol show job $SLURM_JOB_ID | grep -i mem",
    ),
    _answer(
        name="slurm.reservation",
        wordings=(
            r"Requested reservation (?:is invalid|not usable now|is in use)",
            r"Access denied to requested reservation",
            r"\(ReservationDeleted\)",
        ),
        cause="account",
        error="the reservation is unknown, not yet or no longer open, or not for you",
        advice="correct --reservation, or leave it out",
        confirm="scontrol show reservation",
    ),
    _answer(
        name="slurm.access-denied",
        wordings=(rf"{_REQUEST}Access/permission denied", r"System submissions disabled"),
        tells=Tells.NAMES,
        cause="account",
        error="the controller does not let this user do it: {words:.200}",
        advice="check that your account is active, and that the job is yours",
        confirm="sacctmgr -s show user $USER",
    ),
    _answer(
        name="slurm.maintenance",
        wordings=(
            r"ReqNodeNotAvail, (?:Reserved for maintenance|May be reserved)",
            r"Job can not start due to maintenance reservation",
        ),
        cause="no-capacity",
        error="the job does not fit before a maintenance: its time limit would reach into it",
        advice="ask for less --time, or wait until the maintenance is over",
        confirm="scontrol show reservation",
    ),
    _answer(
        name="slurm.nodes-away",
        wordings=(
            r"ReqNodeNotAvail",
            r"Required nodes? not available \(down, drained or reserved\)",
            r"Nodes required for job are DOWN, DRAINED or reserved",
        ),
        tells=Tells.NAMES,
        cause="no-capacity",
        error="nodes that the job needs are down, drained or reserved",
        advice="wait, or drop --nodelist",
        confirm="sinfo -R",
    ),
    _answer(
        name="slurm.dependency",
        wordings=(
            r"DependencyNeverSatisfied",
            r"Job dependency (?:problem|can't be satisfied)",
            r"Circular job dependency",
        ),
        cause="dependency",
        error="the job depends on another that cannot end as asked (it failed, or does not exist)",
        advice="look why the other one failed; afterany instead of afterok starts in every case",
        confirm="scontrol show job JOB | grep Dependency; sacct -j OTHER -o State,ExitCode",
    ),
    _answer(
        name="slurm.requeued-and-held",
        wordings=(
            r"launch[ _]failed[ _]requeued[ _]held",
            r"job requeued in held state",
            r"\((?:JobHoldMaxRequeue|JobLaunchFailure)\)",
        ),
        cause="node-setup",
        error="Slurm could not start the job on its nodes and has put it back, held",
        advice="exclude the node that failed and release it: scontrol release JOB; tell the site",
        confirm="scontrol show job JOB | grep -E 'Reason|NodeList|Restarts'; sinfo -R",
    ),
    _answer(
        name="slurm.controller",
        wordings=(r"Unable to contact slurm controller",),
        cause="scheduler-unreachable",
        error="Slurm's controller did not answer",
        advice="try again later; in a container, mount slurm.conf and the munge socket, or submit from outside",
        confirm="scontrol ping",
    ),
    _answer(
        name="slurm.slow-controller",
        wordings=(
            r"Socket timed out on send/recv operation",
            r"Zero Bytes were transmitted or received",
            r"Rate limit exceeded, please retry",
        ),
        tells=Tells.HINTS,
        cause="scheduler-unreachable",
        error="Slurm's controller was too busy to answer",
        advice="start fewer steps and ask less often (squeue in a loop); then try again",
        confirm="sdiag | head -20; scontrol ping",
    ),
    _answer(
        name="slurm.munge",
        wordings=(
            r"[Mm]unge (?:encode|decode) failed: (?P<why>(?!.*(?:Rewound|Expired) credential|.*retrying).+)",
            r"(?:auth_g|g_slurm_auth)_(?:create|verify|pack|unpack):? .*(?P<why2>authentication|failed|not)",
            r"If munged is up, restart with --num-threads",
            r"Protocol authentication error",
        ),
        cause="scheduler-authentication",
        error="munge, which Slurm authenticates with, does not work on this machine {why}",
        advice="the site has to restart munged there, or set its clock; in a container, mount /run/munge",
        confirm="munge -n | unmunge; date",
    ),
    _answer(
        name="slurm.munge-clock",
        wordings=(r"(?:[Mm]unge|[Cc]redential).*(?:Rewound|Expired) credential",),
        tells=Tells.NAMES,
        cause="scheduler-authentication",
        error="a credential of munge was too old, or from the future",
        advice="exclude the node whose clock is wrong and tell the site",
        confirm="srun --ntasks-per-node=1 date",
    ),
    _answer(
        name="slurm.config-source",
        wordings=(
            r"Could not establish a configuration source",
            r"resolve_ctls_from_dns_srv: res_nsearch error",
            r"Unable to process configuration file",
        ),
        cause="scheduler-unreachable",
        error="Slurm's commands find no configuration that they can use on this machine",
        advice="call them on a login node, outside of the container, or mount /etc/slurm into it",
        confirm="echo $SLURM_CONF; ls -l /etc/slurm/slurm.conf",
    ),
    _answer(
        name="slurm.job-gone",
        wordings=(
            r"Expired or invalid job (?P<job>\d+)",
            r"Unable to confirm allocation for job (?P<job2>\d+): Invalid job id",
            r"slurm_load_jobs error: Invalid job id",
        ),
        tells=Tells.NAMES,
        cause="srun-launch",
        error="the job {job}{job2} that SLURM_JOB_ID names is not there any more",
        advice="it had ended, or the variable is left from another shell: unset SLURM_JOB_ID SLURM_JOBID, or submit anew",
        confirm="squeue -j $SLURM_JOB_ID; sacct -j $SLURM_JOB_ID -o State,End",
        rivals=("time-limit", "cancelled"),
    ),
    _answer(
        name="slurm.unresolved-node",
        wordings=(
            r"Can't find an address, check slurm\.conf",
            r"(?:error|fatal): .*Unable to resolve \"(?P<host>[^\"]+)\"",
        ),
        cause="name-not-resolved",
        error="Slurm cannot resolve the name of a node {host}",
        advice="the site has to correct DNS or slurm.conf; exclude the node until then",
        confirm="getent hosts NODE",
    ),
    # What sbatch and srun refuse themselves.
    _option(
        name="slurm.no-script",
        wordings=(r"sbatch: error: Unable to open file (?P<path>\S+)",),
        cause="script-missing",
        error="sbatch could not open the job script {path}",
        advice="give the path of a script that exists",
    ),
    _option(
        name="slurm.no-shebang",
        wordings=(
            r"This does not look like a batch script",
            r"the first line must start with #! followed by the path",
        ),
        error="the first line of the job script is not #!/bin/bash",
        advice="begin the script with #!/bin/bash, in the very first line; for one command use --wrap",
    ),
    _option(
        name="slurm.dos-script",
        wordings=(r"Batch script contains DOS line breaks",),
        error="the job script has Windows line ends",
        advice="convert it: dos2unix SCRIPT, or sed -i 's/\\r$//' SCRIPT",
    ),
    _option(
        name="slurm.option",
        wordings=(
            r"(?:sbatch|srun|salloc): (?:unrecognized|ambiguous|invalid) option:? (?P<why>.+)",
            r"(?:sbatch|srun|salloc): option .* (?P<why2>requires an argument|is ambiguous)",
            r"Invalid directive found in batch script: (?P<why3>.+)",
            r"(?:sbatch|srun|salloc): error: (?P<why4>Invalid (?:numeric|time|--?\w\S*|argument|value) .*|.*(?:are mutually exclusive|is not allowed).*)",
        ),
        error="Slurm refused an option: {why}{why2}{why3}{why4}",
        advice="correct the line in the #SBATCH head or the command; options stand before the script, and nothing after it is Slurm's",
    ),
    _option(
        name="slurm.output-folder",
        wordings=(
            r"(?:[Cc]ould not|[Cc]ouldn't) open (?:stdout|stderr|stdin|output|error) file:? ?(?P<path>/\S*?)?:? (?P<why>No such file or directory|Permission denied|No space left on device|Disk quota exceeded)",
        ),
        tells=Tells.NAMES,
        cause="file-missing",
        error="Slurm could not open the output file of the job or step {path}: {why}",
        advice="make the folder of --output and --error before submitting (Slurm makes none), where the nodes can write",
        confirm="scontrol show job JOB | grep -E 'StdOut|StdErr'",
        rivals=("permission", "quota", "disk-full"),
    ),
    # How jobs ended, in the accounting.
    _state(
        name="slurm.state-timeout",
        wordings=(
            r"JobState=TIMEOUT",
            r"State: TIMEOUT",
            r"\bTIMEOUT +0:\d+",
            r"DUE TO DEADLINE",
            r"JobState=DEADLINE",
            r"(?:Ended|Failed), Run time \S+, TIMEOUT",
        ),
        kind="time_limit",
    ),
    _state(
        name="slurm.state-node-fail",
        wordings=(
            r"(?:JobState=|State: |Run time \S+, )(?:NODE|BOOT)_FAIL\b",
            r"\b(?:NODE|BOOT)_FAIL +\d+:\d+",
            r"Nodes (?P<node>\S+) are still not ready",
        ),
        kind="node_failed",
    ),
    _state(
        name="slurm.state-preempted",
        wordings=(r"JobState=PREEMPTED", r"State: PREEMPTED", r"\bPREEMPTED +0:\d+"),
        kind="preempted",
    ),
    _state(
        name="slurm.state-failed",
        wordings=(
            r"JobState=FAILED(?: Reason=(?P<why>\w+))?",
            r"^\s*\d+(?:_\d+)?(?:[.+]\w+)? .*\bFAILED +(?P<code>[1-9]\d*):0\b",
            r"^State: FAILED \(exit code (?P<code2>\d+)\)",
        ),
        tells=Tells.HINTS,
        cause="exit-code",
        error="Slurm says that the job failed, not why: {words:.160}",
        advice="read the job's own output: scontrol show job JOB names it (StdOut, StdErr)",
        confirm="sacct -j JOB -o JobID,State,ExitCode,Reason,NodeList",
    ),
    _state(
        name="slurm.state-killed",
        wordings=(r"^\s*\d+(?:_\d+)?(?:[.+]\w+)? .*\bFAILED +\d+:(?P<signum>[1-9]\d*)\b",),
        kind="signal_received",
    ),
    _state(
        name="slurm.requeued",
        wordings=(
            r"CANCELLED AT .*DUE TO (?:JOB REQUEUE|NODE REBOOT)",
            r"JobState=REQUEUED",
        ),
        cause="requeued",
        error="Slurm put the job back into the queue",
        advice="let it start again and continue from its last checkpoint; --no-requeue forbids it",
        confirm="sacct -j JOB --duplicates -o State,Start,End,NodeList",
    ),
)
