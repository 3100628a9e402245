"""Read a script's source before the fork: must its workers be fresh interpreters, and which imports can be made once for all?"""

import sys
from collections.abc import Collection
from pathlib import Path

from torchmuster.core.node.spawner.mainmodule import first_path, hidden_modules
from torchmuster.core.node.spawner.messages import BeginSpawner, ImportsRefused
from torchmuster.core.node.spawner.prepare import flush_everything
from torchmuster.core.node.spawner.script import ScriptReader
from torchmuster.launcher.node.spawner import import_watch, source
from torchmuster.launcher.node.spawner.import_watch import FirstImports, ImportWatch

_LIBRARY = "torchmuster.train"


class SourceReader(ScriptReader):
    """What the script's source says."""

    def __init__(self, config: BeginSpawner, at_start: Collection[str]) -> None:
        super().__init__(config, at_start)
        self._text = _read_source(config)
        self._imported = source.imported_names(self._text)
        self.imports_torch = any(name.partition(".")[0] == "torch" for name in self._imported)
        self.imports_library = _LIBRARY in self._imported

    def reason_for_fresh(self) -> str | None:
        """Return the first reason that the source, the script's folder or Python's own start gives."""
        config = self._config
        text = self._text if config.has_torch else b""
        writes = source.environment_writes(text)
        if writes.names:
            names = ", ".join(writes.names)
            return f"the script changes {names}, which is read while torch is imported"
        if writes.unread_line is not None:
            where = f"the script changes an environment variable in line {writes.unread_line}"
            return f"{where} whose name its source doesn't show, and torch reads some while it is imported"
        early = source.early_calls(text)
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
    path = source.script_path(config.kind, config.target, config.args)
    try:
        return Path(path).read_bytes() if path is not None else b""
    except OSError:
        return b""
