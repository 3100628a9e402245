"""The kernel of a node, as dmesg, syslog and serial consoles show it: GPUs, memory, disks, network cards.

Sources: Linux 4.18 to 6.12 mm/oom_kill.c, kernel/hung_task.c, net/; NVIDIA's Xid catalogue (r450 to r580); systemd-oomd.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_kernel = partial(KnownMessage, source="Linux 4.18 to 6.12, dmesg")
_driver = partial(KnownMessage, source="NVIDIA driver r450 to r580, dmesg")

_REPORT = "exclude the node and report it to the site: `muster run --exclude NODE`"


def _xid(
    numbers: str,
    error: str,
    tells: Tells = Tells.NAMES,
    *,
    cause: str = "gpu-hardware",
    advice: str = _REPORT,
) -> KnownMessage:
    is_cause = tells in (Tells.NAMES, Tells.PROVES)
    return KnownMessage(
        name=f"kernel.xid-{numbers.partition('|')[0]}",
        wordings=(rf"NVRM: Xid \((?P<bus>[^)]*)\): (?P<xid>{numbers})\b",),
        source="NVIDIA's Xid catalogue, driver r450 to r580",
        tells=tells,
        cause=cause if is_cause else "",
        error=f"{error} (Xid {{xid}} of {{bus}})",
        advice=advice,
        confirm="nvidia-smi -q; dmesg | grep -i xid   on that node" if is_cause else None,
    )


ENTRIES: tuple[KnownMessage, ...] = (
    # Faults of a GPU.
    _xid(
        "13|69",
        "a kernel of the program failed on a GPU of {here}",
        cause="cuda-error",
        advice="look at the exception of that rank; CUDA_LAUNCH_BLOCKING=1 names the line; on one node only, suspect the GPU",
    ),
    _xid(
        "31",
        "a kernel of the program read or wrote memory that it does not have on a GPU of {here}",
        cause="cuda-error",
        advice="`compute-sanitizer python ...` names the kernel; often an index that is out of range; on one node only, suspect the GPU",
    ),
    _xid("43|45", "the driver cleaned up after a process that ended", Tells.ECHO),
    _xid("63|121|123|154|156|160", "a GPU of {here} recorded an event", Tells.FACT),
    _xid(
        "8",
        "a kernel ran longer on a GPU of {here} than the driver's watchdog allows",
        cause="cuda-error",
        advice="take a GPU that drives no display (the X server's option Interactive off lifts the limit), or make the work of one kernel smaller; without a display, look for other Xids",
    ),
    _xid("46|109", "a GPU of {here} stopped to process"),
    _xid("32", "a GPU of {here} got a broken stream of commands: the driver, or the PCIe link"),
    _xid("38|61|62|66|67|110|122|143", "the firmware or the controller of a GPU of {here} failed"),
    _xid("48", "a GPU of {here} has an uncorrectable memory error (double bit ECC)", Tells.PROVES),
    _xid(
        "64",
        "a GPU of {here} could not put broken memory out of use: it has to be reset",
        Tells.PROVES,
    ),
    _xid(
        "74",
        "an NVLink of a GPU of {here} has an error",
        advice="exclude the node and report it: `nvidia-smi nvlink -e` shows which link; other GPUs of the node may be at its end",
    ),
    _xid(
        "79",
        "a GPU of {here} has fallen off the bus: the driver cannot reach it",
        Tells.PROVES,
        advice="exclude the node and report it: it needs a reboot or a power cycle; power, heat or the PCIe slot are the usual reasons",
    ),
    _xid("80", "a GPU of {here} received corrupted data"),
    _xid("92", "a GPU of {here} has many correctable memory errors"),
    _xid(
        "94",
        "a memory error of a GPU of {here} ended the process that used the memory",
        advice="start the job again: the GPU put the memory out of use; exclude the node if it comes again, and have it reset",
    ),
    _xid("95|140", "a GPU of {here} has an uncorrectable memory error", Tells.PROVES),
    _xid(
        "119|120",
        "the system processor (GSP) of a GPU of {here} does not answer",
        Tells.NAMES,
        advice="exclude the node and report it: it needs a reset of the GPU, and often a newer driver",
    ),
    _xid("136|144|145|146|147|148|149|150|155", "an NVLink of a GPU of {here} failed"),
    _xid(
        "137",
        "a GPU of {here} was refused access to the memory of another over NVLink",
        cause="cuda-error",
        advice="look at the rank that failed first: mostly it freed its memory, or ended, while others still used it",
    ),
    _driver(
        name="kernel.sxid-fatal",
        wordings=(r"SXid \((?P<bus>[^)]*)\): (?P<sxid>\d+), Fatal",),
        tells=Tells.PROVES,
        cause="gpu-hardware",
        error="an NVSwitch of {here} reports a fatal error (SXid {sxid} of {bus})",
        advice=_REPORT,
        confirm="nvidia-smi nvlink --status; systemctl status nvidia-fabricmanager   on that node",
    ),
    _driver(
        name="kernel.sxid-other",
        wordings=(r"SXid \([^)]*\): \d+, (?:Non-fatal|Link|Severity)",),
        tells=Tells.FACT,
    ),
    _driver(
        name="kernel.gpu-initialise",
        wordings=(
            r"NVRM: (?:GPU \S+ )?RmInitAdapter failed",
            r"NVRM: The NVIDIA probe routine failed for",
            r"NVRM: .*rm_init_adapter failed",
        ),
        tells=Tells.NAMES,
        cause="gpu-hardware",
        rivals=("driver-mismatch",),
        error="the driver could not initialise a GPU of {here}",
        advice=_REPORT,
        confirm="nvidia-smi; dmesg | grep NVRM   on that node",
    ),
    _driver(
        name="kernel.driver-mismatch",
        wordings=(
            r"NVRM: API mismatch: the client has the version (?P<client>[\d.]+)(?:.*version (?P<module>[\d.]+))?",
        ),
        tells=Tells.PROVES,
        cause="driver-mismatch",
        error="on {here} the libraries of the NVIDIA driver (version {client}) and the loaded module differ",
        advice="the site has to reboot the node; in a container, take the image's own libcuda.so and libnvidia-ml.so off LD_LIBRARY_PATH",
        confirm="cat /proc/driver/nvidia/version; nvidia-smi   on that node",
    ),
    _driver(
        name="kernel.gpu-unknown-to-driver",
        wordings=(
            r"NVRM: .*(?:is not supported by|does not include the required GPU)",
            r"NVRM: No NVIDIA (?:GPU|graphics adapter|devices) (?:was )?(?:found|probed)",
        ),
        tells=Tells.NAMES,
        cause="no-gpu",
        error="the NVIDIA driver of {here} finds no GPU that it knows",
        advice="ask the site for a driver that fits the GPU; exclude the node until then",
        confirm="lspci | grep -i nvidia; cat /proc/driver/nvidia/version   on that node",
    ),
    _kernel(
        name="kernel.amdgpu-fault",
        wordings=(
            r"amdgpu.*\bpage fault\b.*(?:pasid|vmid)",
            r"Memory access fault by GPU node-\d+ .*Reason: (?P<why>[^.]+)",
        ),
        tells=Tells.NAMES,
        cause="cuda-error",
        rivals=("gpu-hardware",),
        error="a kernel of the program read or wrote memory that it does not have on an AMD GPU of {here}",
        advice="AMD_SERIALIZE_KERNEL=3 names the line; often an index that is out of range",
    ),
    _kernel(
        name="kernel.amdgpu-broken",
        wordings=(
            r"amdgpu.*(?:GPU reset begin|ring \w+ timeout|GPU hang|RAS.*uncorrectable|uncorrectable hardware error)",
        ),
        tells=Tells.NAMES,
        cause="gpu-hardware",
        rivals=("cuda-error",),
        error="an AMD GPU of {here} hung or has a hardware error",
        advice=_REPORT,
        confirm="rocm-smi --showrasinfo; dmesg | grep amdgpu   on that node",
    ),
    # Memory and processes.
    _kernel(
        name="kernel.oom",
        wordings=(
            r"oom_reaper: reaped process (?P<pid>\d+)",
            r"Tasks? in \S+ killed as a result of limit of",
            r"systemd-oomd.*Killed \S+ due to memory",
            r"earlyoom.*sending SIG(?:TERM|KILL) to process (?P<pid2>\d+)",
        ),
        tells=Tells.PROVES,
        kind="oom_proof",
    ),
    _kernel(
        name="kernel.page-allocation",
        wordings=(r"(?P<command>\S+): page allocation failure: order:(?P<order>\d+)",),
        tells=Tells.HINTS,
        cause="memory",
        error="the kernel of {here} had no memory left for {command}",
        advice="use fewer loader workers, or ask for more memory",
    ),
    _kernel(
        name="kernel.process-limit",
        wordings=(r"cgroup: fork rejected by pids controller in (?P<path>\S+)",),
        tells=Tells.PROVES,
        cause="process-limit",
        error="the job may have no more processes and threads on {here}: the limit of its cgroup is reached",
        advice="use fewer loader workers and OMP_NUM_THREADS=1",
        advice_in={
            "container": "docker run --pids-limit=-1, or fewer loader workers",
            "kubernetes": "a higher podPidsLimit of the kubelet, or fewer loader workers",
        },
        confirm="cat /sys/fs/cgroup/pids.max; ulimit -u   in the job",
    ),
    _kernel(
        name="kernel.segfault",
        wordings=(
            r"\w+\[(?P<pid>\d+)\]: segfault at \w+ ip .*?(?: in (?P<library>[\w.+-]+)\[.*)?$",
            r"traps: \S+\[(?P<pid2>\d+)\] general protection.*?(?: in (?P<library2>[\w.+-]+)\[.*)?$",
        ),
        tells=Tells.HINTS,
        cause="segfault",
        error="process {pid}{pid2} crashed in native code {library}{library2}",
        advice="PYTHONFAULTHANDLER=1 shows the Python line; update or rebuild the library that is named",
        confirm="coredumpctl info PID   on that node",
    ),
    _kernel(
        name="kernel.illegal-instruction",
        wordings=(
            r"traps: \S+\[(?P<pid>\d+)\] trap invalid opcode ip.*?(?: in (?P<library>[\w.+-]+)\[.*)?$",
        ),
        tells=Tells.NAMES,
        cause="illegal-instruction",
        rivals=("aborted",),
        error="process {pid} used an instruction that the processor of {here} does not have {library}",
        advice="build {library} on a node of this kind, without -march=native of a newer one",
        confirm="lscpu | grep Flags   on both kinds of nodes",
    ),
    _kernel(
        name="kernel.blocked",
        wordings=(r"task (?P<command>\S+):(?P<pid>\d+) blocked for more than (?P<s>\d+) seconds",),
        tells=Tells.HINTS,
        cause="blocked-in-kernel",
        error="{command} hung in the kernel of {here} for {s} seconds, mostly waiting for storage",
        advice="look at the file systems of that node (`df`, `dmesg | grep -iE 'nfs|lustre|nvme'`), and read data from a local disk",
        confirm="cat /proc/PID/stack; mount   on that node",
    ),
    _kernel(
        name="kernel.lockup",
        wordings=(
            r"BUG: (?P<what>soft lockup) - CPU#\d+ stuck for",
            r"(?P<what2>hard LOCKUP) on cpu",
            r"rcu\w*: .*(?P<what3>detected stalls? on CPU|self-detected stall)",
        ),
        tells=Tells.HINTS,
        cause="node-crashed",
        error="the kernel of {here} stood still: {what}{what2}{what3}",
        advice=_REPORT,
    ),
    _kernel(
        name="kernel.crashed",
        wordings=(r"Kernel panic - not syncing(?:: (?P<why>.+))?",),
        tells=Tells.PROVES,
        cause="node-crashed",
        error="the kernel of {here} crashed: {why}",
        advice=_REPORT,
    ),
    _kernel(
        name="kernel.oops",
        wordings=(
            r"BUG: (?:unable to handle|kernel NULL pointer)(?P<why2>.*)",
            r"\bOops: (?P<why3>[0-9a-f]{4} \[#\d+\].*)",
        ),
        tells=Tells.NAMES,
        cause="node-crashed",
        error="a part of the kernel of {here} crashed: {why2}{why3}",
        advice=_REPORT,
    ),
    # Hardware of the node.
    _kernel(
        name="kernel.hardware-error",
        wordings=(
            r"EDAC \w+: \d+ UE (?P<what>.*)",
            r"\[Hardware Error\]: .*(?P<what2>Uncorrected|uncorrected|fatal).*",
            r"PCIe Bus Error: severity=Uncorrect\w+ \(Fatal\)(?P<what3>.*)",
            r"mce: .*Uncorrected hardware memory error(?P<what4>.*)",
        ),
        tells=Tells.NAMES,
        cause="node-hardware",
        error="the hardware of {here} has an error: {words:.200}",
        advice=_REPORT,
    ),
    _kernel(
        name="kernel.hardware-corrected",
        wordings=(
            r"EDAC \w+: \d+ CE ",
            r"PCIe Bus Error: severity=Corrected",
            r"(?:Corrected error|Machine check events logged)",
            r"temperature above threshold, cpu clock throttled",
        ),
        tells=Tells.FACT,
    ),
    _kernel(
        name="kernel.disk",
        wordings=(
            r"(?:blk_update_request: |Buffer )?I/O error[, ]+(?:on )?dev(?:ice)? (?P<device>[\w-]+)",
            r"(?P<device2>nvme\w+): (?:I/O (?:tag )?\d+ .*timeout|controller is down)",
            r"(?:EXT4-fs error|XFS) \((?:device )?(?P<device3>[\w-]+)\): .*(?:[Cc]orrupt|I/O error|error)",
        ),
        tells=Tells.NAMES,
        cause="disk-error",
        error="the disk {device}{device2}{device3} of {here} has errors",
        advice=_REPORT,
        confirm="dmesg | grep -iE 'nvme|I/O error'   on that node",
    ),
    _kernel(
        name="kernel.read-only",
        wordings=(r"(?:[Rr]emounting|[Mm]ounting) filesystem read-only",),
        tells=Tells.PROVES,
        cause="read-only",
        error="the kernel of {here} made a file system read-only after an error",
        advice=_REPORT,
    ),
    # The network.
    _kernel(
        name="kernel.link-down",
        wordings=(
            r"mlx5_core \S+(?: (?P<device>\w+))?: (?:Port: \d+ )?Link (?:DOWN|down)",
            r"(?P<device2>(?:eth|en|ib|hsn|bond)\w*): (?:NIC )?(?:Link is Down|link is down)",
            r"link status definitely down for interface (?P<device3>[\w-]+)",
            r"NETDEV WATCHDOG: (?P<device4>\w+) .*transmit queue \d+ timed out",
            r"mlx5_core \S+: .*(?:health compromised|device's health|FW fatal)",
        ),
        tells=Tells.NAMES,
        cause="link-down",
        error="a network link of {here} went down: {device}{device2}{device3}{device4}",
        advice=_REPORT,
        confirm="ip -br link; ibstat   on that node",
    ),
    _kernel(
        name="kernel.network-table",
        wordings=(
            r"nf_conntrack: .*(?P<what>table full), dropping packet",
            r"neighbou?r: (?:arp_cache|ndisc_cache): (?P<what2>neighbor table overflow)",
            r"TCP: (?P<what3>out of memory|too many orphaned sockets)",
        ),
        tells=Tells.NAMES,
        cause="network-table-full",
        error="the kernel of {here} drops packets: {what}{what2}{what3}",
        advice="the site has to raise net.netfilter.nf_conntrack_max, or net.ipv4.neigh.default.gc_thresh3 for many nodes in one network",
        confirm="sysctl net.netfilter.nf_conntrack_count net.ipv4.neigh.default.gc_thresh3   on that node",
    ),
    _kernel(
        name="kernel.harmless",
        wordings=(
            r"possible SYN flooding on port \d+\. Sending cookies",
            r"module license '?NVIDIA'? taints kernel",
            r"nvidia_uvm: module uses symbols .* from proprietary module",
            r"perf: interrupt took too long",
            r"ADDRCONF\(NETDEV_(?:UP|CHANGE)\)",
            r"loading out-of-tree module taints kernel",
        ),
        tells=Tells.NOISE,
    ),
)
