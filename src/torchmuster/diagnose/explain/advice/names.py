"""Values for advice about names: packages, commands, options, files and folders."""

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping

from torchmuster.diagnose.explain.advice.packages import KNOWN_MODULES, distribution_of
from torchmuster.diagnose.explain.advice.said import (
    Value,
    code_at,
    first_of,
    line_with,
    lines_of,
    text_of,
)
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent

_OPTION = re.compile(r"'Namespace' object has no attribute '(?P<name>\w+)'")
_MODULE = re.compile(r"No module named '?(?P<module>[\w.]+)")
_COMMANDS = (
    *("python", "python3", "torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun"),
    *("sbatch", "nvidia-smi", "module", "conda", "source", "export", "bash", "singularity"),
    "apptainer",
)
_SCRIPTS = (
    *("train.py", "main.py", "finetune.py", "run.py", "pretrain.py", "eval.py", "test.py"),
    "inference.py",
)
_ALIKE = 0.8
_LEAST = 4  # letters of a word
_FILE = re.compile(r"[\w./~+-]+\.[A-Za-z]\w{0,11}\b|(?<![\w.])/[\w.+-]+(?:/[\w.+-]+)+")


def _distribution(_case: Case, event: LogEvent) -> str:
    """Return what to hand to pip for a module that is missing or does not fit."""
    module = event.get("module") or event.get("name") or first_of(_MODULE, text_of(event), "module")
    return distribution_of(module)


def _broken_part(_case: Case, event: LogEvent) -> str:
    """Return the package whose own files look for a part of it that is missing."""
    module = first_of(_MODULE, text_of(event), "module")
    top = module.partition(".")[0]
    frames = " ".join(event.detail)
    return distribution_of(top) if top != module and f"-packages/{top}/" in frames else ""


def _pip_install(case: Case, event: LogEvent) -> str:
    """Return the command that installs a missing module; a package that lacks a part of itself is installed anew."""
    broken = _broken_part(case, event)
    name = broken or _distribution(case, event)
    return f"pip install {'--force-reinstall ' if broken else ''}{name}" if name else ""


def _meant_module(_case: Case, event: LogEvent) -> str:
    """Return a well known module that is spelled nearly like the missing one."""
    top = first_of(_MODULE, text_of(event), "module").partition(".")[0]
    near = _nearest(top, KNOWN_MODULES) if top else ""
    return near or (_nearest(top, sys.stdlib_module_names) if top else "")


def _hiding_file(_case: Case, event: LogEvent) -> str:
    """Return the user's own file in which an import went round in a circle, where it has the name of a module of Python's."""
    name = os.path.basename(event.get("where").rpartition(":")[0])
    return name if name.removesuffix(".py") in sys.stdlib_module_names else ""


def _meant_command(case: Case, event: LogEvent) -> str:
    """Return a command that is spelled nearly like the one that was not found."""
    name = next(filter(None, map(event.get, ("command", "other", "name", "why", "path"))), "")
    name = name or line_with(case, "Executable: ").rpartition(" ")[2]
    return _nearest(os.path.basename(name), _COMMANDS)


def _lmod(_case: Case, event: LogEvent) -> str:
    """Return the path of Lmod's own program, where that is what was not found."""
    path = next(filter(None, map(event.get, ("command", "path", "other"))), "")
    return path if path.endswith("/libexec/lmod") else ""


def _existing_cluster(case: Case, _event: LogEvent) -> str:
    line = line_with(case, "existing Ray cluster at address")
    return first_of(re.compile(r"at address: ([\d.]+:\d+)"), line, 1)


def _meant_file(case: Case, event: LogEvent) -> str:
    """Return a path that the log names and that is spelled nearly like the missing one; else a script's usual name."""
    missing = missing_path(event)
    _folder, name = os.path.split(missing)
    if not name:
        return ""
    named = {path for line in lines_of(case) for path in _FILE.findall(line.text)}
    named = {path for path in named if path not in missing and os.path.basename(path) != name}
    near = _nearest(missing, named) or _nearest(name, {path for path in named if "/" not in path})
    if not near and name.endswith(".py"):
        near = _nearest(name, _SCRIPTS)
    return near


def _nearest(word: str, known: Iterable[str]) -> str:
    """Return the one word that is spelled nearly like another, in the same number of letters or one more or less."""
    if word in known:
        return ""
    near = [
        other
        for other in difflib.get_close_matches(word, sorted(known), n=3, cutoff=_ALIKE)
        if other != word and abs(len(other) - len(word)) <= 1 and _differ_in_spelling(word, other)
    ]
    return near[0] if near else ""


def _differ_in_spelling(one: str, other: str) -> bool:
    """Say whether two names differ within words: files of a series differ in a number or a letter of their own."""
    if re.findall(r"\d+", one) != re.findall(r"\d+", other):
        return False
    words, others = re.findall(r"[^\W\d_]+", one), re.findall(r"[^\W\d_]+", other)
    pairs = [pair for pair in zip(words, others, strict=False) if pair[0] != pair[1]]
    return len(words) == len(others) and all(len(min(pair, key=len)) >= _LEAST for pair in pairs)


def _meant_option(case: Case, event: LogEvent) -> str:
    """Return an option of the usage that argparse printed, spelled nearly like the one that it did not know."""
    wrong = first_of(re.compile(r"unrecognized arguments: (--[\w-]+)"), event.line.text, 1)
    usage = {option for line in lines_of(case) for option in re.findall(r"\[(--[\w-]+)", line.text)}
    same = {option for option in usage if option.replace("-", "_") == wrong.replace("-", "_")}
    return next(iter(same), "") or _nearest(wrong, usage)


def _missing_option(_case: Case, event: LogEvent) -> str:
    return first_of(_OPTION, event.get("message"), "name")


# Paths.

_NO_FOLDER = re.compile(
    r"(?:Parent directory|[Dd]irectory|[Ff]older) '?(?P<path>[^\s']+?)'? does not exist"
)
_PATH = re.compile(r"'(?P<path>[^']+)'")
_WRITES = re.compile(
    r"open\([^)]*,\s*(?:mode=)?['\"][wax]|\bsave\w*\(|\.to_(?:csv|json|parquet|pickle)\(|\bdump\(|imwrite\(|FileHandler\(|savefig\(|np\.save|mkstemp|write_\w+\("
)


def missing_path(event: LogEvent) -> str:
    """Return the path that an event says is not there."""
    return event.get("path") or first_of(_PATH, event.get("message") or event.line.text, "path")


def _folder_to_make(_case: Case, event: LogEvent) -> str:
    """Return the folder that is missing where a line writes a file: programs make files, not their folders."""
    named = first_of(_NO_FOLDER, event.get("message"), "path")
    if named and (
        event.get("message").startswith("Parent directory") or _WRITES.search(code_at(event))
    ):
        return named
    return os.path.dirname(missing_path(event)) if _WRITES.search(code_at(event)) else ""


def _home_path(_case: Case, event: LogEvent) -> str:
    path = missing_path(event)
    return path if path.startswith("~") else ""


def _relative_path(_case: Case, event: LogEvent) -> str:
    path = missing_path(event)
    return path if "/" in path and not path.startswith(("/", "~", "$", "http")) else ""


_TMP = re.compile(r"(?<![\w/])(/(?:var/)?tmp)(?=/|'|\"|\s|$)")


def _on_tmp(_case: Case, event: LogEvent) -> str:
    if "cannot create temp file for here-document" in event.line.text:
        return "/tmp"  # where bash puts them
    return first_of(_TMP, event.line.text, 1)


# Which variable says where a library keeps its cache. Source: the libraries' documentation.
_CACHES = {
    "/.cache/huggingface": "HF_HOME",
    "/.cache/torch": "TORCH_HOME",
    "/.cache/torch_extensions": "TORCH_EXTENSIONS_DIR",
    "/torchinductor_": "TORCHINDUCTOR_CACHE_DIR",
    "/.triton": "TRITON_CACHE_DIR",
    "/.cache/vllm": "VLLM_CACHE_ROOT",
    "/.cache/pip": "PIP_CACHE_DIR",
    "/.cache/wandb": "WANDB_CACHE_DIR",
    "/.local/share/wandb": "WANDB_DATA_DIR",
    "/.config/matplotlib": "MPLCONFIGDIR",
    "/.cache/matplotlib": "MPLCONFIGDIR",
    "/.nv/ComputeCache": "CUDA_CACHE_PATH",
    "/.apptainer": "APPTAINER_CACHEDIR",
    "/.singularity": "SINGULARITY_CACHEDIR",
    "/nltk_data": "NLTK_DATA",
    "/.cache": "XDG_CACHE_HOME",
}


def _cache_variable(_case: Case, event: LogEvent) -> str:
    """Return the variable that moves the cache in which a path lies."""
    path = missing_path(event)
    lies_in = [
        part for part in _CACHES if f"{part}/" in f"{path}/" or (part[-1] == "_" and part in path)
    ]
    return _CACHES[max(lies_in, key=len)] if lies_in else ""


# What torch.compile lacks; compilers of C and C++ are packages of their own.
_COMPILERS = (
    (
        re.compile(r"InvalidCxxCompiler|C\+\+ compiler"),
        "a C++ compiler",
        "g++ in the image (in build-essential, or gcc-c++; `module load gcc`, export CXX=g++)",
    ),
    (
        re.compile(r"C compiler"),
        "a C compiler",
        "gcc in the image (`module load gcc`, export CC=gcc)",
    ),
    (re.compile(r"Python\.h"), "Python's headers", "python3-dev (or python3-devel) in the image"),
)


def _compiler(_case: Case, event: LogEvent) -> str:
    return next((name for regex, name, _ in _COMPILERS if regex.search(text_of(event))), "")


def _compiler_package(_case: Case, event: LogEvent) -> str:
    return next((package for regex, _, package in _COMPILERS if regex.search(text_of(event))), "")


def _spelling(_case: Case, event: LogEvent) -> str:
    """Return the name that Python proposes for one that is not there."""
    return first_of(re.compile(r"Did you mean:? [^?]{1,80}\?"), text_of(event))


OF_NAMES: Mapping[str, Value] = {
    "missing_option": _missing_option,
    "distribution": _distribution,
    "pip_install": _pip_install,
    "meant_command": _meant_command,
    "meant_module": _meant_module,
    "hiding_file": _hiding_file,
    "lmod": _lmod,
    "existing_cluster": _existing_cluster,
    "meant_file": _meant_file,
    "folder_to_make": _folder_to_make,
    "home_path": _home_path,
    "relative_path": _relative_path,
    "on_tmp": _on_tmp,
    "meant_option": _meant_option,
    "cache_variable": _cache_variable,
    "spelling": _spelling,
    "compiler": _compiler,
    "compiler_package": _compiler_package,
}
