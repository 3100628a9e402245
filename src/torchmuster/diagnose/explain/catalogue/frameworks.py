"""Frameworks around torch: Accelerate, Lightning, Transformers, PEFT, TRL, bitsandbytes, flash-attn, trackers, Hydra.

Sources: accelerate 0.15 to 1.12, lightning 1.6 to 2.6, transformers 4.20 to 4.57, peft 0.3 to 0.17, trl 0.7 to 0.24,
bitsandbytes 0.37 to 0.48, flash-attn 2, fairseq 0.12, mmengine 0.10, wandb 0.13 to 0.22, hydra 1.1 to 1.3.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_accelerate = partial(
    KnownMessage,
    source="accelerate 0.15 to 1.12, accelerator.py, commands/launch.py",
    tells=Tells.PROVES,
    is_raised=True,
    cause="config-refused",
)
_lightning = partial(
    KnownMessage,
    source="lightning 1.6 to 2.6, fabric and pytorch",
    tells=Tells.PROVES,
    is_raised=True,
    cause="config-refused",
)
_models = partial(
    KnownMessage,
    source="transformers 4.20 to 4.57, peft, trl, bitsandbytes, flash-attn",
    tells=Tells.PROVES,
    is_raised=True,
    cause="config-refused",
)
_tracker = partial(KnownMessage, source="wandb 0.13 to 0.22, mlflow 2 and 3", tells=Tells.NAMES)

ENTRIES: tuple[KnownMessage, ...] = (
    # Accelerate.
    _accelerate(
        name="accelerate.device-map",
        wordings=(
            r"You can't train a model that has been loaded with `device_map='auto'` in any distributed mode",
            r"Your model contains `DTensor` parameters, which is incompatible with DDP",
        ),
        error="parameters of the model are spread over devices, which does not go together with several ranks",
        advice="load it without device_map, or with device_map={{'': LOCAL_RANK}}; to spread it, use FSDP or ZeRO-3",
    ),
    _accelerate(
        name="accelerate.quantised-device",
        wordings=(
            r"You can't train a model that has been loaded in 8-bit (?:or 4-bit )?precision",
        ),
        error="a quantised model lies on another device than its rank trains on, or on several",
        advice="device_map={{'': LOCAL_RANK}} when it is loaded, in every rank",
    ),
    _accelerate(
        name="accelerate.split-batches",
        wordings=(
            r"in `split_batches` mode, the batch size \((?P<size>\d+)\) needs to be a round multiple of the number of processes \((?P<ranks>\d+)\)",
            r"in `split_batches` mode, the batch size",
        ),
        cause="parallel-sizes",
        error="with split_batches the batch size {size} has to be a multiple of the {ranks} ranks",
        advice="choose such a batch size, or split_batches=False",
        advice_in={
            "anywhere": "choose a batch size of {fitting_batch}, a multiple of the {ranks} ranks, or split_batches=False",
        },
    ),
    _accelerate(
        name="accelerate.dispatch",
        wordings=(
            r"You can't use batches of different size with `dispatch_batches=True`",
            r"Batch does not contain any data \(`",
        ),
        error="the main rank hands out batches of an iterable data set, and one is empty or of another size",
        advice="dispatch_batches=False, or split_batches=True; drop_last=True for the last one",
    ),
    _accelerate(
        name="accelerate.optimizer-before-device",
        wordings=(r"model and the optimizer parameters are not on the same device",),
        cause="devices-differ",
        error="parameters of the model and of the optimizer are on different devices",
        advice="model.to(device) first, then make the optimizer; FSDP and DeepSpeed: prepare both in one call",
    ),
    _accelerate(
        name="accelerate.prepare-together",
        wordings=(
            r"When using FSDP2, a model and optimizer must be passed together",
            r"FSDP2 preparation should be done via `accelerate\.prepare\(\)`",
            r"(?:requires you to pass|must specify) (?:at least one of )?(?:a )?training or evaluation dataloader",
            r"You must pass a model and an optimizer together to `accelerate\.prepare\(\)`",
        ),
        error="accelerator.prepare has to get what belongs together in one call: {words:.160}",
        advice="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    ),
    _accelerate(
        name="accelerate.launch-options",
        wordings=(
            r"You can only use one of `--cpu`, `--multi_gpu`",
            r"You need to use at least 2 processes to use `--multi_gpu`",
            r"Less than two GPU ids were configured",
            r"You need to manually pass in `--num_processes`",
            r"The node_rank must be less than the number of nodes",
        ),
        cause="bad-arguments",
        error="accelerate launch refused its options: {words:.200}",
        advice="give --num_machines, --machine_rank, --num_processes (of all nodes together) and --main_process_ip on the command line: they win over the file of accelerate config",
        confirm="accelerate env",
    ),
    _accelerate(
        name="accelerate.notebook-initialised",
        wordings=(
            r"(?:the `Accelerator` should only be initialized inside your training function|an instance of the `Accelerator` was (?:already )?(?:created|initialized))",
            r"To launch a multi-GPU training from your notebook, you need to avoid running any instruction using `torch\.cuda`",
        ),
        cause="cuda-after-fork",
        error="the notebook had used CUDA or an Accelerator before it started its ranks",
        advice="restart the notebook, and make the Accelerator inside of the function that notebook_launcher gets",
    ),
    _accelerate(
        name="accelerate.precision",
        wordings=(
            r"(?:fp16|bf16|fp8) mixed precision requires",
            r"Your setup doesn't support bf16/gpu",
            r"Unknown mixed_precision mode",
            r"Tried to train with `fp8` and auto-detect backend, but no FP8-compatible backend",
        ),
        error="the device or the environment does not have the precision that was asked for: {words:.160}",
        advice="bf16 needs an A100 or newer: use fp16 or none; without a GPU this message means that none is visible",
        tells=Tells.NAMES,
        rivals=("no-gpu", "gpu-not-supported"),
    ),
    # Lightning.
    _lightning(
        name="lightning.slurm-tasks",
        wordings=(
            r"You set `(?:devices|num_nodes)=(?P<size>\d+)` in Lightning, but the number of (?P<what>tasks per node|nodes) configured in SLURM `--\w[\w-]*=(?P<other>\d+)` does not match",
            r"You set `--ntasks=(?P<other2>\d+)` in your SLURM bash script, but this variable is not supported",
        ),
        cause="different-sizes",
        error="Lightning and the Slurm job disagree about {what}: {size} here, {other}{other2} in Slurm",
        advice="#SBATCH --nodes = num_nodes and --ntasks-per-node = devices, and start with srun; or unset SLURM_NTASKS and use torchrun",
        confirm="env | grep -E 'SLURM_N(TASKS|NODES|TASKS_PER_NODE)'",
    ),
    _lightning(
        name="lightning.gpus-requested",
        wordings=(
            r"You requested gpu: (?P<wanted>.+?)(?:\\n| )\s*But your machine only has: (?P<have>.+)",
        ),
        kind="cuda_ordinal",
        cause="",
    ),
    _lightning(
        name="lightning.no-accelerator",
        wordings=(
            r"No supported gpu backend found",
            r"`?(?P<name>\w*Accelerator)`? can not run on your system since the accelerator is not available",
            r"GPUs requested but none are available",
        ),
        kind="no_gpu",
        cause="",
    ),
    _lightning(
        name="lightning.interactive",
        wordings=(
            r"`?(?:Trainer|Fabric)\(strategy=.*\)`? is not compatible with an interactive environment",
        ),
        error="this strategy cannot start its ranks from a notebook",
        advice="strategy='ddp_notebook', or run it as a script",
    ),
    _lightning(
        name="lightning.checkpoint-callback",
        wordings=(
            r"(?:ModelCheckpoint|`?EarlyStopping)\S*(?:\(monitor=)? ?['\"`]?(?P<name>[^'\"` ]*)['\"`)]* .*(?:could not find the monitored key|which is not available|conditioned on metric)",
        ),
        error="the metric that a callback watches was never logged: {words:.160}",
        advice="self.log it under exactly this name in validation_step (sync_dist=True), or correct monitor=",
    ),
    _lightning(
        name="lightning.plugins-twice",
        wordings=(
            r"(?:accelerator|precision|checkpoint_io|cluster_environment) set through both",
            r"Found invalid type for plugin|Received both `precision=",
            r"You selected (?:an )?invalid (?:strategy|accelerator) name|You selected the FSDP strategy but FSDP is only available on GPU",
        ),
        error="the Trainer was given settings that contradict each other: {words:.200}",
        advice="give each of them once, either to the Trainer or to the strategy",
    ),
    _lightning(
        name="lightning.fsdp-optimizer",
        wordings=(r"The optimizer does not seem to reference any (?:XLA)?FSDP parameters",),
        error="the optimizer has no parameters of the model that FSDP wraps",
        advice="make it in configure_optimizers from self.trainer.model.parameters()",
    ),
    _lightning(
        name="lightning.manual",
        wordings=(
            r"Automatic gradient (?:accumulation|clipping) is not supported for manual optimization",
            r"No `(?:training_step|configure_optimizers|train_dataloader)\(\)` method defined",
        ),
        error="the LightningModule and the Trainer's settings do not go together: {words:.200}",
        advice="do with manual optimization what the Trainer did: self.clip_gradients and own accumulation; or return to automatic optimization",
    ),
    _lightning(
        name="lightning.other-rank-failed",
        wordings=(
            r"DeadlockDetectedException|DeadLock detected from rank",
            r"\[rank: \d+\] Child process with PID \d+ terminated with code -?\d+\. Forcefully terminating all other processes",
        ),
        tells=Tells.ECHO,
        is_raised=False,
        cause="",
    ),
    _lightning(
        name="lightning.misconfiguration",
        wordings=(r"MisconfigurationException: (?P<why>.+)",),
        tells=Tells.HINTS,
        error="Lightning refused the configuration: {why:.250}",
        advice="correct the argument that it names",
    ),
    # Transformers and what is used with it.
    _models(
        name="transformers.batch-per-device",
        wordings=(
            r"The global train batch size \(.*\) must be evenly divisible by the number of generations per prompt",
            r"(?:effective|per_device)_\w*batch\w* .*must be (?:evenly )?divisible by",
        ),
        cause="parallel-sizes",
        error="the batch size does not fit the number of ranks: {words:.200}",
        advice="choose ranks x per_device_train_batch_size x accumulation as a multiple of num_generations",
    ),
    _models(
        name="transformers.no-loss",
        wordings=(
            r"The model did not return a loss from the inputs, only the following keys: (?P<keys>[^.]+)",
        ),
        error="the batches have no labels, so the model computed no loss and returned {keys} only",
        advice="give the data set a column `labels` (or name it in label_names), and a data collator that keeps it: remove_unused_columns=False shows what arrives",
    ),
    _models(
        name="transformers.trainer-strategies",
        wordings=(
            r"--load_best_model_at_end requires the save(?:ing)? (?:steps|and eval strategy)",
            r"load_best_model_at_end requires .* to match|The (?:save|eval)\w* strategy .*(?:must|should) match",
            r"IntervalStrategy\.STEPS requires either non-zero",
        ),
        error="settings of the Trainer contradict each other: {words:.200}",
        advice="the same eval_strategy and save_strategy, and save_steps a multiple of eval_steps",
    ),
    _models(
        name="transformers.unexpected-argument",
        wordings=(
            r"(?:TrainingArguments|Trainer|SFTTrainer|DPOTrainer|SFTConfig|GRPOConfig|DPOConfig|Accelerator|LoraConfig|BitsAndBytesConfig)\.__init__\(\) got an unexpected keyword argument '(?P<name>[^']+)'",
        ),
        cause="versions-differ",
        error="this release of the library does not know the argument {name}",
        advice="install the release that the script was written for, or rename the argument (evaluation_strategy is eval_strategy since 4.46; tokenizer is processing_class since 4.46)",
        confirm="pip list | grep -E 'transformers|accelerate|trl|peft'",
    ),
    _models(
        name="transformers.import-versions",
        wordings=(
            r"ImportError: (?P<name>\S+) ?(?:[<>=!]=?[\d.]+\S*)? is required for a normal functioning of this module, but found (?P<have>\S+)",
            r"cannot import name '(?P<name2>\w+)' from '(?:transformers|accelerate|peft|trl|huggingface_hub|deepspeed|torchvision|numpy|diffusers|datasets)\b",
            r"Failed to import transformers\.\S+ because of the following error",
            r"Using .* requires (?:`)?accelerate(?:>=| ?>= ?)(?P<want>[\d.]+)|requires the (?P<name3>\w+) library but it was not found",
        ),
        cause="versions-differ",
        tells=Tells.NAMES,
        error="releases of packages do not fit each other: {words:.250}",
        advice="install them together in one environment: pip install -U transformers accelerate peft trl huggingface_hub, or the versions that the project pins",
        confirm="pip check",
        rivals=("package-missing",),
        advice_in={
            "anywhere": ("pip install '{requirement}' in the environment that the job uses"),
        },
    ),
    _models(
        name="transformers.flash-attention",
        wordings=(
            r"FlashAttention2 has been toggled on, but it cannot be used due to the following error: (?P<why>.+)",
            r"Flash(?: ?|-)Attention (?:2 )?only supports? (?:torch\.)?(?:fp16|float16|half).*",
            r"FlashAttention only support fp16 and bf16 data type",
        ),
        error="flash attention cannot be used here: {words:.200}",
        advice="attn_implementation='sdpa'; flash attention needs an A100 or newer, 16-bit types, and pip install flash-attn --no-build-isolation",
        tells=Tells.NAMES,
        rivals=("gpu-not-supported", "package-missing"),
    ),
    _models(
        name="peft.target-modules",
        wordings=(
            r"Target modules .* not found in the base model",
            r"Please specify `target_modules` in `peft_config`",
        ),
        error="LoRA was to change modules that this model does not have",
        advice="target_modules='all-linear', or names from model.named_modules()",
    ),
    _models(
        name="bitsandbytes.setup",
        wordings=(
            r"CUDA Setup failed despite (?:CUDA|GPU) being available",
            r"Using `bitsandbytes` \d-bit quantization requires",
            r"libbitsandbytes_\w+\.so: cannot open shared object file",
            r"No package metadata was found for bitsandbytes|bitsandbytes.*(?:CUDA setup|compiled without GPU)",
        ),
        cause="wrong-library",
        tells=Tells.NAMES,
        error="bitsandbytes did not find a build for the CUDA that is used here",
        advice="pip install -U bitsandbytes; BNB_CUDA_VERSION=121 names another build; LD_LIBRARY_PATH has to have CUDA's libraries",
        confirm="python -m bitsandbytes",
        rivals=("no-gpu", "package-missing"),
    ),
    _models(
        name="mmengine.registry",
        wordings=(
            r"(?P<name>\S+) is not in the \S+ registry\. Please check whether the value of",
            r"No object named '(?P<name2>[^']+)' found in '[^']+' registry",
        ),
        error="the configuration names {name}{name2}, which is not registered",
        advice="import its module (custom_imports), install the package that has it, or correct the name",
    ),
    _models(
        name="fairseq.loss-scale",
        wordings=(r"Minimum loss scale reached \((?P<size>[\d.e-]+)\)",),
        cause="not-finite",
        error="fp16 overflowed until the loss scale could not get smaller",
        advice="a lower learning rate with warm-up, clipping, or bf16",
    ),
    # Configuration libraries.
    _models(
        name="hydra.override",
        wordings=(
            r"Could not override '(?P<name>[^']+)'",
            r"Key '(?P<name2>[^']+)' is not in struct",
            r"(?:MissingMandatoryValue|InterpolationKeyError): (?P<why>.+)",
            r"(?:LexerNoViableAltException|OverrideParseException): (?P<why2>.+)",
        ),
        error="the configuration (Hydra, OmegaConf) does not take this, or lacks it: {name}{name2}{why}{why2}",
        advice="correct the key; a new one needs a plus: +key=value, and values with =, comma or braces need quotes",
    ),
    _models(
        name="hydra.missing-config",
        wordings=(
            r"In '[^']+': Could not find '(?P<name>[^']+)'",
            r"Cannot find primary config '(?P<name2>[^']+)'",
            r"Primary config (?:directory|module) '?(?P<name3>[^' ]+)'? (?:not found|is empty)",
        ),
        cause="file-missing",
        error="Hydra did not find the configuration {name}{name2}{name3}",
        advice="correct --config-path (absolute, or relative to the script) and --config-name",
    ),
    # Trackers.
    _tracker(
        name="wandb.login",
        wordings=(
            r"api_key not configured \(no-tty\)",
            r"wandb: ERROR (?:api_key|API key|Unable to read|user is not logged in|Error while calling W&B API: (?:user is not logged in|permission denied|project not found))",
            r"(?:wandb\.errors\S*|CommError|AuthenticationError|UsageError): .*(?:api_key|API key|permission denied|not logged in|403|401)",
        ),
        tells=Tells.NAMES,
        cause="hub-refused",
        error="wandb has no valid API key on this node",
        advice="export WANDB_API_KEY in the job, or WANDB_MODE=offline and `wandb sync` afterwards",
    ),
    _tracker(
        name="wandb.no-way-out",
        wordings=(
            r"(?:CommError|UsageError): .*(?:Run initialization has timed out|timed out after|init\(\) timed? ?out|Error communicating with wandb process)",
        ),
        cause="download-failed",
        error="wandb could not reach its server from this node",
        advice="WANDB_MODE=offline and `wandb sync` from the login node; only rank 0 should call wandb.init",
        rivals=("firewall",),
    ),
    _tracker(
        name="mlflow.server",
        wordings=(
            r"MlflowException: (?:API request to|RESOURCE_DOES_NOT_EXIST|PERMISSION_DENIED|INVALID_PARAMETER_VALUE|Could not find).*",
        ),
        cause="hub-refused",
        error="the MLflow server refused or did not answer: {words:.200}",
        advice="check MLFLOW_TRACKING_URI and its token on the compute node; let only rank 0 log",
        rivals=("download-failed",),
    ),
)
