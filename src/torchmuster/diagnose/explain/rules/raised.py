"""What exceptions mean, by type and message: the table behind the rule of exceptions, and advice for those of unknown words."""

import re
from collections.abc import Mapping

from torchmuster.diagnose.explain.advice.said import remedy_of
from torchmuster.diagnose.explain.events import LogEvent
from torchmuster.diagnose.explain.reading.chains import FETCHES, STANDARD_LIBRARY
from torchmuster.diagnose.explain.rules.rows import HIGH, INSTALL_IN, Row, Weight
from torchmuster.diagnose.explain.rules.told import row_of_exception

_FETCH_BEFORE = "compute nodes often have no way out: fetch it before the job, on the login node, or set the proxy"


def _raised(
    words: str,
    cause: str,
    hint: str,
    confirm: str | None = None,
    kinds: tuple[str, ...] = (),
    hint_in: Mapping[str, str | tuple[str, ...]] | None = None,
) -> Row:
    return Row(
        evidence=kinds,
        words=words,
        cause=cause,
        error="{who} failed first: {words:.300}",
        hint=hint,
        hint_in=hint_in or {},
        confirm=confirm,
        weight=Weight.PROGRAM,
        num_lines=1,
    )


_SMALLER_BATCH = "a smaller batch, activation checkpointing, or FSDP"
_OOM_IN: dict[str, str | tuple[str, ...]] = {
    "vllm": "a smaller --max-model-len, --max-num-seqs or --gpu-memory-utilization (what vLLM takes for itself, 0.9 by default), or a"
    " larger --tensor-parallel-size",
    "sglang": "a smaller --mem-fraction-static (what SGLang takes for weights and cache), --chunked-prefill-size or"
    " --max-running-requests, or a larger --tp",
    "tensorflow": "a smaller batch_size in model.fit, or mixed precision; for other programs on that GPU:"
    " TF_FORCE_GPU_ALLOW_GROWTH=true",
    "trainer": (
        (
            "in the {evaluation} the Trainer keeps all outputs on the GPU: eval_accumulation_steps=1, a smaller per_device_eval_batch_size, and"
            " preprocess_logits_for_metrics that keeps only what compute_metrics needs"
        ),
        (
            "halve per_device_train_batch_size and double gradient_accumulation_steps, which trains the same;"
            " gradient_checkpointing=True saves most"
        ),
    ),
    "notebook": "restart the kernel: cells that ran before keep their tensors on the GPU; then a smaller batch, and torch.no_grad() where"
    " nothing is trained",
    "lightning": "halve batch_size of the DataLoader and double accumulate_grad_batches of the Trainer, which trains the same;"
    " precision='bf16-mixed' saves more",
    "deepspeed": "halve train_micro_batch_size_per_gpu and double gradient_accumulation_steps; a higher ZeRO stage, or"
    ' "offload_optimizer": {{"device": "cpu"}}, takes optimizer states off the GPU',
    "megatron": "a smaller --micro-batch-size, --recompute-granularity selective, a distributed optimizer, or more tensor parallelism",
    "data-parallel": "a smaller batch; nn.DataParallel gathers all outputs on GPU 0: start with torchrun (DDP), which does not",
    "anywhere": (
        (
            "training went well up to step {steps_before}, so one batch is longer or what the program keeps grows: cap the length or"
            " number that varies, keep loss.item() in place of loss, and print torch.cuda.memory_allocated() every 100 steps"
        ),
        f"{{memory_own}} of {{memory_total}} are this process's own, and {{memory_asked}} more do not fit: {_SMALLER_BATCH}",
    ),
}

# Of a type or a message what it means; the first row that fits.
EXCEPTIONS: tuple[Row, ...] = (
    _raised(
        "",
        "cuda-out-of-memory",
        "a smaller batch, activation checkpointing, or FSDP; look for another process on that GPU",
        "nvidia-smi   on that node",
        kinds=("cuda_oom",),
        hint_in=_OOM_IN,
    ),
    _raised(
        "",
        "cuda-error",
        "run again with CUDA_LAUNCH_BLOCKING=1: the line that is named may be a later one",
        "compute-sanitizer python ...",
        kinds=("cuda_error",),
    ),
    _raised(
        r"Expected to have finished reduction",
        "unused-parameters",
        "find_unused_parameters=True for DDP, or use all parameters in the loss",
        "TORCH_DISTRIBUTED_DEBUG=DETAIL torchrun ...   names them",
    ),
    _raised(
        r"DDP expects same model|params? .*(?:shapes?.*across|inconsistent)|not to match \w+ of the same param",
        "models-differ",
        "the ranks built different models: use the same configuration and seed everywhere",
    ),
    _raised(
        r"no attribute '_cuda_\w+'|Torch not compiled with CUDA enabled",
        "no-gpu",
        'this torch is a CPU build: install its CUDA build, or use "cuda" only where torch.cuda.is_available()',
        "python -c 'import torch; print(torch.__version__, torch.version.cuda)'   on that node",
    ),
    _raised(
        r"operator torchvision::\w+ does not exist",
        "builds-differ",
        "torch and torchvision are builds that don't fit each other: install both at once, from one index",
        "python -c 'import torch, torchvision; print(torch.__version__, torchvision.__version__)'",
    ),
    _raised(
        r"Default process group has not been initialized",
        "no-process-group",
        "call torch.distributed.init_process_group() first, in every rank; DDP and collectives need it",
    ),
    _raised(
        r"^KeyError: '(?:SLURM_(?:PROCID|LOCALID|NTASKS|NODEID|STEP\w*|JOB_\w+)|PMIX?_RANK|PALS_\w+|OMPI_COMM_WORLD_\w+)'",
        "no-launcher",
        "it reads what srun or mpiexec sets: read RANK, LOCAL_RANK and WORLD_SIZE, which are there under every launcher",
    ),
    _raised(
        r"^ModuleNotFoundError: No module named '\w+\.[\w.]+'",
        "package-missing",
        "the installed package lacks that part: another version of it is wanted, or its installation is broken"
        " (pip install --force-reinstall)",
        "pip show PACKAGE   in the environment of the job",
        hint_in=INSTALL_IN,
    ),
    _raised(
        # A name that the user's own file lacks, or a wrong way to import it, is a mistake in the program.
        (
            r"^(?:ModuleNotFoundError|ImportError)\b(?!: (?:cannot import name .*\(/(?!\S*(?:site|dist)-packages)"
            r"|attempted relative import|\S+ is required for a normal functioning|.* is not a package))"
        ),
        "package-missing",
        "install it in the environment of that node, the one that the job uses",
        "python -c 'import ...'   on every node",
        hint_in=INSTALL_IN,
    ),
    _raised(
        r"PytorchStreamWriter failed|basic_ios::clear: iostream error|unexpected pos \d+ vs \d+|SafetensorError.*(?:No space|os error 28)",
        "disk-full",
        "make room where it saves, or write elsewhere; a quota looks the same",
        "df -h PATH; df -i PATH; quota -s",
    ),
    _raised(
        r"received 0 items of ancdata",
        "open-files",
        "ulimit -n 65536 in the job, or torch.multiprocessing.set_sharing_strategy('file_system')",
        "ulimit -n",
    ),
    _raised(
        r"can't start new thread|pthread_create failed",
        "system-error",
        "fewer threads and loader workers; a higher `ulimit -u`, or pids limit of the container",
        "ulimit -u; cat /sys/fs/cgroup/pids.max",
    ),
    _raised(
        (
            r"connect to '?https?://|Max retries exceeded with url|[Oo]ffline mode is enabled"
            r"|^(?!KeyError|ValueError).*[Ff]ailed to (?:download|fetch)\b|[Cc]ould not (?:download|fetch)\b"
        ),
        "download-failed",
        _FETCH_BEFORE,
        "curl -sSI URL   on that node",
    ),
    _raised(
        r"No supported gpu|[Nn]o (?:usable |available )?GPUs? (?:were |was |is |are )?(?:found|available|detected)",
        "no-gpu",
        "ask for GPUs (--gres, --gpus-per-node, ngpus), and install a CUDA build that fits the driver",
        "nvidia-smi; python -c 'import torch; print(torch.version.cuda)'   on that node",
    ),
    _raised(
        r"AF_UNIX path too long",
        "name-too-long",
        "set TMPDIR to a shorter folder, e.g. /tmp",
        "echo ${{#TMPDIR}}",
    ),
    _raised(
        r"^(?:numpy\.\S*)?_?(?:Array)?MemoryError\b|DefaultCPUAllocator: (?:can't|not enough)|std::bad_alloc",
        "memory",
        "ask for more memory, or use fewer loader workers",
        "free -g; cat /sys/fs/cgroup/memory.max",
    ),
    _raised(
        r"double free|corrupted (?:size|double)|(?:free|malloc|realloc|munmap_chunk)\(\): |(?:stack smashing|buffer overflow) detected",
        "memory-corrupted",
        "PYTHONFAULTHANDLER=1 shows the Python line; two copies of one C++ library look the same: import torch first, without LD_PRELOAD",
        "PYTHONFAULTHANDLER=1 python ...",
        kinds=("fatal_python",),
    ),
    _raised(
        "",
        "aborted",
        "read the lines before it: an assertion or a crash of C++ stands there",
        kinds=("fatal_python",),
    ),
    # What a library that fetches raises, but for its word on a file or a name that it has got.
    _raised(
        rf"^(?![^:]*(?:Validation|NotFitted|JSONDecode))(?:{FETCHES.pattern})",
        "download-failed",
        _FETCH_BEFORE,
        "curl -sSI URL   on that node",
    ),
    _raised(
        r"[Cc]onnection refused|\bError 111\b",
        "connection-refused",
        "see what should listen there, and whether it had ended",
    ),
    _raised(
        r"^(?:std|c10|gloo|at|torch)::",
        "aborted",
        "C++ code raised it and nothing caught it: the library in the frames above it, or the call of the program at that moment, is where to look",
    ),
    _raised(
        r"(?i)\bloss\b.{0,20}\b(?:nan|inf|infinite|not finite)\b|\b(?:nan|inf) (?:loss|gradients?)\b|loss is nan",
        "exception",
        "lower the learning rate or warm up longer, clip gradients, prefer bf16 to fp16; look at the batch of that step",
    ),
    _raised(
        "",
        "exception",
        "{advice}",
    ),
)


_SERVER_IS_AWAY = re.compile(
    r"(?i)\bservers?\b.{0,40}\b(?:launch failed|failed to (?:start|launch|come up)|(?:did|does|is|was) not (?:start|come up|ready|healthy|become))"
    r"|(?:failed to|could not|unable to) (?:start|launch) .{0,40}\bservers?\b|timed? ?out.{0,20} waiting for .{0,40}\bservers?\b"
)


def row_of(event: LogEvent) -> Row:
    """Return what an exception means: what proves a cause, then a type or message known here, then a name for it."""
    known = row_of_exception(event)
    if known is not None and known.confidence is HIGH:
        return known
    special = next((row for row in EXCEPTIONS[:-1] if row.fits(event)), None)
    return special or known or EXCEPTIONS[-1]


def general_advice(event: LogEvent) -> str:
    """Return what to do about an exception of which only its own words are known."""
    if _SERVER_IS_AWAY.search(event.get("message")):
        return (
            "the server that it waited for did not come up: read that server's own log or output from its first error on, or start"
            " it by hand with the same arguments"
        )
    remedy = remedy_of(event)
    if remedy:
        return f"do what the message says: {remedy}"
    where, library = event.get("where"), event.get("library")
    if not where:
        return "the lines above this one would have the traceback: its last frame of your own code is where to look"
    if library and library != STANDARD_LIBRARY and event.get("own"):
        return (
            f"correct what {where} passes to {library}: the message says what it refuses; if the call is right,"
            f" another version of {library} is wanted (pip show {library})"
        )
    if library == STANDARD_LIBRARY:
        return f"see which call of the program leads to {where}: the frames above it name the file and line"
    if library:
        return (
            f"the message is {library}'s own: correct the setting or input that it names, or install the version of"
            f" {library} that the program was written for (pip show {library})"
        )
    return f"correct {where}, or the option or input that the message names: no library is involved"
