"""Parse `--stage SRC[:DST]` and `--before CMD`: every node's set-up before its workers start."""

import os
from collections.abc import Sequence

from torchmuster.core.model.plan import ARCHIVE_SUFFIXES, Stage
from torchmuster.core.model.text import nearest
from torchmuster.core.spec.problems import Problems

_MAX_STAGES = 256
_OTHER_ARCHIVES = (".7z", ".rar", ".gz", ".bz2", ".xz", ".zst")
OWN_NAME = ".muster"


def parse_stages(texts: Sequence[str], cwd: str, problems: Problems) -> tuple[Stage, ...]:
    """Return the data to stage into the scratch folder of every node.

    Without DST an archive is unpacked directly into the scratch folder, like `tar xf` there; a file
    or a folder keeps its name. SRC is relative to `cwd`; it need not exist on this machine.
    """
    stages: list[Stage] = []
    for text in texts:
        stage = _parse(text, cwd, problems)
        if stage is not None:
            stages.append(stage)
    _check_targets(stages, problems)
    if len(stages) > _MAX_STAGES:
        problems.add(f"{len(stages)} stages are more than {_MAX_STAGES}", "--stage")
    return tuple(stages)


def parse_commands(texts: Sequence[str], problems: Problems) -> tuple[str, ...]:
    """Return the commands that run once on every node."""
    for text in texts:
        if not text.strip():
            problems.add("--before has no command", "--before ''", fix="--before 'nvidia-smi'")
        if "\0" in text:
            problems.add("a command can't contain a NUL", "--before")
    return tuple(texts)


def _parse(text: str, cwd: str, problems: Problems) -> Stage | None:
    where = f"--stage {text}"
    source, colon, target = text.rpartition(":")
    if not colon or os.path.exists(os.path.join(cwd, text)):  # a name may hold a colon
        source, colon, target = text, "", ""
    source = os.path.expanduser(source)
    if not source or "\0" in text:
        problems.add("--stage has no source", where, fix="--stage data.tar or --stage data:train")
        return None
    if colon and not target:
        problems.add("--stage has no target after `:`", where, fix=f"--stage {source}")
        return None
    path = os.path.normpath(os.path.join(cwd, source))
    archive = path.endswith(ARCHIVE_SUFFIXES) and not os.path.isdir(path)
    if not colon:
        if _is_odd_archive(path, where, problems):
            return None
        target = "." if archive else os.path.basename(path)
    problem = _wrong_target(target, archive)
    if problem is not None:
        problems.add(
            problem, where, "DST is a path below the scratch folder", _mend(source, target)
        )
        return None
    return Stage(source=path, target=os.path.normpath(target))


def _wrong_target(target: str, archive: bool) -> str | None:
    parts = target.split("/")
    if target.startswith(("/", "~")):
        return f"the target `{target}` is absolute"
    if ".." in parts:
        return f"the target `{target}` is outside the scratch folder"
    if parts[0] == OWN_NAME:
        return f"`{OWN_NAME}` is reserved by muster in the scratch folder"
    if not archive and os.path.normpath(target) == ".":
        return "a file or folder can't take the place of the scratch folder itself"
    return None


def _mend(source: str, target: str) -> str:
    parts = [part for part in target.split("/") if part not in ("", ".", "..", "~", OWN_NAME)]
    return f"--stage {source}:{'/'.join(parts)}" if parts else f"--stage {source}"


def _is_odd_archive(path: str, where: str, problems: Problems) -> bool:
    """Refuse an archive of an unsupported format that would only be copied."""
    name = os.path.basename(path)
    if not name.endswith(_OTHER_ARCHIVES) or name.endswith(ARCHIVE_SUFFIXES):
        return False
    odd = ".tar." in name or name.endswith((".7z", ".rar"))
    if odd:
        near = nearest(os.path.splitext(name)[1], ARCHIVE_SUFFIXES)
        hint = f"; {near} is one" if near else ""
        why = f"these are unpacked: {', '.join(ARCHIVE_SUFFIXES)}{hint}"
        fix = f"{where}:{name} copies it as it is"
        problems.add(f"`{name}` is not an archive that can be unpacked", where, why, fix)
    return odd


def _check_targets(stages: Sequence[Stage], problems: Problems) -> None:
    seen: dict[str, str] = {}
    for stage in stages:
        archive = stage.source.endswith(ARCHIVE_SUFFIXES)
        if stage.target in seen and not archive:
            what = f"two sources go to `{stage.target}`"
            why = f"{seen[stage.target]} and {stage.source}"
            problems.add(what, "--stage", why, f"--stage {stage.source}:OTHER_NAME")
        if not archive:
            seen[stage.target] = stage.source
