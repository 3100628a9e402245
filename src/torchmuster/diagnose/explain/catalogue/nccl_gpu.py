"""What NCCL and RCCL say of the GPUs of a node and of the links between them, and what they say in healthy runs.

Sources: NCCL 2.7 to 2.30 src/ (include/checks.h, transport/, plugin/, misc/), RCCL 5 and 6.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_gpu = partial(KnownMessage, source="NCCL 2.7 to 2.30, src/include/checks.h, transport/, misc/")
_said = partial(KnownMessage, source="NCCL 2.7 to 2.30, src/plugin/, transport/; torch 2.2 to 2.9")

ENTRIES: tuple[KnownMessage, ...] = (
    # GPUs and their links.
    _gpu(
        name="nccl.nvls",
        wordings=(
            r"Failed to bind NVLink SHARP \(NVLS\) Multicast memory",
            r"transport/nvls\.cc:\d+ NCCL WARN Cuda failure(?P<why>.*)",
        ),
        tells=Tells.NAMES,
        cause="fabric-manager",
        rivals=("cuda-out-of-memory", "gpu-hardware"),
        error="NVLink SHARP (multicast between the GPUs of a node) does not work on {here}",
        advice="go on without it: NCCL_NVLS_ENABLE=0; the site has to look after the fabric manager of that node",
        confirm="systemctl status nvidia-fabricmanager; nvidia-smi -q | grep -A3 Fabric   on that node",
    ),
    _gpu(
        name="nccl.mnnvl",
        wordings=(
            r"MNNVL \(cliqueSize (?P<size>\d+)\) is available but not working on this system",
        ),
        tells=Tells.PROVES,
        cause="imex",
        error="NVLink between nodes is available, and does not work on {here}",
        advice="the site has to start nvidia-imex on all nodes and give the job an IMEX channel; until then NCCL_MNNVL_ENABLE=0",
        confirm="nvidia-imex-ctl -N; ls /dev/nvidia-caps-imex-channels   on that node",
    ),
    _gpu(
        name="nccl.p2p-disabled",
        wordings=(
            r"P2P is disabled between (?:NVLINK )?connected GPUs (?P<one>\d+) and (?P<other>\d+)",
        ),
        tells=Tells.NAMES,
        cause="gpu-hardware",
        rivals=("fabric-manager",),
        error="the GPUs {one} and {other} of {here} are joined by NVLink, and still cannot reach each other",
        advice="exclude the node and report it: probably an NVLink is broken",
        confirm="nvidia-smi nvlink --status; nvidia-smi topo -p2p r   on that node",
    ),
    _gpu(
        name="nccl.peer-access",
        wordings=(
            r"failed to peer with device",
            r"Cuda failure \d* ?'peer access is not supported",
            r"transport/p2p\.cc:\d+ NCCL WARN (?:Cuda failure|cudaIpc|cuMem)(?P<why>.*)",
        ),
        tells=Tells.NAMES,
        cause="gpu-peer-access",
        rivals=("gpu-hardware", "fabric-manager"),
        error="two GPUs of {here} cannot map each other's memory{why}",
        advice="go on without it: NCCL_P2P_DISABLE=1; with expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF also try without that",
        advice_in={
            "container": "let the ranks of a node share one container, or start it with --ipc=host --pid=host; without GPUs' direct access: NCCL_P2P_DISABLE=1",
        },
        confirm="nvidia-smi topo -p2p r   on that node",
    ),
    _gpu(
        name="nccl.cuda-fault",
        wordings=(
            r"Cuda failure \d* ?'(?P<text>an illegal memory access[^']*|unspecified launch failure|device-side assert[^']*|misaligned address|an illegal instruction[^']*|the launch timed out[^']*)",
        ),
        tells=Tells.NAMES,
        kind="cuda_error",
    ),
    _gpu(
        name="nccl.cuda-hardware",
        wordings=(
            r"Cuda failure \d* ?'(?P<text>uncorrectable (?:ECC|NVLink) error[^']*|hardware stack error|unknown error)",
        ),
        tells=Tells.NAMES,
        cause="gpu-hardware",
        rivals=("cuda-error",),
        error="a GPU of {here} failed: {text}",
        advice="exclude the node and report it to the site",
        confirm="dmesg | grep -i xid; nvidia-smi -q -d ECC   on that node",
    ),
    _gpu(
        name="nccl.gpu-too-new",
        wordings=(
            r"Cuda failure \d* ?'(?P<text>invalid device function|named symbol not found|device kernel image is invalid)",
        ),
        tells=Tells.NAMES,
        cause="gpu-not-supported",
        rivals=("driver-too-old",),
        error="this NCCL has no code for the GPU of {here}: {text}",
        advice="install a build of torch and NCCL that knows this GPU; take other copies of libnccl off LD_LIBRARY_PATH",
        confirm="nvidia-smi --query-gpu=name,compute_cap --format=csv   on that node",
    ),
    _gpu(
        name="nccl.driver-lacks-call",
        wordings=(
            r"Cuda failure \d* ?'API call is not supported in the installed CUDA driver",
            r"Cuda failure \d* ?'the provided PTX was compiled with an unsupported toolchain",
        ),
        tells=Tells.NAMES,
        cause="driver-too-old",
        rivals=("no-gpu",),
        error="the NVIDIA driver of {here} is older than the CUDA of this environment needs",
        advice="install a torch build for an older CUDA, or ask the site for a newer driver (nvidia-smi shows the newest CUDA that it knows)",
        confirm="nvidia-smi | grep 'CUDA Version'   on that node",
    ),
    _gpu(
        name="nccl.cuda-alloc",
        wordings=(
            r"Failed to CUDA (?:host )?(?:malloc|calloc)(?: async)? (?P<size>\d+) bytes",
            r"Failed to CUDA host alloc (?P<size2>\d+) bytes",
        ),
        tells=Tells.HINTS,
        cause="cuda-out-of-memory",
        error="NCCL could not get {size}{size2} bytes of GPU memory for itself",
        advice="leave it some: a smaller batch, or fewer communicators and NCCL_BUFFSIZE=1048576",
    ),
    _gpu(
        name="nccl.nvml-mismatch",
        wordings=(r"(?i)nvml\w*(?:\(\))?:? .*Driver/library version mismatch",),
        tells=Tells.PROVES,
        cause="driver-mismatch",
        error="on {here} the loaded NVIDIA driver and its library have different versions",
        advice="the site has to reboot the node (or reload the nvidia module); exclude it until then",
        confirm="cat /proc/driver/nvidia/version; nvidia-smi   on that node",
    ),
    _gpu(
        name="nccl.nvml-lost",
        wordings=(r"nvml\w+\S* failed: GPU is lost", r"\bGPU is lost\. +Reboot the system"),
        tells=Tells.PROVES,
        kind="gpu_hardware",
    ),
    _gpu(
        name="nccl.nvml-unknown",
        wordings=(
            r"Failed to initialize NVML: Unknown Error",
            r"nvmlInit\S* failed: Unknown Error",
        ),
        tells=Tells.NAMES,
        cause="no-gpu",
        rivals=("gpu-hardware",),
        error="the process on {here} has lost its right to use the GPUs",
        advice="start the job again on that node",
        advice_in={
            "container": "start the container again: a `systemctl daemon-reload` on the host took the devices away; name them with --device=/dev/nvidia0 --device=/dev/nvidiactl",
        },
        confirm="nvidia-smi   in the job and on the host",
    ),
    _gpu(
        name="nccl.rccl-settings",
        wordings=(
            r"Missing \"?(?:(?:amd|intel)_iommu=on|iommu=pt|HSA_FORCE_FINE_GRAIN_PCIE=1)\"?",
            r"NUMA auto balancing enabled which can lead to variability",
        ),
        tells=Tells.NOISE,
    ),
    # What healthy runs say at NCCL_DEBUG=INFO.
    _said(
        name="nccl.plugin-chatter",
        wordings=(
            r"NCCL INFO .*(?:NET|TUNER|PROFILER|GIN|RMA|ENV|CollNet|NVTX)/Plugin ?:? .*(?:[Cc]ould not find|[Ff]ailed to (?:find|load|open|initialize)|No plugin|not found|Plugin load returned)",
            r"NCCL INFO .*(?:Failed to (?:find|open) |Could not (?:find|open) |Count not open )\S*(?:libibverbs|libnccl|libmlx5|libgdrapi|ncclNetPlugin|ncclCollNetPlugin|ncclTunerPlugin|libnvidia)",
            r"NCCL INFO .*(?:External \w+ plugin \S+ is unsupported|Failed to initialize NET plugin \S+)",
        ),
        tells=Tells.NOISE,
    ),
    _said(
        name="nccl.no-ib",
        wordings=(
            r"NCCL INFO NET/IB : No device found",
            r"NCCL INFO .*Could not enable P2P between dev",
            r"NCCL INFO .*GPU Direct RDMA Disabled for",
            r"NCCL INFO .*(?:DMA-?BUF|dmabuf) .*(?:not (?:supported|available)|unavailable)",
        ),
        tells=Tells.FACT,
    ),
    _said(
        name="nccl.env-deprecated",
        wordings=(
            r"Environment variable NCCL_\w+ is deprecated; use TORCH_NCCL",
            r"NCCL_(?:BLOCKING_WAIT|ASYNC_ERROR_HANDLING) is deprecated",
        ),
        tells=Tells.NOISE,
    ),
)
