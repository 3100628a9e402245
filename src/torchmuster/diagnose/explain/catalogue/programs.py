"""Built-in exceptions of Python as programs raise them by mistake, and programs beside the training.

Of a built-in exception the message is the cause, and the entry adds what helps.

Sources: CPython 3.8 to 3.14, Objects/ and Lib/; messages of OmegaConf, Hydra, pydantic and PyYAML of 2021 to 2025;
submitit 1.4 to 1.5; HTCondor 9 to 24; Gurobi 9 to 12 and FlexNet; AWS Neuron runtime 2.x; dask.distributed 2021 to 2025;
Grid Engine 6 to 8; enroot 3.4.
"""

from typing import Any

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_SOURCE = "CPython 3.8 to 3.14"


def _mistake(
    name: str, wording: str, advice: str, source: str = _SOURCE, **more: Any
) -> KnownMessage:
    return KnownMessage(
        name=f"mistake.{name}",
        wordings=(wording,),
        source=source,
        tells=Tells.HINTS,
        cause=more.pop("cause", "exception"),
        error=more.pop("error", "{who} failed first: {words:.300}"),
        advice=advice,
        is_raised=True,
        **more,
    )


_VERSION = "install the version that the code was written for (its requirements file names it), or change the call"

_MISTAKES: tuple[KnownMessage, ...] = (
    _mistake(
        "module-lacks-name",
        r"AttributeError: (?:partially initialized )?module '(?P<module>[\w.]+)' has no attribute '(?P<name>\w+)'",
        f"the installed version of {{module}} has no {{name}}: {_VERSION}",
        confirm="python -c 'import {module}; print({module}.__version__, {module}.__file__)'",
        advice_in={
            "anywhere": "do what the message says: {spelling}",
        },
    ),
    _mistake(
        "circular-import",
        r"ImportError: cannot import name '(?P<name>\w+)' from partially initialized module '(?P<module>[\w.]+)'",
        "two modules import each other, or a file of yours has the name of a library: rename the file, or move the import",
        confirm="python -c 'import {module}; print({module}.__file__)'",
    ),
    _mistake(
        "package-lacks-name",
        r"ImportError: cannot import name '(?P<name>[\w.]+)' from '(?P<module>[\w.]+)' \((?:\S*(?:site|dist)-packages|unknown)",
        f"the installed version of {{module}} has no {{name}}: {_VERSION}",
        cause="versions-differ",
        error="{who} failed first: {module} as it is installed has no {name}: {words:.200}",
        confirm="pip show {module}",
    ),
    _mistake(
        "unexpected-argument",
        r"TypeError: (?P<call>[\w.<>]+)\(\) got an unexpected keyword argument '(?P<name>\w+)'",
        f"{{call}}() as it is installed does not know {{name}}: {_VERSION}",
        confirm="python -c 'import inspect; ...; print(inspect.signature({call}))'",
    ),
    _mistake(
        "missing-argument",
        r"TypeError: (?P<call>[\w.<>]+)\(\) missing \d+ required (?:positional|keyword-only) arguments?: (?P<names>.+)",
        f"{{call}}() also wants {{names}}: pass them, or {_VERSION}",
    ),
    _mistake(
        "none-has-no-attribute",
        r"AttributeError: 'NoneType' object has no attribute '(?P<name>\w+)'",
        "something that should have been made or found is None at that line: print it one line before; often a file, an option or a return is missing",
    ),
    _mistake(
        "object-has-no-attribute",
        r"AttributeError: '(?P<owner>\w+)' object has no attribute '(?P<name>\w+)'",
        f"{{owner}} has no {{name}}: a misspelled name, an option that was never set, or another version of the library; {_VERSION}",
        advice_in={
            "anywhere": (
                "the program reads args.{missing_option}, and its parser has no such option: parser.add_argument('--{missing_option}'), or the name that the parser does have",
                "do what the message says: {spelling}",
            ),
        },
    ),
    _mistake(
        "not-subscriptable",
        r"TypeError: '(?P<owner>\w+)' object is not (?P<what>subscriptable|callable|iterable)",
        "a value of type {owner} stands there where something {what} is expected: print its value one line before",
    ),
    _mistake(
        "operands",
        r"TypeError: (?:unsupported operand type|'[^']+' not supported between|can only concatenate|must be str, not|expected str, bytes or os\.PathLike object, not (?P<got>\w+))",
        "a value has another type than the line expects: often an option that was not given (None) or is text; print it one line before",
    ),
    _mistake(
        "unpack",
        r"ValueError: (?:not enough|too many) values to unpack \((?:expected|got).*",
        "the line takes another number of values than it is given: print what the right side returns; a new version of a library may return more",
    ),
    _mistake(
        "list-index",
        r"IndexError: (?:list|tuple|string|deque|pop from empty) ?(?:assignment )?(?:index out of range|list)",
        "the list is shorter than the line takes for granted: print its length; an empty data set or a missing file does this",
    ),
    _mistake(
        "key",
        r"KeyError: (?P<key>.+)",
        "the key {key} is not there: print the keys that are; a configuration, checkpoint or batch of another version lacks it",
    ),
    _mistake(
        "name",
        r"(?:NameError|UnboundLocalError): .*(?:name|variable) '(?P<name>\w+)'",
        "{name} is used before it is set: a missing import, or a branch that sets it and was not taken",
        advice_in={
            "anywhere": "do what the message says: {spelling}",
        },
    ),
    _mistake(
        "syntax",
        r"(?:SyntaxError|IndentationError|TabError): ?(?P<why>.*)",
        "correct the line, or use the version of Python that the code needs (python --version in the job)",
        cause="exception",
    ),
    _mistake(
        "json",
        r"(?:json\.decoder\.)?JSONDecodeError: (?P<why>.+)",
        "the file or answer that it reads is no JSON: empty, cut, or a page with an error; look at it with head -c 300",
    ),
    _mistake(
        "sample-larger",
        r"[Ss]ample larger than population",
        "a list has fewer entries than the line draws: leave such items out when the data set is made, or draw min(k, len(items)), or with repeats (random.choices)",
    ),
    _mistake(
        "unicode",
        r"Unicode(?:De|En)codeError: '(?P<codec>[\w-]+)' codec can't",
        "the file is not in {codec}: open it with its own encoding, or set PYTHONUTF8=1; a binary file read as text does this too",
    ),
    _mistake(
        "command-failed",
        r"CalledProcessError: Command '?(?P<command>.{1,160}?)'? (?:returned non-zero exit status|died with) (?P<status>[^.]+)",
        "run that command by hand: what it says itself is not in this log",
        error="a command that the program starts failed ({status}): {command}",
        cause="exit-code",
    ),
    _mistake(
        "pickled-name",
        r"AttributeError: Can't get attribute '(?P<name>\w+)' on <module '(?P<module>[\w.]+)'",
        "the file was pickled with another version of {module}, or by a script in which {name} was at the top: use that version, or save the state_dict only",
        cause="versions-differ",
        error="{who} failed first: a pickled file needs {name}, which {module} as it is here does not have",
        confirm="pip show {module}",
    ),
    _mistake(
        "etcd",
        r"EtcdStubError|The 'etcd' module is required",
        "pip install python-etcd, or use the c10d rendezvous: --rdzv-backend=c10d",
        source="torch 1.9 to 2.9, elastic/rendezvous/etcd_*.py",
        cause="package-missing",
        error="the etcd rendezvous needs the Python package python-etcd, which is not installed",
    ),
    _mistake(
        "recursion",
        r"RecursionError: maximum recursion depth exceeded",
        "something calls itself without an end: see the repeated frames; a __getattr__ of a wrapped module is the usual one",
    ),
    _mistake(
        "omegaconf",
        r"(?:omegaconf\.errors\.\w+|hydra\.errors\.\w+|ConfigAttributeError|ConfigKeyError|MissingMandatoryValue|OverrideParseException)\b:? ?(?P<why>.*)",
        "correct the configuration or the override that the message names; quote values with commas: key='[a,b]'",
        source="OmegaConf 2.0 to 2.3, Hydra 1.0 to 1.3",
        cause="bad-arguments",
        error="the configuration was refused: {words:.300}",
    ),
    _mistake(
        "pydantic",
        r"(?:pydantic\S*ValidationError|ValidationError): (?P<count>\d+) validation errors? for (?P<model>\w+)",
        "correct the fields of {model} that the lines below name",
        source="pydantic 1 and 2",
        cause="bad-arguments",
        error="{count} settings of {model} were refused: {words:.200}",
    ),
    _mistake(
        "yaml",
        r"yaml\.(?:scanner|parser|constructor|reader)\.\w+Error: ?(?P<why>.*)",
        "correct the YAML file at the line that the message names",
        source="PyYAML 5 and 6",
        cause="bad-arguments",
        error="a YAML file can't be read: {words:.200}",
    ),
    _mistake(
        "assert-file",
        r"AssertionError: .*(?P<what>not found|does not exist|doesn't exist|not exist)",
        "put the file there, or correct the path that the message names: seen from the node and folder in which the job runs",
        cause="file-missing",
        error="{who} did not find a file or folder: {words:.250}",
    ),
    _mistake(
        "assert",
        r"^AssertionError(?:: (?P<why>.*))?$",
        "the condition of the assert in that line does not hold: its code and message say what was expected",
        advice_in={
            "megatron": (
                "a part of the data set got no samples: give each part a share with --split (949,50,1), or set --eval-iters 0 where there is none; {empty_split} comes from train-iters, eval-iters and the batch size"
            ),
        },
    ),
    _mistake(
        "not-implemented",
        r"^NotImplementedError(?:: (?P<why>.*))?$",
        "this combination of options is not supported by that code: change the option that the message or the function names",
        advice_in={
            "anywhere": "do what the message says: {remedy}",
        },
    ),
    _mistake(
        "zero-division",
        r"ZeroDivisionError: (?P<why>.+)",
        "a length or count is zero: an empty data set, or fewer samples than ranks and batch size; print it one line before",
    ),
    _mistake(
        "windows-paging-file",
        r"OSError: \[WinError 1455\]",
        "make the paging file of Windows larger (System, Advanced, Performance, Virtual memory), or num_workers=0: each loader worker loads torch's libraries once more",
    ),
    _mistake(
        "interpreter-option",
        r"OSError: \[WinError (?P<number>\d+)\] (?P<why>.+)",
        "the message is of Windows: see its words; for a missing DLL install the Visual C++ runtime",
    ),
)
_TOOLS: tuple[KnownMessage, ...] = (
    KnownMessage(
        name="tools.condor-held-memory",
        wordings=(
            r"(?:put on hold|held).{0,80}(?:memory usage|MemoryUsage|memory limit|exceeded.{0,20}memory)",
            r"Job has gone over memory limit",
        ),
        source="HTCondor 9 to 24, SYSTEM_PERIODIC_HOLD and the starter",
        tells=Tells.PROVES,
        kind="oom_proof",
    ),
    KnownMessage(
        name="tools.licence",
        wordings=(
            r"Request denied: user '(?P<user>[^']+)' not in authorized user list",
            r"Licensed number of users already reached(?P<more>.*)",
            r"[Cc]annot connect to license server(?P<where>.*)",
            r"No license (?:found|available)(?P<for_what>.*)|[Ll]icense (?:has )?expired",
            r"Request denied: license (?P<why>.*)",
            r"User/host (?:on EXCLUDE list|not on INCLUDE list)",
        ),
        source="Gurobi 9 to 12, FlexNet",
        tells=Tells.PROVES,
        cause="account",
        error="a licence server refused the program: {words:.200}",
        advice="ask who runs the licence server to enter this user, or wait for a free licence; check the address of the server in the job's environment",
    ),
    KnownMessage(
        name="tools.neuron-cores",
        wordings=(
            r"Could not find VNC id (?P<core>\S*)",
            r"nrt_allocate_neuron_cores|Neuron(?:C| c)ores? (?:not available|already in use)",
        ),
        source="AWS Neuron runtime 2.x, nrt",
        tells=Tells.NAMES,
        cause="gpu-ordinal",
        error="a process asked for a Neuron core that is not there or belongs to another process: {words:.160}",
        advice="give each process its own cores: NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES, as many processes as cores",
        confirm="neuron-ls; neuron-top",
    ),
    KnownMessage(
        name="tools.neuron-device",
        wordings=(
            r"Could not open the nd(?P<device>\d+)",
            r"Failed to stage graph\S* to vnc ?(?P<core>\d+)|stage_kelf_models\s+Failed",
        ),
        source="AWS Neuron runtime 2.x, nrt",
        tells=Tells.NAMES,
        cause="gpu-busy",
        rivals=("gpu-ordinal", "no-gpu"),
        error="a Neuron device or core is not to be had on {here}: another process holds it, it is not this process's, or the driver does not run: {words:.160}",
        advice="end what holds it (neuron-ls names the process), and give each process its own cores: NEURON_RT_VISIBLE_CORES or NEURON_RT_NUM_CORES",
        confirm="neuron-ls; lsmod | grep neuron",
    ),
    KnownMessage(
        name="tools.nvccli",
        wordings=(r"nvidia-container-cli(?: binary)? not found|while setting up nvccli",),
        source="SingularityCE 3.9 and Apptainer 1.0 on, internal/pkg/util/gpu",
        tells=Tells.PROVES,
        cause="gpu-runtime",
        error="apptainer should set the GPUs up with nvidia-container-cli, which {here} does not have",
        advice="use --nv without --nvccli (`use nvidia-container-cli = no` in its configuration, or unset APPTAINER_NVCCLI SINGULARITY_NVCCLI); or have libnvidia-container-tools installed there",
    ),
    KnownMessage(
        name="tools.grid-engine-signal",
        wordings=(
            r"(?:User|job) .{0,40}received signal (?P<signal>USR1|USR2|XCPU|12|10|24)\b.{0,40}(?:limit|queue|root|uid 0)",
        ),
        source="Grid Engine 6 to 8, queue_conf(5): s_rt, s_vmem warn by a signal",
        tells=Tells.NAMES,
        cause="scheduler-ended",
        error="Grid Engine warned the job by a signal that one of its limits is near, and the program ended by it",
        advice="ask for more time or memory (h_rt, h_vmem), or catch the signal and save: qsub -notify",
    ),
    KnownMessage(
        name="program.glibc-too-old",
        wordings=(r"version [`'](?P<version>GLIBC_[\d.]+)' not found",),
        source="glibc ld.so, dl-version.c",
        tells=Tells.PROVES,
        cause="wrong-library",
        error="the system is older than the program: it lacks {version}",
        advice="use a container image with a newer system, or an older build of what the line names; a module of the site cannot change glibc",
        confirm="ldd --version | head -1   on that node",
    ),
    KnownMessage(
        name="program.libstdcxx-too-old",
        wordings=(r"version [`'](?P<version>(?:GLIBCXX|CXXABI)_[\d.]+)' not found",),
        source="glibc ld.so with libstdc++ 4.8 to 14",
        tells=Tells.PROVES,
        cause="wrong-library",
        error="the libstdc++ that is loaded is too old: it lacks {version}",
        advice="put the newer one first: LD_LIBRARY_PATH=$CONDA_PREFIX/lib, or conda install -c conda-forge libstdcxx-ng; or load a newer gcc module",
        confirm="strings $(gcc -print-file-name=libstdc++.so.6) | grep GLIBCXX | tail -1",
    ),
    KnownMessage(
        name="program.extension-of-other-torch",
        wordings=(
            r"(?P<module>[\w-]+?)(?:\.cpython-[\w-]+)?\.so: undefined symbol: (?P<symbol>_ZN?K?\w*(?:3c10|4c10d|2at|5torch|6caffe2)\w*)",
            r"undefined symbol: (?P<symbol>_ZN?K?\d*(?:3c10|4c10d|2at|5torch|6caffe2)\w*)",
        ),
        source="torch 1.8 to 2.9: C++ names change between releases; extensions bind to one",
        tells=Tells.PROVES,
        cause="builds-differ",
        error="the extension {module} was built for another torch than is installed: it lacks the symbol {symbol:.60}",
        advice="reinstall or rebuild {module} for the installed torch: pip install --no-cache-dir --no-build-isolation --force-reinstall PACKAGE",
        confirm="python -c 'import torch; print(torch.__version__)'; pip list | grep -i PACKAGE",
        advice_in={
            "anywhere": "build it anew for the installed torch: pip install --force-reinstall --no-cache-dir --no-deps {distribution}",
        },
    ),
    KnownMessage(
        name="program.rpc-timeout",
        wordings=(r"RPC ran for more than set timeout \((?P<ms>\d+) ms\)",),
        source="torch 1.6 to 2.9, distributed/rpc",
        tells=Tells.NAMES,
        is_raised=True,
        cause="rank-missing-in-collective",
        error="a remote call took longer than its limit of {ms} ms",
        advice="see what the called worker does (its own log), or raise rpc_timeout in TensorPipeRpcBackendOptions",
    ),
    KnownMessage(
        name="program.interrupted",
        wordings=(
            r"[Dd]etected KeyboardInterrupt",
            r"[Tt]raining (?:was |has been )?interrupted by (?:the )?user",
        ),
        source="Lightning 1 and 2; scripts that catch Ctrl-C",
        tells=Tells.NAMES,
        cause="cancelled",
        error="somebody interrupted the program (SIGINT, Ctrl-C), and it stopped in good order",
        advice="resume from its last checkpoint; start it with `muster run --detach`, tmux or a scheduler if nobody meant to",
    ),
    KnownMessage(
        name="pyxis.folder",
        wordings=(
            r"pyxis: (?:slurmd: )?couldn't mkdir (?P<path>\S+): (?P<why>.+)",
            r"(?:pyxis: +|\[ERROR\] )?mkdir: cannot create directory \W?(?P<path2>/\S*(?:enroot|pyxis)[^\s'\u2019]*)\W?: (?P<why2>.+)",
        ),
        source="pyxis 0.23 pyxis_slurmstepd.c; enroot 4 runtime.sh, mkdir of coreutils",
        tells=Tells.PROVES,
        cause="container-runtime",
        error="enroot or pyxis could not make its folder {path}{path2} on {here}: {why}{why2}",
        advice="the site sets ENROOT_RUNTIME_PATH, ENROOT_CACHE_PATH and ENROOT_DATA_PATH in enroot.conf to folders that users may write",
        confirm="grep -v '^#' /etc/enroot/enroot.conf   on that node",
    ),
    KnownMessage(
        name="program.uid-unknown",
        wordings=(
            r"getpwuid\(\): uid not found: (?P<uid>\d+)",
            r"(?:cannot find|no) name for (?:user|group) ID (?P<uid>\d+)",
        ),
        source="CPython 3.8 to 3.14 pwd; coreutils id",
        tells=Tells.PROVES,
        cause="environment-missing",
        error="the user id {uid} has no name on this node or in this container",
        advice="set USER, LOGNAME and HOME (and TORCHINDUCTOR_CACHE_DIR), or give the container /etc/passwd: docker -v /etc/passwd:/etc/passwd:ro",
        confirm="getent passwd {uid}",
    ),
    KnownMessage(
        name="program.cloud-quota",
        wordings=(
            r"ResourceLimitExceeded|account-level service limit",
            r"[Qq]uota '(?P<quota>[\w -]+)' exceeded|QUOTA_EXCEEDED",
        ),
        source="SageMaker, EC2, GCE and Azure APIs of 2019 to 2025",
        tells=Tells.PROVES,
        cause="site-limits",
        error="the cloud account's quota does not allow this machine or number: {words:.160}",
        advice="ask for a higher quota in the cloud's console, or choose another machine type or region",
    ),
    KnownMessage(
        name="program.triton-cache-race",
        wordings=(r"\.triton/cache/\S+\.tmp\.pid_\d+",),
        source="Triton 2 and 3, runtime/cache.py",
        tells=Tells.NAMES,
        is_raised=True,
        cause="race",
        error="several processes write one Triton cache at once, on a file system where that fails",
        advice="a cache of its own for each process: TRITON_CACHE_DIR=/tmp/triton-$LOCAL_RANK (local disk, not NFS)",
    ),
    KnownMessage(
        name="program.libibverbs-missing",
        wordings=(
            r"Failed to open libibverbs\.so",
            r"No module named '?pynvml'?\b.*(?:skipp|without)",
        ),
        source="NCCL 2.4 to 2.28: goes on over sockets",
        tells=Tells.NOISE,
    ),
    KnownMessage(
        name="torch.device-string",
        wordings=(
            r"Invalid device (?:string|type)?:? ?'(?P<device>[^']*)'|Expected one of cpu, cuda, .* device type at start of device string: (?P<device2>\S+)",
        ),
        source="torch 1.12 to 2.9, c10/core/Device.cpp",
        tells=Tells.PROVES,
        is_raised=True,
        cause="bad-setting",
        error="{who} names a device that cannot be: {device}{device2}",
        advice="write it as cuda:0, with the number in LOCAL_RANK: torch.device('cuda', int(os.environ['LOCAL_RANK']))",
    ),
)

ENTRIES: tuple[KnownMessage, ...] = (*_MISTAKES, *_TOOLS)
