"""What a spawner knows about the script before it forks: nothing here; another room reads the source (table `script_readers`)."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from torchmuster.core import plugs
from torchmuster.core.node.spawner.messages import BeginSpawner, ImportsRefused


class EarlyImports(ABC):
    """Imports at the top of the script, made once in the spawner for all its workers.

    Attributes:
        stopped: Where they stop short of all, and why.
        is_spoilt: This process has tried one that it may not make, and can fork no worker.
    """

    stopped: ImportsRefused | None
    is_spoilt: bool

    @abstractmethod
    def make(self, argv: list[str]) -> None:
        """Make the imports, with the workers' `sys.argv`."""

    @abstractmethod
    def what_differs(self, environment: Mapping[str, str], unset: Collection[str]) -> str | None:
        """Return a variable that an import has read and whose value differs in a worker."""

    @abstractmethod
    def renew(self) -> None:
        """Make again, in a worker, what must differ between workers."""


class ScriptReader:
    """What is known about a script from its source.

    Attributes:
        imports_torch: The script imports torch.
        imports_library: The script imports `torchmuster.train`.
    """

    def __init__(self, config: BeginSpawner, at_start: Collection[str]) -> None:
        self._config, self._at_start = config, at_start
        self.imports_torch = self.imports_library = False

    def reason_for_fresh(self) -> str | None:
        """Return why workers must be fresh interpreters rather than forks; None if forks do."""
        return "nothing here reads the script before torch is imported"

    def early_imports(self, folder: str | None) -> EarlyImports | None:
        """Return the imports to make before the fork, with `folder` first in `sys.path`; None for none."""
        return None


def read_script(config: BeginSpawner, at_start: Collection[str]) -> ScriptReader:
    """Return what is known about the script; `at_start` are the modules that every interpreter starts with."""
    reader: type[ScriptReader] = next(plugs.every("script_readers"), ScriptReader)
    return reader(config, at_start)
