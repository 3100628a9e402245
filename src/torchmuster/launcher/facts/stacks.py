"""Parse stacks, and judge the activity of a rank from the frames of its main thread.

The text comes from faulthandler (most recent call first) or from py-spy. Nothing here uses a clock.
"""

import enum
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

_SECTION = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
_FAULT_FRAME = re.compile(r'^\s+File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_SPY_FRAME = re.compile(r"^\s+(?P<name>\S.*?) \((?P<file>[^()]+):(?P<line>\d+)\)$")
_OURS = re.compile(r"/torchmuster/(core|launcher)/node/spawner/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A frame of a stack."""

    file: str
    line: int
    name: str

    @property
    def place(self) -> str:
        """Return `data.py:88`."""
        return f"{os.path.basename(self.file)}:{self.line}"


class RankActivity(enum.Enum):
    """The kind of activity of a rank, as far as its stack shows."""

    WAITS = "waits"  # for other ranks
    COMPILES = "compiles"
    SAVES = "saves"  # or loads
    EVALUATES = "evaluates"
    DEBUGGED = "debugged"
    STOPPED = "stopped"
    UNINTERRUPTIBLE = "in kernel"  # sleeps uninterruptibly
    WORKS = "works"  # the script's own code, or a library's
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackReading:
    """The activity of a rank.

    Attributes:
        what: The operation or call: `all_reduce`, `read()`.
        frame: The script's innermost frame; the innermost of all if none is the script's.
        by: For a wait: `in a process of its loader`; else empty.
        is_sure: For a wait: whether the frames prove it, even if the processor is busy.
    """

    doing: RankActivity
    what: str = ""
    frame: Frame | None = None
    by: str = ""
    is_sure: bool = True

    @property
    def place(self) -> str:
        """Return `train.py:41`; empty if unknown."""
        return self.frame.place if self.frame is not None else ""


# Frames.


def threads(text: str) -> list[tuple[str, list[Frame]]]:
    """Return the threads of a text: (first line, frames from the innermost) of each."""
    parts = (part.partition("\n") for part in _sections(text))
    return [(head, _frames(rest)) for head, _, rest in parts]


def _sections(text: str) -> list[str]:
    """Return the part of each thread, from its first line to the next thread's."""
    starts = [head.start() for head in _SECTION.finditer(text)]
    return [text[begin:end] for begin, end in pairwise([*starts, len(text)])]


def _frames(text: str) -> list[Frame]:
    found = []
    for line in text.splitlines():
        match = _FAULT_FRAME.match(line) or _SPY_FRAME.match(line)
        if match is not None:
            name = match["name"]
            found.append(Frame(file=match["file"], line=int(match["line"]), name=name))
    return found


def main_first(text: str) -> str:
    """Return the text with the main thread first: faulthandler writes it last."""
    parts = _sections(text)
    if not parts:
        return text
    chosen = _main_index(parts)
    rest = [part for index, part in enumerate(parts) if index != chosen]
    return "\n".join(part.strip("\n") for part in [parts[chosen], *rest]) + "\n"


def _main_index(parts: Sequence[str]) -> int:
    """Return the index of the main thread: named so or with our frames, else the current, else the last."""
    for index, part in enumerate(parts):
        if _OURS.search(part) or "MainThread" in part.partition("\n")[0]:
            return index
    for index, part in enumerate(parts):
        if part.startswith("Current thread"):
            return index
    return len(parts) - 1


def main_frames(text: str) -> list[Frame]:
    """Return the frames of the main thread from the innermost, without our own at the bottom."""
    found = threads(main_first(text))
    frames = found[0][1] if found else []
    return [frame for frame in frames if not _OURS.search(frame.file)]


def user_frame(frames: Sequence[Frame]) -> Frame | None:
    """Return the innermost frame that is the script's own."""
    return next((frame for frame in frames if not is_library(frame.file)), None)


_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python\d|^<frozen|^<string>"
    r"|/torchmuster/(core|launcher|train|workflow|multirun|kubernetes|diagnose|report|errors)"
)
_SYNTHETIC = re.compile(r"^<|/torchinductor_|^/tmp/tmp[^/]*/[a-z0-9]{52}")


def is_library(file: str) -> bool:
    """Return whether a file is not the user's: of a package or of Python, or generated."""
    return bool(_LIBRARY.search(file) or _SYNTHETIC.search(file))


# Meaning of the frames. Each pattern matches a mechanism, not a message: the files in which torch
# and related libraries wait, compile and save. Source: torch 2.6 to 2.13; Lightning, Accelerate and
# DeepSpeed for the names of their folders.

_DEBUGGERS = re.compile(
    r"/(pdb|bdb|ipdb/.*|pudb/.*|code)\.py$|/(debugpy|pydevd\w*|_pydevd_\w+|IPython/terminal)/"
)
_COMPILERS = re.compile(
    r"/torch/_dynamo/(convert_frame|symbolic_convert|output_graph|variables/\w+)\.py$"
    r"|/torch/_inductor/(async_compile|codecache|scheduler|graph|select_algorithm|cpp_builder|compile_worker/\w+)\.py$"
    r"|/torch/_inductor/codegen/|/torch/_functorch/(aot_autograd|_aot_autograd/(dispatch|graph|jit)\w*)\.py$"
    r"|/triton/(compiler|backends|runtime/(build|autotuner))|/torch/utils/cpp_extension\.py$|/torch/export/"
    r"|/jax/_src/compiler|/ninja/"
)
_COMPILER_NAMES = re.compile(r"compile_fx|fx_codegen_and_compile|_compile\b|autotune|benchmark_all")
_SAVERS = re.compile(
    r"/torch/serialization\.py$|/torch/distributed/checkpoint/|/torchmuster/train/(snapshot/|saves\.py)"
    r"|/safetensors/|checkpoint_io|/torchsnapshot/"
)
_SAVING = re.compile(
    r"(^|_|\.)(save|saves|saving|saved|checkpoint|checkpoints|snapshot|resume)(_|$|d$)"
)
_EVALUATORS = re.compile(
    r"/(evaluation_loop|prediction_loop)\.py$|/torchmuster/train/evaluation\.py$"
)
_EVALUATING = re.compile(
    r"(^|_|\.)(eval|evaluate|evaluation|evaluating|valid|validate|validation|val|test|testing|predict)(_|$)"
)
_WAITING = re.compile(
    r"/torch/distributed/(?!checkpoint/|elastic/|run\.py|launch)"
    r"|/torchmuster/train/(lockstep|barrier|exchange|group|once|preempt|snapshot/writer)\.py$"
    r"|/torch/nn/parallel/distributed\.py$|/torch/nn/modules/_functions\.py$"
)
_OPERATION = re.compile(
    r"^(all_reduce|all_gather|reduce_scatter|broadcast|barrier|monitored_barrier|reduce|gather|scatter"
    r"|all_to_all|send|recv|isend|irecv|batch_isend_irecv|init_process_group|new_group|wait|rendezvous"
    r"|_sync_buffers|_sync_module_states|_verify_param_shape_across_processes)"
)
_OPERATION_NAMES = {
    "_sync_buffers": "the broadcast of DDP's buffers",
    "_sync_module_states": "the broadcast of DDP's weights",
    "_verify_param_shape_across_processes": "DDP's comparison of parameters",
}
_FETCHER = "/torch/utils/data/_utils/fetch.py"  # not in the stack of an idle process of a loader
_LOADER = re.compile(r"/torch/utils/data/dataloader\.py$")
# Calls of C code in which a line of the script waits: for the GPU, or for a torch handle.
_GPU_WAIT = re.compile(r"\.(item|cpu|numpy|tolist|synchronize)\(|\.to\([\"']cpu")
_HANDLE_WAIT = re.compile(r"\b\w+\.wait\(")
_STORE_WAIT = re.compile(r"\bTCPStore\(")
_STORE_MAKER = re.compile(r"/torch/distributed/rendezvous\.py$")


def judge(
    text: str,
    *,
    state: str = "",
    source: str = "",
    children: Sequence[str] = (),
    uses_gpu: bool = False,
) -> StackReading:
    """Return the activity of a rank.

    Args:
        text: Stacks of all its threads.
        state: The kernel's state letter of the process.
        source: The line of the script at the script's innermost frame.
        children: Stacks of the loader's processes.
        uses_gpu: Whether its process has opened a GPU.
    """
    frames = main_frames(text)
    frame = user_frame(frames) or (frames[0] if frames else None)
    name = _call_name(frames, frame)
    if state == "T":
        return StackReading(doing=RankActivity.STOPPED, what=name, frame=frame)
    if state == "t" or any(_DEBUGGERS.search(f.file) for f in frames):
        return StackReading(doing=RankActivity.DEBUGGED, what=name, frame=frame)
    if state == "D":
        return StackReading(doing=RankActivity.UNINTERRUPTIBLE, what=name, frame=frame)
    if not frames:
        return StackReading(doing=RankActivity.UNKNOWN)
    if (aside := _slow_activity(frames)) is not None:
        return StackReading(doing=aside, what=name, frame=frame)
    found = _waiting(frames, frame, children)
    if found is None and frame is frames[0]:
        found = _waiting_in_c(frame, source, uses_gpu=uses_gpu)
    return found or StackReading(doing=RankActivity.WORKS, what=name, frame=frame)


def _slow_activity(frames: Sequence[Frame]) -> RankActivity | None:
    """Return the activity of a rank that compiles, saves or evaluates (slow); None otherwise."""
    for one in frames:
        if one.name == "<module>":  # it is being imported
            continue
        if _COMPILERS.search(one.file) or (
            "/torch/_inductor/compile_fx" in one.file and _COMPILER_NAMES.search(one.name)
        ):
            return RankActivity.COMPILES
    if _operation(frames) is not None:
        return None  # a wait for others inside a save or an evaluation counts as a wait
    if any(_SAVERS.search(f.file) or _is_named(f, _SAVING) for f in frames):
        return RankActivity.SAVES
    if any(_EVALUATORS.search(f.file) or _is_named(f, _EVALUATING) for f in frames):
        return RankActivity.EVALUATES
    return None


def _is_named(frame: Frame, names: re.Pattern[str]) -> bool:
    return not is_library(frame.file) and bool(names.search(frame.name))


def _waiting(
    frames: Sequence[Frame], frame: Frame | None, children: Sequence[str]
) -> StackReading | None:
    """Return the wait for other ranks, for the backward pass or for the loader."""
    operation = _operation(frames)
    if operation is not None:
        return StackReading(doing=RankActivity.WAITS, what=operation, frame=frame)
    if frames[0].name == "_engine_run_backward":
        return StackReading(doing=RankActivity.WAITS, what="backward", frame=frame, is_sure=False)
    if _is_at_loader(frames):
        return _loading(frame, children)
    return None


def _waiting_in_c(frame: Frame, source: str, *, uses_gpu: bool) -> StackReading | None:
    """Return the wait in C code called by this line of the script: Python has no frame for it."""
    what = source if len(source) <= 40 else f"{source[:37]}..."
    if _STORE_WAIT.search(source):
        return StackReading(doing=RankActivity.WAITS, what="TCPStore", frame=frame, is_sure=False)
    if _HANDLE_WAIT.search(source):
        return StackReading(doing=RankActivity.WAITS, what=f"`{what}`", frame=frame, is_sure=False)
    if uses_gpu and _GPU_WAIT.search(source):  # sure: it spins, so the processor is busy
        return StackReading(doing=RankActivity.WAITS, what=f"`{what}`", frame=frame)
    return None


def _operation(frames: Sequence[Frame]) -> str | None:
    """Return the collective, or the function of torch or torchmuster, that the innermost frames wait in."""
    inner = [f for f in frames if not _is_standard(f.file)]
    if not inner or not _WAITING.search(inner[0].file):
        return None
    for frame in inner:
        if not _WAITING.search(frame.file):
            break
        found = _OPERATION.match(frame.name)
        if found is not None and frame.name != "wait":
            return _OPERATION_NAMES.get(
                frame.name, found.group(1) if frame.name[0] == "_" else frame.name
            )
    if inner[0].file.endswith("/torch/nn/parallel/distributed.py"):
        return None  # its own Python code, such as the hooks around a forward
    if "/torchmuster/" in inner[0].file:
        return f"torchmuster's {os.path.basename(inner[0].file).removesuffix('.py')}"
    return inner[0].name


def _is_standard(file: str) -> bool:
    standard = re.search(r"/lib(64)?/python\d[\d.]*/(?!site-packages|dist-packages)", file)
    return bool(standard) or file.startswith("<frozen")


def makes_store(text: str, source: str = "") -> bool:
    """Return whether the main thread is creating a torch.distributed store.

    Args:
        text: Stacks of all its threads.
        source: The line of the script at the script's innermost frame.
    """
    inner = [frame for frame in main_frames(text) if not _is_standard(frame.file)]
    if not inner:
        return False
    if _STORE_MAKER.search(inner[0].file):
        return True
    return not is_library(inner[0].file) and bool(_STORE_WAIT.search(source))


def is_importing(text: str) -> bool:
    """Return whether the main thread imports a library: import frames are above the script's."""
    for frame in main_frames(text):
        if frame.file.startswith("<frozen importlib"):
            return True
        if not is_library(frame.file):
            return False
    return False


def waits_for_loader(text: str) -> bool:
    """Return whether the main thread waits for the processes of a DataLoader."""
    return _is_at_loader(main_frames(text))


def _is_at_loader(frames: Sequence[Frame]) -> bool:
    inner = [frame for frame in frames if not _is_standard(frame.file)]
    return bool(inner) and bool(_LOADER.search(inner[0].file))


def _loading(frame: Frame | None, children: Sequence[str]) -> StackReading:
    """Return what the loader's processes do while the rank waits for them."""
    for text in children:
        if text.startswith("stopped"):
            return StackReading(
                doing=RankActivity.STOPPED, frame=frame, by="a process of its loader"
            )
        frames = main_frames(text)
        inner = user_frame(frames)
        if inner is not None and any(_FETCHER in frame.file for frame in frames):
            what = _call_name(frames, inner)
            return StackReading(
                doing=RankActivity.WORKS, what=what, frame=inner, by="in a process of its loader"
            )
    return StackReading(doing=RankActivity.WORKS, what="its loader", frame=frame)


def _call_name(frames: Sequence[Frame], frame: Frame | None) -> str:
    """Return the function of the given frame, else of the innermost one, as `read()`."""
    if not frames:
        return ""
    name = (frame or frames[0]).name
    return name if name.startswith("<") else f"{name}()"
