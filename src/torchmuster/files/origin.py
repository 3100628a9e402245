"""Who asked for a run, from where, and with which code: the content of `origin.json`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeVersion:
    """The state of a git work tree.

    Attributes:
        root: Its folder.
        commit: What is checked out; empty where nothing was ever committed.
        branch: Empty when none is checked out.
        changed: Files that git tracks and that differ from the commit, a few of them.
        num_changed: How many there are.
        untracked: Files that git neither tracks nor ignores, a few of them; their content is not kept.
        num_untracked: How many there are.
        difference: From the commit to the files, as `git diff` shows it, without files and values that look secret.
        left_out: Why `difference` is not all of it; empty when it is.
    """

    root: str
    commit: str = ""
    branch: str = ""
    changed: tuple[str, ...] = ()
    num_changed: int = 0
    untracked: tuple[str, ...] = ()
    num_untracked: int = 0
    difference: str = ""
    left_out: str = ""

    @property
    def is_clean(self) -> bool:
        """Say whether the files are those of the commit."""
        return bool(self.commit) and not self.num_changed and not self.num_untracked


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Who asked for a run.

    Attributes:
        user: Name of the account.
        host: Where it was asked for.
        torchmuster: Version of the client.
        python: Version of the client's interpreter.
        code: None where the script is in no git work tree.
        why_no_code: Why nothing is known of the code; empty when something is.
        packages: What is installed for the program's interpreter on the client's machine, as `numpy==2.4.6`; empty
            where that can't be seen from here.
    """

    user: str
    host: str
    torchmuster: str
    python: str
    code: CodeVersion | None = None
    why_no_code: str = ""
    packages: tuple[str, ...] = ()
