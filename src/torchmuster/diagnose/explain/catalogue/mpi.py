"""MPI launchers: Open MPI and PRRTE, Hydra of MPICH and Intel, PALS.

Sources: Open MPI 1.10 to 5.0 help texts, PRRTE 1 to 3; MPICH 3.2 to 4.3 src/pm/hydra; Intel MPI 2018 to 2021; Cray PALS.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_ompi = partial(
    KnownMessage,
    source="Open MPI 1.10 to 5.0 and PRRTE, help texts",
    tells=Tells.PROVES,
    cause="launch-failed",
)
_hydra = partial(
    KnownMessage,
    source="MPICH 3.2 to 4.3 src/pm/hydra; Intel MPI 2018 to 2021",
    tells=Tells.PROVES,
    cause="launch-failed",
)
_echo = partial(
    KnownMessage, source="Open MPI, MPICH, Intel MPI: their last words", tells=Tells.ECHO
)

ENTRIES: tuple[KnownMessage, ...] = (
    _ompi(
        name="ompi.no-slots",
        wordings=(
            r"There are not enough slots available in the system to satisfy the (?P<count>\d+)",
            r"not enough slots available in the system",
            r"All nodes which are allocated for this job are already filled",
        ),
        cause="too-few-slots",
        error="mpirun was asked for more processes than it has slots {count}",
        advice="give it places: a hostfile with slots=N, --map-by ppr:N:node, or --oversubscribe",
        advice_in={
            "slurm": "ask Slurm for as many tasks: #SBATCH --ntasks-per-node=N; mpirun takes its slots from there",
            "pbs": "ask PBS for as many processes: -l select=NODES:ncpus=C:mpiprocs=N; mpirun takes its slots from there",
        },
        confirm="mpirun --display-allocation -n 1 hostname",
    ),
    _ompi(
        name="ompi.overbound",
        wordings=(
            r"A request was made to bind to that would (?:result in binding|require binding)",
            r"request (?:was made )?to bind (?:a process )?.*(?:more processes than cpus|not enough|more than one)",
        ),
        cause="cpu-binding",
        error="mpirun was to bind more processes to CPUs than there are",
        advice="ask for more CPUs per process, or turn binding off: mpirun --bind-to none",
        confirm="mpirun --report-bindings -n 1 true; nproc",
    ),
    _ompi(
        name="ompi.binding-unsupported",
        wordings=(
            r"Open MPI tried to bind a (?:new )?process, but something went wrong",
            r"WARNING: a request was made to bind a process\. While the system",
        ),
        tells=Tells.HINTS,
        cause="cpu-binding",
        error="Open MPI could not bind a process to its CPUs",
        advice="mpirun --bind-to none; in containers binding is often not permitted",
    ),
    _ompi(
        name="ompi.not-in-allocation",
        wordings=(
            r"hosts? (?:in the hostfile|list).*not.*(?:allocat|included in)",
            r"requested hosts were not included in the current allocation",
        ),
        cause="impossible-request",
        error="mpirun was given hosts that are not in the job's allocation",
        advice="leave out -H and --hostfile within a job: mpirun knows its nodes",
        confirm="mpirun --display-allocation -n 1 hostname",
    ),
    _ompi(
        name="ompi.daemon-not-found",
        wordings=(
            r"(?P<command>orted|prted|hydra_pmi_proxy|hydra_bstrap_proxy|pmi_proxy): (?:[Cc]ommand not found|No such file or directory)",
            r"not finding the required libraries and/or binaries on one or more nodes",
        ),
        error="the MPI launcher's daemon {command} was not found on another node: MPI is not on PATH there",
        advice="give its place: mpirun --prefix /path/of/mpi, or load the module in ~/.bashrc; it has to be the same version everywhere",
        confirm="ssh NODE which orted prted hydra_bstrap_proxy",
    ),
    _ompi(
        name="ompi.daemon-died",
        wordings=(
            r"ORTE was unable to reliably start one or more daemons",
            r"PRTE (?:was unable to reliably start|has lost communication)",
            r"ORTE (?:does not know how to route|has lost communication with) a?",
            r"A daemon (?:\(pid \d+\) )?(?:on node \S+ )?(?:failed|died|unexpectedly)",
        ),
        tells=Tells.NAMES,
        error="mpirun's daemon on another node did not start, or was lost",
        advice="try mpirun -n NODES hostname first: it needs ssh without a password or the scheduler's launcher, MPI on PATH, and open ports between the nodes",
        confirm="mpirun --mca plm_base_verbose 10 -n NODES hostname",
        rivals=("node-failed", "ssh-login", "firewall"),
    ),
    _ompi(
        name="ompi.cannot-execute",
        wordings=(
            r"(?:mpirun|mpiexec|prterun|prun) was unable to find the specified executable file",
            r"(?:could not|unable to) (?:access or execute|find) (?:the )?(?:specified )?(?:executable|an executable)",
        ),
        cause="command-missing",
        error="mpirun did not find the program on a node",
        advice="give its full path, one that every node sees; pass PATH on with -x PATH",
        advice_in={
            "anywhere": "if {meant_command} is meant, correct the spelling; else give its full path, one that every node sees"
        },
        confirm="mpirun -n NODES --map-by ppr:1:node which python",
    ),
    _ompi(
        name="ompi.wrong-folder",
        wordings=(
            r"(?:unable to launch|could not) .*working directory",
            r"[Ww]orking directory:? +.*(?:does not exist|not found)",
        ),
        cause="file-missing",
        error="the working folder does not exist on a node",
        advice="start from a folder that all nodes see, or give --wdir",
    ),
    _ompi(
        name="ompi.no-pmi",
        wordings=(
            r"application appears to have been direct launched using \"srun\"",
            r"OMPI was not built with SLURM's PMI support",
        ),
        cause="launcher-plugin",
        error="Open MPI was started by srun without a PMI that it understands",
        advice="srun --mpi=pmix (srun --mpi=list shows what there is), or start it with mpirun; torch without the MPI backend needs neither",
        confirm="srun --mpi=list; ompi_info | grep -i pmi",
    ),
    _ompi(
        name="ompi.pmix-server",
        wordings=(
            r"PMIX ERROR: (?P<why>PMIX_ERR_\S+|[A-Z-]+) in file(?!.*(?:gds|dstore|ds12|ds21|psec|mca_base))",
            r"PMIx_Init failed|PMIX_ERR(?:OR)?[_-](?:UNREACH|INIT|LOST|OUT[_-]OF[_-]RESOURCE)",
        ),
        tells=Tells.HINTS,
        cause="launcher-plugin",
        error="PMIx, with which MPI starts, had an error: {words:.160}",
        advice="use one PMIx for launcher and library; a session folder that is not writable looks the same: set TMPDIR to a local folder",
    ),
    _ompi(
        name="ompi.session-folder",
        wordings=(
            r"(?:Unable|unable) to create (?:the )?(?:session|top) (?:directory|session)",
            r"session directory.*(?:could not|unable|failed)",
            r"orte_session_dir failed",
            r"PRTE_?.*session_dir.*failed",
        ),
        cause="permission",
        error="MPI could not make its session folder on a node",
        advice="set TMPDIR to a folder that exists on each node and that you may write, on a disk that is not full",
        confirm="df -h /tmp; ls -ld $TMPDIR   on every node",
        rivals=("disk-full",),
        tells=Tells.NAMES,
    ),
    _ompi(
        name="ompi.root",
        wordings=(r"(?:mpirun|prterun|mpiexec) has detected an attempt to run as root",),
        cause="config-refused",
        error="mpirun does not run as root unless it is told to",
        advice="mpirun --allow-run-as-root, or OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 in the image",
    ),
    _ompi(
        name="ompi.unreachable",
        wordings=(
            r"At least one pair of MPI processes are unable to reach each other",
            r"at least one MPI process is unreachable\s*$",
            r"MPI_INIT has failed because at least one MPI process is unreachable",
        ),
        tells=Tells.NAMES,
        cause="no-route",
        error="two MPI processes have no network in common that Open MPI may use",
        advice="name the interface that all nodes share: --mca btl_tcp_if_include eth0 (or a net like 10.0.0.0/8), and --mca pml ob1 --mca btl self,vader,tcp to leave the fabric out",
        confirm="ip -br addr   on every node",
        rivals=("firewall", "network-plugin"),
    ),
    _ompi(
        name="ompi.tcp-connect",
        wordings=(
            r"Open MPI failed to TCP connect to a peer MPI process",
            r"btl_tcp_endpoint\S* .*connect\(\) to (?P<host>[\d.]+) failed: (?P<why>.+)",
            r"mca_btl_tcp_endpoint_complete_connect.*(?:failed|connect\(\))",
        ),
        tells=Tells.NAMES,
        cause="firewall",
        error="Open MPI could not connect to a process on another node {host} {why}",
        advice="keep it off container bridges and private nets: --mca btl_tcp_if_exclude lo,docker0,virbr0; open the ports between the nodes",
        confirm="ip -br addr   on both nodes",
        rivals=("no-route", "bridge-address", "link-local-address"),
    ),
    _ompi(
        name="ompi.tcp-stranger",
        wordings=(
            r"detected an inbound MPI TCP connection request from a peer",
            r"accepted a TCP connection (?:from what appears to be|but did not receive)",
            r"received unexpected process identifier",
        ),
        tells=Tells.NAMES,
        cause="bridge-address",
        error="Open MPI was reached from an address that it did not expect: nodes have addresses that are not unique",
        advice="name the one interface: --mca btl_tcp_if_include eth0 --mca oob_tcp_if_include eth0; docker0 has the same address on every node",
        confirm="ip -br addr   on every node",
        rivals=("other-service-on-port",),
    ),
    _ompi(
        name="ompi.peer-hung-up",
        wordings=(r"MPI communication peer process has unexpectedly disconnected",),
        tells=Tells.ECHO,
        cause="",
    ),
    _ompi(
        name="ompi.shared-memory",
        wordings=(
            r"not (?:appear to be )?enough (?:free )?space (?:on the shared memory backing|for .* \(the shared-memory)",
            r"There is not enough space in .*shared memory backing file",
        ),
        cause="small-dev-shm",
        error="MPI's file for shared memory does not fit where it lies",
        advice="make /dev/shm larger (--shm-size=8g), or put the file elsewhere: --mca orte_tmpdir_base or OMPI_MCA_btl_vader_backing_directory=/tmp",
        confirm="df -h /dev/shm /tmp",
    ),
    _ompi(
        name="ompi.option",
        wordings=(
            r"(?:mpirun|mpiexec|prterun|prun): (?:unrecognized argument|Error: unknown option|unrecognized option) (?P<why>\S+)",
            r"(?:mpirun|prterun) (?:was given|received) .*(?:option|CLI).*(?:unrecognized|not recognized|conflict)",
            r"[Mm]ultiple (?:conflicting )?(?:mapping|binding|ranking) (?:policies|directives)",
        ),
        cause="bad-arguments",
        error="mpirun refused an option {why}",
        advice="options of Open MPI, MPICH and Intel MPI differ: check which mpirun is called",
        confirm="which mpirun; mpirun --version",
    ),
    _ompi(
        name="ompi.several-singletons",
        wordings=(r"ORTE_ERROR_LOG: (?P<why>.+) in file",),
        tells=Tells.HINTS,
        error="Open MPI's runtime had an error: {why}",
        advice="read the lines around it; after them, try mpirun -n NODES hostname",
    ),
    # Hydra.
    _hydra(
        name="hydra.no-proxy",
        wordings=(
            r"unable to (?:connect to|wait for) (?:the )?(?:proxy|bootstrap)",
            r"Failed to connect to (?:the )?host.*hydra",
            r"check_exit_codes .*(?:unable to run (?:bstrap_proxy|proxy) on (?P<host>[^\s(]+))",
            r"unable to run bstrap_proxy on (?P<host2>[^\s(]+)",
            r"HYDT_bscu_wait_for_completion .*one of the processes terminated badly",
        ),
        tells=Tells.NAMES,
        error="Hydra could not start its proxy on a node {host}{host2}",
        advice="choose the scheduler's own way: mpiexec -bootstrap slurm (or pbs, ssh), with MPI at the same path on every node",
        confirm="mpiexec -verbose -n NODES -ppn 1 hostname",
        rivals=("ssh-login", "firewall"),
    ),
    _hydra(
        name="hydra.option",
        wordings=(
            r"(?:match_arg|mpiexec).*unrecognized argument (?P<why>\S+)",
            r"(?:mpiexec|HYD\w+).*(?:match_arg|parse_args).*(?:unrecognized|error)",
        ),
        cause="bad-arguments",
        error="mpiexec does not know the option {why}",
        advice="options of MPICH, Intel MPI and Open MPI differ: check which mpiexec is called",
        confirm="which mpiexec; mpiexec --version",
    ),
    _hydra(
        name="hydra.resolve",
        wordings=(
            r"(?:HYDU_sock_connect|HYDU_sock_get_iface_ip|gethost_ip).*(?:unable to (?:resolve|get host address|find)|hostname)",
            r"unable to get host address for (?P<host>\S+)",
        ),
        cause="name-not-resolved",
        error="Hydra could not find the address of {host}",
        advice="give it the interface that all nodes share: mpiexec -iface eth0 (I_MPI_HYDRA_IFACE)",
        confirm="getent hosts NODE",
    ),
    _hydra(
        name="mpich.no-provider",
        wordings=(
            r"(?:OFI|ofi)\S* (?:fi_getinfo|addrinfo|endpoint open|EP creation|EP enable|provider).*(?:failed|No data available|not found|error)",
            r"MPIDI_OFI\w*.*(?:failed|No data available)",
            r"OFI get address vector map failed",
        ),
        tells=Tells.NAMES,
        cause="network-plugin",
        error="MPI found no network of libfabric that it can use: {words:.160}",
        advice="choose another provider: FI_PROVIDER=tcp (Intel MPI: I_MPI_OFI_PROVIDER=tcp) works everywhere, slower",
        confirm="fi_info -l",
        rivals=("memlock", "wrong-provider"),
    ),
    _hydra(
        name="mpich.init",
        wordings=(
            r"Fatal error in (?:internal_|PMPI_)?(?:MPI_)?Init(?:_thread)?",
            r"Abort\(\d+\) on node \d+ \(rank \d+ in comm 0\): Fatal error in (?:internal_|PMPI_)?(?:MPI_)?Init",
        ),
        tells=Tells.HINTS,
        error="MPI did not start: {words:.200}",
        advice="read the lines below it: the last one names the step that failed",
    ),
    _hydra(
        name="pals.launch",
        wordings=(
            r"(?:pals|PALS|mpiexec): .*(?:Couldn't|couldn't) (?:launch|forward RPC|find node|connect).*",
            r"(?:mpiexec|aprun|palsd)\S*: (?:Unexpected|RPC) .*(?:launch|timeout|failed).*",
        ),
        tells=Tells.NAMES,
        error="PALS could not start the program on all nodes: {words:.160}",
        advice="start hostname in the same way; report a node that fails",
        confirm="mpiexec -n NODES --ppn 1 hostname",
        rivals=("node-failed",),
    ),
    _hydra(
        name="pals.depth",
        wordings=(
            r"(?:mpiexec|PALS|aprun).*(?:exceeds? (?:the )?(?:number of )?(?:available )?(?:CPUs|cpus|cores|processors)|not enough (?:CPUs|cpus))",
            r"request exceeds max (?:nodes|CPUs|cores)",
        ),
        tells=Tells.NAMES,
        cause="too-few-slots",
        error="mpiexec was asked for more ranks or CPUs per node than there are",
        advice="lower --ppn or --depth, or ask PBS for more nodes or ncpus",
    ),
    # What it says of the process that went first.
    _ompi(
        name="ompi.signal",
        wordings=(
            r"(?:mpirun|mpiexec|prterun|prun) noticed that process rank \d+ .*exited on signal (?P<number>\d+)",
        ),
        kind="signal_received",
        cause="",
    ),
    # Echoes.
    _echo(
        name="mpi.aborted-by-another",
        wordings=(
            r"(?:Primary|primary) job +terminated normally, but (?:\d+|some) process",
            r"(?:mpirun|mpiexec|prterun|Mpirun) (?:noticed|detected|has exited due to) .*(?:process|proc|job)",
            r"BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
            r"YOUR APPLICATION TERMINATED WITH THE EXIT STRING",
            r"non-zero exit code\.\. Per user-direction, the job has been aborted",
            r"Per user-direction, the job has been aborted",
        ),
    ),
    KnownMessage(
        name="mpi.abort-code",
        wordings=(
            r"application called MPI_Abort\(\S+ (?P<code>-?\d+)\)(?: - process (?P<rank>\d+))?",
        ),
        source="MPICH 3.2 to 4.3 and Intel MPI, src/mpi/init/abort.c",
        tells=Tells.HINTS,
        cause="exit-code",
        error="process {rank} ended the job by MPI_Abort with code {code}; the message does not say why",
        advice="read what this process wrote before it: the program, or a library in it, called MPI_Abort itself",
    ),
    _echo(
        name="mpi.abort-called",
        wordings=(
            r"MPI_ABORT was invoked on rank \d+",
            r"Other MPI error, error stack",
            r"(?:rank|process) \d+ .*exited (?:without calling|on signal).*finalize",
            r"APPLICATION TERMINATED WITH|CLEANING UP REMAINING PROCESSES",
        ),
    ),
    _echo(
        name="mpi.hydra-echo",
        wordings=(
            r"HYD\w+ \(\S*(?:pmiserv|mpiexec|bscu_wait|utils|launch)\S*:\d+\): ",
            r"\[(?:mpiexec|proxy)\S*@(?P<host>[^\]]+)\] .*(?:assert|callback returned)",
            r"control_cb .*assert",
        ),
    ),
)
