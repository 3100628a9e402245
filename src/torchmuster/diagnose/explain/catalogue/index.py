"""All messages, found by the words that they have: a line is held only against entries that share a word with it."""

from collections.abc import Iterable, Mapping

from torchmuster.diagnose.explain.catalogue import (
    c10d,
    containers,
    cuda,
    deepspeed,
    fabrics,
    frameworks,
    kernel,
    kubernetes,
    mpi,
    nccl,
    nccl_gpu,
    noise,
    pbs,
    programs,
    python,
    serving,
    slurm,
    slurm_steps,
    ssh,
    storage,
    torch,
    torch_training,
)
from torchmuster.diagnose.explain.catalogue.entry import KnownMessage, Tells
from torchmuster.diagnose.explain.catalogue.stems import StemFinder, stems_of

ENTRIES: tuple[KnownMessage, ...] = (
    *c10d.ENTRIES,
    *containers.ENTRIES,
    *cuda.ENTRIES,
    *deepspeed.ENTRIES,
    *fabrics.ENTRIES,
    *frameworks.ENTRIES,
    *kernel.ENTRIES,
    *kubernetes.ENTRIES,
    *mpi.ENTRIES,
    *nccl.ENTRIES,
    *nccl_gpu.ENTRIES,
    *noise.ENTRIES,
    *pbs.ENTRIES,
    *programs.ENTRIES,
    *python.ENTRIES,
    *serving.ENTRIES,
    *slurm.ENTRIES,
    *slurm_steps.ENTRIES,
    *ssh.ENTRIES,
    *storage.ENTRIES,
    *torch.ENTRIES,
    *torch_training.ENTRIES,
)

_NEVER_RAISED = (Tells.NOISE, Tells.FACT)


class Catalogue:
    """Messages by name, and by the stems of their wordings."""

    def __init__(self, entries: Iterable[KnownMessage]) -> None:
        self.by_name: dict[str, KnownMessage] = {entry.name: entry for entry in entries}
        self._by_stem: dict[str, list[tuple[int, KnownMessage]]] = {}
        for number, entry in enumerate(self.by_name.values()):
            for stem in {stem for wording in entry.wordings for stem in stems_of(wording)}:
                self._by_stem.setdefault(stem, []).append((number, entry))
        self._in_lines = {
            stem
            for stem, found in self._by_stem.items()
            if not all(entry.is_raised for _, entry in found)
        }
        self._finder = StemFinder(self._by_stem)

    @property
    def stems(self) -> Iterable[str]:
        """Return pieces of words, in lower case and without digits: a line without any of them is no message."""
        return self._in_lines

    def find(
        self, text: str, *, is_raised: bool = False
    ) -> tuple[KnownMessage, Mapping[str, str]] | None:
        """Return the message that a line says, the one that tells most if it says several; None when it says none.

        Args:
            text: A line, or what an exception says with its type.
            is_raised: It is an exception's: then it is neither noise nor a mere fact.
        """
        near = {
            number: entry
            for stem in self._finder.find(text.lower())
            for number, entry in self._by_stem[stem]
            if (entry.tells not in _NEVER_RAISED if is_raised else not entry.is_raised)
        }
        # What tells most comes first; of the same kind, what stands first in its module.
        for _, entry in sorted(near.items(), key=lambda one: (-one[1].tells, one[0])):
            found = entry.find(text)
            if found is not None:
                fields = {name: value for name, value in found.groupdict().items() if value}
                return entry, fields
        return None


CATALOGUE = Catalogue(ENTRIES)
