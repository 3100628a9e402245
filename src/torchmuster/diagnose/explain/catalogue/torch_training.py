"""Exceptions of torch's training machinery: DDP, FSDP, loaders, checkpoints, pickles, torch.compile.

Sources: torch 1.12 to 2.9, nn/parallel, distributed/, utils/data, serialization.py, nn/modules/module.py, _dynamo, _inductor;
Triton 2 and 3.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_raised = partial(KnownMessage, tells=Tells.PROVES, is_raised=True)
_ddp = partial(_raised, source="torch 1.12 to 2.9, csrc/distributed/c10d/reducer.cpp, nn/parallel")
_fsdp = partial(_raised, source="torch 1.12 to 2.9, distributed/fsdp, distributed/tensor")
_data = partial(_raised, source="torch 1.12 to 2.9, utils/data")
_saved = partial(_raised, source="torch 1.12 to 2.9, serialization.py, nn/modules/module.py, optim")
_compiled = partial(_raised, source="torch 2.0 to 2.9, _dynamo, _inductor; Triton 2 and 3")

ENTRIES: tuple[KnownMessage, ...] = (
    # DDP.
    _ddp(
        name="torch.ddp-ready-twice",
        wordings=(
            r"Expected to mark a variable ready only once",
            r"Parameter at index \d+.* has been marked as ready twice",
        ),
        cause="autograd",
        error="DDP of {who} met a parameter twice in one backward pass",
        advice="use_reentrant=False for checkpointing; with shared parameters or several forward passes, model._set_static_graph() or find_unused_parameters=False",
    ),
    _ddp(
        name="torch.ddp-no-parameters",
        wordings=(
            r"DistributedDataParallel is not needed when a module doesn't have any parameters? that requires? a gradient",
        ),
        cause="autograd",
        error="the model that {who} gave to DDP has no parameter that is trained",
        advice="wrap it after the layers are unfrozen, or leave DDP away for models that are only used",
    ),
    _ddp(
        name="torch.ddp-devices",
        wordings=(
            r"DistributedDataParallel(?:'s)? (?:device_ids and output_device arguments only work with|input) .*(?:single-device|same type of devices|CUDA)",
            r"[Mm]odule must have its parameters and buffers on device (?P<one>\S+) .* but found one of them on device: (?P<other>\S+)",
        ),
        cause="devices-differ",
        error="the model of {who} is not all on the one device that was named: {words:.200}",
        advice="model.to(f'cuda:{{LOCAL_RANK}}') before DDP(model, device_ids=[LOCAL_RANK])",
    ),
    _ddp(
        name="torch.ddp-uninitialised",
        wordings=(r"(?:A module|Modules) with uninitialized parameters can't be used with",),
        cause="sharding",
        error="the model of {who} has lazy layers that have no sizes yet",
        advice="run one forward pass before it is wrapped",
    ),
    _ddp(
        name="torch.group-twice",
        wordings=(r"trying to initialize the default process group twice",),
        cause="invalid-collective",
        error="{who} called init_process_group a second time",
        advice="call it once: `if not torch.distributed.is_initialized()`; a trainer library does it itself",
    ),
    _ddp(
        name="torch.numpy-of-gradient",
        wordings=(r"Can't call numpy\(\) on Tensor that requires grad",),
        cause="autograd",
        error="{who} made a numpy array of a tensor that has a gradient",
        advice="x.detach().cpu().numpy()",
    ),
    _ddp(
        name="torch.backend-not-built",
        wordings=(r"Distributed package doesn't have (?P<backend>NCCL) built in",),
        kind="no_gpu",
    ),
    _ddp(
        name="torch.other-backend-not-built",
        wordings=(r"Distributed package doesn't have (?P<backend>(?!NCCL)\w+) built in",),
        cause="builds-differ",
        error="this torch was built without {backend}",
        advice='use "nccl" for GPUs and "gloo" for CPUs; torch with MPI has to be built from source against that MPI',
        confirm="python -c 'import torch.distributed as d; print(d.is_mpi_available(), d.is_nccl_available())'",
    ),
    _ddp(
        name="torch.backend-unknown",
        wordings=(
            r"(?:Unknown c10d backend type|Invalid backend:?) '?(?P<backend2>\w+)(?!.*_dynamo)",
        ),
        cause="bad-setting",
        error="torch has no backend {backend2} for collectives",
        advice='init_process_group takes "nccl", "gloo" or "mpi"; others have to be registered first, by importing their package',
    ),
    _ddp(
        name="torch.world-not-divided",
        wordings=(
            r"(?P<size>[Ww]orld[ _]size ?\(?\d*\)?) (?:is not|must be) divisible by",
            r"Mesh should not be bigger than default world size \d+, but found \d+ ranks",
            r"The world size \((?P<size2>\d+)\) must be (?:equal to|divisible by)",
        ),
        cause="bad-arguments",
        error="the number of ranks does not fit the asked parallelism: {words:.200}",
        advice="the product of the tensor, pipeline and data parallel sizes has to be the number of ranks",
    ),
    _ddp(
        name="torch.group-membership",
        wordings=(
            r"(?:Global|Group) rank (?P<rank>\d+) is not part of group",
            r"Invalid (?:root rank|source rank|destination rank)",
        ),
        cause="invalid-collective",
        error="{who} used a process group with a rank that it does not have: {words:.160}",
        advice="make groups on all ranks in the same order, and call their collectives on their members only; src and dst are global ranks",
    ),
    _ddp(
        name="torch.collective-sizes",
        wordings=(
            r"output tensor size must be equal to world_size times input tensor size",
            r"Split sizes doesn't match total dim 0 size",
            r"[Tt]ensor list (?:size|length) must (?:be equal to|match) .*(?:world|group)",
            r"input and output tensors must have the same (?:type|size)",
            r"invalid (?:tensor size at index|output tensor list at index|input tensor list size)",
            r"ProcessGroup\w+::\w+: (?P<why>invalid .*|requires .*)",
        ),
        cause="invalid-collective",
        error="a collective of {who} got tensors of sizes or types that do not fit each other: {words:.160}",
        advice="output of all_gather_into_tensor is world size times the input; all ranks need the same shape and data type",
    ),
    _ddp(
        name="torch.wrapped-model",
        wordings=(
            r"'(?P<wrapper>DistributedDataParallel|DataParallel|FullyShardedDataParallel|OptimizedModule|DeepSpeedEngine)' object has no attribute '(?P<name>\w+)'",
        ),
        cause="wrapped-model",
        error="{who} asked the wrapper {wrapper} for {name}, which only the model inside has",
        advice="write model.module.{name} (torch.compile: model._orig_mod.{name})",
    ),
    _ddp(
        name="torch.lightning-unused",
        wordings=(r"your LightningModule has parameters that were not used in producing the loss",),
        cause="unused-parameters",
        error="the module of {who} has parameters without a gradient",
        advice="Trainer(strategy='ddp_find_unused_parameters_true'), or use all parameters in the loss",
    ),
    # FSDP and DTensor.
    KnownMessage(
        name="torch.weight-of-one-dimension",
        wordings=(r"(?:mat2|weight) must be a matrix, got 1-D tensor",),
        source="torch 1.12 to 2.13, F.linear",
        is_raised=True,
        tells=Tells.NAMES,
        cause="shapes-differ",
        rivals=("sharding",),
        error="a layer of {who} got a weight of one dimension",
        advice="call the wrapped model itself: FSDP and ZeRO-3 keep the weights of submodules flat outside of its forward (FSDP.summon_full_params() gives the whole); without them print weight.shape before the line",
    ),
    _fsdp(
        name="torch.fsdp-dtypes",
        wordings=(
            r"Must flatten tensors with (?:uniform dtype|the same dtype)(?:,)? but got (?P<one>\S+) and (?P<other>\S+)",
            r"FSDP expects uniform original parameter dtype",
            r"Must flatten tensors with uniform `?requires_grad`? when `use_orig_params=False`",
        ),
        cause="sharding",
        error="FSDP of {who} got parameters of one unit that differ in data type or in requires_grad: {words:.160}",
        advice="use_orig_params=True for frozen parameters (LoRA), and one data type before wrapping: model.to(torch.float32)",
    ),
    _fsdp(
        name="torch.dtensor-mixed",
        wordings=(
            r"got mixed torch\.Tensor and DTensor, need to convert all torch\.Tensor to DTensor",
        ),
        cause="sharding",
        error="{who} used sharded and plain tensors in one operation",
        advice="make the plain one a DTensor (distribute_tensor), or use x.full_tensor(); parameters have to be used inside of the module's forward",
    ),
    _fsdp(
        name="torch.fsdp-weight-2d",
        wordings=(
            r"'weight' must be 2-D",
            r"setStorage: sizes .* requiring a storage size of \d+ are out of bounds for storage of size 0",
            r"The tensor has a non-zero number of elements, but its data is not allocated yet",
        ),
        tells=Tells.NAMES,
        cause="sharding",
        rivals=("shapes-differ",),
        advice_in={
            "deepspeed": "ZeRO-3 has partitioned the weights: read them within `with deepspeed.zero.GatheredParameters(params):`, and call the engine, not the model inside",
        },
        error="{who} used parameters that are empty here: FSDP or ZeRO-3 has them sharded",
        advice="call the wrapped model itself, not a submodule or model.generate outside of forward; FSDP.summon_full_params() or DeepSpeed's GatheredParameters gives the whole",
    ),
    _fsdp(
        name="torch.fsdp-state",
        wordings=(
            r"(?:FSDP|FlatParameter|flat_param).*(?:expected|expects) .*(?:state|handle|HandleTrainingState)",
            r"Expects? (?:to be|the) .*(?:training state|TrainingState\.\w+)",
            r"Non-root FSDP instance's .*should not have been set yet",
        ),
        tells=Tells.NAMES,
        cause="sharding",
        error="FSDP of {who} was used in a way that it refuses: {words:.200}",
        advice="call forward of the outermost wrapped module only, and no collective of it within another",
    ),
    # Loaders.
    _data(
        name="torch.collate-sizes",
        wordings=(
            r"each element in list of batch should be of equal size",
            r"Trying to resize storage that is not resizable",
            r"Unable to create tensor, you should probably activate truncation and/or padding",
        ),
        cause="batches-differ",
        error="samples of one batch of {who} have different sizes",
        advice="give the DataLoader a collate_fn that pads (torch.nn.utils.rnn.pad_sequence), or padding=True, truncation=True for the tokenizer",
    ),
    _data(
        name="torch.collate-type",
        wordings=(
            r"default_collate: batch must contain tensors, numpy arrays, numbers, dicts or lists; found (?P<type>.+)",
        ),
        cause="batches-differ",
        error="samples of {who} hold something that cannot be put into a batch: {type}",
        advice="return tensors, numbers or strings from __getitem__ (None often is a sample that failed to load), or write a collate_fn",
    ),
    _data(
        name="torch.empty-dataset",
        wordings=(r"num_samples should be a positive integer value, but got num_samples=0",),
        cause="empty-dataset",
        error="the data set of {who} is empty",
        advice="look at the path and pattern of the data on that node (`ls PATH | head`), and at what filters it",
        confirm="ls DATA | wc -l   on every node",
    ),
    _data(
        name="torch.loader-arguments",
        wordings=(
            r"(?:sampler|batch_sampler) option is mutually exclusive with",
            r"DataLoader with IterableDataset: expected unspecified",
            r"(?:prefetch_factor|persistent_workers|timeout) option (?:could only be specified|needs num_workers > 0)",
            r"multiprocessing_context can only be used with multi-process loading",
        ),
        cause="bad-setting",
        error="options of the DataLoader of {who} exclude each other: {words:.160}",
        advice="shuffle belongs to the sampler: DistributedSampler(shuffle=True) and no shuffle in the DataLoader; prefetch_factor needs num_workers > 0",
    ),
    _data(
        name="torch.loader-timeout",
        wordings=(r"DataLoader timed out after (?P<s>[\d.]+) seconds",),
        tells=Tells.NAMES,
        cause="slow-data",
        rivals=("memory", "blocked-in-kernel"),
        error="no batch came from the loader of {who} for {s} seconds",
        advice="look at the file system that the data is on, and at what a worker waits for: `py-spy dump --pid WORKER`; fewer workers than processors",
    ),
    _data(
        name="torch.shm-manager",
        wordings=(
            r"Shared memory manager connection has timed out",
            r"torch_shm_manager at .*(?:error|failed|could not)",
        ),
        tells=Tells.NAMES,
        cause="small-dev-shm",
        rivals=("open-files", "permission"),
        error="{who} could not start torch's manager of shared memory",
        advice="torch.multiprocessing.set_sharing_strategy('file_descriptor') with ulimit -n 65536, and a TMPDIR that may be written and run from",
        confirm="df -h /dev/shm; ls -ld $TMPDIR   in the job",
    ),
    # Processes and pickles.
    _data(
        name="torch.not-picklable",
        wordings=(
            r"[Cc]an't (?:get|pickle) (?:local )?(?:object|attribute)? ?'?(?P<name>[^'<]*<(?:locals|lambda)>[^']*)",
            r"cannot pickle '(?P<type>[\w.]+)' object",
            r"PicklingError: Can't pickle (?P<name2>.{0,120})",
        ),
        cause="not-picklable",
        error="{who} handed something to another process that cannot be pickled: {name}{name2}{type}",
        advice="put functions and classes at the top of a module in place of lambda and local ones, and open files and locks in the worker",
    ),
    _data(
        name="torch.main-guard",
        wordings=(
            r"An attempt has been made to start a new process before the current process has finished its bootstrapping",
            r"freeze_support\(\)",
        ),
        cause="main-guard",
        error="the script of {who} starts processes when it is imported",
        advice="put what it runs under `if __name__ == '__main__':`",
    ),
    _data(
        name="torch.spawn-exit",
        wordings=(r"daemonic processes are not allowed to have children",),
        cause="not-picklable",
        error="{who} started processes inside of a worker that may have none",
        advice="num_workers=0 there, or start the outer processes with daemon=False",
    ),
    # Checkpoints.
    _saved(
        name="torch.state-dict",
        wordings=(
            r"Error\(s\) in loading state_dict for (?P<model>\w+)",
            r"Missing key(?: in checkpoint state_dict|\(s\) in state_dict): (?P<key>\S+)",
            r"Size mismatch between saved (?P<size>.+) and current",
        ),
        cause="checkpoint-differs",
        error="a checkpoint does not fit the model of {who}: {words:.160}",
        advice="build the model with the configuration of the checkpoint; keys that begin with `module.` or `_orig_mod.` were saved from a wrapped model: save model.module.state_dict()",
        advice_in={
            "anywhere": (
                "all keys of the checkpoint begin with `{wrapper_prefix}`, because it was saved from a wrapped model: load {{key.removeprefix('{wrapper_prefix}'): value for key, value in state.items()}}, and save the inner model's state_dict",
                "the checkpoint has {stored_rows} rows in {stored_key}, the model {built_rows}: make the model with {stored_rows} tokens (vocab_size), load, and only then model.resize_token_embeddings({built_rows}); or use the tokenizer of the checkpoint",
                "{stored_key} has the shape ({stored_shape}) in the checkpoint and ({built_shape}) in the model: give the model the setting that it was saved with, or leave such keys out of the state_dict and load with strict=False",
            ),
        },
    ),
    _saved(
        name="torch.optimizer-state",
        wordings=(
            r"loaded state dict (?:has a different number of parameter groups|contains a parameter group that doesn't match the size)",
        ),
        cause="checkpoint-differs",
        error="the optimizer state that {who} loads is of another model, or of other parameter groups",
        advice="build the same parameter groups as when it was saved, or load the weights only",
    ),
    _saved(
        name="torch.checkpoint-broken",
        wordings=(
            r"PytorchStreamReader failed (?P<why>.*)",
            r"Error while deserializing header: (?P<why2>\w+)",
            r"(?:UnpicklingError|EOFError): (?P<why3>invalid load key.*|pickle data was truncated|unpickling stack underflow)",
            r"[Ii]nvalid magic number; corrupt file",
            r"not a ZIP archive|unexpected EOF, expected \d+ more bytes",
        ),
        tells=Tells.NAMES,
        cause="checkpoint-broken",
        rivals=("checkpoint-differs",),
        error="a checkpoint that {who} loads is cut off, damaged or of another format: {why}{why2}{why3}",
        advice="load the one before it, and save to a new name that is renamed when whole; a file of a few hundred bytes is a Git LFS pointer: git lfs pull",
        confirm="ls -l CHECKPOINT; head -c 100 CHECKPOINT",
    ),
    _saved(
        name="torch.pickle-empty",
        wordings=(r"EOFError: Ran out of input",),
        tells=Tells.NAMES,
        cause="checkpoint-broken",
        rivals=("not-picklable",),
        error="{who} read a pickle that is empty: a file cut off when it was written, or a parent process that ended",
        advice="remove the empty file (`find . -size 0`), and let one rank only write the cache",
    ),
    _saved(
        name="torch.weights-only",
        wordings=(
            r"Weights only load failed",
            r"Unsupported (?:global|class|operand).*weights_only",
            r"Due to a serious vulnerability issue in `torch\.load`",
        ),
        cause="weights-only",
        error="torch.load refused a checkpoint of {who} because it holds other objects than tensors",
        advice="torch.load(path, weights_only=False) for a file that you trust, torch.serialization.add_safe_globals([...]), or safetensors; since torch 2.6 the default is True",
    ),
    _saved(
        name="torch.old-reader",
        wordings=(
            r"Attempted to read a PyTorch file with version (?P<new>\d+), but the maximum supported version for reading is (?P<old>\d+)",
            r"No module named 'torch\.(?P<module>\S+)'.*pickle",
            r"unsupported pickle protocol: (?P<protocol>\d+)",
        ),
        cause="checkpoint-differs",
        error="a checkpoint was written by a newer torch or Python than {who} runs",
        advice="load it with the version that wrote it and save it anew, or use that version on all nodes",
    ),
    _saved(
        name="torch.dcp-metadata",
        wordings=(
            r"metadata is None|No such file or directory: '(?P<path>[^']*\.metadata)'",
            r"Checkpoint at (?P<path2>\S+) is missing keys",
            r"CheckpointException ranks:(?P<ranks>.*)",
        ),
        tells=Tells.NAMES,
        cause="checkpoint-broken",
        rivals=("checkpoint-differs", "file-missing"),
        error="a distributed checkpoint is not whole {path}{path2}: its metadata or some shards are missing",
        advice="load one that was finished (it has the file .metadata), from a file system that all nodes see",
        confirm="ls -la CHECKPOINT   on every node",
    ),
    # torch.compile and Triton.
    _compiled(
        name="torch.compile-no-compiler",
        wordings=(
            r"InvalidCxxCompiler|(?:No working|Failed to find) C\+\+ compiler",
            r"Failed to find C compiler\. Please specify via CC",
            r"fatal error: (?P<header>Python\.h): No such file",
        ),
        cause="no-compiler",
        error="torch.compile of {who} needs {compiler}, and there is none on {here}",
        advice="install {compiler_package}, or TORCHDYNAMO_DISABLE=1",
        confirm="which gcc g++; python -c 'import sysconfig; print(sysconfig.get_path(\"include\"))'   in the job",
    ),
    _compiled(
        name="torch.compile-failed",
        wordings=(
            r"torch\._dynamo\.exc\.(?:BackendCompilerFailed|InternalTorchDynamoError|TorchRuntimeError|Unsupported)",
            r"(?:BackendCompilerFailed|InductorError|LoweringException): (?P<why>.+)",
            r"backend='inductor' raised:",
        ),
        tells=Tells.NAMES,
        cause="compile-failed",
        rivals=("shapes-differ", "no-compiler", "disk-full"),
        error="torch.compile failed on {who}: {words:.200}",
        advice="TORCHDYNAMO_DISABLE=1 shows whether the program works without it; clear /tmp/torchinductor_$USER, or set TORCHINDUCTOR_CACHE_DIR to a local disk",
    ),
    _compiled(
        name="torch.triton-resources",
        wordings=(
            r"OutOfResources: out of resource: (?P<what>[\w ]+), Required: (?P<wanted>\d+), Hardware limit: (?P<limit>\d+)",
            r"No valid triton configs\. (?P<why>.+)",
        ),
        cause="compile-failed",
        error="a Triton kernel of {who} needs more than the GPU has: {words:.120}",
        advice="smaller blocks (BLOCK_SIZE, num_stages), or TORCHINDUCTOR_MAX_AUTOTUNE=0; it was tuned for a larger GPU",
    ),
    _compiled(
        name="torch.triton-too-old-gpu",
        wordings=(
            r"Found (?P<gpu>.+) which is too old to be supported by the triton GPU compiler",
            r"Cannot find a working triton installation",
            r"libcuda\.so cannot found",
        ),
        cause="compile-failed",
        error="Triton does not work on {here}: {words:.200}",
        advice="TORCHDYNAMO_DISABLE=1, or a GPU of compute capability 7.0 and newer with a Triton that fits torch; libcuda.so has to be in `ldconfig -p`",
    ),
    _compiled(
        name="torch.cudagraph-overwritten",
        wordings=(
            r"accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run",
        ),
        cause="cuda-graph",
        error="{who} used an output of a CUDA graph after the next run had overwritten it",
        advice="clone it, call torch.compiler.cudagraph_mark_step_begin() before each step, or mode='max-autotune-no-cudagraphs'",
    ),
    _compiled(
        name="torch.dynamo-python",
        wordings=(
            r"Dynamo is not supported on Python (?P<version>[\d.]+)",
            r"torch\.compile is not supported on (?P<version2>.+)",
        ),
        cause="builds-differ",
        error="this torch cannot compile under Python {version}{version2}",
        advice="use a newer torch or an older Python, or TORCHDYNAMO_DISABLE=1",
    ),
)
