"""The texts that an expression of a script may stand for, as far as its source tells.

Names are looked up in the whole file, whatever their scope: what a name is bound to anywhere, it may stand for. So
an answer is never too small, and "that can't be told" is an answer.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

_MOST_TEXTS = 256  # of one expression; more are not told
_DEEPEST = 20


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts that are possible.

    Attributes:
        known: Whole ones.
        begins: Of others no more is known than that they begin so; "" if nothing is.
    """

    known: frozenset[str] = frozenset()
    begins: frozenset[str] = frozenset()

    def __or__(self, other: "Texts") -> "Texts":
        """Return what both sides may stand for."""
        return Texts(self.known | other.known, self.begins | other.begins)

    def then(self, other: "Texts") -> "Texts":
        """Return the texts of both, one behind the other."""
        if len(self.known) * len(other.known) > _MOST_TEXTS:
            return UNKNOWN
        known = {left + right for left in self.known for right in other.known}
        begins = {left + right for left in self.known for right in other.begins}
        return Texts(frozenset(known), frozenset(begins) | self.begins)


UNKNOWN = Texts(begins=frozenset({""}))
_NONE = Texts()


@dataclass(slots=True)
class ParsedScript:
    """A parsed script: what each of its names is bound to."""

    tree: ast.AST
    bound: dict[str, list[ast.AST | None]] = field(default_factory=dict)  # None: something else
    added_keys: dict[str, list[ast.AST]] = field(default_factory=dict)  # name["KEY"] = ...
    _found: dict[tuple[str, str], Texts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note all bindings."""
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
        """Return the texts that an expression may stand for."""
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
        """Return the keys of what becomes a dictionary: one, its call, pairs, or a name of these."""
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
        """Return the texts that are met in a loop over something, or in one place of its tuples."""
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
                elements = partial(self._elements_at, index)
                return self._of_name(f"elements {index}", name, elements, depth)
            case _:
                return UNKNOWN

    def _elements_at(self, index: int | None, node: ast.AST | None, depth: int) -> Texts:
        return self._elements(node, index, depth)

    def _of_name(
        self, what: str, name: str, look: Callable[[ast.AST | None, int], Texts], depth: int
    ) -> Texts:
        """Look at all that a name is bound to, once; a name that leads to itself can't be told."""
        if (what, name) not in self._found:
            self._found[what, name] = UNKNOWN
            values = self.bound.get(name, [None])
            self._found[what, name] = _union(look(value, depth + 1) for value in values)
        return self._found[what, name]


class Element(ast.AST):
    """What a loop's variable stands for: an element of something, or one place of it."""

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
    """Yield the targets of a statement with what each is bound to; None where that is no expression."""
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
