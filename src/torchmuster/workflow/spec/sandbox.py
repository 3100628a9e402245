"""The child process that renders a template: Jinja's sandbox with limits on time and memory.

It reads one JSON request from standard input and writes one JSON answer to standard output:

    {"text", "values", "nonce", "cpu_s", "memory_bytes", "max_bytes"}
    {"text", "lines", "undeclared"}  or  {"error": {kind, line, message, ...}}

Markers show which template line each rendered line came from. They go around the nodes of the
parsed template, not into its text, so that they don't affect whitespace control. The module imports
little, so that it starts with `-I -S` and three folders in its path.
"""

import contextlib
import json
import re
import resource
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jinja2 import StrictUndefined, TemplateSyntaxError, Undefined, UndefinedError, meta, nodes
from jinja2.environment import Template
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment

# Template values as JSON.


def pack(value: Any) -> Any:
    """Encode a value for JSON: maps keep keys that are not text, dates become text."""
    if isinstance(value, dict):
        return {"map": [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [pack(item) for item in value]}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def unpack(value: Any) -> Any:
    """Decode a value that `pack` has encoded."""
    if not isinstance(value, dict):
        return value
    if "map" in value:
        return {unpack(key): unpack(item) for key, item in value["map"]}
    return [unpack(item) for item in value["list"]]


MAX_RANGE = 100_000
_MAX_TEXT = 1_000_000  # characters or items that one `*` may make
_MAX_BITS = 10_000  # of an integer that `*` or `**` makes
_FILE = "<template>"
# Their output may pass through a filter, so nothing inside them gets a marker.
_OPAQUE = (nodes.FilterBlock, nodes.CallBlock, nodes.Block)
_SILENT = (nodes.Macro, nodes.AssignBlock)


class TooLongError(Exception):
    """The time limit has passed."""


class TooLargeError(Exception):
    """The rendered text is larger than its limit."""


class Sandbox(SandboxedEnvironment):
    """Jinja's sandbox, in which no single operation can fill the memory."""

    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined)
        self.globals["range"] = _safe_range

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Refuse private attributes."""
        return not attr.startswith("_") and super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse operations with huge results: products, powers and `%` formats."""
        if operator == "*":
            _check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        elif (
            operator == "%" and isinstance(left, str) and re.search(r"%[^a-zA-Z]*(\*|\d{5})", left)
        ):
            raise SecurityError(f"`{left[:40]}` would make a huge text")
        return super().call_binop(context, operator, left, right)


def _safe_range(*args: int) -> range:
    for arg in args:
        if isinstance(arg, Undefined):
            str(arg)  # raises the error that names it; range() would blame an integer
    found = range(*args)
    if len(found) > MAX_RANGE:
        raise SecurityError(f"range() of {len(found)} items is more than {MAX_RANGE}")
    return found


def _check_product(left: Any, right: Any) -> None:
    for many, times in ((left, right), (right, left)):
        is_repeated = isinstance(many, str | list | tuple | bytes) and isinstance(times, int)
        if is_repeated and len(many) * times > _MAX_TEXT:
            raise SecurityError(f"`*` makes {len(many) * times} characters or items")
    are_ints = isinstance(left, int) and isinstance(right, int)
    if are_ints and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise SecurityError("`*` makes a huge number")


def _check_power(left: Any, right: Any) -> None:
    are_ints = isinstance(left, int) and isinstance(right, int)
    if are_ints and right > 0 and left.bit_length() * right > _MAX_BITS:
        raise SecurityError("`**` makes a huge number")


@dataclass(slots=True)
class Marks:
    """Puts markers around a template's nodes, and reads them out of the rendered text."""

    nonce: str
    _lines: list[int] = field(default_factory=list)
    _solid: bool = False

    def mark(self, tree: nodes.Template) -> nodes.Template:
        """Add markers to the template and return it."""
        tree.body = self._body(tree.body)
        return tree

    def read(self, marked: str) -> tuple[str, list[int]]:
        """Remove the markers; return the text and the template line of each of its lines."""
        parts = re.split(self.nonce + r"(\d+)([sd])", marked)
        self._lines, self._solid = [1], False
        texts = [parts[0]]
        for line, kind, text in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            self._count(text, int(line), 1 if kind == "s" else 0)
            texts.append(text)
        return "".join(texts), self._lines

    def _count(self, text: str, line: int, step: int) -> None:
        for index, piece in enumerate(text.split("\n")):
            if index:
                line += step
                self._lines.append(line)
                self._solid = False
            if not self._solid and piece.strip():
                self._lines[-1] = line
                self._solid = True

    def _body(self, body: list[nodes.Node]) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        for node in body:
            is_recursive = isinstance(node, nodes.For) and node.recursive
            if isinstance(node, nodes.Output):
                node.nodes = [part for inner in node.nodes for part in (self._before(inner), inner)]
            elif isinstance(node, _OPAQUE) or is_recursive:
                found.append(nodes.Output([self._before(node)], lineno=node.lineno))
            elif not isinstance(node, _SILENT):
                self._inside(node)
            found.append(node)
        return found

    def _inside(self, node: nodes.Node) -> None:
        for name in ("body", "else_", "elif_"):
            inner = getattr(node, name, None)
            if isinstance(inner, list):
                setattr(node, name, self._body(inner))

    def _before(self, node: nodes.Node) -> nodes.TemplateData:
        kind = "s" if isinstance(node, nodes.TemplateData) else "d"
        return nodes.TemplateData(f"{self.nonce}{node.lineno}{kind}", lineno=node.lineno)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Render a request; return the text with its lines, or the error with its line."""
    env, nonce, text = Sandbox(), request["nonce"], request["text"]
    try:
        tree = env.parse(text)
        undeclared = sorted(meta.find_undeclared_variables(tree))
        code = env.compile(Marks(nonce).mark(tree), filename=_FILE)
        template = Template.from_code(env, code, env.make_globals(None))
        marked = _render(template, request["values"], nonce, request["max_bytes"])
        _stop_timers()
    except UndefinedError as error:
        missing = _all_undefined(template, request["values"], error)
        return {"error": _describe(error, "undefined"), "undefined": missing}
    except TooLongError as error:
        return {"error": _describe(error, "time")}
    except MemoryError as error:
        return {"error": _describe(error, "memory")}
    except TooLargeError as error:
        return {"error": {"kind": "size", "line": int(str(error)), "message": ""}}
    except TemplateSyntaxError as error:
        return {"error": {"kind": "syntax", "line": error.lineno, "message": error.message or ""}}
    except SecurityError as error:
        return {"error": _describe(error, "refused")}
    except RecursionError as error:
        return {"error": _describe(error, "depth")}
    except Exception as error:  # noqa: BLE001 - a filter or an operation may raise anything
        return {"error": _describe(error, "failed")}
    rendered, lines = Marks(nonce).read(marked)
    return {"text": rendered, "lines": lines, "undeclared": undeclared}


def _render(template: Template, values: Any, nonce: str, max_bytes: int) -> str:
    parts: list[str]
    size, parts, last = 0, [], nonce + "1s"
    for part in template.generate(values):
        if (index := part.rfind(nonce)) >= 0:
            last = part[index:]
        size += len(part) - part.count(nonce) * (len(nonce) + 2)
        parts.append(part)
        if size > max_bytes:
            line = re.match(r"\d+", last[len(nonce) :])
            raise TooLargeError(line[0] if line else "1")
    return "".join(parts)


def _all_undefined(template: Template, values: Any, first: UndefinedError) -> list[list[Any]]:
    """Return [name, line] of each missing name; each is set to 1 to find the next one."""
    values, found, error = dict(values), [], first
    for _ in range(20):
        name = re.fullmatch(r"'(\w+)' is undefined", error.message or "")
        if not name or name[1] in values:
            break
        found.append([name[1], _line_of(error)])
        values[name[1]] = 1
        try:
            for _part in template.generate(values):
                pass
            break
        except UndefinedError as another:
            error = another
        except Exception:  # noqa: BLE001 - a consequence of the missing names
            break
    return found


def _describe(error: BaseException, kind: str) -> dict[str, Any]:
    message = str(error)[:300] if kind != "failed" else f"{type(error).__name__}: {error}"[:300]
    return {"kind": kind, "line": _line_of(error), "message": message}


def _line_of(error: BaseException) -> int | None:
    """Return the template line of the innermost frame in the template."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == _FILE]
    return lines[-1] if lines else None


def _raise_too_long(*_: object) -> None:
    raise TooLongError


@contextlib.contextmanager
def limits(cpu_s: float, memory_bytes: int) -> Iterator[None]:
    """Limit memory and CPU time: TooLongError after `cpu_s`, then the kernel ends the process."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _raise_too_long)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s * 1.4)  # for C code that checks no signal
    try:
        yield
    finally:
        _stop_timers()


def _stop_timers() -> None:
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def main() -> None:
    """Answer the one request on standard input."""
    request = json.load(sys.stdin)
    request["values"] = unpack(request["values"])
    with limits(request["cpu_s"], request["memory_bytes"]):
        found = answer(request)
    json.dump(found, sys.stdout)
