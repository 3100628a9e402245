"""DeepSpeed and Megatron: launcher, configuration, ZeRO, ops built on the fly, sizes of parallelism.

Sources: DeepSpeed 0.6 to 0.18 deepspeed/launcher, runtime, op_builder; Megatron-LM core 0.4 to 0.14, Megatron-DeepSpeed, NeMo.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_config = partial(
    KnownMessage,
    source="DeepSpeed 0.6 to 0.18, deepspeed/runtime/config.py and engine.py",
    tells=Tells.PROVES,
    is_raised=True,
    cause="config-refused",
)
_runner = partial(
    KnownMessage,
    source="DeepSpeed 0.6 to 0.18, deepspeed/launcher",
    tells=Tells.PROVES,
    cause="bad-arguments",
)
_zero = partial(
    KnownMessage,
    source="DeepSpeed 0.6 to 0.18, deepspeed/runtime/zero",
    tells=Tells.PROVES,
    is_raised=True,
)
_op = partial(
    KnownMessage,
    source="DeepSpeed 0.6 to 0.18, op_builder/builder.py",
    tells=Tells.PROVES,
    is_raised=True,
    cause="extension-build",
)
_megatron = partial(
    KnownMessage,
    source="Megatron-LM core 0.4 to 0.14, parallel_state.py, arguments.py",
    tells=Tells.PROVES,
    is_raised=True,
    cause="parallel-sizes",
)

ENTRIES: tuple[KnownMessage, ...] = (
    # The configuration.
    _config(
        name="deepspeed.batch-sizes",
        wordings=(
            r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size:? ?(?P<why>.*)",
        ),
        cause="parallel-sizes",
        error="DeepSpeed's batch sizes do not fit the number of ranks: train_batch_size has to be micro batch x accumulation x ranks ({why})",
        advice='give two of the three, or "auto" under Accelerate and the Trainer, and DeepSpeed works out the third',
        advice_in={
            "anywhere": '"train_batch_size": {train_batch}, or leave one of the three out of the configuration ("auto" under Accelerate and the Trainer), and DeepSpeed works it out',
        },
    ),
    _config(
        name="deepspeed.batch-size-missing",
        wordings=(
            r"Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
            r"set an integer value in `train_micro_batch_size_per_gpu`",
            r"[Tt]rain(?:ing)? batch size: \S+ has to be greater than 0",
        ),
        error="DeepSpeed's configuration has no batch size",
        advice="set train_micro_batch_size_per_gpu in the DeepSpeed configuration",
    ),
    _config(
        name="deepspeed.auto-left",
        wordings=(
            r"[Ii]nput should be a valid (?:integer|number|boolean).*input_value='auto'",
            r"(?:not supported between instances of|could not convert string to float|invalid literal for int).*'auto'.*",
            r"validation errors? for (?P<name>DeepSpeedZero\w*|DeepSpeed\w*Config)",
        ),
        tells=Tells.NAMES,
        error='a value of DeepSpeed\'s configuration has the wrong type {name}: "auto" is known to Accelerate and the Trainer only',
        advice='replace "auto" by numbers, or hand the file to Accelerate or the Trainer',
        rivals=("exception",),
    ),
    _config(
        name="deepspeed.config-conflict",
        wordings=(
            r"DeepSpeed config values mismatch TrainingArguments|Please correct the following DeepSpeed config values that mismatch",
        ),
        error="values of the DeepSpeed configuration and of the TrainingArguments contradict each other",
        advice='set them to "auto" in the DeepSpeed configuration: the lines below name each',
    ),
    _config(
        name="deepspeed.config-file",
        wordings=(
            r"Expected a string path to an existing deepspeed config",
            r"DeepSpeed requires --deepspeed_config to specify configuration file",
            r"Expected ds_config to be a dictionary but received",
        ),
        error="DeepSpeed did not find its configuration: {words:.200}",
        advice="give the full path of a JSON file that every node sees",
    ),
    _config(
        name="deepspeed.two-optimizers",
        wordings=(
            r"You cannot specify an? (?P<name>optimizer|scheduler) in the config file and in the code at the same time",
            r"You cannot create a `Dummy(?:Optim|Scheduler)` without specifying",
        ),
        error="the optimizer or scheduler is given both in DeepSpeed's configuration and in the code, or in neither",
        advice="take it out of the configuration, or use accelerate.utils.DummyOptim and DummyScheduler in the code",
    ),
    _config(
        name="deepspeed.half-precision",
        wordings=(
            r"bfloat16 and fp16 (?:modes )?cannot be (?:simultaneously )?enabled at once|fp16 and bf16 .*both",
            r"Cannot enable both amp with \(legacy\) fp16",
            r"Type (?:bf16|fp16) is not supported on your device",
        ),
        error="DeepSpeed was asked for a precision that the device does not have, or for two at once: {words:.160}",
        advice="enable one of fp16 and bf16; bf16 needs an A100 or newer",
    ),
    _config(
        name="deepspeed.zero-unsupported",
        wordings=(
            r"zero stage \d+ requires an optimizer",
            r"You are using (?:an untested|ZeRO-Offload with a client provided) optimizer|zero_force_ds_cpu_optimizer",
            r"ZeRO stage \S+ not implemented",
            r"is not compatible with ZeRO",
            r"(?:MoE not|Native DeepSpeed MoE is not) supported with (?:ZeRO )?Stage 3",
        ),
        error="this ZeRO stage does not go together with the rest of the configuration: {words:.200}",
        advice='change the stage, or the optimizer; "zero_force_ds_cpu_optimizer": false permits an own one with offload',
    ),
    # The launcher.
    _runner(
        name="deepspeed.hostfile",
        wordings=(
            r"Hostfile (?P<path>\S+)? ?(?:is not formatted correctly|contains multiple entries|is empty or not formatted)",
            r"[Hh]ostfile contains (?:a bad entry|duplicate hosts)|Bad hostfile text",
            r"Num nodes is >1 but no extra nodes available via hostfile",
            r"No slots defined for (?:hostname )?'?(?P<host>[^' ]+)",
        ),
        error="DeepSpeed's hostfile is wrong or lacks the other nodes {path}{host}",
        advice="write one line for each node: NAME slots=GPUS; or give --num_nodes, --node_rank and --no_ssh and start it on each",
    ),
    _runner(
        name="deepspeed.filters",
        wordings=(
            r"(?:Hostname|hostname) '?(?P<host>[^' ]+)'? not found in (?:hostfile|host list)",
            r"No slot '?(?P<slot>\d+)'? specified on host '?(?P<host2>[^' ]+)",
        ),
        error="--include or --exclude of deepspeed names a host or GPU that the hostfile does not have {host}{host2}",
        advice="correct it; without them the hostfile decides",
    ),
    _runner(
        name="deepspeed.no-hostfile",
        wordings=(
            r"Unable to find hostfile, will proceed with training with local resources only",
        ),
        tells=Tells.NOISE,
        cause="",
    ),
    _runner(
        name="deepspeed.passwordless",
        wordings=(r"Using hostfile at \S+ but host=(?P<host>\S+) was not reachable via ssh",),
        cause="launch-failed",
        error="deepspeed could not reach {host} by ssh",
        advice="set up a key for it, or start on each node by itself: deepspeed --no_ssh --node_rank N --master_addr HOST",
        confirm="ssh -o BatchMode=yes {host} true",
    ),
    _runner(
        name="deepspeed.no-gpus",
        wordings=(r"Unable to proceed, no GPU resources available",),
        kind="no_gpu",
        cause="",
    ),
    _runner(
        name="deepspeed.master-address",
        wordings=(r"Unable to detect suitable master address via [`']hostname -I",),
        error="deepspeed could not find an address of this node by itself",
        advice="give it: --master_addr ADDRESS",
        confirm="hostname -I",
    ),
    _runner(
        name="deepspeed.elastic",
        wordings=(
            r"(?:world size|World size) \((?P<size>\d+)\) is not valid with the current list of valid GPU counts",
            r"(?:ElasticityConfigError|ElasticityIncompatibleWorldSize)",
        ),
        cause="parallel-sizes",
        error="DeepSpeed's elasticity does not allow this number of GPUs {size}",
        advice="take a number from its list, or other micro_batch_sizes and max_train_batch_size",
        confirm="ds_elastic -c CONFIG.json -w GPUS",
    ),
    _runner(
        name="deepspeed.subprocess-died",
        wordings=(
            r"Killing subprocess \d+",
            r"\[launch\.py:\d+:sigkill_handler\]",
        ),
        tells=Tells.ECHO,
        cause="",
    ),
    _runner(
        name="deepspeed.mpi-discovery",
        wordings=(
            r"Not using the DeepSpeed or dist launchers, attempting to detect MPI environment",
            r"Attempting to detect MPI environment",
        ),
        tells=Tells.HINTS,
        cause="no-launcher",
        error="DeepSpeed found no variables of a launcher and tried MPI instead",
        advice="start it with torchrun or deepspeed; or pip install mpi4py and use mpirun",
    ),
    # ZeRO.
    _zero(
        name="deepspeed.loss-scale",
        wordings=(
            r"Current loss scale already at minimum",
            r"[Mm]inimum loss scale reached",
        ),
        cause="not-finite",
        error="fp16 overflowed until the loss scale could not get smaller",
        advice="use bf16, a lower learning rate with warm-up, and look for bad samples",
    ),
    _zero(
        name="deepspeed.zero3-in-flight",
        wordings=(
            r"(?:tracing|trace) error at step \d+|expected the next \d+ parameters in the parameter fetch queue",
            r"still have inflight params|AssertionError: \{'id': \d+, 'status': 'INFLIGHT'",
            r"Cannot partition a param in flight",
        ),
        cause="collectives-differ",
        error="under ZeRO-3 the ranks ran through the modules in another order than before: {words:.160}",
        advice="all ranks have to call the same modules in each step (no rank-dependent branches); name branching blocks with deepspeed.utils.set_z3_leaf_modules",
        tells=Tells.NAMES,
        rivals=("exception",),
    ),
    _zero(
        name="deepspeed.zero3-empty-weight",
        wordings=(
            r"size mismatch for \S+: copying a param with shape torch\.Size\(\[[\d, ]*\]\) from checkpoint, the shape in current model is torch\.Size\(\[0\]\)",
        ),
        tells=Tells.NAMES,
        cause="shapes-differ",
        error="weights are empty on this rank: ZeRO-3 has partitioned them, and the code reads them as a whole",
        advice="read and write them within `with deepspeed.zero.GatheredParameters(params):`, and load checkpoints through the engine or from_pretrained",
        rivals=("checkpoint-differs",),
    ),
    _zero(
        name="deepspeed.checkpoint-ranks",
        wordings=(
            r"The checkpoint being loaded used a DP world size of (?P<other>\d+) but the current world size is (?P<size>\d+)",
            r"(?:ZeRO-3 elastic checkpointing|Automatic adjustment of ZeRO's optimizer state partitioning).*(?:not supported|unsupported|deprecated)",
            r"ZeRORuntimeException: The checkpoint",
        ),
        cause="checkpoint-differs",
        error="the DeepSpeed checkpoint was written by {other} ranks, and now there are {size}",
        advice="start with as many ranks, or convert it: ds_to_universal.py --input_folder .. --output_folder .., then load_universal of the checkpoint section",
    ),
    _zero(
        name="deepspeed.checkpoint-missing",
        wordings=(
            r"Unable to find latest file at (?P<path>\S+), if trying to load latest checkpoint",
            r"The following zero checkpoints? paths? are missing: (?P<name>.+)",
            r"Client provided checkpoint load path: (?P<path2>\S+) does not exist",
        ),
        tells=Tells.NAMES,
        is_raised=False,
        cause="file-missing",
        error="the DeepSpeed checkpoint is not whole on this node {path}{path2}{name}",
        advice="save and load on a file system that all nodes see; every rank has to call save_checkpoint",
        rivals=("checkpoint-differs",),
    ),
    _zero(
        name="deepspeed.save-16bit",
        wordings=(
            r"stage3_gather_16bit_weights_on_model_save",
            r"consolidated_16bit_state_dict is only applicable",
        ),
        cause="config-refused",
        error="under ZeRO-3 the whole model cannot be saved unless it is told to be gathered",
        advice='"stage3_gather_16bit_weights_on_model_save": true in zero_optimization',
    ),
    _zero(
        name="deepspeed.backward",
        wordings=(
            r"[Dd]irect calls to tensor\.backward\(\) are not supported",
            r"must call engine\.backward\(loss\)|backward pass is invalid for module in evaluation mode",
            r"element 0 of tensors does not require grad.*deepspeed",
        ),
        cause="exception",
        error="the backward pass has to go through the DeepSpeed engine: {words:.160}",
        advice="engine.backward(loss) and engine.step() instead of loss.backward() and optimizer.step()",
    ),
    _zero(
        name="deepspeed.aio",
        wordings=(
            r"(?:async_io|libaio).*(?:not (?:compatible|found|installed)|requires the dev libaio|cannot)",
            r"aio_handle.*(?:fail|error)",
        ),
        tells=Tells.HINTS,
        is_raised=False,
        cause="package-missing",
        error="DeepSpeed's offload to NVMe lacks libaio on this node",
        advice="install libaio-dev (conda: libaio), or offload to the CPU",
        confirm="ds_report | grep async_io",
    ),
    # Ops that are compiled at the first use.
    _op(
        name="deepspeed.cuda-versions",
        wordings=(
            r"Installed CUDA version (?P<have>[\d.]+) does not match the version torch was compiled with (?P<want>[\d.]+)",
        ),
        cause="versions-differ",
        error="DeepSpeed's ops cannot be built: the CUDA toolkit is {have}, and torch was built with {want}",
        advice="load the toolkit of torch's version (module load cuda/..., CUDA_HOME); DS_SKIP_CUDA_CHECK=1 if only the minor version differs",
        confirm="nvcc --version; python -c 'import torch; print(torch.version.cuda)'",
    ),
    _op(
        name="deepspeed.op-unavailable",
        wordings=(
            r"Unable to JIT load the (?P<name>\S+) op due to (?P<why>.+)",
            r"Error building extension '(?P<name2>fused_adam|cpu_adam|utils|async_io|transformer_inference|fused_lamb|cpu_lion|\w*deepspeed\w*)'",
        ),
        error="DeepSpeed could not compile its op {name}{name2}: {why}",
        advice="load a compiler and the CUDA toolkit (nvcc, ninja), put TORCH_EXTENSIONS_DIR on a local disk, or build in advance: DS_BUILD_OPS=1 pip install deepspeed",
        confirm="ds_report",
    ),
    _op(
        name="deepspeed.no-cuda-home",
        wordings=(
            r"MissingCUDAException|CUDA_HOME does not exist, unable to compile CUDA op",
            r"No module named '?op_builder",
        ),
        cause="no-compiler",
        error="DeepSpeed found no CUDA toolkit to compile its ops with",
        advice="load one and set CUDA_HOME (module load cuda)",
        confirm="echo $CUDA_HOME; which nvcc; ds_report",
    ),
    # Megatron.
    _megatron(
        name="megatron.world-size",
        wordings=(
            r"world_size \((?P<size>\d+)\) is not divisible by (?P<why>.+)",
            r"world size \(?(?P<size2>\d+)\)? is not divisible by (?P<why2>(?:total_model_size|tensor|encoder|pipeline|model|context).*)",
            r"[Ww]orld size \(?(?P<size3>\d+)\)? (?:must be|is not) (?:a multiple of|divisible by) .*(?:parallel|tp|pp|cp|ep|size)",
        ),
        error="{size}{size2}{size3} ranks cannot be divided by the sizes of tensor, pipeline and context parallelism {why}{why2}",
        advice="choose nodes x GPUs as a multiple of TP x PP x CP",
        advice_in={
            "anywhere": (
                "start {fitting_world} ranks, a multiple of TP x PP x CP, or change these sizes"
            ),
        },
    ),
    _megatron(
        name="megatron.global-batch",
        wordings=(
            r"global batch size \((?P<size>\d+)\) is not divisible by micro batch size \((?P<micro>\d+)\) times data parallel size \((?P<dp>\d+)\)",
            r"number of (?:micro-?batches|samples).*(?:not divisible|must be divisible).*(?:pipeline|data.parallel)",
        ),
        error="the global batch size {size} is no multiple of micro batch {micro} x data parallelism {dp}",
        advice="choose it as a multiple: --global-batch-size = micro batch x data parallel size x accumulation",
        advice_in={
            "anywhere": "--global-batch-size {fitting_batch}: a multiple of micro batch {micro} x data parallel size {dp}",
        },
    ),
    _megatron(
        name="megatron.heads",
        wordings=(
            r"(?P<a>\d+) is not divisible by (?P<b>\d+)\s*$",
            r"num(?:ber of)?[_ ](?:attention[_ ]heads|query[_ ]groups|layers|experts|key_value_heads).*(?:must be|not|be) (?:a )?(?:divisible|multiple)",
            r"Total number of attention heads \((?P<heads>\d+)\) must be divisible by tensor parallel size \((?P<tp>\d+)\)",
        ),
        tells=Tells.NAMES,
        rivals=("exception",),
        error="heads, layers, experts or the vocabulary of the model cannot be divided among the ranks: {words:.160}",
        advice="choose a tensor (pipeline, expert) parallel size that divides them",
    ),
    _megatron(
        name="megatron.not-initialised",
        wordings=(
            r"(?:tensor|pipeline|data|context|expert|model)[_ ](?:model )?parallel (?:group|world size) is not initialized",
            r"(?:parallel_state|model parallel) .*(?:already|not) initialized",
        ),
        cause="no-process-group",
        error="model parallelism was used before it was set up: {words:.160}",
        advice="call initialize_model_parallel after init_process_group, in every rank",
    ),
    _megatron(
        name="megatron.checkpoint-arguments",
        wordings=(
            r"(?P<name>[\w-]+) value from checkpoint \((?P<other>[^)]*)\) is not equal to the input argument value \((?P<size>[^)]*)\)",
            r"could not find arguments in the checkpoint",
            r"Unable to load optimizer from checkpoint .*Specify --no-load-optim",
        ),
        tells=Tells.NAMES,
        is_raised=False,
        cause="checkpoint-differs",
        error="the checkpoint was made with other settings: {name} was {other}, now {size}",
        advice="give the same sizes, convert the checkpoint, or --no-load-optim --no-load-rng --finetune",
    ),
    _megatron(
        name="megatron.nan",
        wordings=(
            r"(?:found|Unexpected result|rerun).*\b(?:NaN|nan|Inf)\b in (?:local )?(?:forward|backward|loss|grad)",
            r"found NaN in local grad norm",
        ),
        is_raised=False,
        tells=Tells.NAMES,
        cause="not-finite",
        error="the loss or the gradients became NaN: {words:.200}",
        advice="lower the learning rate, look at the data of that step, and test the GPU of the rank that it names",
        rivals=("gpu-hardware",),
    ),
    _megatron(
        name="megatron.te-attention",
        wordings=(
            r"No dot product attention (?:backend|support) (?:is )?(?:available|for the provided inputs)",
        ),
        cause="config-refused",
        error="Transformer Engine has no attention kernel for these inputs",
        advice="NVTE_DEBUG=1 NVTE_DEBUG_LEVEL=2 says why; another head size, mask or dtype, or install flash-attn",
    ),
    _megatron(
        name="megatron.dataset-index",
        wordings=(
            r"(?:helpers_cpp|compile_helpers|helpers).*(?:[Mm]ake(?:file)?|failed|not found|cannot)",
            r"Could not build (?:the )?dataset index|waiting for.*index.*(?:built|cache)",
        ),
        tells=Tells.HINTS,
        is_raised=False,
        cause="extension-build",
        error="Megatron could not build its helpers for data sets",
        advice="build them once before the job: make -C megatron/core/datasets; the cache of indices has to be on a shared file system",
    ),
)
