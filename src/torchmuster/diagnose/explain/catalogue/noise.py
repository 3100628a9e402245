"""Lines of healthy runs that frighten: warnings of libraries and shells that go on without what they did not find.

Sources: torch 1.12 to 2.9, tensorflow 2.x, transformers, tokenizers, CPython, libibverbs, NVIDIA's containers, pip, bash.
"""

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells


def _harmless(name: str, source: str, *wordings: str) -> KnownMessage:
    return KnownMessage(name=f"noise.{name}", wordings=wordings, source=source, tells=Tells.NOISE)


def _fact(name: str, source: str, *wordings: str) -> KnownMessage:
    return KnownMessage(name=f"noise.{name}", wordings=wordings, source=source, tells=Tells.FACT)


_TORCH = "torch 1.12 to 2.9, its warnings and glog"
_TF = "tensorflow 2.4 to 2.19, XLA"
_HF = "transformers, tokenizers, accelerate, huggingface_hub"
_SHELL = "bash, ssh, ld.so, login scripts"
_IMAGE = "entrypoint of nvcr.io/nvidia/pytorch; apptainer 1.x"
_MPI = "Open MPI 1.10 to 5.0, PMIx 2 to 5, hwloc 1.11 to 2.11, Intel MPI 2018 to 2021"
_SLURM = "Slurm 19.05 to 26.05, srun, sbatch, salloc"
_LMOD = "Lmod 7 and 8, Environment Modules 4 and 5"
_KUBE = "Kubernetes 1.24 to 1.34, kubectl, docker, podman"
_TRACK = "wandb 0.13 to 0.22, mlflow 2 and 3, tensorboard"

# fmt: off
ENTRIES: tuple[KnownMessage, ...] = (
    # torch.
    _harmless("one-thread", _TORCH, r"Setting OMP_NUM_THREADS environment variable for each process"),
    _harmless("group-not-destroyed", _TORCH, r"destroy_process_group\(\) was not called before program exit", r"process group has NOT been destroyed before we destruct ProcessGroupNCCL"),
    _harmless("barrier-device", _TORCH, r"using GPU \d+ (?:to perform barrier|as device used by this process)", r"barrier\(\): using the device under current context", r"No device id is provided via `?init_process_group"),
    _harmless("checkpoint-reentrant", _TORCH, r"use_reentrant parameter should be passed explicitly", r"None of the inputs have requires_grad=True\. Gradients will be None"),
    _harmless("deprecated", "CPython warnings", r"(?:Future|Deprecation|PendingDeprecation|Resource|Syntax)Warning: "),
    _harmless("scheduler-order", _TORCH, r"Detected call of `lr_scheduler\.step\(\)` before", r"Please also save or load the state of the optimizer when saving"),
    _harmless("many-workers", _TORCH, r"This DataLoader will create \d+ worker processes in total"),
    _harmless("gradient-strides", _TORCH, r"Grad strides do not match bucket view strides"),
    _harmless("unused-not-found", _TORCH, r"find_unused_parameters=True was specified in DDP constructor, but did not find any"),
    _harmless("no-ipv6-socket", _TORCH, r"(?:server|client) socket (?:on \S+ )?cannot be initialized.*errno: 97"),
    _harmless("store-backlog", _TORCH, r"Starting store with \d+ workers but somaxconn is", r"failed to parse somaxconn proc file"),
    _harmless("store-stranger", _TORCH, r"Miscellaneous client with(?:out| incorrect) VALIDATE query is detected"),
    _harmless("ipc-producer", _TORCH, r"Producer process has been terminated before all shared CUDA tensors released", r"CUDA warning: driver shutting down"),
    _harmless("compile-limits", _TORCH, r"torch\._dynamo hit config\.\w+_limit", r"Not enough SMs to use max_autotune_gemm", r"[Ss]kipping cudagraphs (?:due to|for)", r"Graph break (?:in|from) user code"),
    _harmless("tf32-off", _TORCH, r"TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled", r"You are using a CUDA device \(.*that has Tensor Cores"),
    _harmless("nnpack", _TORCH, r"Could not initialize NNPACK", r"Failed to load image Python extension", r"No audio backend is available", r"FFmpeg extension is not available"),
    _harmless("optional-kernels", _TORCH, r"[Tt]riton is not available, some optimizations", r"xFormers (?:is not available|can't load C)", r"multi_tensor_applier will be unavailable", r"(?i)\b(?:apex|flash[-_ ]?attn|flash[-_ ]?attention|xformers|transformer[-_ ]engine)\b.{0,30}(?:not (?:found|installed|available)|is unavailable).{0,120}(?:using|fall|instead|default|disabl|native|skip|will be|some)", r"(?i)(?:warn\w*|info|could not import|failed to import).{0,60}No module named '?(?:apex|amp_C|flash_attn|triton|xformers|transformer_engine|deep_gemm)"),
    _harmless("no-cuda-home", _TORCH, r"No CUDA runtime is found, using CUDA_HOME", r"TORCH_CUDA_ARCH_LIST is not set, all archs", r"CUDA extension not installed"),
    _harmless("expandable", _TORCH, r"expandable_segments not supported on this platform"),
    _harmless("redirects", _TORCH, r"Redirects are currently not supported in Windows or MacOs"),
    _harmless("unwaited", _TORCH, r"At the time of process termination, there are still \d+ unwaited collective"),
    _fact("bitsandbytes", "bitsandbytes 0.37 to 0.48", r"bitsandbytes was compiled without GPU support", r"Could not find the bitsandbytes CUDA binary"),
    # tensorflow and XLA, which many programs import.
    _harmless("factories", _TF, r"Unable to register cu(?:DNN|FFT|BLAS) factory", r"computation[_ ]placer (?:already registered|factory)", r"Attempting to register factory for plugin"),
    _harmless("no-tensorrt", _TF, r"TF-TRT Warning: Could not find TensorRT", r"Could not load dynamic library 'lib(?:nvinfer|cud|cublas|cufft|curand|cusparse|cusolver)", r"Could not find cuda drivers on your machine"),
    _harmless("onednn", _TF, r"oneDNN custom operations are on", r"TensorFlow binary is optimized", r"rebuild TensorFlow with the appropriate compiler flags", r"All log messages before absl::InitializeLog\(\)"),
    # The libraries of models.
    _harmless("tokenizers-fork", _HF, r"huggingface/tokenizers: The current process just got forked", r"To disable this warning, you can either:|Explicitly set the environment variable TOKENIZERS_PARALLELISM"),
    _harmless("new-weights", _HF, r"Some weights of .* were not (?:initialized|used)", r"You should probably TRAIN this model on a down-stream task"),
    _harmless("model-advice", _HF, r"Token indices sequence length is longer than", r"`use_cache=True` is incompatible with gradient checkpointing", r"You are using a model of type \S+ to instantiate", r"Special tokens have been added in the vocabulary", r"Could not estimate the number of tokens", r"Setting `pad_token_id` to `eos_token_id`", r"Flash Attention 2(?:\.0)? (?:with a model not initialized on GPU|only supports)[^:]*, but the current"),
    _fact("old-kernel", _HF, r"Detected kernel version \S+, which is below the recommended minimum"),
    _harmless("retried", "urllib3, requests, httpx", r"Retrying \(Retry\(total=[1-9]", r"HTTP Request: (?:GET|HEAD|POST) \S+ \"HTTP/\S+ (?:404|307|302) "),
    _harmless("versions-of-requests", "requests, urllib3", r"RequestsDependencyWarning|NotOpenSSLWarning|InsecureRequestWarning", r"A NumPy version >=\S+ and <\S+ is required for this version of SciPy"),
    _harmless("fonts", "matplotlib, fontconfig", r"Matplotlib (?:is building the font cache|created a temporary)", r"Fontconfig (?:error|warning): Cannot load default config"),
    # Python and its C libraries.
    _harmless("leaked-semaphores", "CPython multiprocessing/resource_tracker.py", r"resource_tracker: There appear to be \d+ leaked", r"resource_tracker: process died unexpectedly, relaunching"),
    _harmless("run-as-module", "CPython runpy", r"found in sys\.modules after import of package"),
    _harmless("openmp", "libomp, libgomp", r"OMP: Warning #\d+", r"omp_set_nested routine deprecated", r"libgomp: Invalid value for environment variable OMP_NUM_THREADS", r"KMP_AFFINITY: "),
    _harmless("large-alloc", "tcmalloc, jemalloc", r"tcmalloc: large alloc", r"<jemalloc>: .*(?:MADV_DONTNEED|background_thread)"),
    _harmless("affinity", "onnxruntime", r"pthread_setaffinity_np failed"),
    # The shell and the loader.
    _harmless("preload", _SHELL, r"object '\S+' from LD_PRELOAD cannot be preloaded .*ignored"),
    _harmless("locale", _SHELL, r"warning: setlocale: ", r"Setting locale failed"),
    _harmless("terminal", _SHELL, r"(?:stty|mesg|ttyname|standard input)\b.*Inappropriate ioctl for device", r"tput: No value for \$TERM", r"TERM environment variable not set", r"no job control in this shell", r"cannot set terminal process group", r"Pseudo-terminal will not be allocated", r"XDG_RUNTIME_DIR (?:is invalid or )?not set"),
    _harmless("known-hosts", _SHELL, r"Warning: Permanently added \S+ .*to the list of known hosts"),
    _harmless("git", "git 2.x", r"fatal: not a git repository", r"fatal: detected dubious ownership in repository"),
    _harmless("pip", "pip 20 to 25", r"Running pip as the 'root' user", r"pip's dependency resolver does not currently take into account", r"A new release of pip"),
    # Containers.
    _fact("small-shm-note", _IMAGE, r"The SHMEM allocation limit is set to the default of (?P<size>\d+\w*)"),
    _harmless("forward-compatibility", _IMAGE, r"CUDA Forward Compatibility mode ENABLED", r"MOFED driver for multi-node communication was not detected"),
    _harmless("apptainer", _IMAGE, r"(?:gocryptfs|fuse2fs|squashfuse|newuidmap) not found", r"underlay of \S+ required more than", r"Converting SIF file to temporary sandbox"),
    # Network libraries.
    _harmless("ibverbs-drivers", "rdma-core 20 to 55, libibverbs/init.c", r"libibverbs: Warning: couldn't (?:load driver|open config directory)", r"libibverbs: Warning: no userspace device-specific driver found"),
    _harmless("ucx-device", "UCX 1.8 to 1.18", r"UCX +WARN +(?:network device|transport|device) .*is not available"),
    # Launchers and clusters.
    _harmless("openib", _MPI, r"(?:no|No) preset parameters were found for the device", r"There was an error initializing an OpenFabrics device", r"By default, for Open MPI 4\.0 and later, infiniband ports", r"Warning: btl_openib|btl_openib\S* .*(?:ignored|warning)", r"unable to find any relevant network interfaces", r"Another transport will be used instead", r"A high-performance Open MPI point-to-point messaging module"),
    _harmless("mca-component", _MPI, r"mca_base_component_repository_open: unable to open", r"A requested component was not found, or was unable to be opened", r"No components were able to be opened in the \S+ framework"),
    _harmless("cma", _MPI, r"Linux kernel CMA support was requested via the btl_vader", r"Open MPI will fall back on another single-copy mechanism", r"vader:? .*(?:single.copy|CMA|xpmem)", r"Read -1, expected \d+, errno = 1"),
    _harmless("pmix-gds", _MPI, r"PMIX ERROR: (?:ERROR|NOT-FOUND|OUT-OF-RESOURCE|PMIX_ERROR) in file .*(?:gds|dstore|ds12|ds21|psec|munge|mca_base)", r"psec(?:urity)?[:/ ]munge.*(?:not|unable)"),
    _harmless("help-aggregated", _MPI, r"\d+ more process(?:es)? ha(?:s|ve) sent help message", r"Set MCA parameter \"orte_base_help_aggregate\""),
    _harmless("hwloc", _MPI, r"hwloc.*(?:has encountered what looks like an error from the operating system|received invalid information)", r"\* (?:hwloc will now ignore this|Failed with: intersection without inclusion|The following FAQ entry in the hwloc)"),
    _harmless("fork-mpi", _MPI, r"A process has executed an operation involving a call to the\s*$|operation involving a call to the \"fork\(\)\" system call", r"ibv_fork_init|RDMAV_FORK_SAFE"),
    _harmless("impi-notes", _MPI, r"MPI startup\(\): (?:\S+ (?:environment )?variable|Warning|Intel|library|libfabric|tuning|File|Unable to read tuning|detected)", r"I_MPI_\w+ (?:environment )?variable .*(?:not supported|deprecated)"),
    _harmless("prte-notes", _MPI, r"The (?:deprecated|following) (?:MCA parameter|command line option).*deprecated", r"PRTE-?\w* .*deprecated"),
    _harmless("slurm-notes", _SLURM, r"srun: warning: Ignoring ", r"(?:sbatch|srun|salloc): (?:warning|info|Info)[:!] .*(?:default|account|setting|using)", r"salloc: (?:Pending|Granted|Nodes|Waiting|Relinquishing)", r"srun: job \d+ (?:queued and waiting|has been allocated) ", r"X11 forwarding not available|_slurm_x11|x11 port forwarding setup failed"),
    _harmless("slurm-retries", _SLURM, r"srun: error: _?slurm_(?:persist|receive)\S* .*retry|Retrying job complete RPC|failed sending step completion message directly to slurmctld, retrying", r"slurmstepd: (?:task_p_\w+|acct_gather\S*|cgroup\S*): .*(?:debug|info)|acct_gather_\w+.*(?:rsmi|nvml|ipmi|rapl)"),
    _harmless("lmod-notes", _LMOD, r"Lmod is automatically replacing|The following have been reloaded with a version change|Due to MODULEPATH changes,? the following have been", r"Inactive Modules:|Activating Modules:|The following modules were not unloaded|\(Use \"module --force purge\" to unload all\)", r"Loading requirement: "),
    _harmless("kubectl-notes", _KUBE, r"Defaulted container \"[^\"]+\" out of:", r"\(BestEffort\)|Pulling image|Successfully pulled|Container image .* already present", r"warning: .*(?:deprecated|would violate PodSecurity)|Warning: (?:autopilot|unknown field|resource .* is missing the kubectl)"),
    _harmless("kubelet-start", _KUBE, r"pod has unbound immediate .*skipping|TriggeredScaleUp|NotTriggerScaleUp|failed to sync (?:configmap|secret) cache: timed out"),
    _harmless("docker-memory", _KUBE, r"WARNING: (?:No swap limit support|Your kernel does not support (?:swap|cgroup))", r"Emulate Docker CLI using podman"),
    _harmless("apptainer-binds", _IMAGE, r"(?:Skipping mount|skipping (?:mount|bind)) ", r"bind path .* not (?:found|exist).*skip|(?:nv|rocm) files: .*(?:skip|not found)|Environment variable \S+ already has value", r"While bind mounting .*:? ?(?:skip|destination is already)", r"User not listed in /etc/subuid, trying root-mapped"),
    _harmless("image-banner", _IMAGE, r"NOTE: (?:CUDA Forward Compatibility|Mellanox network driver detected|The SHMEM)", r"Use the NVIDIA Container Toolkit to start this container"),
    # Trackers and downloads.
    _harmless("wandb-notes", _TRACK, r"wandb: (?:WARNING|W ) ", r"wandb: Network error \(\w+\), entering retry loop", r"wandb: (?:While tearing down|Waiting for W&B|\d+ of \d+ files synced|Synced|Find logs at|You can sync this run|Tracking run|Currently logged in|Using wandb-core)", r"wandb: (?:ERROR )?(?:Dropped streaming|Retry attempt failed|Error while calling W&B API.*retrying)"),
    _harmless("mlflow-notes", _TRACK, r"mlflow\S*: .*(?:git executable|Encountered unexpected error while inferring pip requirements)", r"Bad git executable|Failed to import Git|Initial .*git.* check"),
    _harmless("tensorboard-notes", _TRACK, r"tensorboard.*(?:not installed|TensorFlow installation not found)|Missing logger folder", r"Experiment logs directory \S+ exists and is not empty|Checkpoint directory \S+ exists and is not empty"),
    _harmless("hub-retries", _HF, r"Retrying in \d+s \[Retry \d|Error while downloading from \S+.*Trying to resume", r"Xet Storage is enabled for this repo, but the 'hf_xet' package is not installed", r"`?huggingface-cli`? .*deprecated|Ignored error while writing commit hash", r"cannot be used with (?:hf_transfer|`?resume_download)|Unauthenticated requests to the HF Hub"),
    _harmless("datasets-notes", _HF, r"Using the latest cached version of the (?:module|dataset)", r"Setting num_proc from \d+ (?:back )?to \d+", r"Repo card metadata block was not found", r"Parameter '\w+'=.* couldn't be hashed properly"),
    _harmless("lightning-notes", "lightning 1.6 to 2.6", r"does not have many workers which may be a bottleneck", r"It is recommended to use `self\.log\(.*sync_dist=True\)`", r"The `?srun`? command is available on your system but is not used", r"GPU available(?:: \w+)?(?: \(\w+\))?, used: |TPU available: |HPU available: ", r"You have overridden `|`Trainer\.fit` stopped: `max_(?:epochs|steps)", r"Missing logger folder: |SLURM auto-requeueing enabled|Found unsupported keys in the optimizer"),
    _harmless("deepspeed-notes", "DeepSpeed 0.6 to 0.18", r"(?:async_io|sparse_attn|spatial_inference|evoformer_attn|cutlass|fp_quantizer|ragged_ops) .*(?:requires|\[NO\]|is not compatible|not yet supported)", r"NVIDIA Inference is only supported on|sparse_attn requires|please (?:install triton|set .*CUTLASS_PATH)", r"\[WARNING\].*(?:DeepSpeed|async_io|cpu_adam|Please specify the CUTLASS)", r"\[(?:deepspeed\] )?OVERFLOW!|OVERFLOW! Rank \d+ Skipping step|Skipping step\. Attempted loss scale", r"pytorch allocator cache flushes since last step", r"Setting ds_accelerator to|Client provided a .*optimizer|does not support (?:the )?(?:ZeRO|fp16) .*ignoring"),
    _harmless("amp-notes", "apex, Transformer Engine, Megatron", r"Gradient overflow\. +Skipping step, loss scaler \d+ reducing loss scale", r"fused_weight_gradient_mlp_cuda|(?:Apex|apex) is not installed\. Falling back", r"(?:Using|using) torch (?:fused|softmax|SDPA|RMSNorm) .*(?:instead|fallback)|Falling back to (?:Torch|torch|PyTorch) \w+"),
    _harmless("vllm-notes", "vLLM, SGLang, Ray", r"FlashInfer is not available\. Falling back|Using (?:XFormers|Flash Attention|FlashAttention|TORCH_SDPA)\S* backend", r"Custom allreduce is disabled because|Reducing Torch parallelism from|Your GPU does not have native support for FP8", r"Failed to import from vllm\._C|No plugins? (?:for group|found)|Please install (?:triton|flashinfer|sgl-kernel)", r"Tip: In future versions of Ray|Overriding RAY_DEDUP_LOGS"),
    _harmless("storage-notes", "Lustre, botocore, s3fs, aws", r"LustreError: .*(?:-11\b.*retry|ASYNC|Skipped \d+ previous)|Skipped \d+ previous similar message", r"Connection pool is full, discarding connection|Found credentials in", r"unclosed (?:client session|file|socket)|\.nfs[0-9a-f]{10,}.*(?:busy|Device or resource)"),
)
# fmt: on
