"""The agent's side of the look before the start: collect facts in a thread, send them when they are wanted.

The thread is a daemon: a file system that hangs keeps neither the agent nor its end waiting.
"""

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torchmuster.files.layout import RunDir
from torchmuster.model import codec
from torchmuster.model.plan import Program, ScriptKind
from torchmuster.net import messages

MAX_FACTS_BYTES = 128 << 10


class FactsServer:
    """Answers `AskFacts` on one node.

    Facts are sent when they are collected and the spawner has said which torch it will import.
    """

    def __init__(self, send: Callable[[messages.Message], None]) -> None:
        self._send = send
        self._facts: dict[str, Any] | None = None
        self._torch: Mapping[str, Any] | None = None
        self._asked_at: float | None = None
        self._begun = False

    def take(
        self,
        ask: messages.AskFacts,
        program: Program,
        environment: Mapping[str, str],
        run_dir: RunDir,
    ) -> None:
        """Begin to collect, if that has not begun; what is known already is sent again."""
        self._asked_at = time.time()
        if not self._begun:
            self._begun = True
            loop = asyncio.get_running_loop()
            order = (ask, program, dict(environment), run_dir, loop)
            threading.Thread(target=self._collect, args=order, name="facts", daemon=True).start()
        self._send_if_ready()

    def take_torch(self, found: Mapping[str, Any]) -> None:
        """Take what the spawner says of the torch that it imports; only its first word counts."""
        if self._torch is None:
            self._torch = found
            self._send_if_ready()

    def _collect(
        self,
        ask: messages.AskFacts,
        program: Program,
        environment: dict[str, str],
        run_dir: RunDir,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        from torchmuster.diagnose.facts.collect import FactsOrder, collect

        has_plan = os.path.exists(run_dir.plan)  # muster torchrun makes its folder later
        order = FactsOrder(
            is_long=ask.is_long,
            environment=environment,
            names=ask.names,
            run_dir=run_dir.path if has_plan else None,
            once_written=run_dir.plan,
            script=script_path(program, ask.script),
            folders=[("snapshots", run_dir.snapshots)] if os.path.isdir(run_dir.snapshots) else (),
        )
        try:
            facts = codec.to_plain(collect(order))
        except Exception as error:  # noqa: BLE001 - what can't be told is said
            facts = {"unknown": {"all": f"{type(error).__name__}: {error}"[:200]}}
        try:
            loop.call_soon_threadsafe(self._take_facts, facts)
        except RuntimeError:  # the agent has ended meanwhile
            return

    def _take_facts(self, facts: dict[str, Any]) -> None:
        self._facts = facts
        self._send_if_ready()

    def _send_if_ready(self) -> None:
        if self._facts is None or self._torch is None or self._asked_at is None:
            return
        from torchmuster.diagnose.facts.collect import torch_facts

        facts = {**self._facts, "torch": codec.to_plain(torch_facts(self._torch))}
        if len(json.dumps(facts)) > MAX_FACTS_BYTES:
            facts = {"unknown": {"all": f"the facts have more than {MAX_FACTS_BYTES >> 10} KiB"}}
        asked_at, self._asked_at = self._asked_at, None
        self._send(messages.NodeFacts(facts=facts, asked_at=asked_at, sent_at=time.time()))


def script_path(program: Program, instead: str | None) -> str | None:
    """Return the path of the program's script; None for modules and commands."""
    target = instead
    if target is None:
        target = program.target if program.kind is ScriptKind.FILE else None
    return os.path.join(program.cwd, target) if target else None
