"""`--ship-env`: pack an environment of this machine, for ssh hosts and jobs."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from torchmuster.errors import UsageError

if TYPE_CHECKING:
    from torchmuster.core.model.plan import RunPlan
    from torchmuster.launcher.files.environment import PackedEnvironment

_ARCHIVE = "environment.parcel"


def pack_named(named: str) -> "PackedEnvironment":
    """Pack the environment that the user names, showing progress; return the archive.

    Raises:
        UsageError: There is no such environment, or it can't be sent.
    """
    from torchmuster.core.files.layout import muster_home
    from torchmuster.launcher.files.environment import find_prefix, pack

    prefix = find_prefix(named, os.environ)
    cache = os.path.join(muster_home(), "cache")
    return pack(prefix, cache, lambda text: click.echo(f"muster: {text}", err=True))


def start_packing(named: str) -> "Callable[[], PackedEnvironment]":
    """Pack in a thread while hosts are called; return a function that waits for the archive.

    Even for an environment that was sent before, packing takes half a second: muster asks its
    interpreter and looks at 20,000 files.

    Raises:
        UsageError: There is no such environment.
    """
    from torchmuster.launcher.files.environment import find_prefix

    find_prefix(named, os.environ)  # report a misspelled path before anything is created
    packed: Future[PackedEnvironment] = Future()

    def work() -> None:
        try:
            packed.set_result(pack_named(named))
        except BaseException as error:  # noqa: BLE001  # it is raised where it is waited for
            packed.set_exception(error)

    # A run that ends earlier does not wait for it.
    threading.Thread(target=work, name="environment", daemon=True).start()
    return packed.result


def with_shipped(plan: "RunPlan", named: str | None) -> "tuple[RunPlan, PackedEnvironment | None]":
    """Let the nodes of a job unpack an environment; return the plan, and the archive or None.

    Raises:
        UsageError: There is no such environment, or it can't be sent.
    """
    from torchmuster.core.files.layout import runs_dir
    from torchmuster.core.model.plan import ShippedEnvironment

    if named is None:
        return plan, None
    packed = pack_named(named)
    archive = os.path.join(runs_dir(), plan.run_id, _ARCHIVE)
    shipped = ShippedEnvironment(archive=archive, needs=packed.needs)
    setup = replace(plan.node_setup, shipped=shipped, python_follows=False)
    return replace(plan, node_setup=setup), packed


def link_parcel(plan: "RunPlan", packed: "PackedEnvironment | None") -> None:
    """Link the archive into the run directory, so that a waiting job keeps it; copy it if need be.

    Raises:
        UsageError: The archive can't be written.
    """
    shipped = plan.node_setup.shipped
    if packed is None or shipped is None:
        return
    with contextlib.suppress(OSError):
        os.link(packed.path, shipped.archive)
        return
    try:
        shutil.copyfile(packed.path, shipped.archive)
    except OSError as error:
        raise UsageError(
            "the environment can't be put into the run directory",
            where=shipped.archive,
            why=str(error),
        ) from error
