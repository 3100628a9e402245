"""Under which names a script holds os.environ: names, attributes, parameters, results of its own functions.

As in constants.py, a name counts in the whole file, whatever its scope. So a write is rather seen twice than missed;
os.environ that is only read, copied or handed to a function of another file makes no alias.
"""

import ast
from collections.abc import Iterable, Iterator

from torchmuster.node.spawner.constants import Element, ParsedScript

_ENVIRONS = frozenset({"environ", "environb"})
_PUTENVS = frozenset({"putenv", "unsetenv", "setenv"})
_BUILDERS = ("__init__", "__new__", "__call__", "__post_init__")
_PASSED_ON = {
    "ChainMap": 0,
    "cast": 1,
    "nullcontext": 0,
}  # calls whose result is, or writes to, this argument

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Values = dict[str, list[ast.AST]]


class Aliases:
    """What a script calls os.environ and os.putenv."""

    def __init__(self, known: ParsedScript) -> None:
        """Note everything that may stand for something else."""
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
        """Say whether an expression may be os.environ itself."""
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
        """Say whether an expression may be os.putenv, or another function that sets what it is given."""
        if isinstance(node, ast.Attribute):
            return node.attr in _PUTENVS
        if isinstance(node, ast.Call):
            return bool(self._got_by_name(node) & _PUTENVS)
        name = getattr(node, "id", "")
        if ("putenv", name) not in self._found:
            self._found["putenv", name] = self._imported.get(name, name) in _PUTENVS
            values = self._known.bound.get(name, [])
            self._found["putenv", name] |= any(self.is_putenv(value) for value in values)
        return self._found["putenv", name]

    def method_of(self, node: ast.AST | None) -> str | None:
        """Return which method of os.environ an expression may be, directly or by a name."""
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
                returned = (part.value for part in ast.walk(node) if _is_result(part))  # type: ignore[attr-defined]
                self._results.setdefault(name, []).extend(value for value in returned if value)
            case ast.ClassDef(name=name, body=body):
                self._note_class(name, body)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Lambda() as function):
                self._functions.setdefault(name, []).append(function)
                self._results.setdefault(name, []).append(function.body)

    def _note_class(self, name: str, body: list[ast.stmt]) -> None:
        """Note by which functions an object is made, and what its attributes begin as."""
        methods = [part for part in body if isinstance(part, ast.FunctionDef)]
        makers = [method for method in methods if method.name in _BUILDERS]
        fields = [part.target for part in body if isinstance(part, ast.AnnAssign)]
        names = [ast.arg(field.id) for field in fields if isinstance(field, ast.Name)]
        self._functions.setdefault(name, []).extend(makers or [_taking(names)])
        for target, value in _assigned(body):
            if isinstance(target, ast.Name):
                self._attributes.setdefault(target.id, []).append(value)
        for field in names:
            self._attributes.setdefault(field.arg, []).append(ast.Name(field.arg))

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
        # map(f, [os.environ]), Thread(target=f, args=(os.environ,)): which parameter gets it, can't be told.
        functions = [function for value in given for function in self._named(value)]
        parts = [part for value in given for part in _parts(value)] if functions else []
        for parameter in (name for function in functions for name in _names(function.args)):
            self._parameters.setdefault(parameter, []).extend(parts)

    def _named(self, node: ast.AST) -> list[Function]:
        """Return the file's own functions that an expression may be."""
        if isinstance(node, ast.Lambda):
            return [node]
        return self._functions.get(name_of(node), [])

    def _stands_for(self, what: str, name: str) -> bool:
        """Say whether os.environ is among what a name or attribute is bound to; asked once."""
        if (what, name) not in self._found:
            self._found[what, name] = False
            values: Iterable[ast.AST | None] = self._attributes.get(name, [])
            if what == "name":
                values = [*self._known.bound.get(name, []), *self._parameters.get(name, [])]
            else:  # a property is read like an attribute
                values = [*values, *self._results.get(name, [])]
            self._found[what, name] = any(self.is_environ(value) for value in values)
        return self._found[what, name]

    def _holds_environ(self, node: ast.AST | None) -> bool:
        """Say whether os.environ is among the parts of a list, tuple or dictionary."""
        if isinstance(node, ast.Name):
            if ("parts", node.id) not in self._found:
                self._found["parts", node.id] = False
                values = [*self._known.bound.get(node.id, []), *self._parameters.get(node.id, [])]
                self._found["parts", node.id] = any(self._holds_environ(value) for value in values)
            return self._found["parts", node.id]
        parts = _parts(node) if isinstance(node, ast.List | ast.Tuple | ast.Set | ast.Dict) else []
        return any(self.is_environ(part) for part in parts)

    def _gives_environ(self, call: ast.Call) -> bool:
        name = name_of(call.func)
        if name in _PASSED_ON:
            return any(self.is_environ(part) for part in call.args[_PASSED_ON[name] :][:1])
        if self._got_by_name(call) & _ENVIRONS:
            return True
        if ("result", name) not in self._found:
            self._found["result", name] = False
            results = self._results.get(name, [])
            self._found["result", name] = any(self.is_environ(value) for value in results)
        return self._found["result", name]

    def _got_by_name(self, call: ast.Call) -> frozenset[str]:
        """Return what `getattr(os, NAME)` gets."""
        is_getattr = getattr(call.func, "id", "") == "getattr" and len(call.args) > 1
        return self._known.texts(call.args[1]).known if is_getattr else frozenset()


def name_of(node: ast.AST | None) -> str:
    """Return the last word of a name or of an attribute."""
    word: str = getattr(node, "attr", "") or getattr(node, "id", "")
    return word


def _is_result(node: ast.AST) -> bool:
    return isinstance(node, ast.Return | ast.Yield)


def _taking(parameters: list[ast.arg]) -> ast.Lambda:
    """Return a stand-in for the constructor that a dataclass makes of its fields."""
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
    """Return what a call is given by an argument: itself, or what a literal collection holds."""
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
    """Yield which parameter may get what; behind a starred argument and for `*args`, each may."""
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
