"""NCCL and RCCL: what they print and return.

Sources: NCCL 2.7 to 2.30 src/ (init.cc, net*.cc, misc/socket.cc, transport/), RCCL 5 and 6.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_ib = partial(KnownMessage, source="NCCL 2.7 to 2.30, src/transport/net_ib.cc, misc/ibvwrap.cc")
_net = partial(KnownMessage, source="NCCL 2.7 to 2.30, src/misc/socket.cc, bootstrap.cc, proxy.cc")
_init = partial(KnownMessage, source="NCCL 2.7 to 2.30, src/init.cc, misc/argcheck.cc, graph/")

_GID_ADVICE = "choose the GID of RoCE v2 with an IPv4 address, the same on all nodes: NCCL_IB_GID_INDEX=3 (show_gids lists them), and only ports of one network in NCCL_IB_HCA"

ENTRIES: tuple[KnownMessage, ...] = (
    # InfiniBand and RoCE.
    _ib(
        name="nccl.ib-path-setup",
        wordings=(
            r"ibv_modify_qp failed with (?:error |\d+ )(?P<why>(?:Network is|No route|No data|No such|Invalid arg)[^,]*)",
            r"ibv_modify_qp failed with (?:22|101|113|61)\b",
        ),
        tells=Tells.NAMES,
        cause="ib-path",
        rivals=("firewall", "no-route"),
        error="a RoCE or InfiniBand connection of {who} could not be set up: the addresses (GIDs) of the two ports do not fit each other",
        advice=_GID_ADVICE,
        confirm="show_gids; ib_write_bw -x GID_INDEX HOST   between the two nodes",
    ),
    _ib(
        name="nccl.ib-timeout",
        wordings=(
            r"ibv_modify_qp failed with (?:error |(?P<errno>\d+) )(?P<why>[A-Z][^,]*)",
            r"NET/IB.*status=IBV_WC_(?:RETRY_EXC|RNR_RETRY_EXC|RESP_TIMEOUT)_ERR\((?P<status>\d+)\)",
        ),
        tells=Tells.NAMES,
        kind="nccl_ib",
    ),
    _ib(
        name="nccl.ib-flushed",
        wordings=(
            r"NET/IB\w*/?\w* ?: Got completion from peer .*(?:status=|error )(?:IBV_WC_WR_FLUSH_ERR\()?5\b",
        ),
        tells=Tells.ECHO,
    ),
    _ib(
        name="nccl.ib-memory",
        wordings=(
            r"NET/IB.*Got completion from peer (?P<peer>\S+) with (?:error |status=)(?:IBV_WC_\w+\()?(?:4|9|10|11)\b",
        ),
        tells=Tells.NAMES,
        cause="gpudirect",
        rivals=("gpu-hardware", "ib-path"),
        error="the network card could not read or write the memory of a transfer with {peer}: GPUDirect RDMA does not work there, or the memory had gone",
        advice="try NCCL_NET_GDR_LEVEL=LOC (no GPUDirect); if that helps, load nvidia-peermem, and turn PCI ACS or the IOMMU off on that node",
        confirm="lsmod | grep nvidia_peermem; lspci -vvv | grep ACSCtl   on that node",
    ),
    _ib(
        name="nccl.ib-gpudirect-register",
        wordings=(
            r"ibv_reg_(?:mr|mr_iova2|dmabuf_mr|dmabuf_mr_\w+)\S* failed with error (?P<why>Bad address|Operation not supported|Invalid argument|Protocol not supported)",
        ),
        tells=Tells.NAMES,
        cause="gpudirect",
        rivals=("memlock",),
        error="the memory of a GPU could not be registered with the network card ({why}): GPUDirect RDMA does not work on {here}",
        advice="load the module with `modprobe nvidia-peermem`, or do without it: NCCL_DMABUF_ENABLE=0, then NCCL_NET_GDR_LEVEL=LOC",
        confirm="lsmod | grep nvidia_peermem   on that node",
    ),
    _ib(
        name="nccl.ib-memlock-queue",
        wordings=(r"ibv_create_(?:qp|srq)\S* failed with error (?P<why>Cannot allocate memory)",),
        tells=Tells.NAMES,
        kind="nccl_memlock",
    ),
    _ib(
        name="nccl.ib-open",
        wordings=(
            r"NET/IB ?: Unable to open device (?P<device>\S+)",
            r"Call to ibv_open_device failed",
        ),
        tells=Tells.NAMES,
        cause="rdma-device",
        rivals=("permission",),
        error="the RDMA device {device} could not be opened on {here}",
        advice="give the process /dev/infiniband; on the host, the user needs to be allowed to open /dev/infiniband/uverbs*",
        advice_in={
            "kubernetes": "ask for the resource of the RDMA device plugin (such as rdma/hca: 1), which puts /dev/infiniband into the pod",
            "container": "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1",
        },
        confirm="ls -l /dev/infiniband; ibv_devinfo   in the job",
    ),
    _ib(
        name="nccl.ib-link-down",
        wordings=(
            r"NET/IB : (?:(?P<device>\S+):(?P<port>\d+) )?(?:Got )?async (?:fatal )?(?:error )?event ?: (?P<what>port error|device fatal error|local catastrophic error)",
            r"NET/IB : (?P<device2>\S+):\d+ (?:Got )?async fatal event(?: on \w+ \([^)]*\).*?)?: (?P<what2>.+)",
        ),
        tells=Tells.NAMES,
        cause="ib-path",
        rivals=("gpu-hardware",),
        error="the InfiniBand or RoCE device {device}{device2} of {here} reported: {what}{what2}",
        advice="look at the link and its cable (`ibstat`, `mlxlink -d {device}{device2}`), and leave the node out with --exclude until it is mended",
        confirm="dmesg | grep -i mlx5; ibstat   on that node",
    ),
    _ib(
        name="nccl.ib-event-harmless",
        wordings=(
            r"NET/IB : \S+:\d+ Got (?:non-fatal )?async event ?: (?:client re-?registration|LID change|P_Key change|SM change|GID (?:table )?change|port active|communication established)",
            r"NET/IB : \S+:\d+ GID table changed",
        ),
        tells=Tells.NOISE,
    ),
    _ib(
        name="nccl.ib-mixed-links",
        wordings=(
            r"NET/IB : Attempted to (?:connect|merge) incompatible devices: (?P<both>.+?)\. Try",
            r"NET/IB : Remote (?P<remote>\S+) device is incompatible with the local (?P<local>\S+)",
        ),
        tells=Tells.PROVES,
        cause="network-devices-differ",
        error="NCCL tried to connect an InfiniBand port with an Ethernet (RoCE) port: {both}{remote} {local}",
        advice="name the ports of one kind only, on all nodes: NCCL_IB_HCA==mlx5_0,mlx5_1 (ibv_devinfo shows link_layer)",
        confirm="ibv_devinfo | grep -E 'hca_id|link_layer'   on all nodes",
    ),
    _init(
        name="nccl.network-devices-differ",
        wordings=(
            r"Detected mixed local (?P<what>\w+) device counts across ranks \(min (?P<least>\d+), max (?P<most>\d+)\)",
        ),
        tells=Tells.NAMES,
        cause="network-devices-differ",
        error="the ranks see different numbers of network devices ({least} to {most}): a card is missing or down on a node",
        advice="compare `ibv_devinfo -l` on all nodes and leave out the one that lacks a card, or name those that all have in NCCL_IB_HCA",
    ),
    # Sockets.
    _net(
        name="nccl.no-interface",
        wordings=(
            r"NET/(?:Socket|IB) ?: [Nn]o (?:IP )?interface found",
            r"no device found (?:matching|after excluding) .*(?:verify|check) NCCL_(?:SOCKET|OOB_NET)_IFNAME",
        ),
        tells=Tells.PROVES,
        kind="nccl_interface",
    ),
    _net(
        name="nccl.comm-id-subnet",
        wordings=(r"NET/Socket ?: No usable listening interface found",),
        tells=Tells.PROVES,
        cause="no-such-interface",
        error="no interface of {here} is in the network of the address that NCCL_COMM_ID names",
        advice="unset NCCL_COMM_ID: torch tells NCCL where to meet; without torch, set it to an address of rank 0 that all nodes share a network with",
        confirm="echo $NCCL_COMM_ID; ip -br addr   on every node",
    ),
    _net(
        name="nccl.connect-no-route",
        wordings=(
            r"NCCL WARN .*[Cc]onnect to (?P<peer>[^\s<]+)<(?P<port>\d+)> (?:failed ?:|returned.*errno \d+\(|exceeded.*|returned )\s*(?:No route to host|Network is unreachable)",
            r"NCCL WARN .*connect returned (?:No route to host|Network is unreachable)",
        ),
        tells=Tells.NAMES,
        cause="no-route",
        rivals=("firewall", "bridge-address"),
        error="{here} has no way to {peer}, the address that NCCL uses for another rank",
        advice="open all ports between the nodes (a firewall that rejects says the same), or choose the network that all share: NCCL_SOCKET_IFNAME=ib0",
        confirm="ping -c1 {peer}; ip route get {peer}   on {here}",
    ),
    _net(
        name="nccl.connect-timed-out",
        wordings=(
            r"NCCL WARN .*[Cc]onnect to (?P<peer>[^\s<]+)<(?P<port>\d+)> (?:failed ?:|returned.*errno \d+\(|exceeded.*)\s*Connection timed out",
            r"NCCL WARN .*(?:socketPollConnect|socketStartConnect): exceeded timeouts",
            r"NCCL WARN .*connect returned Connection timed out, exceeded",
        ),
        tells=Tells.NAMES,
        cause="firewall",
        rivals=("no-route", "bridge-address"),
        error="no answer came from {peer}, the address that NCCL uses for another rank: packets are dropped on the way",
        advice="open all TCP ports between the nodes, or choose the network that all share: NCCL_SOCKET_IFNAME=ib0",
        confirm="nc -vz {peer} 22   on {here}",
    ),
    _net(
        name="nccl.connect-refused",
        wordings=(
            r"NCCL WARN .*[Cc]onnect to (?P<host>[^\s<]+)<(?P<port>\d+)> (?:failed ?:|returned.*errno \d+\()\s*Connection refused",
            r"NCCL WARN .*(?:socketPollConnect|socketStartConnect): exceeded retries",
            r"NCCL WARN .*connect returned Connection refused, exceeded",
        ),
        tells=Tells.ECHO,
        kind="nccl_remote",
    ),
    _net(
        name="nccl.connect-retried",
        wordings=(
            r"NCCL INFO .*[Cc]onnect(?:ing)? (?:to \S+ )?(?:returned|failed).*(?:retry|attempt)",
            r"Call to connect returned .*, retrying",
            r"NCCL INFO .*socketFinalizeAccept: (?:wrong|unexpected)",
        ),
        tells=Tells.NOISE,
    ),
    _net(
        name="nccl.service-thread",
        wordings=(
            r"NCCL (?:WARN|INFO) .*\[Service thread\] (?:Error encountered progressing|Could not receive type|Accept failed)",
            r"NCCL WARN .*Proxy Call to rank \d+ failed",
            r"NCCL WARN .*Socket recv failed while polling for opId",
            r"NCCL WARN .*ncclProxy(?:Call\w*|Client\w+) call to .* failed",
            r"NCCL WARN .*\[Proxy Service(?: UDS)? ?\d*\] (?:Failed to execute operation|Poll failed)",
        ),
        tells=Tells.ECHO,
        kind="nccl_remote",
    ),
    _net(
        name="nccl.service-closed",
        wordings=(r"NCCL INFO \[Service thread\] Connection closed by localRank",),
        tells=Tells.NOISE,
    ),
    _net(
        name="nccl.truncated",
        wordings=(
            r"Message truncated : received (?P<got>[\d,]+) bytes instead of (?P<wanted>[\d,]+)",
            r"NET/Socket : peer \S+ message truncated : receiving (?P<got2>\d+) bytes instead of (?P<wanted2>\d+)",
        ),
        tells=Tells.NAMES,
        cause="collectives-differ",
        rivals=("nccl-versions-differ",),
        error="a rank sent {got}{got2} bytes where another expected {wanted}{wanted2}: the ranks make different calls, or run different versions of NCCL",
        advice="let all ranks make the same calls with the same sizes; TORCH_DISTRIBUTED_DEBUG=DETAIL names the ones that differ",
    ),
    _net(
        name="nccl.rank-count",
        wordings=(
            r"Bootstrap Root : mismatch in (?:rank count|info) from procs,? ?(?:nranks )?(?P<one>\d+) (?::|vs) (?P<other>\d+)",
        ),
        tells=Tells.NAMES,
        cause="world-sizes-differ",
        error="ranks of one job were told different numbers of ranks: {one} and {other}",
        advice="give all nodes the same --nnodes and --nproc-per-node (or WORLD_SIZE)",
        confirm="print RANK and WORLD_SIZE on every node",
    ),
    _net(
        name="nccl.rank-twice",
        wordings=(
            r"Bootstrap Root : rank (?P<rank>\d+) of (?P<size>\d+) ranks has already checked in",
        ),
        tells=Tells.PROVES,
        cause="duplicate-rank",
        error="two processes say that they are rank {rank} of {size}",
        advice="give every node its own --node-rank, and every process its own RANK",
        confirm="print RANK and hostname in every process",
    ),
    _net(
        name="nccl.comm-id",
        wordings=(
            r"Invalid NCCL_COMM_ID, please use format",
            r"ncclCommGetUniqueId should not be called when NCCL_COMM_ID is set",
        ),
        tells=Tells.PROVES,
        cause="bad-setting",
        error="NCCL_COMM_ID is set in the environment, and NCCL cannot use it: {words:.200}",
        advice="unset NCCL_COMM_ID: torch hands the address on by itself",
    ),
    _net(
        name="nccl.bind-address",
        wordings=(r"NCCL WARN .*Call to bind failed ?: Cannot assign requested address",),
        tells=Tells.NAMES,
        cause="bad-setting",
        rivals=("no-such-interface",),
        error="NCCL should listen on an address that {here} does not have",
        advice="unset NCCL_COMM_ID and NCCL_SOCKET_IFNAME, or name an interface of this node",
        confirm="env | grep NCCL; ip -br addr   on that node",
    ),
    # What the program asked for.
    _init(
        name="nccl.rank-beyond",
        wordings=(r"Invalid rank requested ?: (?P<rank>-?\d+)/(?P<size>\d+)",),
        tells=Tells.PROVES,
        cause="wrong-rank",
        error="a process says that it is rank {rank} of {size}, which cannot be",
        advice="count ranks from 0 to WORLD_SIZE - 1; RANK = node rank * processes per node + local rank",
    ),
    _init(
        name="nccl.argument",
        wordings=(
            r"NCCL WARN (?P<op>\w+) : invalid (?P<what>type|root|reduction operation) (?P<value>-?\d+)",
        ),
        tells=Tells.PROVES,
        cause="invalid-collective",
        error="{op} was called with a {what} that NCCL does not know ({value})",
        advice="root has to be a rank of that group, and the data type and reduction ones that NCCL knows",
    ),
    _init(
        name="nccl.pointer",
        wordings=(r"NCCL WARN (?P<op>\w+) : \w+ \S+ is not a valid pointer",),
        tells=Tells.NAMES,
        cause="invalid-collective",
        error="{op} was given memory that is not on a GPU",
        advice="move the tensor to the GPU of the rank before the call: tensor.to(f'cuda:{{LOCAL_RANK}}')",
    ),
    _init(
        name="nccl.pointer-device",
        wordings=(r"allocated on device (?P<one>\d+) mismatchs? with NCCL device (?P<other>\d+)",),
        tells=Tells.PROVES,
        cause="devices-differ",
        error="a collective was given a tensor of GPU {one}, while the communicator is on GPU {other}",
        advice="call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first, and make all tensors there",
    ),
    _init(
        name="nccl.algorithm",
        wordings=(
            r"No algorithm/protocol available for function (?P<op>\w+) with datatype (?P<type>\w+)(?P<rest>.*)",
        ),
        tells=Tells.NAMES,
        cause="bad-setting",
        error="the settings NCCL_ALGO and NCCL_PROTO leave no way to do {op} with {type}",
        advice="unset NCCL_ALGO and NCCL_PROTO",
        confirm="env | grep -E 'NCCL_(ALGO|PROTO)'",
    ),
    _init(
        name="nccl.topology-file",
        wordings=(
            r"Could not open XML (?:topology|graph) file (?P<path>\S+)",
            r"XML (?:Topology|Graph) has wrong version",
            r"XML (?:Import|Export) Channel : (?:dev|rank) \S+ not found",
            r"XML Parse(?: error)? : (?:[Uu]n|[Ee]xpect)",
        ),
        tells=Tells.NAMES,
        cause="bad-setting",
        error="the topology or graph file of NCCL does not fit this node: {words:.160}",
        advice="unset NCCL_TOPO_FILE and NCCL_GRAPH_FILE, or name the file that is made for this kind of node",
        confirm="env | grep -E 'NCCL_(TOPO|GRAPH)_FILE'",
    ),
    _init(
        name="nccl.network-name",
        wordings=(r"Failed to initialize any NET plugin",),
        tells=Tells.NAMES,
        kind="nccl_plugin",
    ),
    _init(
        name="nccl.same-gpu-twice",
        wordings=(r"Multiple Ranks are using the same GPU(?:/Partition)?",),
        tells=Tells.PROVES,
        kind="nccl_duplicate_gpu",
    ),
    _init(
        name="nccl.communicator-broken",
        wordings=(
            r"communicator encountered a fatal error",
            r"Attempt to use communicator before the previous operation returned ncclSuccess",
            r"comm \S+ is in abort state",
        ),
        tells=Tells.ECHO,
    ),
)
