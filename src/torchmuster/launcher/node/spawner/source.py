"""What a script's source says about how it must be started, and which imports can be made once for all workers.

torch, OpenMP and BLAS read some variables while they are loaded. A forked worker has loaded torch
already, so a script that sets or removes one of them starts in a fresh interpreter instead.
"""

import ast
import importlib.machinery
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torchmuster.core.model import contract
from torchmuster.core.node.spawner.mainmodule import first_path, hidden_modules
from torchmuster.core.node.spawner.messages import BeginSpawner, ImportsRefused
from torchmuster.core.node.spawner.serve import ScriptReader, flush_everything
from torchmuster.launcher.node.spawner import import_watch
from torchmuster.launcher.node.spawner.import_watch import FirstImports, ImportWatch

# The strings that an expression in a script may evaluate to, as far as its source tells.
#
# Scopes are ignored: a name may have any value that it is bound to anywhere in the file. So a
# result is never too small, and "unknown" is a possible result.


_MOST_TEXTS = 256  # of one expression; more count as unknown
_DEEPEST = 20


@dataclass(frozen=True, slots=True)
class Texts:
    """The possible values of a string expression.

    Attributes:
        known: The values that are fully known.
        begins: Prefixes of other values; "" if nothing is known about them.
    """

    known: frozenset[str] = frozenset()
    begins: frozenset[str] = frozenset()

    def __or__(self, other: "Texts") -> "Texts":
        """Return the possible values of either side."""
        return Texts(self.known | other.known, self.begins | other.begins)

    def then(self, other: "Texts") -> "Texts":
        """Return the values of the two concatenated."""
        if len(self.known) * len(other.known) > _MOST_TEXTS:
            return UNKNOWN
        known = {left + right for left in self.known for right in other.known}
        begins = {left + right for left in self.known for right in other.begins}
        return Texts(frozenset(known), frozenset(begins) | self.begins)


UNKNOWN = Texts(begins=frozenset({""}))
_NONE = Texts()


@dataclass(slots=True)
class ParsedScript:
    """A parsed script, with the values that each of its names is bound to."""

    tree: ast.AST
    bound: dict[str, list[ast.AST | None]] = field(default_factory=dict)  # None: something else
    added_keys: dict[str, list[ast.AST]] = field(default_factory=dict)  # name["KEY"] = ...
    _found: dict[tuple[str, str], Texts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Record all bindings."""
        for node in ast.walk(self.tree):
            for target, value in _bindings(node):
                self._bind(target, value)

    def _bind(self, target: ast.AST, value: ast.AST | None) -> None:
        if isinstance(target, ast.Name):
            self.bound.setdefault(target.id, []).append(value)
        elif isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            self.added_keys.setdefault(target.value.id, []).append(target.slice)
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value.elts if isinstance(value, ast.Tuple | ast.List) else []
            known = len(parts) == len(target.elts)
            for number, part in enumerate(target.elts):
                self._bind(part, parts[number] if known else None)

    def texts(self, node: ast.AST | None, depth: int = 0) -> Texts:
        """Return the strings that an expression may evaluate to."""
        if depth > _DEEPEST:
            return UNKNOWN
        match node:
            case ast.Constant(value=str() as text):
                return Texts(frozenset({text}))
            case ast.Constant(value=bytes() as data):
                return Texts(frozenset({data.decode(errors="replace")}))
            case ast.FormattedValue(value=value, conversion=-1, format_spec=None):
                return self.texts(value, depth + 1)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.texts(left, depth + 1).then(self.texts(right, depth + 1))
            case ast.JoinedStr(values=values):
                whole = Texts(frozenset({""}))
                for value in values:
                    whole = whole.then(self.texts(value, depth + 1))
                return whole
            case ast.IfExp(body=body, orelse=orelse):
                return self.texts(body, depth + 1) | self.texts(orelse, depth + 1)
            case ast.Name(id=name):
                return self._of_name("texts", name, self.texts, depth)
            case Element(iterable=iterable, index=index):
                return self._elements(iterable, index, depth + 1)
            case _:
                return UNKNOWN

    def keys(self, node: ast.AST | None, depth: int = 0) -> Texts:
        """Return the possible keys of a dictionary: literal, `dict(...)`, pairs or a name."""
        if depth > _DEEPEST:
            return UNKNOWN
        match node:
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                return _union(
                    self.texts(key, depth + 1) if key else self.keys(value, depth + 1)
                    for key, value in pairs
                )
            case ast.Call(func=ast.Name(id="dict"), args=args, keywords=keywords):
                named = Texts(frozenset(word.arg for word in keywords if word.arg))
                more = [*args, *(word.value for word in keywords if not word.arg)]
                return named | _union(self.keys(part, depth + 1) for part in more)
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self.keys(left, depth + 1) | self.keys(right, depth + 1)
            case ast.List() | ast.Tuple():
                return self._elements(node, 0, depth + 1)
            case ast.DictComp(key=key):
                return self.texts(key, depth + 1)
            case ast.Name(id=name):
                added = _union(self.texts(key, depth + 1) for key in self.added_keys.get(name, []))
                return added | self._of_name("keys", name, self.keys, depth)
            case _:
                return UNKNOWN

    def _elements(self, node: ast.AST | None, index: int | None, depth: int) -> Texts:
        """Return the possible elements of an iterable, or the items at `index` of its tuples."""
        if depth > _DEEPEST:
            return UNKNOWN
        match node:
            case ast.List(elts=elts) | ast.Tuple(elts=elts) | ast.Set(elts=elts):
                parts = elts if index is None else [_part(element, index) for element in elts]
                return _union(self.texts(part, depth + 1) for part in parts)
            case ast.Dict() if index is None:
                return self.keys(node, depth + 1)
            case ast.Call(func=ast.Attribute(value=value, attr="items")) if index == 0:
                return self.keys(value, depth + 1)
            case ast.Call(func=ast.Attribute(value=value, attr="keys")) if index is None:
                return self.keys(value, depth + 1)
            case ast.Call(func=ast.Name(id="sorted" | "list" | "tuple" | "set"), args=[value]):
                return self._elements(value, index, depth + 1)
            case ast.Name(id=name):
                return self._of_name(
                    f"elements {index}",
                    name,
                    lambda value, depth: self._elements(value, index, depth),
                    depth,
                )
            case _:
                return UNKNOWN

    def _of_name(
        self, what: str, name: str, look: Callable[[ast.AST | None, int], Texts], depth: int
    ) -> Texts:
        """Return the values of all that a name is bound to, cached; a recursive name is unknown."""
        if (what, name) not in self._found:
            self._found[what, name] = UNKNOWN
            values = self.bound.get(name, [None])
            self._found[what, name] = _union(look(value, depth + 1) for value in values)
        return self._found[what, name]


class Element(ast.AST):
    """The value of a loop variable: an element of an iterable, or one item of that element."""

    _fields = ()

    def __init__(self, iterable: ast.AST, index: int | None) -> None:
        super().__init__()
        self.iterable = iterable
        self.index = index


def _union(parts: Iterator[Texts]) -> Texts:
    whole = _NONE
    for part in parts:
        whole |= part
    return whole


def _part(node: ast.AST, index: int) -> ast.AST | None:
    parts = node.elts if isinstance(node, ast.Tuple | ast.List) else []
    return parts[index] if index < len(parts) else None


def _bindings(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST | None]]:
    """Yield a statement's targets with the bound expressions; None if there is no expression."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            yield target, value
        case ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.AugAssign(target=target):
            yield target, None
        case (
            ast.For(target=target, iter=iterable) | ast.comprehension(target=target, iter=iterable)
        ):
            yield from _of_loop(target, iterable)
        case ast.arg(arg=name):
            yield ast.Name(name), None
        case ast.withitem(optional_vars=ast.AST() as target):
            yield target, None


def _of_loop(target: ast.AST, iterable: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(target, ast.Tuple | ast.List):
        for number, part in enumerate(target.elts):
            yield part, Element(iterable, number)
    else:
        yield target, Element(iterable, None)


# The aliases of os.environ in a script: names, attributes, parameters, results of its own
# functions.
#
# Here too, scopes are ignored: a write may be seen twice, but is not missed. Reading or copying
# os.environ, or passing it to a function of another file, makes no alias.


_ENVIRONS = frozenset({"environ", "environb"})
_PUTENVS = frozenset({"putenv", "unsetenv", "setenv"})
_BUILDERS = ("__init__", "__new__", "__call__", "__post_init__")
# Calls whose result is, or writes to, this argument.
_PASSED_ON = {"ChainMap": 0, "cast": 1, "nullcontext": 0}

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Values = dict[str, list[ast.AST]]


class Aliases:
    """The aliases of os.environ and os.putenv in a script."""

    def __init__(self, known: ParsedScript) -> None:
        """Record all definitions and values that may make an alias."""
        self._known = known
        self._imported: dict[str, str] = {}
        self._functions: dict[str, list[Function]] = {}
        self._attributes: Values = {}
        self._parameters: Values = {}
        self._results: Values = {}
        self._found: dict[tuple[str, str], bool] = {}
        nodes = list(ast.walk(known.tree))
        for node in nodes:
            self._note_definition(node)
        for node in nodes:
            self._note_values(node)

    def is_environ(self, node: ast.AST | None) -> bool:
        """Return whether an expression may be os.environ itself."""
        match node:
            case ast.Name(id=name):
                return self._imported.get(name, name) in _ENVIRONS or self._stands_for("name", name)
            case ast.Attribute(attr=name):
                return name in _ENVIRONS or self._stands_for("attribute", name)
            case ast.Subscript(value=value, slice=key):
                return bool(self._known.texts(key).known & _ENVIRONS) or self._holds_environ(value)
            case ast.IfExp(body=body, orelse=orelse):
                return self.is_environ(body) or self.is_environ(orelse)
            case ast.BoolOp(values=values):
                return any(self.is_environ(value) for value in values)
            case ast.NamedExpr(value=value) | ast.Starred(value=value) | ast.Await(value=value):
                return self.is_environ(value)
            case Element(iterable=iterable):
                return self._holds_environ(iterable)
            case ast.Call():
                return self._gives_environ(node)
            case _:
                return False

    def is_putenv(self, node: ast.AST | None) -> bool:
        """Return whether an expression may be os.putenv, or a similar function that writes."""
        if isinstance(node, ast.Attribute):
            return node.attr in _PUTENVS
        if isinstance(node, ast.Call):
            return bool(self._got_by_name(node) & _PUTENVS)
        name = getattr(node, "id", "")
        if self._imported.get(name, name) in _PUTENVS:
            return True
        return self._any_of("putenv", name, self.is_putenv, self._known.bound.get(name, []))

    def method_of(self, node: ast.AST | None) -> str | None:
        """Return which method of os.environ an expression may be, directly or by name, or None."""
        if isinstance(node, ast.Attribute):
            return node.attr if self.is_environ(node.value) else None
        values = self._known.bound.get(node.id, []) if isinstance(node, ast.Name) else []
        of_environ = (value for value in values if isinstance(value, ast.Attribute))
        return next((value.attr for value in of_environ if self.is_environ(value.value)), None)

    def _note_definition(self, node: ast.AST) -> None:
        match node:
            case ast.ImportFrom(module="os", names=names):
                self._imported |= {name.asname or name.name: name.name for name in names}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                self._functions.setdefault(name, []).append(node)
                results = (one for one in ast.walk(node) if isinstance(one, ast.Return | ast.Yield))
                returned = (one.value for one in results)
                self._results.setdefault(name, []).extend(value for value in returned if value)
            case ast.ClassDef(name=name, body=body):
                self._note_class(name, body)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as function):
                self._functions.setdefault(name, []).append(function)
                self._results.setdefault(name, []).append(function.body)

    def _note_class(self, name: str, body: list[ast.stmt]) -> None:
        """Record the functions that construct an object, and its attributes' first values."""
        methods = [part for part in body if isinstance(part, ast.FunctionDef)]
        makers = [method for method in methods if method.name in _BUILDERS]
        fields = [part.target for part in body if isinstance(part, ast.AnnAssign)]
        names = [ast.arg(field.id) for field in fields if isinstance(field, ast.Name)]
        self._functions.setdefault(name, []).extend(makers or [_taking(names)])
        for target, value in _assigned(body):
            if isinstance(target, ast.Name):
                self._attributes.setdefault(target.id, []).append(value)
        for attribute in names:
            self._attributes.setdefault(attribute.arg, []).append(ast.Name(attribute.arg))

    def _note_values(self, node: ast.AST) -> None:
        for target, value in _assigned([node]):
            if isinstance(target, ast.Attribute):
                self._attributes.setdefault(target.attr, []).append(value)
        if isinstance(node, Function):
            for parameter, default in _defaults(node.args):
                self._parameters.setdefault(parameter, []).append(default)
        elif isinstance(node, ast.Call):
            self._note_call(node)

    def _note_call(self, call: ast.Call) -> None:
        given = [*call.args, *(word.value for word in call.keywords)]
        if name_of(call.func) == "setattr" and len(call.args) == 3:
            for text in self._known.texts(call.args[1]).known:
                self._attributes.setdefault(text, []).append(call.args[2])
        for function in self._named(call.func):
            for parameter, value in _arguments(function, call):
                self._parameters.setdefault(parameter, []).append(value)
        # map(f, [os.environ]), Thread(target=f, args=(os.environ,)): any parameter may get it.
        functions = [function for value in given for function in self._named(value)]
        parts = [part for value in given for part in _parts(value)] if functions else []
        for parameter in (name for function in functions for name in _names(function.args)):
            self._parameters.setdefault(parameter, []).extend(parts)

    def _named(self, node: ast.AST) -> list[Function]:
        """Return the functions of this file that an expression may be."""
        if isinstance(node, ast.Lambda):
            return [node]
        return self._functions.get(name_of(node), [])

    def _stands_for(self, what: str, name: str) -> bool:
        """Return whether a name or attribute may be bound to os.environ; cached."""
        values: list[ast.AST | None]
        if what == "name":
            values = [*self._known.bound.get(name, []), *self._parameters.get(name, [])]
        else:  # a property is read like an attribute
            values = [*self._attributes.get(name, []), *self._results.get(name, [])]
        return self._any_of(what, name, self.is_environ, values)

    def _any_of(
        self,
        what: str,
        name: str,
        look: Callable[[ast.AST | None], bool],
        values: Sequence[ast.AST | None],
    ) -> bool:
        """Return whether `look` is true of any of a name's values; cached, also against recursion."""
        if (what, name) not in self._found:
            self._found[what, name] = False
            self._found[what, name] = any(look(value) for value in values)
        return self._found[what, name]

    def _holds_environ(self, node: ast.AST | None) -> bool:
        """Return whether a list, set, tuple or dictionary may contain os.environ."""
        if isinstance(node, ast.Name):
            values = [*self._known.bound.get(node.id, []), *self._parameters.get(node.id, [])]
            return self._any_of("parts", node.id, self._holds_environ, values)
        parts = _parts(node) if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict) else []
        return any(self.is_environ(part) for part in parts)

    def _gives_environ(self, call: ast.Call) -> bool:
        name = name_of(call.func)
        if name in _PASSED_ON:
            return any(self.is_environ(part) for part in call.args[_PASSED_ON[name] :][:1])
        if self._got_by_name(call) & _ENVIRONS:
            return True
        return self._any_of("result", name, self.is_environ, self._results.get(name, []))

    def _got_by_name(self, call: ast.Call) -> frozenset[str]:
        """Return the possible NAMEs of `getattr(os, NAME)`; none for another call."""
        is_getattr = getattr(call.func, "id", "") == "getattr" and len(call.args) > 1
        return self._known.texts(call.args[1]).known if is_getattr else frozenset()


def name_of(node: ast.AST | None) -> str:
    """Return a name, or the last part of an attribute; empty for anything else."""
    word: str = getattr(node, "attr", "") or getattr(node, "id", "")
    return word


def _taking(parameters: list[ast.arg]) -> ast.Lambda:
    """Return a stand-in for the constructor that a dataclass generates from its fields."""
    arguments = ast.arguments(
        posonlyargs=[], args=parameters, kwonlyargs=[], kw_defaults=[], defaults=[]
    )
    return ast.Lambda(args=arguments, body=ast.Constant(None))


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[tuple[ast.AST, ast.AST]]:
    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _pairs(target, node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node.target, node.value


def _pairs(target: ast.AST, value: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    if isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List):
        yield from zip(target.elts, value.elts, strict=False)
    else:
        yield target, value


def _parts(node: ast.AST) -> list[ast.AST]:
    """Return what an argument passes to a call: itself, or the items of a literal collection."""
    match node:
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return list(parts)
        case ast.Dict(values=values):
            return list(values)
        case _:
            return [node]


def _names(arguments: ast.arguments) -> list[str]:
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [argument.arg for argument in named]


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.AST]]:
    by_place = [*arguments.posonlyargs, *arguments.args]
    for argument, default in zip(reversed(by_place), reversed(arguments.defaults), strict=False):
        yield argument.arg, default
    for argument, by_name in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if by_name is not None:
            yield argument.arg, by_name


def _arguments(function: Function, call: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    """Yield which parameter may get which value; with a starred argument, each may get each."""
    by_place = [*function.args.posonlyargs, *function.args.args]
    names = [argument.arg for argument in by_place]
    if names[:1] in (["self"], ["cls"], ["mcs"]):
        names = names[1:]
    if any(isinstance(value, ast.Starred) for value in call.args):
        yield from ((name, value) for name in names for value in call.args)
    yield from zip(names, call.args, strict=False)
    if function.args.vararg is not None:
        yield function.args.vararg.arg, ast.Tuple(call.args[len(names) :], ast.Load())
    for word in call.keywords:
        for name in [word.arg] if word.arg else _names(function.args):
            yield name, word.value


# Methods of os.environ, and functions with it as their first argument, by their next argument.
_BY_KEY = ("setdefault", "pop", "__setitem__", "__delitem__", "setitem", "delitem")
_BY_MAPPING = ("update", "__ior__", "dict")
_BY_NOTHING = ("clear", "popitem")
_EVALUATORS = ("exec", "eval")
# These disable existing loggers (logging.config), or set how many processors torch's threads see.
_BEFORE_TORCH = ("dictConfig", "fileConfig", "sched_setaffinity", "cpu_affinity")
_TOOLS = (
    "cProfile",
    "profile",
    "pdb",
    "trace",
    "coverage",
    "kernprof",
    "line_profiler",
    "viztracer",
    "scalene",
    "debugpy",
)


def script_path(kind: str, target: str, args: Sequence[str] = ()) -> str | None:
    """Return the source file of a script, module or function, without importing any package.

    For a tool that runs a script, such as `-m cProfile train.py`, it is the script.
    """
    if kind == "file":
        return target
    if kind == "module" and target.partition(".")[0] in _TOOLS:
        return next((word for word in args if word.endswith(".py") and os.path.isfile(word)), None)
    target = target.partition(":")[0]
    if kind not in ("module", "function") or (kind, target) == ("function", "__main__"):
        return None
    paths: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    for part in target.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, paths)
        if spec is None:
            return None
        paths = list(spec.submodule_search_locations or [])
    if kind == "module" and spec is not None and spec.submodule_search_locations:
        spec = importlib.machinery.PathFinder.find_spec("__main__", paths)
    return spec.origin if spec is not None else None


def _parse(source: bytes | str) -> ast.Module:
    """Return the syntax tree; an empty one of a broken script, which itself fails with the error."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def imported_names(source: bytes) -> set[str]:
    """Return the modules that the source imports anywhere, and `a.b` for `from a import b`."""
    nodes = list(ast.walk(_parse(source)))
    names = {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return names


@dataclass(frozen=True, slots=True, kw_only=True)
class Writes:
    """The environment variables a script sets or removes that torch may read during its import.

    Attributes:
        names: The variables, in source order.
        unread_line: The line that writes a variable whose name the source doesn't show.
    """

    names: tuple[str, ...] = ()
    unread_line: int | None = None


def early_calls(source: bytes) -> tuple[str, int] | None:
    """Return a call before the imports whose effect torch's import would change, and its line.

    Text order counts: the calls of a function that is called before an import are not seen.
    """
    if not any(name.encode() in source for name in _BEFORE_TORCH):
        return None  # nearly every script: don't parse it once more
    nodes = list(ast.walk(_parse(source)))
    imports = [
        (node.lineno, _imported_first(node))
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    of_torch = [line for line, roots in imports if "torch" in roots]
    of_others = [line for line, roots in imports if roots]
    imported_at = min(of_torch) if of_torch else max(of_others, default=0)
    calls = [
        (node.lineno, name_of(node.func))
        for node in nodes
        if isinstance(node, ast.Call) and name_of(node.func) in _BEFORE_TORCH
    ]
    line, name = min(calls, default=(0, ""))
    return (name, line) if 0 < line < imported_at else None


def _imported_first(node: ast.AST) -> set[str]:
    """Return the packages that a top-level import imports from, without Python's own."""
    names: list[str] = []
    match node:
        case ast.Import(names=aliases, col_offset=0):
            names = [alias.name for alias in aliases]
        case ast.ImportFrom(module=str(module), level=0, col_offset=0):
            names = [module]
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names


def environment_writes(source: bytes) -> Writes:
    """Return the writes to variables that torch may read during its import."""
    names: dict[str, None] = {}
    lines: list[int] = []
    for line, texts in _writes(source):
        for name in sorted(texts.known):
            if contract.is_read_at_import(name):
                names[name] = None
        if any(contract.may_be_read_at_import(begin) for begin in texts.begins):
            lines.append(line)
    return Writes(names=tuple(names), unread_line=min(lines, default=None))


def _writes(source: bytes | str, depth: int = 0) -> Iterator[tuple[int, Texts]]:
    """Yield the line and the possible names of every write to the environment."""
    known = ParsedScript(_parse(source))
    aliases = Aliases(known)
    for node in ast.walk(known.tree):
        line = getattr(node, "lineno", 0)
        for texts in _written_by(node, known, aliases):
            yield line, texts
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in _EVALUATORS
            and depth == 0
        ):
            for text in known.texts(node.args[0] if node.args else None).known:
                yield from ((line, texts) for _, texts in _writes(text, depth + 1))


def _written_by(node: ast.AST, known: ParsedScript, aliases: Aliases) -> Iterator[Texts]:
    """Yield the variables that a syntax node sets or removes."""
    match node:
        case ast.AugAssign(target=target, value=value) if aliases.is_environ(target):
            yield known.keys(value)  # environ |= {...}
        case ast.Assign(targets=targets) | ast.Delete(targets=targets):
            yield from _written_at(targets, known, aliases)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            yield from _written_at([target], known, aliases)
        case ast.Call():
            yield from _written_by_call(node, known, aliases)
            yield from _handed_over(node, aliases)


def _written_at(targets: list[ast.expr], known: ParsedScript, aliases: Aliases) -> Iterator[Texts]:
    for target in targets:
        if isinstance(target, ast.Subscript) and aliases.is_environ(target.value):
            yield known.texts(target.slice)
        elif isinstance(target, ast.Tuple | ast.List):
            yield from _written_at(target.elts, known, aliases)


def _written_by_call(call: ast.Call, known: ParsedScript, aliases: Aliases) -> Iterator[Texts]:
    method, args = aliases.method_of(call.func), call.args
    if aliases.is_putenv(call.func):
        method = "__setitem__"
    elif method is None and _is_given_environ(call, known, aliases):
        # Such as setitem of operator, or dict of unittest.mock.patch.
        method, args = name_of(call.func), args[1:]
    if method in _BY_KEY:
        yield known.texts(args[0] if args else None)
    elif method in _BY_MAPPING:
        yield Texts(frozenset(word.arg for word in call.keywords if word.arg))
        more = [*args, *(word.value for word in call.keywords if not word.arg)]
        yield from (known.keys(part) for part in more)
    elif method in _BY_NOTHING:
        yield UNKNOWN


def _is_given_environ(call: ast.Call, known: ParsedScript, aliases: Aliases) -> bool:
    """Return whether a call writes to its first argument, and that may be os.environ."""
    first = call.args[0] if call.args else None
    match call.func:
        case ast.Name(id="setitem" | "delitem"):
            return aliases.is_environ(first)
        case ast.Attribute(attr="dict"):  # of mock.patch, which accepts a name as well
            return aliases.is_environ(first) or "os.environ" in known.texts(first).known
        case ast.Attribute(attr="update"):  # {}.update(os.environ) only reads it
            return aliases.is_environ(first) and len(call.args) > 1
        case ast.Attribute():
            return aliases.is_environ(first)
        case _:
            return False


def _handed_over(call: ast.Call, aliases: Aliases) -> Iterator[Texts]:
    """Yield UNKNOWN if another function may write: map(os.environ.setdefault, names, values)."""
    given = [*call.args, *(word.value for word in call.keywords)]
    methods = (aliases.method_of(value) for value in given)
    if any(aliases.is_putenv(value) for value in given if not isinstance(value, ast.Call)) or any(
        method in (*_BY_KEY, *_BY_MAPPING) for method in methods
    ):
        yield UNKNOWN


_LIBRARY = "torchmuster.train"


# What it means for the spawner.


class SourceReader(ScriptReader):
    """What the script's source says."""

    def __init__(self, config: BeginSpawner, at_start: Collection[str]) -> None:
        super().__init__(config, at_start)
        self._text = _read_source(config)
        self._imported = imported_names(self._text)
        self.imports_torch = any(name.partition(".")[0] == "torch" for name in self._imported)
        self.imports_library = _LIBRARY in self._imported

    def reason_for_fresh(self) -> str | None:
        """Return the first reason that the source, the script's folder or Python's own start gives."""
        config = self._config
        text = self._text if config.has_torch else b""
        writes = environment_writes(text)
        if writes.names:
            names = ", ".join(writes.names)
            return f"the script changes {names}, which is read while torch is imported"
        if writes.unread_line is not None:
            where = f"the script changes an environment variable in line {writes.unread_line}"
            return f"{where} whose name its source doesn't show, and torch reads some while it is imported"
        early = early_calls(text)
        if early is not None:
            return f"the script calls {early[0]} in line {early[1]}, before its imports: after that of torch it does something else"
        folder = first_path(config.kind, config.target)
        refuses = import_watch.refuses_torch(self._imported if config.has_torch else (), folder)
        if refuses is not None:
            return f"{refuses} wants to be imported before torch"
        hidden = hidden_modules(folder, self._at_start)
        if hidden:
            return f"{hidden[0]} in the script's folder hides Python's own module of this name"
        start_code = import_watch.start_code_with_rank()
        if start_code is not None:
            return f"{start_code} runs when Python starts, and reads what only a worker has"
        return None

    def early_imports(self, folder: str | None) -> FirstImports | None:
        """Return the imports that the script begins with; None where something comes before them, or looks at them."""
        config = self._config
        is_timed = bool(sys.flags.verbose) or "importtime" in sys._xoptions
        has_macros = config.macros and any("$" in word for word in config.args)
        if config.kind != "file" or not config.has_torch or is_timed or has_macros:
            return None
        limit = config.num_imports
        known = ImportsRefused(num_made=limit, why=config.imports_why) if limit >= 0 else None
        watch = ImportWatch(flush_everything)
        return FirstImports(self._text, config.target, folder, config.cache, watch, stopped=known)


def _read_source(config: BeginSpawner) -> bytes:
    """Return the script's source; empty if none can be read."""
    path = script_path(config.kind, config.target, config.args)
    try:
        return Path(path).read_bytes() if path is not None else b""
    except OSError:
        return b""
