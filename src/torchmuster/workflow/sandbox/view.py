"""The surroundings of a task's command: its own view of the files, a container, or the machine itself."""

from collections.abc import Mapping, Sequence

from torchmuster.core import proc
from torchmuster.workflow.sandbox.container import EngineFailure


class CommandView:
    """One start's surroundings; what is not overridden is so on the machine itself."""

    def start(
        self, words: Sequence[str], variables: Mapping[str, str], stdout: int, stderr: int
    ) -> proc.Child:
        """Start the command in it."""
        raise NotImplementedError

    def host_path(self, path: str) -> str:
        """Return where a path of the task lies as the agent sees it."""
        return path

    def take_over(self, earlier: "CommandView") -> None:
        """Keep what an earlier start in the same place has written outside of it."""

    def why_not_begun(self) -> str | None:
        """Return why the command itself never began; None when it did."""
        return None

    def engine_failure(self, status: int, tail: Sequence[str]) -> EngineFailure | None:
        """Return why a container never began; None where there is none, or when it did."""
        return None

    def pids(self) -> set[int]:
        """Return processes beside the started one whose descendants belong to the command."""
        return set()

    def kill(self) -> None:
        """End what is no descendant of the started process."""

    def close(self) -> None:
        """Remove what was put outside of the working place."""
