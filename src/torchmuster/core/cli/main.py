"""`muster`: the group of all commands.

Commands are imported on call, so that `muster --help` stays quick.
"""

import os
import shlex
import sys
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

import torchmuster
from torchmuster.core import plugs
from torchmuster.core.cli.spelling import hint_for_option, refuse_removed
from torchmuster.errors import ManyErrors, MusterError, UsageError

SECTIONS = ("Run", "Watch", "Diagnose", "Workflows", "Clusters", "Data")
_OTHERS = "Other packages"


class _ReaderHasGoneError(Exception):
    """The reader of the output has gone; click would turn a `BrokenPipeError` into exit code 1."""


class _LazyGroup(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise _ReaderHasGoneError from error

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ["--help"])

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*plugs.table("commands"), *plugs.others("commands")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        ours = plugs.table("commands").get(cmd_name)
        command = plugs.load_other("commands", cmd_name) if ours is None else plugs.load(ours[2])
        if command is not None and not isinstance(command, click.Command):
            raise UsageError(f"`muster {cmd_name}` of another package is no command of click")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and name not in plugs.table("commands") and not name.startswith("-"):
            known = self.list_commands(ctx)
            if name in known:
                return super().resolve_command(ctx, args)
            if name == "help":  # `muster help run`
                asked = [word for word in args[1:2] if word in known]
                if not asked:
                    click.echo(ctx.get_help())
                    ctx.exit()
                return super().resolve_command(ctx, [*asked, "--help"])
            refuse_removed(f"muster {name}")
            from torchmuster.core.model.text import nearest

            near = nearest(name, known)
            fix = f"did you mean `muster {near}`?" if near else "muster --help"
            if os.path.isfile(name) or name.endswith((".py", ".sh")):
                fix = f"muster run {shlex.join(args)}"
            if name.endswith((".yaml", ".yml")):
                fix = f"muster submit {shlex.join(args)}"
            raise UsageError(f"muster has no command `{name}`", fix=fix)
        if name in ("run", "submit", "sweep", "torchrun", "restart", "session", "dev", "replay"):
            try:
                os.getcwd()
            except OSError as error:
                what = "the working directory does not exist any more"
                raise UsageError(
                    what, why=error.strerror, fix="cd to a folder that exists"
                ) from error
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in SECTIONS}
        for name, (title, text, _) in plugs.table("commands").items():
            rows[title].append((name, text))
        rows[_OTHERS] = [
            (name, f"Of {one.dist.name if one.dist else one.value}.")
            for name, one in plugs.others("commands").items()
        ]
        for title, commands in rows.items():
            if commands:
                with formatter.section(title):
                    formatter.write_dl(commands)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete a command's name without importing any."""
        ours = {name: text for name, (_, text, _) in plugs.table("commands").items()}
        texts = {**ours, **dict.fromkeys(plugs.others("commands"), "")}
        found = {name: text for name, text in texts.items() if name.startswith(incomplete)}
        return [CompletionItem(name, help=text) for name, text in found.items()]


def _with_dashes(name: str) -> str:
    """Normalize underscores to dashes: accept torchrun's `--nproc_per_node`, as torchrun does."""
    return name.replace("_", "-")


@click.group(
    cls=_LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": _with_dashes,
    },
)
@click.version_option(torchmuster.__version__, prog_name="muster")
def muster() -> None:
    """Take a PyTorch training script from one GPU to many nodes.

    \b
    muster run train.py --epochs 10              every GPU of this machine
    muster run --nodes 2 --nproc-per-node 2 train.py     two simulated nodes
    muster torchrun --nnodes 2 ... train.py      torchrun's own line
    """  # noqa: D301 - \b is click's mark


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run a command; turn every error of ours into a message and an exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code: Any = muster.main(
            args=arguments, prog_name="muster", standalone_mode=False, windows_expand_args=False
        )
    except MusterError as error:
        _leave([error], words)
    except ManyErrors as many:
        _leave(many.errors, words)
    except click.exceptions.Exit as end:
        code = end.exit_code
    except click.Abort:  # Ctrl-C that nothing else handled
        _interrupted()
    except RuntimeError as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # in an import, older Pythons
            _interrupted()
        raise
    except click.UsageError as error:
        _leave([_translate(error, words)], words)
    except click.ClickException as error:
        _leave([UsageError(error.format_message())], words)
    except _ReaderHasGoneError:  # as `cat` ends, by SIGPIPE
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = 141
    sys.exit(code if isinstance(code, int) else 0)


def _interrupted() -> NoReturn:
    """Exit at once, removing an unbegun run directory; a thread may still be waiting for git."""
    if (create := sys.modules.get("torchmuster.core.owner.create")) is not None:
        create.remove_unbegun()
    os._exit(130)


def _leave(errors: Any, words: list[str]) -> NoReturn:
    from torchmuster.core.cli.messages import print_errors

    if any(word.partition("=")[0] == "--json" for word in words):
        from torchmuster.core.cli.ending import answer_unless_given

        command = muster.get_command(click.Context(muster), words[0])
        answer_unless_given(command, words[1:], errors)
    print_errors(errors)
    sys.exit(errors[0].exit_code)


def _translate(error: click.UsageError, words: list[str]) -> UsageError:
    """Return click's complaint in the form of our errors."""
    known = muster.list_commands(click.Context(muster))
    command = " ".join(["muster", *(word for word in words[:1] if word in known)])
    if error.ctx is not None and isinstance(
        getattr(error.ctx.parent, "command", None), click.Group
    ):
        command = error.ctx.command_path  # a command in a group: `muster session end`
    help_line = f"{command} --help"
    if isinstance(error, click.NoSuchOption):
        params = error.ctx.command.get_params(error.ctx) if error.ctx is not None else []
        options = [name for param in params for name in param.opts if name.startswith("--")]
        otherwise = help_line
        if command in ("muster run", "muster dev"):
            otherwise = (
                f"is it an option of the script? then it goes after it: {command} train.py ..."
            )
        what = f"`{command}` has no option `{error.option_name}`"
        return UsageError(what, fix=hint_for_option(error.option_name, options) or otherwise)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        name = error.param.human_readable_name
        example = {"SCRIPT": "train.py", "RUN": "last"}.get(name)
        fix = f"{command} {example}" if example else help_line
        if command == "muster cancel":
            fix = "`muster ps` lists the runs"
        return UsageError(f"`{command}` needs {name}", fix=fix)
    if isinstance(error, click.BadParameter) and error.param is not None:
        typed = {word.partition("=")[0] for word in words}
        opts = error.param.opts
        name = next((word for word in opts if _with_dashes(word) in typed), opts[-1])
        what = error.message.rstrip(".").replace("'", "`")
        what = what.replace(" is not in the range x>=", " is less than ")
        return UsageError(what, where=name, fix=help_line)
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in error.message:
        return UsageError(f"`{error.option_name}` needs a value", fix=help_line)
    what = error.format_message().rstrip(".").replace("'", "`")
    if what.startswith("Got unexpected extra"):
        what = f"`{command}` takes no argument `{what.partition('(')[2].rstrip(')')}`"
    return UsageError(what, fix=help_line)
