"""Network libraries under NCCL and MPI: libibverbs, libfabric with its providers, aws-ofi-nccl, UCX, PSM.

Sources: rdma-core 20 to 55; libfabric 1.13 to 2.2, prov/efa, prov/cxi, prov/psm3; aws-ofi-nccl 1.4 to 1.17; UCX 1.8 to 1.18.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_ofi = partial(KnownMessage, source="aws-ofi-nccl 1.4 to 1.17, src/")
_fabric = partial(KnownMessage, source="libfabric 1.13 to 2.2, prov/")
_verbs = partial(KnownMessage, source="rdma-core 20 to 55")
_ucx = partial(KnownMessage, source="UCX 1.8 to 1.18, src/uct, src/ucp")

_PINNING = "ulimit -l unlimited in the job; the site raises LimitMEMLOCK of slurmd, pbs_mom or the container's daemon"
_PINNING_IN = {
    "kubernetes": "the container runtime of the node needs LimitMEMLOCK=infinity, and the pod IPC_LOCK",
    "container": "docker run --ulimit memlock=-1 --cap-add=IPC_LOCK",
}

ENTRIES: tuple[KnownMessage, ...] = (
    # aws-ofi-nccl and EFA.
    _ofi(
        name="fabrics.efa-security-group",
        wordings=(r"security group on either this instance or the peer instance",),
        tells=Tells.NAMES,
        cause="firewall",
        error="the security group of {here} or of its peer does not let EFA through",
        advice="allow all traffic of the security group from and to itself, in both directions",
        confirm="aws ec2 describe-security-groups --group-ids SG   (both rules name the group itself)",
    ),
    _ofi(
        name="fabrics.ofi-peer-gone",
        wordings=(
            r"NET/OFI .*(?:Request|Completed) .*(?:completed )?with error\. RC: \d+\. .*(?:unresponsive r\w+|[Uu]nreachable remote|Connection reset|remote (?:peer|process))",
            r"EFA internal error: \(\d+\) (?P<why>[Uu]nresponsive|Unreachable|Remote) ",
        ),
        tells=Tells.ECHO,
        kind="nccl_remote",
    ),
    _ofi(
        name="fabrics.ofi-request-failed",
        wordings=(
            r"NET/OFI Request \S+ completed with error\. RC: (?P<rc>\d+)\. Error: (?P<why>[^.]+)",
        ),
        tells=Tells.HINTS,
        cause="ib-path",
        error="a transfer over libfabric failed: {why}",
        advice="look at what the rank at its other end did; if it still runs, test the two nodes with fi_pingpong -p efa",
    ),
    _ofi(
        name="fabrics.ofi-libfabric-old",
        wordings=(
            r"EFA provider requires at least libfabric version (?P<wanted>[\d.]+)",
            r"libfabric version (?P<found>\S+) is (?:too old|not supported)",
            r"(?:symbol|version) .*FABRIC_1\.\d+.* not (?:defined|found)",
        ),
        tells=Tells.PROVES,
        cause="wrong-library",
        error="the libfabric of {here} is too old for the plugin of NCCL: {words:.120}",
        advice="load the libfabric that belongs to the plugin: /opt/amazon/efa/lib first on LD_LIBRARY_PATH, or the site's module",
        confirm="fi_info --version; ldd $(find / -name 'libnccl-net*.so' 2>/dev/null | head -1) | grep fabric",
    ),
    _ofi(
        name="fabrics.ofi-no-devices",
        wordings=(
            r"NET/OFI .*(?:Insufficient Libfabric devices found|No eligible providers were found|Failed to initialize (?:rdma|sendrecv) protocol)",
            r"NET/OFI .*Unable to find a protocol that worked",
            r"NET/OFI .*aws-ofi-nccl initialization failed",
        ),
        tells=Tells.NAMES,
        kind="nccl_plugin",
    ),
    _ofi(
        name="fabrics.ofi-register",
        wordings=(
            r"NET/OFI .*(?:Could not register memory|Couldn't register memory region|Unable to register memory)(?P<what>.*)",
        ),
        tells=Tells.NAMES,
        cause="gpudirect",
        rivals=("memlock",),
        error="libfabric could not register memory with the network card{what}",
        advice="try FI_EFA_USE_DEVICE_RDMA=0 (no GPUDirect), and ulimit -l unlimited in the job",
        confirm="ulimit -l; fi_info -p efa -t FI_EP_RDM   in the job",
        advice_in={
            "slingshot": "export FI_MR_CACHE_MONITOR=userfaultfd FI_CXI_DISABLE_HOST_REGISTER=1 on all nodes; NCCL_NET_GDR_LEVEL=LOC goes on without GPUDirect; use the site's own libfabric and plugin",
        },
    ),
    _ofi(
        name="fabrics.ofi-open",
        wordings=(
            r"NET/OFI .*Couldn't (?:open|create) (?:a )?(?:fabric|CQ|domain|completion|AV)\S*.*RC: (?P<rc>-?\d+), ERROR: (?P<why>.+)",
            r"NET/OFI .*Couldn't (?:allocate|enable) endpoint\. RC: (?P<rc2>-?\d+), ERROR: (?P<why2>.+)",
        ),
        tells=Tells.NAMES,
        cause="rdma-device",
        rivals=("memlock", "wrong-provider"),
        error="libfabric could not open the network card of {here}: {why}{why2}",
        advice="give the job the device (/dev/infiniband, /dev/cxi*), unlimited locked memory, and few enough ranks per card",
        advice_in={
            "kubernetes": "ask for vpc.amazonaws.com/efa in the pod's limits, and hugepages-2Mi"
        },
        confirm="fi_info -l; ulimit -l; ls /dev/infiniband /dev/cxi*   in the job",
    ),
    _ofi(
        name="fabrics.ofi-chatter",
        wordings=(
            r"NCCL INFO NET/OFI (?:Setting|Using|Created|Plugin|Initializing|Internode|Could not load libgdr|Failed to open gdr|Disabling NVLS|Skipping)",
            r"NCCL INFO NET/OFI (?!.*[Pp]rovider).*(?:not supported|GDRCopy)",
        ),
        tells=Tells.NOISE,
    ),
    _fabric(
        name="fabrics.efa-fork",
        wordings=(
            r"A process has executed an operation involving a call\s*to the fork\(\) system call",
            r"(?:libfabric|efa).*FI_EFA_FORK_SAFE",
        ),
        tells=Tells.NAMES,
        cause="rdma-fork",
        error="a process that uses EFA made a copy of itself (fork), which this libfabric does not allow",
        advice="export FI_EFA_FORK_SAFE=1 on all nodes, or num_workers with multiprocessing_context='spawn'",
    ),
    _fabric(
        name="fabrics.efa-hugepages",
        wordings=(r"libfabric:\S+:efa:.*(?:[Ff]ailed to allocate|cannot allocate) .*huge ?page",),
        tells=Tells.HINTS,
        cause="memory",
        error="libfabric got no huge pages on {here}",
        advice="FI_EFA_USE_HUGE_PAGE=0, or more huge pages on the node (vm.nr_hugepages)",
    ),
    # Slingshot.
    _fabric(
        name="fabrics.cxi-matching",
        wordings=(
            r"(?:libfabric|cxi).*LE(?:s)? (?:resources? (?:not recovered|exhausted)|.*exhausted)",
            r"(?:libfabric|cxi).*[Uu]nexpected (?:list|message).*exhausted",
            r"cxip?_\w+.*(?:FC|flow control).*(?:append|LE) (?:fail|exhaust)\w*",
        ),
        tells=Tells.NAMES,
        cause="cxi-resources",
        error="the matching hardware of the Slingshot card of {here} is full",
        advice="export FI_CXI_RX_MATCH_MODE=software (or hybrid) and FI_CXI_DEFAULT_CQ_SIZE=131072 on all nodes",
    ),
    _fabric(
        name="fabrics.cxi-service",
        wordings=(
            r"(?:libfabric|cxi).*(?:No CXI service|cxi service .*not|Failed to (?:get|allocate|find) .*(?:VNI|service|LNI|CP))",
            r"(?:libfabric|cxi)\S*.*cxil_(?:open_device|alloc_\w+) .*failed",
        ),
        tells=Tells.NAMES,
        cause="cxi-resources",
        error="the job has no share of the Slingshot card of {here}: its service, VNI or an allocation was refused",
        advice="start it by srun or mpiexec of the site, which give it a VNI: `--network=single_node_vni` in one allocation; count ranks per card",
        confirm="env | grep -E 'SLINGSHOT|VNI'; cxi_service list   in the job",
    ),
    _fabric(
        name="fabrics.cxi-timeout",
        wordings=(
            r"(?:libfabric|cxi).*(?:TRANSACTION_TYPE|C_RC_\w+|[Nn]ack|retry handler|Request dest_addr).*(?:timed out|[Tt]imeout|exhausted|dropped)",
            r"cxi(?:_eq)?.*(?:link (?:down|flap)|LINK_DOWN)",
        ),
        tells=Tells.NAMES,
        cause="ib-path",
        rivals=("peer-lost",),
        error="a transfer over Slingshot got no answer from the other end",
        advice="look whether that node still runs; exclude the node whose link went down, and report it",
        confirm="cxi_stat   on both nodes",
    ),
    _fabric(
        name="fabrics.cxi-warnings",
        wordings=(
            r"libfabric:\d+:\S*:cxi:\S+:\S+\(\):\d+<(?:info|debug|trace)>",
            r"libfabric:\d+:\S*:(?:core|ofi_rxm|tcp|verbs|psm3|shm|efa):.*<(?:info|debug|trace|warn)>.*(?:not found|no valid|unable to|skipping|disabled|deprecated)",
        ),
        tells=Tells.NOISE,
    ),
    _fabric(
        name="fabrics.no-provider",
        wordings=(
            r"fi_getinfo(?:\(\))?:? .*(?:No data available|-61)",
            r"(?:OFI|libfabric).*(?:no|No) (?:suitable |usable |matching )?providers? (?:found|available)",
        ),
        tells=Tells.NAMES,
        kind="nccl_plugin",
    ),
    # Omni-Path.
    _fabric(
        name="fabrics.psm-contexts",
        wordings=(
            r"PSM\d?.*(?:[Cc]an't open|[Uu]nable to (?:open|find)).*(?:hfi|unit|context|port)(?P<what>.*)",
            r"hfi_userinit.*(?:assign_context|Device or resource busy|No such)",
            r"(?:hfi1|PSM).*[Nn]o free (?:hardware )?contexts?",
        ),
        tells=Tells.NAMES,
        cause="rdma-device",
        rivals=("permission",),
        error="no context of the Omni-Path card of {here} could be had: more processes than contexts, or the card is down",
        advice="fewer processes per node, or PSM2_SHAREDCONTEXTS=1 with PSM2_RANKS_PER_CONTEXT=2",
        confirm="opainfo; ls -l /dev/hfi1*   on that node",
    ),
    # Verbs.
    _verbs(
        name="fabrics.verbs-memlock",
        wordings=(
            r"RLIMIT_MEMLOCK is (?P<bytes>\d+) bytes",
            r"ibv_(?:create_\w+|reg_mr|alloc_\w+)\b.*(?:Cannot allocate memory|ENOMEM)",
            r"(?:register|pin|lock)\w* .{0,60}memory.*(?:Cannot allocate memory).*(?:memlock|ulimit|locked)",
        ),
        tells=Tells.NAMES,
        cause="memlock",
        rivals=("memory",),
        error="the limit of locked memory is too low for RDMA on {here}: {words:.120}",
        advice=_PINNING,
        advice_in=_PINNING_IN,
        confirm="ulimit -l   in the job, on that node",
    ),
    _verbs(
        name="fabrics.verbs-no-device",
        wordings=(
            r"libibverbs: (?:Fatal|Warning): couldn't (?:read|open) (?:uverbs ABI version|uverbs device|.*sysfs)",
            r"[Nn]o (?:active )?IB devices? (?:were )?found",
            r"[Ff]ailed to (?:open|get) (?:IB|RDMA|verbs|infiniband) device",
        ),
        tells=Tells.HINTS,
        cause="rdma-device",
        error="no InfiniBand device can be seen on {here}",
        advice="use a node with one, or sockets: NCCL_IB_DISABLE=1; the module ib_uverbs has to be loaded",
        advice_in={"container": "docker run --device=/dev/infiniband"},
        confirm="ibv_devinfo   in the job",
    ),
    _verbs(
        name="fabrics.gid-missing",
        wordings=(r"[Ii]nvalid GID index (?P<index2>\d+)",),
        tells=Tells.NAMES,
        cause="ib-path",
        error="the GID {index2} does not exist on the network card of {here}",
        advice="unset NCCL_IB_GID_INDEX and UCX_IB_GID_INDEX, or choose one that show_gids lists on all nodes",
        confirm="show_gids   on all nodes",
    ),
    # UCX.
    _ucx(
        name="fabrics.ucx-timeout",
        wordings=(
            r"UCX +ERROR.*(?:Transport retry count exceeded|RC QP .*WITH ERR|Remote (?:access|operation) (?:error|on))(?P<what>.*)",
            r"Transport retry count exceeded on (?P<device>\S+)",
        ),
        tells=Tells.NAMES,
        cause="ib-path",
        rivals=("peer-lost",),
        error="UCX got no answer over InfiniBand or RoCE, because the path is broken or the other process had gone: {words:.160}",
        advice="look whether the other process still runs; then test the link between the two nodes, with UCX_NET_DEVICES naming one port",
        confirm="ib_write_bw HOST   between the two nodes",
    ),
    _ucx(
        name="fabrics.ucx-unreachable",
        wordings=(
            r"UCX +ERROR +no (?:active messages|remote registered memory access|auxiliary|am bcopy|.*) transport(?:s)? (?:to|available)(?P<what>.*)",
            r"UCX +ERROR.*Destination is unreachable",
        ),
        tells=Tells.NAMES,
        cause="network-devices-differ",
        rivals=("bad-setting",),
        error="UCX found no transport that both ends have: {words:.160}",
        advice="unset UCX_TLS and UCX_NET_DEVICES, or allow what all nodes have: UCX_TLS=rc,sm,self,cuda_copy,cuda_ipc",
        confirm="ucx_info -d | grep -E 'Transport|Device'   on both nodes",
    ),
    _ucx(
        name="fabrics.ucx-connect",
        wordings=(
            r"UCX +ERROR.*(?:connect\(\S+\)|connection to \S+).*failed: (?P<why>Connection refused|Connection timed out|No route to host)",
        ),
        tells=Tells.NAMES,
        cause="firewall",
        rivals=("no-route", "peer-lost"),
        error="UCX could not connect to another node: {why}",
        advice="UCX_NET_DEVICES=ib0 (or mlx5_0:1) names the network that all nodes share; open all ports between them",
    ),
    _ucx(
        name="fabrics.ucx-shared-memory",
        wordings=(
            r"UCX +ERROR.*(?:shmget|shm_open|mmap|posix).*(?:No space left|Cannot allocate|failed)(?P<why>.*)",
            r"UCX +ERROR.*(?:ptrace|CMA|process_vm_(?:readv|writev)).*(?P<why2>Operation not permitted|EPERM)",
        ),
        tells=Tells.NAMES,
        cause="small-dev-shm",
        rivals=("permission",),
        error="UCX could not share memory between the processes of {here}",
        advice="--ipc=host --shm-size=8g for the container, or UCX_TLS=^cma",
    ),
    _ucx(
        name="fabrics.ucx-warnings",
        wordings=(
            r"UCX +WARN +(?:IB: ibv_fork_init|memtype_cache|invalid configuration: UCX_|unused (?:env|environment))",
        ),
        tells=Tells.NOISE,
    ),
)
