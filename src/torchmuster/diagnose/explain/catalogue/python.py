"""Python itself: its start, imports, the C libraries beneath it, its processes, and data that it cannot read.

Sources: CPython 3.8 to 3.14 Python/pylifecycle.c, Lib/; glibc 2.17 to 2.40; libgomp, libiomp, OpenBLAS, MKL; pip, conda.
"""

from functools import partial

from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells

_python = partial(KnownMessage, source="CPython 3.8 to 3.14")
_import = partial(
    KnownMessage,
    source="CPython 3.8 to 3.14, importlib, and the loader of glibc",
    tells=Tells.PROVES,
    is_raised=True,
)
_native = partial(KnownMessage, source="glibc 2.17 to 2.40, libgomp, libiomp, OpenBLAS, MKL")
_data = partial(
    KnownMessage,
    source="CPython zlib, json, tarfile; Pillow, pyarrow, h5py",
    is_raised=True,
    cause="data-broken",
)

_ONE_OF_EACH = "install the packages anew in one go in a new environment, and take other folders off PYTHONPATH and LD_LIBRARY_PATH"

ENTRIES: tuple[KnownMessage, ...] = (
    # The interpreter.
    _python(
        name="python.home",
        wordings=(
            r"Fatal Python error: (?:init_fs_encoding|initfsencoding|init_import_site|Py_Initialize)\S*: (?P<why>.+)",
            r"No module named '(?P<module>encodings)'",
        ),
        tells=Tells.PROVES,
        cause="python-paths",
        error="Python of {here} does not find its own library",
        advice="unset PYTHONHOME PYTHONPATH, and make the environment anew if it was moved or copied",
        confirm="env | grep PYTHON; python -c 'import sys; print(sys.prefix)'   on that node",
    ),
    _python(
        name="python.prefix-note",
        wordings=(r"Could not find platform (?:in)?dependent libraries <",),
        tells=Tells.FACT,
    ),
    _python(
        name="python.recursion",
        wordings=(r"RecursionError: maximum recursion depth exceeded",),
        tells=Tells.PROVES,
        is_raised=True,
        cause="recursion",
        error="functions of {who} called each other more deeply than Python allows",
        advice="look at the line that repeats in the traceback; often a __getattr__ that asks for itself, or a model that is its own submodule",
    ),
    _python(
        name="python.union-types",
        wordings=(
            r"TypeError: unsupported operand type\(s\) for \|: '(?:type|NoneType|\w*GenericAlias)' and '(?:type|NoneType|\w*GenericAlias)'",
            r"requires a different Python: (?P<found>[\d.]+) not in '(?P<wanted>[^']+)'",
            r"TypeError: '(?:type|ABCMeta)' object is not subscriptable",
        ),
        tells=Tells.NAMES,
        cause="python-version",
        error="the Python of {here} {found} is too old for the program {wanted}",
        advice="use Python 3.10 or newer on all nodes",
        confirm="python --version   on every node, in the job",
    ),
    _import(
        name="python.removed-modules",
        wordings=(
            r"No module named '(?P<module>distutils|imp|asynchat|asyncore|smtpd)'",
            r"module 'pkgutil' has no attribute 'ImpImporter'",
            r"cannot import name '(?P<name>Mapping|MutableMapping|Iterable|Callable|Sequence)' from 'collections'",
        ),
        cause="python-version",
        error="a package uses {module}{name}, which the Python of {here} has no longer",
        advice="update that package (pip install -U setuptools helps for distutils), or use the Python that it was written for",
        confirm="python --version   on every node, in the job",
    ),
    _import(
        name="python.built-without",
        wordings=(
            r"No module named '(?P<module>_lzma|_ctypes|_bz2|_sqlite3|_ssl|_tkinter|_curses)'",
        ),
        cause="python-build",
        error="the Python of {here} was built without {module}",
        advice="use a Python that has it (conda, uv or the distribution's), or install the -dev package of that library and build Python anew",
        confirm="python -c 'import {module}'   on that node",
    ),
    # Imports.
    _import(
        name="python.circular-import",
        wordings=(
            r"partially initialized module '(?P<module>[\w.]+)' .*\(most likely due to a circular import\)",
            r"partially initialized module '(?P<module2>[\w.]+)' has no attribute",
        ),
        cause="import-path",
        error="{module}{module2} imports itself: two modules import each other, or a file of yours has the name of a package",
        advice="look for a file {module}{module2}.py beside the script and rename it; else import inside the function",
    ),
    _import(
        name="python.relative-import",
        wordings=(
            r"attempted relative import (?:with no known parent package|beyond top-level package)",
            r"No module named '(?P<module>[\w.]+)'; '(?P<name>[\w.]+)' is not a package",
        ),
        cause="import-path",
        error="a module of the program is started or imported in a way that does not find its package",
        advice="start it as a module from the folder above: torchrun ... -m package.train, or install it with `pip install -e FOLDER`",
    ),
    _import(
        name="python.package-version",
        wordings=(
            r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)' \((?P<path>\S*(?:site|dist)-packages\S*)\)",
            r"module 'torch(?:\.\w+)*' has no attribute '(?P<name3>\w+)'",
            r"module 'numpy' has no attribute '(?P<name2>int|float|bool|object|complex|str|Inf|float_|bool8|product|unicode_|NaN)'",
            r"ImportError: (?P<module2>[\w.-]+)(?:[><=!~]=?[\w.,<>=!~ ]+)+ is required for a normal functioning of this module, but found (?P<found>.+?)\.?$",
        ),
        tells=Tells.NAMES,
        cause="versions-differ",
        rivals=("package-missing", "import-path"),
        error="a package is of another version than the program needs: {words:.200}",
        advice="install the versions that the program names (pip install -r requirements.txt) in the environment of every node",
        advice_in={
            "anywhere": "{spelling} Else install the version that the program was written for (pip install -r requirements.txt)"
        },
        confirm="pip list | grep -iE 'torch|numpy|transformers'   on every node",
    ),
    _import(
        name="python.undefined-mkl-symbol",
        wordings=(r"undefined symbol: (?P<symbol>iJIT_NotifyEvent)",),
        cause="builds-differ",
        error="torch was built for an older MKL than {here} has: it lacks the symbol iJIT_NotifyEvent",
        advice="pip install 'mkl<2024.1'",
        confirm="pip list | grep -iE '^(torch|mkl) '",
    ),
    _import(
        name="python.undefined-cuda-symbol",
        wordings=(
            r"undefined symbol: (?P<symbol>__nvJitLink\w+|cusparse\w+|cublas\w+|cudnn\w+|cufft\w+|nccl[A-Z]\w+)",
        ),
        cause="wrong-library",
        error="another library of CUDA or NCCL is loaded than torch was built with: it lacks {symbol}",
        advice="take CUDA and NCCL off LD_LIBRARY_PATH (unset LD_LIBRARY_PATH; no `module load cuda nccl`): torch brings its own",
        confirm="echo $LD_LIBRARY_PATH; ldd $(python -c 'import torch; print(torch._C.__file__)')",
    ),
    _import(
        name="python.glibcxx",
        wordings=(
            r"(?P<path>\S*libstdc\+\+\.so\S*): version `(?P<version>(?:GLIBCXX|CXXABI)_[\d.]+)' not found",
        ),
        cause="wrong-library",
        error="{path} is too old: it lacks {version}",
        advice="use the environment's own: export LD_LIBRARY_PATH=$CONDA_PREFIX/lib:$LD_LIBRARY_PATH after conda install -c conda-forge libstdcxx-ng, or module load gcc",
        confirm="strings PATH | grep GLIBCXX   on that node",
    ),
    _import(
        name="python.opencv-gl",
        wordings=(
            r"(?P<library>libGL|libgthread-2\.0|libSM|libXrender|libXext)\.so\S*: cannot open shared object file",
        ),
        cause="wrong-library",
        error="{library} is not there on {here}: a package (mostly OpenCV) wants to draw windows",
        advice="pip uninstall -y opencv-python; pip install opencv-python-headless",
    ),
    _native(
        name="python.numpy-api",
        wordings=(
            r"module compiled against (?:ABI|API) version \S+ but this version of numpy is",
            r"numpy\.core\.multiarray failed to import",
            r"initialization of _internal failed without raising an exception",
        ),
        tells=Tells.PROVES,
        cause="builds-differ",
        error="the numpy of {here} does not fit a package that was built with another",
        advice="pip install -U numpy PACKAGE, or pip install 'numpy<2' where a package knows no newer one",
        confirm="python -c 'import numpy; print(numpy.__version__, numpy.__file__)'   on that node",
    ),
    # The C libraries.
    _native(
        name="python.heap-corrupted",
        wordings=(
            r"^(?:\S+: )?(?P<what>double free or corruption|free\(\): [\w ]+|malloc\(\): [\w ]+|corrupted (?:size vs\. prev_size|double-linked list)|munmap_chunk\(\): invalid pointer|realloc\(\): invalid \w+)",
            r"\*\*\* (?P<what2>stack smashing detected|buffer overflow detected)",
        ),
        tells=Tells.NAMES,
        kind="fatal_python",
    ),
    _native(
        name="python.c-assertion",
        wordings=(
            r"^(?:\S+: )?(?P<place>[\w./+-]+\.(?:c|cc|cpp|cxx|cu|cuh|h|hh|hpp|inl):\d+): (?P<function>[^\[\]]+): Assertion [`'](?P<check>.+)' failed\.?$",
        ),
        tells=Tells.NAMES,
        cause="aborted",
        error="an assertion of native code failed in {function} ({place}): {check}",
        advice="see which call of the program hands over what {function} refuses: PYTHONFAULTHANDLER=1 shows its line",
    ),
    _native(
        name="python.two-openmp",
        wordings=(
            r"OMP: Error #15: Initializing (?P<one>\S+), but found (?P<other>\S+) already initialized",
        ),
        tells=Tells.PROVES,
        cause="wrong-library",
        error="two copies of the OpenMP library are in one process: {one} and {other}",
        advice="install torch and numpy from one source (pip or conda, not both); KMP_DUPLICATE_LIB_OK=TRUE goes on at a risk",
    ),
    _native(
        name="python.mkl-layer",
        wordings=(
            r"MKL_THREADING_LAYER=INTEL is incompatible with (?P<library>\S+)",
            r"(?:Intel|INTEL) (?:one)?MKL (?:FATAL )?ERROR: (?:Cannot load )?(?P<library2>lib\w+\.so\S*)",
        ),
        tells=Tells.PROVES,
        cause="wrong-library",
        error="MKL does not fit another library of the process: {library}{library2}",
        advice="MKL_THREADING_LAYER=GNU, and import numpy before torch; else install numpy and mkl anew from one source",
    ),
    _native(
        name="python.thread-limit",
        wordings=(
            r"OpenBLAS blas_thread_init: pthread_create failed(?!.*not permitted)",
            r"libgomp: Thread creation failed",
            r"OMP: Error #34",
            r"OMP: System error #11",
        ),
        tells=Tells.PROVES,
        cause="process-limit",
        error="a maths library of {who} could not start its threads: the limit of processes and threads is reached",
        advice="OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1, and fewer loader workers; a higher `ulimit -u`",
        advice_in={"container": "OMP_NUM_THREADS=1, and docker run --pids-limit=-1"},
        confirm="ulimit -u; cat /sys/fs/cgroup/pids.max   in the job",
    ),
    _native(
        name="python.thread-at-exit",
        wordings=(r"terminate called without an active exception",),
        tells=Tells.HINTS,
        cause="aborted",
        error="a thread of {who} still ran when its process ended",
        advice="read what was printed before it: the process ended for that; at the end of a good run it is harmless",
    ),
    # Processes.
    _python(
        name="python.open-files",
        wordings=(
            r"Too many open files\. Communication with the workers is no longer possible",
            r"bit out of range 0 - FD_SETSIZE on fd_set",
            r"filedescriptor out of range in select\(\)",
        ),
        tells=Tells.PROVES,
        cause="open-files",
        error="{who} has too many open files",
        advice="ulimit -n 65536 in the job, and torch.multiprocessing.set_sharing_strategy('file_system')",
        advice_in={"container": "docker run --ulimit nofile=65536:65536"},
        confirm="ulimit -n   in the job",
    ),
    _python(
        name="python.mmap-limit",
        wordings=(r"unable to mmap \d+ bytes from file <(?P<path>[^>]*)>: Cannot allocate memory",),
        tells=Tells.NAMES,
        is_raised=True,
        cause="memory",
        rivals=("small-dev-shm",),
        error="{who} could not map a file or shared memory: memory, or the number of mappings, is used up",
        advice="more memory or fewer loader workers; with much memory free, sysctl vm.max_map_count=1048576 on the node",
        confirm="free -g; sysctl vm.max_map_count   on that node",
    ),
    _python(
        name="python.pool-broken",
        wordings=(
            r"BrokenProcessPool: (?P<words2>.+)",
            r"A (?:process in the process pool was terminated abruptly|worker process managed by the executor was unexpectedly terminated)",
        ),
        tells=Tells.NAMES,
        is_raised=True,
        cause="out-of-memory",
        rivals=("segfault", "killed"),
        error="a worker process of {who} was killed: mostly because memory ran out",
        advice="ask for more memory, or use fewer workers: the scheduler's record or dmesg says who killed it",
        confirm="sacct -j JOB -o State,MaxRSS; dmesg | grep -i oom",
    ),
    _python(
        name="python.context-set",
        wordings=(r"RuntimeError: context has already been set",),
        tells=Tells.PROVES,
        is_raised=True,
        cause="bad-setting",
        error="{who} chose the way to start processes twice",
        advice="call set_start_method once under `if __name__ == '__main__':`, or with force=True",
    ),
    # Environments.
    _python(
        name="python.conda-environment",
        wordings=(
            r"(?:EnvironmentNameNotFound|EnvironmentLocationNotFound): (?:Could not find conda environment|Not a conda environment): (?P<name>\S+)",
            r"Your shell has not been properly configured to use 'conda activate'",
            r"CondaError: Run 'conda init' before 'conda activate'",
        ),
        tells=Tells.PROVES,
        cause="environment-missing",
        error="the conda environment {name} could not be activated on {here}",
        advice="source /PATH/TO/conda/etc/profile.d/conda.sh; conda activate /FULL/PATH in the job script: ~/.bashrc is not read there",
        confirm="conda env list   on that node",
    ),
    _python(
        name="python.no-distribution",
        wordings=(
            r"ERROR: (?:Could not find a version that satisfies the requirement|No matching distribution found for) (?P<name>[^\s(]+)",
        ),
        tells=Tells.NAMES,
        cause="package-missing",
        rivals=("download-failed", "python-version"),
        error="pip found no {name} for this Python and processor",
        advice="install it before the job, on a node with access to the network; look whether it has wheels for this Python: pip download {name}",
        confirm="python --version; uname -m; curl -sSI https://pypi.org   on that node",
    ),
    # Text and data.
    _data(
        name="python.encoding",
        wordings=(
            r"UnicodeEncodeError: '(?P<codec>ascii|latin-1)' codec can't encode",
            r"UnicodeDecodeError: '(?P<codec2>ascii)' codec can't decode",
        ),
        tells=Tells.PROVES,
        cause="wrong-encoding",
        error="Python of {who} reads and writes {codec}{codec2} only: the job has no UTF-8 locale",
        advice="export PYTHONUTF8=1 LC_ALL=C.UTF-8 in the job",
    ),
    _data(
        name="python.not-utf8",
        wordings=(
            r"UnicodeDecodeError: 'utf-?8' codec can't decode byte (?P<byte>0x\w+) in position (?P<position>\d+)",
        ),
        tells=Tells.NAMES,
        cause="wrong-encoding",
        rivals=("data-broken",),
        error="a file that {who} reads is not UTF-8: byte {byte} at position {position}",
        advice="open it with encoding='latin-1' or errors='replace', or in binary mode if it is no text; `file PATH` tells what it is",
    ),
    _data(
        name="python.image",
        wordings=(
            r"UnidentifiedImageError: cannot identify image file (?P<path>.{1,160})",
            r"image file is truncated|broken (?:data stream|PNG file)",
        ),
        tells=Tells.PROVES,
        error="an image that {who} reads is damaged or no image: {path}",
        advice="remove it from the data, or skip it in __getitem__; PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True reads what is there",
    ),
    _data(
        name="python.compressed",
        wordings=(
            r"Compressed file ended before the end-of-stream marker",
            r"zlib\.error: Error -\d|error: Error -3 while decompressing",
            r"BadZipFile: (?P<why>.+)",
            r"(?:tarfile\.)?ReadError: (?P<why2>unexpected end of data|file could not be opened successfully|not a gzip file)",
            r"(?:Parquet magic bytes not found|Could not open Parquet input source|Invalid flatbuffers message|not an Arrow file)",
            r"\(truncated file: eof = (?P<eof>\d+)",
            r"[Tt]runcated or corrupt(?:ed)? file",
        ),
        tells=Tells.PROVES,
        error="a file that {who} reads is cut off or damaged: {words:.160}",
        advice="fetch or write it again, and compare its size and checksum; while one rank writes a cache, let the others wait",
        confirm="ls -l PATH; sha256sum PATH",
    ),
    _data(
        name="python.json",
        wordings=(r"JSONDecodeError: (?P<why>(?:Expecting|Unterminated|Extra data|Invalid)\b.*)",),
        tells=Tells.NAMES,
        error="a file or answer that {who} reads is no whole JSON: {why}",
        advice="look at the file that the line opens: it is empty, cut off, or an error page in place of JSON",
    ),
    # Files that only one process may have.
    _data(
        name="python.hdf5-lock",
        wordings=(
            r"[Uu]nable to (?:lock file|(?:synchronously )?open (?:file|object) \(unable to lock file)",
            r"OperationalError: database is locked",
        ),
        tells=Tells.PROVES,
        cause="file-locked",
        error="a file that {who} opens is locked by another process, or its file system has no locks",
        advice="HDF5_USE_FILE_LOCKING=FALSE for files that are only read; let one rank only write, and keep SQLite on a local disk",
    ),
    KnownMessage(
        name="torch.numpy-missing",
        wordings=(
            r"RuntimeError: Numpy is not available",
            r"_ARRAY_API not found",
            r"numpy\.(?:dtype|ndarray) size changed, may indicate binary incompatibility",
        ),
        source="torch 1.12 to 2.9",
        tells=Tells.PROVES,
        is_raised=True,
        cause="builds-differ",
        error="the numpy of {here} does not fit what torch or another library was built with",
        advice="install one that fits: pip install 'numpy<2', or newer builds of the libraries",
        confirm="python -c 'import numpy, torch; print(numpy.__version__, torch.__version__)'",
    ),
    KnownMessage(
        name="torch.cuda-not-compiled-op",
        wordings=(
            r"(?:Not compiled with CUDA support|(?P<op>\w+::\w+).*Could not run .* with arguments from the 'CUDA' backend)",
            r"Could not run '(?P<op2>\S+)' with arguments from the '(?:Sparse)?CUDA' backend",
        ),
        source="torch 1.12 to 2.9",
        tells=Tells.PROVES,
        is_raised=True,
        cause="builds-differ",
        error="an extension of {here} was built without CUDA, or for another torch: {op}{op2}",
        advice="install the CUDA build of it for this torch (torchvision, torch-scatter, detectron2: from the index that their page names)",
        confirm="python -m torch.utils.collect_env",
    ),
)
