"""The imports that a script begins with, made once in the spawner, where that makes no difference to the workers.

Only statements that stand before everything else in the script, and only of packages that were compared with an import in
each worker: a watch alone can't show that it makes no difference (a lock that all ranks share, a value that is made from the rank
two lines later, a module that patches Python). What stops a statement is kept beside the runs, so that the next run does
not try it again.
"""

import ast
import hashlib
import json
import os
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder

from torchmuster.files import atomic
from torchmuster.node.spawner.import_watch import (
    MOST_WHY,
    ImportWatch,
    RefusedError,
    is_installed,
    is_of_a_worker,
)
from torchmuster.node.spawner.messages import ImportsRefused

_MOST_KEPT = 256
_TRY_AGAIN_S = 86400.0  # some effects happen once: matplotlib writes its list of fonts
_SKIPPED = ("torchmuster", "__future__")
ROOTS = frozenset(
    {
        *("accelerate", "lightning", "numpy", "pandas", "pytorch_lightning", "safetensors"),
        *("scipy", "sklearn", "tokenizers", "torch", "torchmetrics", "tqdm", "transformers"),
    }
)


@dataclass(slots=True)
class FirstImports:
    """The first imports of one script, and what the making of them has shown.

    Attributes:
        text: Of the script.
        path: Of the script.
        folder: What stands in front of `sys.path`.
        cache: The folder for what has been found out; empty for none.
        roots: The packages that may be imported here.
        stopped: Where they stop short of all, and why.
        is_spoilt: This process has tried one that it may not make, and can fork no worker.
    """

    text: bytes
    path: str
    folder: str | None
    cache: str
    watch: ImportWatch
    roots: Collection[str] = ROOTS
    stopped: ImportsRefused | None = None
    is_spoilt: bool = False
    num_made: int = 0

    def make(self, argv: list[str]) -> None:
        """Make them, as far as no other process has stopped; `argv` is that of the workers."""
        statements = self._statements()
        self.stopped = self.stopped or self._known(statements)
        limit = self.stopped.num_made if self.stopped is not None else len(statements)
        before, sys.argv = sys.argv, argv
        try:
            for statement in statements[:limit]:
                why = self._make_one(statement)
                if why:
                    self.stopped = ImportsRefused(num_made=self.num_made, why=why)
                    self.is_spoilt = True
                    if self.watch.why:  # not what may pass, such as an interrupt
                        self._keep(statements, self.stopped)
                    return
                self.num_made += 1
        finally:
            sys.argv = before

    def what_differs(self, environment: Mapping[str, str], unset: Collection[str]) -> str | None:
        """Return a variable that an import has read and that is another one for a worker."""
        reads = self.watch.reads
        changed = (name for name, value in environment.items() if reads.get(name, value) != value)
        gone = (name for name in unset if reads.get(name) is not None)
        return next((name for name in (*changed, *gone) if not is_of_a_worker(name)), None)

    def renew(self) -> None:
        """Make anew, in a worker, what differs between workers."""
        for generator, _ in self.watch.generators:
            generator.seed()
        for renewal in self.watch.renewals:
            renewal.make()

    def _make_one(self, statement: ast.stmt) -> str:
        words = ast.unparse(statement)
        code = compile(ast.Module(body=[statement], type_ignores=[]), self.path, "exec")
        try:
            with self.watch.watching(f"`{words}`"):
                exec(code, {"__name__": "__main__"})
        except RefusedError:
            return self.watch.why
        except BaseException as error:  # noqa: BLE001 - the workers say it, in the script's own words
            return self.watch.why or f"`{words}` raises {type(error).__name__}"
        return self.watch.why

    def _statements(self) -> list[ast.stmt]:
        """Return the imports that come before everything else, without those of Python's own modules."""
        try:
            body = ast.parse(self.text).body
        except (SyntaxError, ValueError):
            return []
        found: list[ast.stmt] = []
        for statement in body:
            match statement:
                case ast.Expr(value=ast.Constant()):
                    continue
                case ast.Import(names=names):
                    tops = {name.name.partition(".")[0] for name in names}
                case ast.ImportFrom(module=str(module), level=0):
                    tops = {module.partition(".")[0]}
                case _:
                    return found
            tops -= sys.stdlib_module_names.union(_SKIPPED)
            if not all(self._is_installed(top) for top in tops):
                return found
            if tops:
                found.append(statement)
        return found

    def _is_installed(self, name: str) -> bool:
        if name not in self.roots:
            return False
        paths = [*([self.folder] if self.folder is not None else []), *sys.path]
        spec = PathFinder.find_spec(name, paths)
        if spec is None or spec.origin is None:
            return False
        return is_installed(spec.origin)

    # What has been found out.

    def _file(self, statements: list[ast.stmt]) -> str:
        installed = [entry for entry in sys.path if os.path.isdir(entry)]
        times = [os.stat(entry).st_mtime_ns for entry in installed if is_installed(f"{entry}/x")]
        parts = [
            sys.version,
            sys.prefix,
            self.folder,
            times,
            [ast.unparse(one) for one in statements],
        ]
        return os.path.join(self.cache, hashlib.sha256(repr(parts).encode()).hexdigest()[:32])

    def _known(self, statements: list[ast.stmt]) -> ImportsRefused | None:
        if not self.cache:
            return None
        path = self._file(statements)
        plain = atomic.read_json(path)
        if not isinstance(plain, dict) or not isinstance(plain.get("num_made"), int):
            return None
        try:
            is_old = time.time() > os.stat(path).st_mtime + _TRY_AGAIN_S
        except OSError:  # another run has removed it
            return None
        why = str(plain.get("why"))[:MOST_WHY]
        return None if is_old else ImportsRefused(num_made=max(0, plain["num_made"]), why=why)

    def _keep(self, statements: list[ast.stmt], stopped: ImportsRefused) -> None:
        if not self.cache:
            return
        try:
            os.makedirs(self.cache, mode=0o700, exist_ok=True)
            names = sorted(
                os.listdir(self.cache),
                key=lambda name: os.stat(os.path.join(self.cache, name)).st_mtime,
            )
            for name in names[: max(0, len(names) - _MOST_KEPT)]:
                os.unlink(os.path.join(self.cache, name))
            said = json.dumps({"num_made": stopped.num_made, "why": stopped.why}).encode()
            atomic.replace_file(self._file(statements), said)
        except OSError:
            return
