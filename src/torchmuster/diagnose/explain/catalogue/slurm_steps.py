"""Slurm's steps: srun, slurmd and slurmstepd, their plugins, prologs, cgroups and bindings.

Sources: Slurm 19.05 to 26.05 src/srun, src/slurmd, src/plugins/mpi, src/plugins/task, src/common/spank.c.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_srun = partial(
    KnownMessage,
    source="Slurm 19.05 to 26.05, src/srun",
    tells=Tells.PROVES,
    cause="srun-launch",
)
_stepd = partial(
    KnownMessage,
    source="Slurm 19.05 to 26.05, src/slurmd/slurmstepd",
    tells=Tells.NAMES,
    cause="node-setup",
)
_plugin = partial(
    KnownMessage,
    source="Slurm 19.05 to 26.05, src/plugins",
    tells=Tells.PROVES,
    cause="launcher-plugin",
)
_echo = partial(KnownMessage, source="Slurm 19.05 to 26.05, src/srun", tells=Tells.ECHO)

ENTRIES: tuple[KnownMessage, ...] = (
    # A step that cannot be made.
    _srun(
        name="srun.nodes-busy",
        wordings=(
            r"Unable to create step for job .*: Requested nodes are busy",
            r"step creation (?:temporarily|still) disabled, retrying \(Requested nodes are busy\)",
        ),
        error="another step of the same job holds the CPUs, the memory or the GPUs that this one wants",
        advice="give the second srun --overlap (Slurm 20.11 and later), or each step its own share with --exact and --mem",
        confirm="sacct -j $SLURM_JOB_ID -o JobID,State,AllocTRES%60; squeue -s -j $SLURM_JOB_ID",
    ),
    _srun(
        name="srun.prolog-runs",
        wordings=(r"step creation temporarily disabled, retrying \(.*[Pp]rolog",),
        tells=Tells.NOISE,
        cause="",
    ),
    _srun(
        name="srun.step-limit",
        wordings=(r"Step limit reached for this job",),
        cause="site-limits",
        error="the job has started as many steps as Slurm allows",
        advice="start many small programs within one step: srun --multi-prog, xargs -P or GNU parallel",
        confirm="scontrol show config | grep MaxStepCount",
    ),
    _srun(
        name="srun.job-over",
        wordings=(
            r"Unable to create step for job .*: Job/step already completing or completed",
            r"(?:Job allocation|Slurm job) \d+ has (?:been revoked|expired)",
        ),
        tells=Tells.ECHO,
        cause="",
    ),
    _srun(
        name="srun.too-few-nodes",
        wordings=(r"Only allocated (?P<got>\d+) nodes asked for (?P<wanted>\d+)",),
        cause="impossible-request",
        error="srun asked for {wanted} nodes, and the job has {got}",
        advice="make --nodes of srun and of the job agree",
        confirm="echo $SLURM_JOB_NUM_NODES $SLURM_JOB_NODELIST",
    ),
    _srun(
        name="srun.nodes-lowered",
        wordings=(
            r"can't run (?P<tasks>\d+) processes on (?P<nodes>\d+) nodes, setting nnodes to",
            r"can't honor --ntasks-per-node set to (?P<per>\d+)",
        ),
        tells=Tells.HINTS,
        cause="different-sizes",
        error="srun started on fewer nodes, or with fewer tasks per node, than was asked for: {words:.160}",
        advice="make --nodes, --ntasks and --ntasks-per-node agree: srun --nodes=N --ntasks-per-node=1 for torchrun",
        confirm="srun hostname | sort | uniq -c",
    ),
    _srun(
        name="srun.cpus-per-task-twice",
        wordings=(
            r"cpus-per-task set by two different environment variables (?P<one>\S+) != (?P<other>\S+)",
        ),
        cause="bad-arguments",
        error="srun was told two numbers of CPUs for a task: {one} and {other}",
        advice="unset the older: unset SLURM_TRES_PER_TASK, or give --cpus-per-task to srun itself",
        confirm="env | grep -E 'SLURM_(CPUS|TRES)_PER_TASK'",
    ),
    _srun(
        name="srun.memory-twice",
        wordings=(r"SLURM_MEM_PER_(?:CPU|GPU|NODE).*mutually exclusive",),
        cause="bad-arguments",
        error="srun was given memory per CPU, per GPU and per node at once",
        advice="unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_MEM_PER_NODE before an srun within another job",
        confirm="env | grep SLURM_MEM",
    ),
    _srun(
        name="srun.node-count-differs",
        wordings=(r"SLURM_JOB_NUM_NODES environment variable conflicts with allocated node count",),
        cause="bad-arguments",
        error="SLURM_JOB_NUM_NODES says another number of nodes than the job has",
        advice="unset what an outer job or a script has set: unset SLURM_JOB_NUM_NODES SLURM_NNODES",
    ),
    _srun(
        name="srun.no-program",
        wordings=(
            r"No executable program specified for this task",
            r"srun: fatal: No command given to execute",
        ),
        cause="bad-arguments",
        error="srun was given options but no program",
        advice="write the program last; a backslash at a line's end that has a blank after it cuts the command",
    ),
    _srun(
        name="srun.multi-prog",
        wordings=(
            r"[Cc]onfiguration file (?P<path>\S+) (?:is )?invalid, no record for task id (?P<task>\d+)",
            r"Line \d+ of configuration file (?P<path2>\S+) (?:is )?invalid",
            r"Could not (?:open|stat) multi_prog config file (?P<path3>\S+)",
        ),
        cause="bad-arguments",
        error="the file of --multi-prog does not say what each task runs {path}{path2}{path3}",
        advice="give it a line for each task, from 0 to ntasks - 1, or `*`",
    ),
    _srun(
        name="srun.step-credential",
        wordings=(
            r"launch .*failed.*: (?P<why>Invalid job credential|Job credential (?:expired|revoked|replayed))",
        ),
        tells=Tells.NAMES,
        cause="scheduler-authentication",
        error="a node refused the step: {why}",
        advice="the job had ended there, or the clocks differ; exclude the node and tell the site",
        confirm="srun --ntasks-per-node=1 date",
        rivals=("node-failed", "time-limit"),
    ),
    _srun(
        name="srun.node-unreachable",
        wordings=(
            r"Task launch for .* failed on node (?P<host>\S+): (?P<why>Communication connection failure|Socket timed out.*|Connection (?:refused|timed out).*|No route to host|Unexpected missing socket error)",
            r"Task launch for .* failed on node (?P<host2>\S+): (?P<why2>Slurmd could not .*|Kill task failed|Unspecified error)",
        ),
        tells=Tells.NAMES,
        error="Slurm could not start its tasks on {host}{host2}: {why}{why2}",
        advice="exclude that node and start again (--exclude); tell the site",
        confirm="scontrol show node NODE | grep -E 'State|Reason'",
        rivals=("node-failed", "firewall"),
    ),
    _srun(
        name="srun.lost-stepd",
        wordings=(
            r"io error with slurmstepd on node (?P<node>\S+)",
            r"lost connection (?:to|with) slurmstepd",
        ),
        tells=Tells.NAMES,
        cause="node-failed",
        error="srun lost its connection to the node {node} while the step ran",
        advice="see what happened on the node; exclude it if it happens there again",
        confirm="scontrol show node NODE | grep -E 'State|Reason|BootTime'",
        rivals=("out-of-memory", "firewall"),
    ),
    _srun(
        name="srun.broadcast",
        wordings=(r"Failed to broadcast '(?P<path>[^']+)'",),
        tells=Tells.NAMES,
        error="srun could not copy {path} to the nodes",
        advice="see that its target folder exists on every node and has room, or drop --bcast",
        rivals=("disk-full", "permission"),
    ),
    _srun(
        name="srun.cpu-binding",
        wordings=(
            r"CPU binding outside of job step allocation, allocated CPUs are: ?(?P<cpus>\S*)",
            r"[Uu]nable to (?:satisfy|parse) cpu[- ]bind",
            r"Task binding outside of job step allocation",
        ),
        cause="cpu-binding",
        error="the binding asks for CPUs that the step does not have {cpus}",
        advice="leave it to Slurm or turn it off: srun --cpu-bind=none, unset SLURM_CPU_BIND*",
        confirm="srun --cpu-bind=verbose,none true; env | grep SLURM_CPU_BIND",
    ),
    # What slurmd could not do on a node.
    _stepd(
        name="slurmd.program-foreign",
        wordings=(r"execve\(\): (?P<command>\S+): Exec format error",),
        kind="not_executable",
    ),
    _stepd(
        name="slurmd.working-folder",
        wordings=(
            r"couldn't chdir to [`'](?P<path>[^'`]+)': (?P<why>[^:]+): going to /tmp instead",
            r"couldn't chdir to [`'](?P<path2>[^'`]+)': (?P<why2>[^:]+)$",
        ),
        cause="file-missing",
        error="the working folder {path}{path2} is not there on {here}: {why}{why2}",
        advice="submit from a folder that all nodes see, or give --chdir; what is local to the login node is not there",
        confirm="srun --ntasks-per-node=1 ls -d FOLDER",
        rivals=("permission", "mount-lost"),
    ),
    _stepd(
        name="slurmd.prolog",
        wordings=(
            r"[Pp]rolog failed",
            r"[Pp]rolog (?:error|failure)",
            r"launch failed.*: Job prolog failed",
            r"TaskProlog failed status=",
        ),
        tells=Tells.PROVES,
        error="the site's prolog failed on a node",
        advice="exclude the node and start again; tell the site, who finds the reason in slurmd's log",
        confirm="scontrol show node NODE | grep -E 'State|Reason'",
    ),
    _stepd(
        name="slurmd.memory-killed",
        wordings=(
            r"Exceeded (?:job|step) memory limit",
            r"Some of (?:your processes|your job|the step tasks).*(?:killed by the cgroup|OOM Killed|been killed)",
            r"task/cgroup: .*oom[- ]kill",
        ),
        tells=Tells.PROVES,
        kind="oom_proof",
    ),
    _stepd(
        name="slurmd.unkillable",
        wordings=(
            r"STEPD TERMINATED ON (?P<host>\S+) AT .*DUE TO (?:JOB|STEP) NOT ENDING WITH SIGNALS",
            r"[Kk]ill task failed",
        ),
        cause="blocked-in-kernel",
        error="processes on {host} could not be ended even by SIGKILL: they hang in the kernel, mostly on a file system or a GPU",
        advice="exclude the node and tell the site; it has to be rebooted",
        confirm="ps -eo pid,stat,wchan:30,cmd | awk '$2 ~ /D/'   on that node",
        rivals=("gpu-hardware", "mount-lost"),
    ),
    _stepd(
        name="slurmd.container-namespace",
        wordings=(
            r"(?:job_container|namespace)_[pg]_(?:join|create|stepd_create)\S* ?.*(?:failed|error)",
            r"container_p_join: .*(?:setns|open) failed",
        ),
        tells=Tells.PROVES,
        error="Slurm could not make or enter the job's private /tmp on a node",
        advice="exclude the node and tell the site (job_container/tmpfs, namespace/tmpfs)",
    ),
    _stepd(
        name="slurmd.cgroup",
        wordings=(
            r"(?:cgroup_g_|xcgroup_|task_cgroup|cgroup/v[12]|proctrack/cgroup).*(?:unable|failed|cannot|No such)",
            r"Failed to invoke task plugins",
        ),
        tells=Tells.HINTS,
        error="Slurm had trouble with the cgroups of a node: {words:.160}",
        advice="if tasks failed on that node alone, exclude it and tell the site",
    ),
    _stepd(
        name="slurmd.tmpdir",
        wordings=(r"Unable to create TMPDIR \[(?P<path>[^\]]+)\]", r"Setting TMPDIR to /tmp"),
        tells=Tells.HINTS,
        cause="file-missing",
        error="TMPDIR does not exist on a node: {path}",
        advice="set TMPDIR to a folder that every node has, or unset it in the job script",
    ),
    _stepd(
        name="slurmd.user-environment",
        wordings=(
            r"Failed to load current user environment variables",
            r"Unable to get user's local environment",
            r"Failed to get current user environment",
        ),
        tells=Tells.HINTS,
        error="Slurm could not read your login environment in time",
        advice="make ~/.bashrc quick and quiet, or submit with --export=ALL from a shell that is set up",
    ),
    _stepd(
        name="slurmd.no-such-user",
        wordings=(
            r"(?:[Ii]nvalid user id|getpwuid\w* failed|Unable to resolve user ID|uid \d+ not found on system)",
        ),
        error="a node does not know your user",
        advice="exclude the node and tell the site: its directory of users (LDAP, sssd) does not answer",
        confirm="srun --ntasks-per-node=1 id",
    ),
    # Plugins.
    _plugin(
        name="slurmplugin.mpi-type",
        wordings=(
            r"Invalid MPI type '(?P<name>[^']+)'",
            r"Invalid MPI plugin name",
            r"find (?:the specified plugin name for |mpi plugin for )mpi/(?P<name2>\w+)",
        ),
        error="this Slurm has no MPI plugin {name}{name2}",
        advice="name one that srun --mpi=list shows; torchrun needs none: --mpi=none",
        confirm="srun --mpi=list",
    ),
    _plugin(
        name="slurmplugin.mpi-setup",
        wordings=(
            r"MPI plugin's pre-launch setup failed",
            r"Unable to configure MPI plugin",
            r"Failed mpi_g_slurmstepd_prefork",
        ),
        tells=Tells.NAMES,
        error="Slurm's MPI plugin could not start on a node",
        advice="torchrun needs none: srun --mpi=none; for MPI choose the version that its library was built with (--mpi=pmix or pmi2)",
        confirm="srun --mpi=list",
        rivals=("disk-full", "permission"),
    ),
    _plugin(
        name="slurmplugin.load",
        wordings=(
            r"Couldn't (?:load|find) (?:the )?specified plugin name for (?P<name>\S+?):",
            r"cannot (?:find|create) \S+ (?:plugin|context) for (?P<name2>\S+)",
            r"Incompatible (?:Slurm plugin|versions of client and server code)",
        ),
        error="parts of Slurm do not fit each other here: {words:.200}",
        advice="commands and daemons of Slurm have to be of one version; in a container use the host's, or none",
        confirm="srun --version; scontrol show config | grep SLURM_VERSION",
    ),
    _plugin(
        name="slurmplugin.spank",
        wordings=(
            r"spank: (?:required plugin|Failed to) (?P<name>.+)",
            r"Plugin stack (?:initialization|post-option processing) failed",
            r"Failed to invoke spank plugin stack",
            r"spank_(?:user|init|task_\w+|init_post_opt)\w* failed",
        ),
        tells=Tells.HINTS,
        error="one of the site's plugins (SPANK) ended the step: {words:.160}",
        advice="read the line before it: the plugin says there what it missed",
    ),
    _plugin(
        name="slurmplugin.pmix",
        wordings=(r"mpi/pmix\w*: .*(?:\[?error\]?|ERROR|failed)",),
        tells=Tells.HINTS,
        error="Slurm's PMIx plugin had trouble: {words:.160}",
        advice="for torchrun start with srun --mpi=none; for MPI use one PMIx in Slurm and in the MPI library",
    ),
    # What srun says of the others when one has gone.
    _echo(
        name="srun.first-task-exited",
        wordings=(
            r"First task exited \d+s ago",
            r"Timed out waiting for job step to complete",
            r"STEP \S+ ON \S+ FAILED \(non-zero exit code",
            r"eio_handle_mainloop: Abandoning IO",
            r"Cancelled pending (?:job )?step",
            r"aborted before step completely launched",
        ),
    ),
    _echo(
        name="slurmplugin.pmix-fence",
        wordings=(r"pmixp?_\w+.*(?:collective timeout|[Ff]ence.*timed? ?out)",),
    ),
    KnownMessage(
        name="slurm.srun-execve",
        wordings=(r"execve\(\): (?P<command>[^:]+): No such file or directory",),
        source="Slurm 19 to 25, slurmd/slurmstepd/task.c",
        tells=Tells.PROVES,
        cause="command-missing",
        error="srun did not find the program {command} on the node",
        advice="give its full path, activate the environment in the job script, or `python -m torch.distributed.run` for torchrun; shell functions and aliases need `bash -lc`",
        confirm="srun bash -lc 'which {command}'",
    ),
    KnownMessage(
        name="slurm.step-asks-too-much",
        wordings=(
            r"Unable to create step for job \S+: Requested node configuration is not available",
        ),
        source="Slurm 19 to 25, srun/libsrun/launch.c",
        tells=Tells.NAMES,
        cause="impossible-request",
        error="a step asks for nodes, CPUs, GPUs or memory that its own job does not have",
        advice="ask for no more in srun than the job has: the names of --nodelist as `scontrol show hostnames` gives them, --cpus-per-task, --gres, --mem",
        confirm="scontrol show job $SLURM_JOB_ID | grep -E 'NodeList|TRES'",
    ),
    KnownMessage(
        name="slurm.low-real-memory",
        wordings=(r"Low RealMemory",),
        source="Slurm 17 to 25, slurmctld/node_mgr.c",
        tells=Tells.NAMES,
        cause="node-setup",
        error="Slurm drained a node because it has less memory than slurm.conf says",
        advice="the site has to correct RealMemory in slurm.conf (slurmd -C prints the right value) and resume the node; use other nodes until then",
        confirm="sinfo -R; slurmd -C",
    ),
    KnownMessage(
        name="slurm.submitit-timeout",
        wordings=(
            r"Job has timed out\. Ran \d+ minutes",
            r"submitit.*Job (?:\S+ )?(?:timed out|not requeued because)",
        ),
        source="submitit 1.4, core/job_environment.py",
        tells=Tells.PROVES,
        kind="time_limit",
    ),
)
