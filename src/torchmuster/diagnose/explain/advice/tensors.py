"""Values for advice about tensors: devices, sizes, data types, what a checkpoint holds."""

import math
import re
from collections.abc import Mapping

from torchmuster.diagnose.explain.advice.said import Value, code_at, first_of, line_with, text_of
from torchmuster.diagnose.explain.case import Case
from torchmuster.diagnose.explain.events import LogEvent

# Devices.


# Sizes.

_PRODUCT = re.compile(r"\((?P<rows>\d+)x(?P<have>\d+) and (?P<want>\d+)x\d+\)")
_VIEW = re.compile(r"shape '\[(?P<shape>[-\d, ]+)\]' is invalid for input of size (?P<size>\d+)")
_STORED = re.compile(
    r"size mismatch for (?P<key>\S+?): copying a param with shape torch\.Size\(\[(?P<stored>[\d, ]*)\]\) from checkpoint,"
    r" the shape in current model is torch\.Size\(\[(?P<built>[\d, ]*)\]\)"
)
_TOKENS = re.compile(
    r"sequence length is longer than the specified maximum sequence length for this model \((?P<tokens>\d+) > (?P<most>\d+)\)"
)
_TABLE = re.compile(r"(?:embed|wte|lm_head|word_embeddings|tok_embeddings)", re.IGNORECASE)


def _matrix_have(_case: Case, event: LogEvent) -> str:
    return first_of(_PRODUCT, event.get("message"), "have") if _is_in_a_layer(event) else ""


def _matrix_want(_case: Case, event: LogEvent) -> str:
    return first_of(_PRODUCT, event.get("message"), "want") if _is_in_a_layer(event) else ""


def _is_in_a_layer(event: LogEvent) -> bool:
    return "nn/modules/linear.py" in event.get("through")


def _odd_view(_case: Case, event: LogEvent) -> str:
    """Return the size that a view asks for and the number of entries does not divide by."""
    found = _VIEW.search(event.get("message"))
    if found is None:
        return ""
    sizes = [int(word) for word in found["shape"].split(",")]
    fixed = math.prod(size for size in sizes if size > 0)
    if sizes.count(-1) != 1 or not fixed or int(found["size"]) % fixed == 0:
        return ""
    return f"{found['size']} entries are no multiple of {fixed}"


def _position_table(_case: Case, event: LogEvent) -> str:
    """Return `positions` where the frames show that the table in question is that of the positions."""
    return "positions" if any(map(_POSITION.search, event.detail)) else ""


_POSITION = re.compile(r"\bwpe\b|position|\bpos(?:_?emb\w*)?\b|positional", re.IGNORECASE)


def _max_tokens(case: Case, _event: LogEvent) -> str:
    return first_of(_TOKENS, line_with(case, "longer than the specified maximum"), "most")


def _num_tokens(case: Case, _event: LogEvent) -> str:
    return first_of(_TOKENS, line_with(case, "longer than the specified maximum"), "tokens")


def _stored_key(_case: Case, event: LogEvent) -> str:
    return first_of(_STORED, text_of(event), "key")


def _stored_shape(_case: Case, event: LogEvent) -> str:
    return first_of(_STORED, text_of(event), "stored")


def _built_shape(_case: Case, event: LogEvent) -> str:
    return first_of(_STORED, text_of(event), "built")


def _stored_rows(_case: Case, event: LogEvent) -> str:
    """Return how many rows a table of tokens has in the checkpoint, if only their number differs."""
    found = _STORED.search(text_of(event))
    if found is None or not _TABLE.search(found["key"]):
        return ""
    stored, built = found["stored"].split(", "), found["built"].split(", ")
    return stored[0] if stored[1:] == built[1:] and stored != built else ""


def _built_rows(case: Case, event: LogEvent) -> str:
    return (
        first_of(_STORED, text_of(event), "built").split(", ")[0]
        if _stored_rows(case, event)
        else ""
    )


def _module_prefix(_case: Case, event: LogEvent) -> str:
    """Return the prefix that all keys of a checkpoint have and the model's do not: it was saved from a wrapper."""
    keys = re.findall(r'"([\w.]+)"', text_of(event).partition("Unexpected key(s)")[2])
    prefixes = {prefix for key in keys if (prefix := first_of(_WRAPPERS, key))}
    return prefixes.pop() if len(prefixes) == 1 and all(map(_WRAPPERS.match, keys)) else ""


_WRAPPERS = re.compile(r"^(?:module|_orig_mod|_forward_module|model\.module)\.")


def _last_index(_case: Case, event: LogEvent) -> str:
    size = event.get("size") or first_of(_OF_SIZE, event.get("message"), 1)
    return str(int(size) - 1) if size.isdigit() and int(size) else ""


_OF_SIZE = re.compile(r"with size (\d+)")


def _multiples(size: str, unit: int) -> str:
    """Return the multiples of a number around a size that is none."""
    if not size.isdigit() or not unit or int(size) % unit == 0:
        return ""
    below = int(size) // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


def _fitting_batch(_case: Case, event: LogEvent) -> str:
    """Return the global batch sizes next to one that is no multiple of micro batch times data parallel size."""
    sizes = [event.get(name) for name in ("micro", "dp")]
    if all(word.isdigit() for word in sizes):
        return _multiples(event.get("size"), math.prod(map(int, sizes)))
    ranks = event.get("ranks")
    return _multiples(event.get("size"), int(ranks)) if ranks.isdigit() else ""


def _fitting_world(_case: Case, event: LogEvent) -> str:
    """Return the numbers of ranks next to one that is no multiple of what the model is divided into."""
    unit = re.fullmatch(r"\(?(\d+)\)?\.?", event.get("why").strip())
    return _multiples(event.get("size"), int(unit[1])) if unit is not None else ""


def _tensor_sizes(_case: Case, event: LogEvent) -> str:
    """Return the tensor parallel sizes up to the one that was asked for that divide the number of heads."""
    heads, most = event.get("heads"), event.get("tp")
    if not heads.isdigit() or not most.isdigit():
        return ""
    sizes = [str(size) for size in range(1, int(most)) if int(heads) % size == 0]
    return f"{', '.join(sizes[:-1])} and {sizes[-1]}" if len(sizes) > 1 else ""


_EQUATION = re.compile(r"(?P<train>\d+) != (?P<micro>\d+) \* (?P<steps>\d+) \* (?P<ranks>\d+)")


def _train_batch(_case: Case, event: LogEvent) -> str:
    """Return what DeepSpeed's train_batch_size would have to be: micro batch times accumulation times ranks."""
    found = _EQUATION.search(text_of(event))
    return str(math.prod(int(found[name]) for name in ("micro", "steps", "ranks"))) if found else ""


def _classes_needed(_case: Case, event: LogEvent) -> str:
    """Return how many classes a label needs."""
    return str(int(event.get("target")) + 1) if event.get("target").isdigit() else ""


def _empty_split(_case: Case, event: LogEvent) -> str:
    return "num_samples" if re.search(r"assert .*num_samples > 0", code_at(event)) else ""


# Data types.


OF_TENSORS: Mapping[str, Value] = {
    "matrix_have": _matrix_have,
    "matrix_want": _matrix_want,
    "odd_view": _odd_view,
    "position_table": _position_table,
    "max_tokens": _max_tokens,
    "num_tokens": _num_tokens,
    "stored_key": _stored_key,
    "stored_shape": _stored_shape,
    "built_shape": _built_shape,
    "stored_rows": _stored_rows,
    "built_rows": _built_rows,
    "wrapper_prefix": _module_prefix,
    "last_index": _last_index,
    "fitting_batch": _fitting_batch,
    "fitting_world": _fitting_world,
    "tensor_sizes": _tensor_sizes,
    "train_batch": _train_batch,
    "classes_needed": _classes_needed,
    "empty_split": _empty_split,
}
