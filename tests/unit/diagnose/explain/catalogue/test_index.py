"""Every row that explain knows is whole, and its messages can be found in the words of the program."""

import random
import re
import string
from pathlib import Path

import pytest

from kit.tables import rows
from torchmuster.diagnose.explain.advice import VALUES
from torchmuster.diagnose.explain.catalogue import index
from torchmuster.diagnose.explain.catalogue.index import (
    CATALOGUE,
    CAUSES,
    RULE_ROWS,
    TABLES,
    Row,
    StemFinder,
    Telling,
    known_stems,
    read_messages,
    read_rows,
    shorten_stems,
    stems_of,
    stems_of_row,
)
from torchmuster.diagnose.explain.reading.patterns import LINES, ROLES, match

ALWAYS = {"words", "who", "here", "named", "pair"} | set(VALUES)
MESSAGES = read_messages()


def faults_of(row):
    """Yield what a message lacks or has too much."""
    if not re.fullmatch(r"[a-z0-9]+\.[a-z0-9-]+", row.name):
        yield "its name is not of the form program.what-it-says"
    if not row.source or not row.says:
        yield "it has no source, or no wording"
    if row.kind in ROLES:
        return
    if row.kind != f"told:{row.name}":
        yield f"no rule knows events of the kind {row.kind}"
    if row.tells in (Telling.PROVES, Telling.NAMES, Telling.HINTS):
        if row.cause not in CAUSES or not row.error or not row.hint or row.hint.endswith("."):
            yield "cause, error or hint is not there, or not of the form"
    elif row.cause:
        yield "what names no cause has one"
    groups = {name for regex in row.regexes for name in regex.groupindex}
    special = [text for texts in row.hint_in.values() for text in texts]
    texts = (row.error, row.hint, row.confirm or "", *special)
    named = {name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name}
    if unknown := named - groups - ALWAYS:
        yield f"no wording has the fields {sorted(unknown)}"


def test_every_message_is_whole():
    assert [f"{row.name}: {fault}" for row in MESSAGES for fault in faults_of(row)] == []


def test_names_are_unique():
    names = [row.name for row in (*MESSAGES, *LINES, *RULE_ROWS.values())]
    assert len(set(names)) == len(names)


def test_stems_that_are_written_down_are_those_of_the_wordings():
    stems = known_stems()
    assert set(stems) == set(CATALOGUE.by_name)
    assert [row.name for row in MESSAGES if stems[row.name] != stems_of_row(row)] == []


def test_rows_of_rules_have_a_cause_and_a_cure():
    rows = RULE_ROWS.values()
    assert [row.name for row in rows if not (row.cause and row.error and row.hint)] == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[a.b]\nsayz: x\n", "sayz"),
        ("[a.b]\ntells: lots\n", "LOTS"),
        ("[a.b]\nweight: heavy + 2\n", "heavy is no weight"),
        ("[a.b]\ncause: x\ncause: y\n", "too many values"),
    ],
)
def test_a_row_that_can_not_be_read_names_its_line(text, why, tmp_path, monkeypatch):
    (tmp_path / "made.txt").write_text(text)
    monkeypatch.setattr(index, "__file__", tmp_path / "index.py")
    with pytest.raises(ValueError, match=rf"made.txt, line 1: a.b: .*{re.escape(why)}"):
        read_rows("made")


def test_what_tells_most_wins_whatever_stands_first():
    said = Row(name="a.hint", says=("broken thing",), source="x", tells=Telling.HINTS)
    proof = Row(name="a.proof", says=("thing is broken at",), source="x", tells=Telling.PROVES)
    found = type(CATALOGUE)([said, proof]).find("a broken thing: thing is broken at 3")
    assert found is not None
    assert found[0] is proof


@pytest.mark.parametrize(
    ("name", "line"),
    rows(
        """
        cuda.index-assert           ../aten/src/ATen/native/cuda/Indexing.cu:1290: block: [4,0,0], Assertion `srcIndex < srcSelectDimSize` failed.
        nccl.ib-path-setup          [3] transport/net_ib.cc:1121 NCCL WARN Call to ibv_modify_qp failed with 22 Invalid argument, on dev mlx5_2:1
        nccl.ib-flushed             [1] transport/net_ib.cc:1302 NCCL WARN NET/IB: Got completion from peer 10.4.0.17<48812> with status=IBV_WC_WR_FLUSH_ERR(5) opcode=IBV_WC_SEND(0) vendor_err=249 (Send) hca mlx5_0
        nccl.ib-memory              NCCL WARN NET/IB : Got completion from peer 172.16.9.4<51110> with error 4, opcode 0, len 0, vendor err 81
        nccl.ib-gpudirect-register  [0] misc/ibvwrap.cc:252 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Bad address
        nccl.ib-link-down           NCCL WARN NET/IB : mlx5_3:1 async fatal event: port error
        nccl.ib-mixed-links         NCCL WARN NET/IB : Attempted to connect incompatible devices: [0]mlx5_0:1/IB and [2]mlx5_2:1/RoCE. Try selecting NICs of only one link type using NCCL_IB_HCA
        nccl.connect-no-route       [2] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to 10.12.3.9<41233> failed : No route to host
        nccl.connect-timed-out      [5] misc/socket.cc:550 NCCL WARN socketPollConnect: Connect to 172.17.0.1<38211> returned 110(Connection timed out) errno 110(Connection timed out)
        nccl.truncated              [0] bootstrap.cc:77 NCCL WARN Message truncated : received 1024 bytes instead of 256
        nccl.rank-count             [0] bootstrap.cc:290 NCCL WARN Bootstrap Root : mismatch in rank count from procs 16 : 8
        nccl.rank-twice             [0] bootstrap.cc:301 NCCL WARN Bootstrap Root : rank 3 of 8 ranks has already checked in
        nccl.rank-beyond            [0] NCCL WARN Invalid rank requested : 8/8
        nccl.argument               [1] enqueue.cc:1610 NCCL WARN Broadcast : invalid root 12 (root should be in the 0..8 range)
        nccl.nvls                   [4] transport/nvls.cc:254 NCCL WARN Cuda failure 401 'the operation cannot be performed in the present state'
        nccl.mnnvl                  [0] mnnvl.cc:61 NCCL WARN MNNVL (cliqueSize 18) is available but not working on this system. Check the IMEX channel configuration (/dev/nvidia-caps-imex-channels).
        nccl.p2p-disabled           graph/paths.cc:311 NCCL WARN P2P is disabled between NVLINK connected GPUs 2 and 5. This should not be the case given their connectivity, and is probably due to a hardware issue.
        nccl.plugin-chatter         [0] NCCL INFO NET/Plugin: Could not find: libnccl-net-ofi.so. Using internal net plugin.
        kernel.xid-31               NVRM: Xid (PCI:0000:9b:00): 31, pid=20413, name=python, Ch 0000001b, intr 00000000. MMU Fault: ENGINE GRAPHICS
        kernel.xid-136              NVRM: Xid (PCI:0000:1a:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 05
        kernel.xid-119              NVRM: Xid (PCI:0000:c1:00): 119, pid=811, Timeout after 6s of waiting for RPC response from GPU1 GSP!
        kernel.sxid-fatal           nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 32 LTSSM Fault Up
        kernel.driver-mismatch      NVRM: API mismatch: the client has the version 550.54.15, but
        kernel.segfault             python[40221]: segfault at 18 ip 00007f1b2c4e1a30 sp 00007ffd0a1b error 4 in libtorch_cpu.so[7f1b28000000+1a2b000]
        kernel.blocked              INFO: task python3:88123 blocked for more than 120 seconds.
        kernel.hardware-error       EDAC MC1: 1 UE memory read error on CPU_SrcID#1_MC#0_Chan#1_DIMM#0
        kernel.disk                 blk_update_request: I/O error, dev nvme1n1, sector 81264640 op 0x0:(READ)
        kernel.link-down            mlx5_core 0000:5e:00.0 ibs3: Link down
        kernel.network-table        nf_conntrack: nf_conntrack: table full, dropping packet
        cuda.probability-assert     MultinomialKernel.cu:112: block: [3,0,0], thread: [41,0,0] Assertion `probability >= 0` failed.
        cuda.arch-not-compatible    UserWarning: NVIDIA B200 with CUDA capability sm_100 is not compatible with the current PyTorch installation.
        cuda.nvrtc-arch             nvcc fatal   : Unsupported gpu architecture 'compute_120'
        cuda.cudnn-missing          Could not load library libcudnn_cnn_train.so.8. Error: libcudnn_ops_train.so.8: cannot open shared object file: No such file or directory
        cuda.container-driver-old   ERROR: This container was built for NVIDIA Driver Release 560.35 or later, but
        noise.one-thread            Setting OMP_NUM_THREADS environment variable for each process to be 1 in default, to avoid your system being overloaded
        fabrics.verbs-memlock       libibverbs: Warning: RLIMIT_MEMLOCK is 65536 bytes.
        c10d.bind-address           socket.cpp:506 The server socket on [cn04]:29400 has failed to bind (errno: 99 - Cannot assign requested address).
        c10d.port-forbidden         socket.cpp:506 The server socket on [::]:443 has failed to bind (errno: 13 - Permission denied).
        c10d.missing-ranks          barrier failed -- missing ranks: [5, 7]
        c10d.local-rank-argument    finetune.py: error: unrecognized arguments: --local-rank=3
        c10d.flight-recorder        Observed flight recorder dump signal from another rank via TCPStore.
        c10d.gloo-too-many          [/build/gloo/transport/tcp/pair.cc:144] socket: Too many open files
        python.home                 Fatal Python error: init_fs_encoding: failed to get the Python codec of the filesystem encoding
        python.heap-corrupted       double free or corruption (!prev)
        python.two-openmp           OMP: Error #15: Initializing libiomp5.so, but found libomp.so already initialized.
        python.thread-limit         OpenBLAS blas_thread_init: pthread_create failed for thread 31 of 64: Resource temporarily unavailable
        python.conda-environment    EnvironmentNameNotFound: Could not find conda environment: llm311
        python.no-distribution      ERROR: No matching distribution found for torch==2.9.9
        python.numpy-api            RuntimeError: module compiled against ABI version 0x2000000 but this version of numpy is 0x1000009
        slurm.too-many-cpus         srun: error: Unable to create step for job 77120: More processors requested than permitted
        slurm.gres                  sbatch: error: Invalid generic resource (gres) specification
        srun.nodes-busy             srun: Job 3177 step creation temporarily disabled, retrying (Requested nodes are busy)
        srun.first-task-exited      srun: First task exited 60s ago
        k8s.no-gpus                 0/12 nodes are available: 4 Insufficient nvidia.com/gpu, 8 node(s) didn't match Pod's node affinity/selector.
        k8s.no-cpu-or-memory        0/3 nodes are available: 3 Insufficient memory. preemption: 0/3 nodes are available
        k8s.taints                  0/6 nodes are available: 6 node(s) had untolerated taint {nvidia.com/gpu: present}.
        k8s.volume-binding          Warning  FailedScheduling  3m  default-scheduler  pod has unbound immediate PersistentVolumeClaims
        k8s.quota                   pods "ddp-worker-3" is forbidden: exceeded quota: gpu-team, requested: requests.nvidia.com/gpu=8, used: requests.nvidia.com/gpu=28, limited: requests.nvidia.com/gpu=32
        k8s.pod-security            pods "t-0" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false (container "t" must set it)
        k8s.webhook                 admission webhook "validate.kyverno.svc" denied the request: resource limits are required
        k8s.mount                   MountVolume.SetUp failed for volume "data" : mount failed: exit status 32
        k8s.image-login             Failed to pull image "registry.example.org/llm:7": rpc error: code = Unknown desc = failed to authorize: 401 Unauthorized
        k8s.evicted-memory          The node was low on resource: ephemeral-storage. Threshold quantity: 10Gi, available: 3Gi.
        k8s.liveness                Container train failed liveness probe, will be restarted
        k8s.unhealthy               Warning  Unhealthy  20s  kubelet  Readiness probe failed: connection refused
        k8s.crash-loop              Back-off restarting failed container trainer in pod t-0_default
        k8s.kueue                   couldn't assign flavors to pod set main: insufficient unused quota for nvidia.com/gpu in flavor h100, 8 more needed
        deepspeed.no-hostfile       Unable to find hostfile, will proceed with training with local resources only.
        deepspeed.subprocess-died   Killing subprocess 30112
        noise.lmod-notes            Lmod is automatically replacing "gcc/12" with "nvhpc/24".
        noise.wandb-notes           wandb: Network error (ConnectionError), entering retry loop.
        noise.deepspeed-notes       sparse_attn requires a torch version >= 1.5 and < 2.0 but detected 2.6
        """
    ),
)
def test_a_line_is_the_message_that_its_program_prints(line, name):
    found = match(line)
    assert found is not None
    assert found.kind in (f"told:{name}", CATALOGUE.by_name[name].kind)


@pytest.mark.parametrize(
    ("name", "words"),
    rows(
        """
        cuda.forked                       RuntimeError: Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method
        cuda.busy                         RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable
        cuda.launch-size                  RuntimeError: CUDA error: invalid configuration argument
        cuda.cublas-create                RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`
        cuda.cudnn-versions               RuntimeError: cuDNN version incompatibility: PyTorch was compiled  against (9, 1, 0) but found runtime version (8, 9, 7).
        cuda.cudnn-start                  RuntimeError: GET was unable to find an engine to execute this computation
        cuda.flash-attention-gpu          RuntimeError: FlashAttention only supports Ampere GPUs or newer.
        cuda.no-toolkit                   OSError: CUDA_HOME environment variable is not set. Please set it to your CUDA install root.
        cuda.extension-build              RuntimeError: Error building extension 'fused_rope'
        c10d.no-libuv                     RuntimeError: use_libuv was requested but PyTorch was built without libuv support, run with USE_LIBUV=0 to disable it.
        c10d.port-value                   ValueError: port must have value from 0 to 65535 but was 71422.
        c10d.env-value                    ValueError: Error initializing torch.distributed using env:// rendezvous: rank parameter missing
        c10d.no-process-group             ValueError: Default process group has not been initialized, please make sure to call init_process_group.
        c10d.gloo-tensor                  ValueError: Cannot use ReduceOp.BAND with non-integral dtype
        torch.embedding-index             IndexError: index out of range in self
        torch.ddp-ready-twice             RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following reasons
        torch.ddp-no-parameters           RuntimeError: DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient.
        torch.group-twice                 ValueError: trying to initialize the default process group twice!
        torch.fsdp-dtypes                 ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32
        torch.dtensor-mixed               RuntimeError: aten.mm.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor before calling distributed operators!
        torch.collate-sizes               RuntimeError: each element in list of batch should be of equal size
        torch.empty-dataset               ValueError: num_samples should be a positive integer value, but got num_samples=0
        torch.not-picklable               AttributeError: Can't pickle local object 'build.<locals>.collate'
        torch.state-dict                  RuntimeError: Error(s) in loading state_dict for DenseNet:
        torch.optimizer-state             ValueError: loaded state dict contains a parameter group that doesn't match the size of optimizer's group
        torch.checkpoint-broken           RuntimeError: PytorchStreamReader failed reading zip archive: failed finding central directory
        torch.weights-only                _pickle.UnpicklingError: Weights only load failed. This file can still be loaded, to do so you have two options
        torch.compile-failed              torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:
        torch.compile-no-compiler         RuntimeError: Failed to find C compiler. Please specify via CC environment variable.
        torch.triton-resources            triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, Hardware limit: 101376. Reducing block sizes or `num_stages` may help.
        python.removed-modules            ModuleNotFoundError: No module named 'distutils'
        python.built-without              ModuleNotFoundError: No module named '_lzma'
        python.circular-import            AttributeError: partially initialized module 'wandb' has no attribute 'init' (most likely due to a circular import)
        program.extension-of-other-torch  ImportError: /env/lib/python3.11/site-packages/flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi
        python.opencv-gl                  ImportError: libGL.so.1: cannot open shared object file: No such file or directory
        python.image                      PIL.UnidentifiedImageError: cannot identify image file '/data/train/0421.jpg'
        python.compressed                 EOFError: Compressed file ended before the end-of-stream marker was reached
        c10d.socket-timeout               RuntimeError: Socket Timeout
        cuda.driver-memory                RuntimeError: CUDA driver error: out of memory
        cuda.solver                       RuntimeError: cuFFT error: CUFFT_INTERNAL_ERROR
        torch.device-string               RuntimeError: Invalid device string: 'cuda:local'
        torch.wrapped-model               AttributeError: 'DistributedDataParallel' object has no attribute 'save_pretrained'
        python.package-version            AttributeError: module 'torch.library' has no attribute 'register_fake'
        k8s.missing-config                Error: secret "hf-token" not found
        deepspeed.batch-sizes             AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size 128 != 4 * 4 * 6
        deepspeed.config-conflict         ValueError: Please correct the following DeepSpeed config values that mismatch TrainingArguments values:
        deepspeed.loss-scale              Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.
        deepspeed.zero3-in-flight         RuntimeError: still have inflight params [{'id': 12}]
        deepspeed.passwordless            RuntimeError: Using hostfile at /job/hostfile but host=w2 was not reachable via ssh.
        deepspeed.cuda-versions           CUDAMismatchException: >- DeepSpeed Op Builder: Installed CUDA version 12.4 does not match the version torch was compiled with 11.8
        megatron.world-size               AssertionError: world_size (12) is not divisible by 8
        megatron.global-batch             AssertionError: global batch size (100) is not divisible by micro batch size (4) times data parallel size (8)
        vllm.no-room-for-cache            ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine.
        vllm.context-too-long             ValueError: To serve at least one request with the models's max seq len (131072), 16.0 GiB KV cache is needed
        vllm.executor-died                RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
        ray.out-of-memory                 ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.
        ray.versions                      RuntimeError: Version mismatch: The cluster was started with:
        """
    ),
)
def test_an_exception_is_the_message_that_its_program_raises(words, name):
    found = match(words, is_raised=True)
    assert found is not None
    assert found.kind in (f"told:{name}", CATALOGUE.by_name[name].kind)


def test_an_exception_is_never_noise():
    words = "Setting OMP_NUM_THREADS environment variable for each process to be 1"
    assert CATALOGUE.find(f"RuntimeError: {words}", is_raised=True) is None
    assert CATALOGUE.find(words) is not None


# A stem is in every line that its expression fits, and all stems of a line are found.


@pytest.mark.parametrize(
    ("wording", "line"),
    [
        (r"ibv_modify_qp failed with (?:110|error \w+)", "x ibv_modify_qp failed with 110"),
        (r"(?:no space|disk quota) (?:left|exceeded)", "disk quota exceeded"),
        (r"[Oo]ut of (?P<what>memory|tokens)+", "Out of memorymemory"),
        (r"a?b*(?:never)?always", "always"),
    ],
)
def test_a_line_that_fits_has_a_stem(wording, line):
    assert re.search(wording, line)
    assert any(stem in line.lower() for stem in stems_of(wording))


@pytest.mark.parametrize("wording", [r"x+", r"(?:word)?", r"(?:whole|x)", r"ab \d+ cd"])
def test_an_expression_without_a_sure_word_is_refused(wording):
    with pytest.raises(ValueError, match="4 letters"):
        stems_of(wording)


def test_all_stems_of_a_text_are_found_also_where_they_overlap():
    finder = StemFinder(["modi", "modify", "ownership", "shipping", "port"])
    assert finder.find("modify") == {"modi", "modify"}
    assert finder.find("ownershipping") == {"ownership", "shipping"}
    assert finder.find("nothing") == set()


def test_ends_of_stems_begin_with_few_letters_and_each_is_within_its_stem():
    stems = {f"{a}{b}{c}tion" for a in "abcdefgh" for b in "lmnopqrs" for c in "aeiou"} | {"nan"}
    ends = shorten_stems(stems)
    assert all(any(stem.endswith(end) for end in ends) for stem in stems)
    assert all(len(end) >= 4 or end in stems for end in ends)
    assert len({end[0] for end in ends}) == 2


def test_search_for_a_thousand_stems_is_not_slower_than_for_a_hundred():
    dice = random.Random(1)

    def words(num_words):
        return ["".join(dice.choices(string.ascii_lowercase, k=8)) for _ in range(num_words)]

    line = " ".join(words(14))

    def steps(num_stems):  # how many places of a line a search has to look at closely
        beginnings = {end[0] for end in shorten_stems(words(num_stems))}
        return sum(letter in beginnings for letter in line)

    assert steps(1000) <= 2 * steps(100)
    assert steps(1000) < 0.6 * len(line)


# Words for causes are an interface: they are documented, all of them, and no others are used.


ROOT = Path(__file__).parents[5]
SOURCES = ROOT / "src" / "torchmuster" / "diagnose" / "explain"
ROWS = [*CATALOGUE.by_name.values(), *RULE_ROWS.values()]


def test_every_word_in_the_rows_is_explained():
    used = {word for row in ROWS for word in (row.cause, *row.rivals) if word}
    assert used - set(CAUSES) == set()


def test_every_word_is_used():
    text = "".join(path.read_text() for path in SOURCES.rglob("*.py"))
    known = {row.cause for row in ROWS} | TABLES["cured-in-code"].words
    assert [word for word in CAUSES if word not in known and f'"{word}"' not in text] == []


def test_docs_list_the_words_of_the_code():
    rows = [f"| `{word}` | {meaning} |" for word, meaning in CAUSES.items()]
    table = "\n".join(["| cause | what it means |", "|---|---|", *rows, ""])
    assert table in (ROOT / "docs" / "explain.md").read_text()
