"""Every entry of the catalogue is whole, and can be found in the words of the program."""

import re
import string

import pytest

from torchmuster.diagnose.explain.advice.values import VALUES
from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells
from torchmuster.diagnose.explain.catalogue.index import CATALOGUE, ENTRIES
from torchmuster.diagnose.explain.causes import CAUSES
from torchmuster.diagnose.explain.reading.patterns import ROLES, match

ALWAYS = {"words", "who", "here", "named", "pair"} | set(VALUES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_an_entry_is_whole(entry):
    assert re.fullmatch(r"[a-z0-9]+\.[a-z0-9-]+", entry.name)
    assert entry.source
    if entry.kind:
        assert entry.kind in ROLES
    elif entry.tells in (Tells.PROVES, Tells.NAMES, Tells.HINTS):
        assert entry.cause in CAUSES
        assert entry.error
        assert entry.advice
        assert not entry.advice.endswith(".")
    else:
        assert not entry.cause
    assert set(entry.rivals) <= set(CAUSES)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_braces_of_an_entry_are_fields_of_its_wordings(entry):
    groups = {name for regex in entry.regexes for name in regex.groupindex}
    special = [words for words in entry.advice_in.values() if isinstance(words, str)]
    special += [
        text for texts in entry.advice_in.values() if isinstance(texts, tuple) for text in texts
    ]
    texts = (entry.error, entry.advice, entry.confirm or "", *special)
    named = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name}
    assert named <= groups | ALWAYS


def test_names_are_unique():
    assert len(CATALOGUE.by_name) == len(ENTRIES)


def test_what_tells_most_wins_whatever_stands_first():
    said = KnownMessage(name="a.hint", wordings=("broken thing",), source="x", tells=Tells.HINTS)
    proof = KnownMessage(
        name="a.proof", wordings=("thing is broken at",), source="x", tells=Tells.PROVES
    )
    found = type(CATALOGUE)([said, proof]).find("a broken thing: thing is broken at 3")
    assert found is not None
    assert found[0] is proof


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (
            "../aten/src/ATen/native/cuda/Indexing.cu:1290: block: [4,0,0], Assertion `srcIndex < srcSelectDimSize` failed.",
            "cuda.index-assert",
        ),
        (
            "[3] transport/net_ib.cc:1121 NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_2:1",
            "nccl.ib-path-setup",
        ),
        (
            "[1] transport/net_ib.cc:1302 NCCL WARN NET/IB: Got completion from peer 10.4.0.17<48812> with status=IBV_WC_WR_FLUSH_ERR(5) opcode=IBV_WC_SEND(0) vendor_err=249 (Send) hca mlx5_0",
            "nccl.ib-flushed",
        ),
        (
            "NCCL WARN NET/IB : Got completion from peer 172.16.9.4<51110> with error 4, opcode 0, len 0, vendor err 81",
            "nccl.ib-memory",
        ),
        (
            "[0] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address",
            "nccl.ib-gpudirect-register",
        ),
        (
            "NCCL WARN NET/IB : mlx5_3:1 async fatal event: port error",
            "nccl.ib-link-down",
        ),
        (
            "NCCL WARN NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [2]mlx5_2:1/RoCE. Try selecting NICs of only one link type using NCCL_IB_HCA",
            "nccl.ib-mixed-links",
        ),
        (
            "[2] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.12.3.9<41233> failed : No route to host",
            "nccl.connect-no-route",
        ),
        (
            "[5] misc/socket.cc:550 NCCL WARN socketPollConnect: Connect to 172.17.0.1<38211> returned 110(Connection timed out) errno 110(Connection timed out)",
            "nccl.connect-timed-out",
        ),
        (
            "[0] bootstrap.cc:77 NCCL WARN Message truncated : received 1024 bytes instead of 256",
            "nccl.truncated",
        ),
        (
            "[0] bootstrap.cc:290 NCCL WARN Bootstrap Root : mismatch in rank count from procs 16 : 8",
            "nccl.rank-count",
        ),
        (
            "[0] bootstrap.cc:301 NCCL WARN Bootstrap Root : rank 3 of 8 ranks has already checked in",
            "nccl.rank-twice",
        ),
        (
            "[0] NCCL WARN Invalid rank requested : 8/8",
            "nccl.rank-beyond",
        ),
        (
            "[1] enqueue.cc:1610 NCCL WARN Broadcast : invalid root 12 (root should be in the 0..8 range)",
            "nccl.argument",
        ),
        (
            "[4] transport/nvls.cc:254 NCCL WARN Cuda failure 401 'the operation cannot be performed in the present state'",
            "nccl.nvls",
        ),
        (
            "[0] mnnvl.cc:61 NCCL WARN MNNVL (cliqueSize 18) is available but not working on this system. Check the IMEX channel configuration (/dev/nvidia-caps-imex-channels).",
            "nccl.mnnvl",
        ),
        (
            "graph/paths.cc:311 NCCL WARN P2P is disabled between NVLINK connected GPUs 2 and 5. This should not be the case given their connectivity, and is probably due to a hardware issue.",
            "nccl.p2p-disabled",
        ),
        (
            "[0] NCCL INFO NET/Plugin: Could not find: libnccl-net-ofi.so. Using internal net plugin.",
            "nccl.plugin-chatter",
        ),
        (
            "NVRM: Xid (PCI:0000:9b:00): 31, pid=20413, name=python, Ch 0000001b, intr 00000000. MMU Fault: ENGINE GRAPHICS",
            "kernel.xid-31",
        ),
        (
            "NVRM: Xid (PCI:0000:1a:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 05",
            "kernel.xid-136",
        ),
        (
            "NVRM: Xid (PCI:0000:c1:00): 119, pid=811, Timeout after 6s of waiting for RPC response from GPU1 GSP!",
            "kernel.xid-119",
        ),
        (
            "nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 32 LTSSM Fault Up",
            "kernel.sxid-fatal",
        ),
        (
            "NVRM: API mismatch: the client has the version 550.54.15, but",
            "kernel.driver-mismatch",
        ),
        (
            "python[40221]: segfault at 18 ip 00007f1b2c4e1a30 sp 00007ffd0a1b error 4 in libtorch_cpu.so[7f1b28000000+1a2b000]",
            "kernel.segfault",
        ),
        (
            "INFO: task python3:88123 blocked for more than 120 seconds.",
            "kernel.blocked",
        ),
        (
            "EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#1_DIMM#0",
            "kernel.hardware-error",
        ),
        (
            "blk_update_request: I/O error, dev nvme1n1, sector 81264640 op 0x0:(READ)",
            "kernel.disk",
        ),
        (
            "mlx5_core 0000:5e:00.0 ibs3: Link down",
            "kernel.link-down",
        ),
        (
            "nf_conntrack: nf_conntrack: table full, dropping packet",
            "kernel.network-table",
        ),
        (
            "MultinomialKernel.cu:112: block: [3,0,0], thread: [41,0,0] Assertion `probability >= 0` failed.",
            "cuda.probability-assert",
        ),
        (
            "UserWarning: NVIDIA B200 with CUDA capability sm_100 is not compatible with the current PyTorch installation.",
            "cuda.arch-not-compatible",
        ),
        (
            "nvcc fatal   : Unsupported gpu architecture 'compute_120'",
            "cuda.nvrtc-arch",
        ),
        (
            "Could not load library libcudnn_cnn_train.so.8. Error: libcudnn_ops_train.so.8: cannot open shared object file: No such file or directory",
            "cuda.cudnn-missing",
        ),
        (
            "ERROR: This container was built for NVIDIA Driver Release 560.35 or later, but",
            "cuda.container-driver-old",
        ),
        (
            "Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded",
            "noise.one-thread",
        ),
        (
            "ERROR: ld.so: object '/opt/site/libshim.so' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored.",
            "noise.preload",
        ),
        (
            "E0000 00:00:1744.1 4021 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register factory for plugin cuDNN when one has already been registered",
            "noise.factories",
        ),
        (
            "huggingface/tokenizers: The current process just got forked, after parallelism has already been used. Disabling parallelism to avoid deadlocks...",
            "noise.tokenizers-fork",
        ),
        (
            "libibverbs: Warning: couldn't load driver 'libvmw_pvrdma-rdmav34.so': libvmw_pvrdma-rdmav34.so: cannot open shared object file",
            "noise.ibverbs-drivers",
        ),
        (
            "NCCL WARN NET/OFI Request 0x7f31 completed with error: * This error indicates that the security group on either this instance or the peer instance",
            "fabrics.efa-security-group",
        ),
        (
            "NCCL WARN NET/OFI EFA provider requires at least libfabric version 1.22.0.",
            "fabrics.ofi-libfabric-old",
        ),
        (
            "[2] NCCL WARN NET/OFI Couldn't open a fabric access domain. RC: -12, ERROR: Cannot allocate memory",
            "fabrics.ofi-open",
        ),
        (
            "libfabric:41020:1718:cxi:ep_ctrl:cxip_ctrl_handler():221<warn> x1102c3s0b0n1: LE resources not recovered during flow control. FI_CXI_RX_MATCH_MODE=[hybrid|software] is required",
            "fabrics.cxi-matching",
        ),
        (
            "libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.",
            "fabrics.verbs-memlock",
        ),
        (
            "ib_mlx5_log.c:177 UCX  ERROR Transport retry count exceeded on mlx5_1:1/RoCE (synd 0x15 vend 0x81 hw_synd 0/0)",
            "fabrics.ucx-timeout",
        ),
        (
            "select.c:629  UCX  ERROR   no active messages transport to <no debug data>: self/memory - Destination is unreachable",
            "fabrics.ucx-unreachable",
        ),
        (
            "socket.cpp:506 The server socket on [cn04]:29400 has failed to bind (errno: 99 - Cannot assign requested address).",
            "c10d.bind-address",
        ),
        (
            "socket.cpp:506 The server socket on [::]:443 has failed to bind (errno: 13 - Permission denied).",
            "c10d.port-forbidden",
        ),
        (
            "barrier failed -- missing ranks: [5, 7]",
            "c10d.missing-ranks",
        ),
        (
            "finetune.py: error: unrecognized arguments: --local-rank=3",
            "c10d.local-rank-argument",
        ),
        (
            "Observed flight recorder dump signal from another rank via TCPStore.",
            "c10d.flight-recorder",
        ),
        (
            "[/build/gloo/transport/tcp/pair.cc:144] socket: Too many open files",
            "c10d.gloo-too-many",
        ),
        (
            "Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding",
            "python.home",
        ),
        (
            "double free or corruption (!prev)",
            "python.heap-corrupted",
        ),
        (
            "OMP: Error #15: Initializing libiomp5.so, but found libomp.so already initialized.",
            "python.two-openmp",
        ),
        (
            "OpenBLAS blas_thread_init: pthread_create failed for thread 31 of 64: Resource temporarily unavailable",
            "python.thread-limit",
        ),
        (
            "EnvironmentNameNotFound: Could not find conda environment: llm311",
            "python.conda-environment",
        ),
        (
            "ERROR: No matching distribution found for torch==2.9.9",
            "python.no-distribution",
        ),
        (
            "RuntimeError: module compiled against ABI version 0x2000000 but this version of numpy is 0x1000009",
            "python.numpy-api",
        ),
    ],
)
def test_a_line_is_the_message_that_its_program_prints(line, name):
    found = match(line)
    assert found is not None
    assert found.kind in (f"told:{name}", CATALOGUE.by_name[name].kind)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (
            "RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method",
            "cuda.forked",
        ),
        (
            "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
            "cuda.busy",
        ),
        (
            "RuntimeError: CUDA error: invalid configuration argument",
            "cuda.launch-size",
        ),
        (
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
            "cuda.cublas-create",
        ),
        (
            "RuntimeError: cuDNN version incompatibility: PyTorch was compiled  against (9, 1, 0) but found runtime version (8, 9, 7).",
            "cuda.cudnn-versions",
        ),
        (
            "RuntimeError: GET was unable to find an engine to execute this computation",
            "cuda.cudnn-start",
        ),
        (
            "RuntimeError: FlashAttention only supports Ampere GPUs or newer.",
            "cuda.flash-attention-gpu",
        ),
        (
            "OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.",
            "cuda.no-toolkit",
        ),
        (
            "RuntimeError: Error building extension 'fused_rope'",
            "cuda.extension-build",
        ),
        (
            "RuntimeError: use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it.",
            "c10d.no-libuv",
        ),
        (
            "ValueError: port must have value from 0 to 65535 but was 71422.",
            "c10d.port-value",
        ),
        (
            "ValueError: Error initializing torch.distributed using env:// rendezvous: rank parameter missing",
            "c10d.env-value",
        ),
        (
            "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
            "c10d.no-process-group",
        ),
        (
            "ValueError: Cannot use ReduceOp.BAND with non-integral dtype",
            "c10d.gloo-tensor",
        ),
        (
            "RuntimeError: The size of tensor a (48) must match the size of tensor b (64) at non-singleton dimension 1",
            "torch.elementwise-shapes",
        ),
        (
            "RuntimeError: stack expects each tensor to be equal size, but got [3, 224, 224] at entry 0 and [1, 224, 224] at entry 5",
            "torch.cat-shapes",
        ),
        (
            "RuntimeError: Given groups=1, weight of size [64, 3, 7, 7], expected input[8, 1, 96, 96] to have 3 channels, but got 1 channels instead",
            "torch.conv-channels",
        ),
        (
            "ValueError: Expected input batch_size (512) to match target batch_size (8).",
            "torch.loss-shapes",
        ),
        (
            "IndexError: index out of range in self",
            "torch.embedding-index",
        ),
        (
            "RuntimeError: expected scalar type Half but found Float",
            "torch.dtypes-matmul",
        ),
        (
            "RuntimeError: mat1 and mat2 must have the same dtype, but got BFloat16 and Float",
            "torch.dtypes-matmul",
        ),
        (
            "RuntimeError: \"addmm_impl_cpu_\" not implemented for 'Half'",
            "torch.not-implemented-dtype",
        ),
        (
            "RuntimeError: No backend type associated with device type cpu",
            "torch.cpu-for-gpu-backend",
        ),
        (
            "NotImplementedError: Cannot copy out of meta tensor; no data!",
            "torch.meta-tensor",
        ),
        (
            "RuntimeError: Trying to backward through the graph a second time (or directly access saved tensors after they have already been freed).",
            "torch.backward-twice",
        ),
        (
            "RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn",
            "torch.no-gradient",
        ),
        (
            "RuntimeError: Function 'LogBackward0' returned nan values in its 0th output.",
            "torch.anomaly",
        ),
        (
            "ValueError: Attempting to unscale FP16 gradients.",
            "torch.scaler-fp16",
        ),
        (
            "TypeError: RNG state must be a torch.ByteTensor",
            "torch.rng-state",
        ),
        (
            "RuntimeError: Attempting to deserialize object on CUDA device 5 but torch.cuda.device_count() is 2.",
            "torch.fake-devices",
        ),
        (
            "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons",
            "torch.ddp-ready-twice",
        ),
        (
            "RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.",
            "torch.ddp-no-parameters",
        ),
        (
            "ValueError: trying to initialize the default process group twice!",
            "torch.group-twice",
        ),
        (
            "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
            "torch.fsdp-dtypes",
        ),
        (
            "RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!",
            "torch.dtensor-mixed",
        ),
        (
            "RuntimeError: each element in list of batch should be of equal size",
            "torch.collate-sizes",
        ),
        (
            "ValueError: num_samples should be a positive integer value, but got num_samples=0",
            "torch.empty-dataset",
        ),
        (
            "AttributeError: Can't pickle local object 'build.<locals>.collate'",
            "torch.not-picklable",
        ),
        (
            "RuntimeError: Error(s) in loading state_dict for DenseNet:",
            "torch.state-dict",
        ),
        (
            "ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group",
            "torch.optimizer-state",
        ),
        (
            "RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory",
            "torch.checkpoint-broken",
        ),
        (
            "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options",
            "torch.weights-only",
        ),
        (
            "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:",
            "torch.compile-failed",
        ),
        (
            "RuntimeError: Failed to find C compiler. Please specify via CC environment variable.",
            "torch.compile-no-compiler",
        ),
        (
            "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
            "torch.triton-resources",
        ),
        (
            "ModuleNotFoundError: No module named 'distutils'",
            "python.removed-modules",
        ),
        (
            "ModuleNotFoundError: No module named '_lzma'",
            "python.built-without",
        ),
        (
            "AttributeError: partially initialized module 'wandb' has no attribute 'init' (most likely due to a circular import)",
            "python.circular-import",
        ),
        (
            "ImportError: /env/lib/python3.11/site-packages/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
            "program.extension-of-other-torch",
        ),
        (
            "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
            "python.opencv-gl",
        ),
        (
            "PIL.UnidentifiedImageError: cannot identify image file '/data/train/0421.jpg'",
            "python.image",
        ),
        (
            "EOFError: Compressed file ended before the end-of-stream marker was reached",
            "python.compressed",
        ),
        (
            "RuntimeError: Socket Timeout",
            "c10d.socket-timeout",
        ),
        (
            "RuntimeError: CUDA driver error: out of memory",
            "cuda.driver-memory",
        ),
        (
            "RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR",
            "cuda.solver",
        ),
        (
            "ValueError: optimizer got an empty parameter list",
            "torch.no-parameters",
        ),
        (
            "ValueError: Expected parameter loc (Tensor of shape (64, 6)) of distribution Normal(loc: torch.Size([64, 6]), scale: torch.Size([64, 6])) to satisfy the constraint Real()",
            "torch.distribution-values",
        ),
        (
            "torch._C._LinAlgError: linalg.cholesky: (Batch element 3): The factorization could not be completed because the input is not positive-definite",
            "torch.singular",
        ),
        (
            "RuntimeError: Invalid device string: 'cuda:local'",
            "torch.device-string",
        ),
        (
            "AttributeError: 'DistributedDataParallel' object has no attribute 'save_pretrained'",
            "torch.wrapped-model",
        ),
        (
            "AttributeError: module 'torch.library' has no attribute 'register_fake'",
            "python.package-version",
        ),
    ],
)
def test_an_exception_is_the_message_that_its_program_raises(words, name):
    found = match(words, is_raised=True)
    assert found is not None
    assert found.kind in (f"told:{name}", CATALOGUE.by_name[name].kind)


def test_an_exception_is_never_noise():
    assert CATALOGUE.find("RuntimeError: FutureWarning: too old", is_raised=True) is None
    assert CATALOGUE.find("train.py:3: FutureWarning: too old") is not None
