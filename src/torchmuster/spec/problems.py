"""All that is wrong with what a user wrote, said at once."""

from dataclasses import dataclass, field

from torchmuster.errors import UsageError


@dataclass(slots=True)
class Problems:
    """Collects errors, so that a user sees all of them in one go."""

    found: list[UsageError] = field(default_factory=list)

    def add(
        self, what: str, where: str | None = None, why: str | None = None, fix: str | None = None
    ) -> None:
        """Note one problem."""
        self.found.append(UsageError(what, where=where, why=why, fix=fix))
