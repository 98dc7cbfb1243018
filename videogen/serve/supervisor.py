"""Keeps one worker process per GPU group alive; a worker whose server dies sees its input end and stops between steps."""

import logging
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from videogen.jobs.claims import is_alive

logger = logging.getLogger(__name__)

FIRST_WAIT_S, LONGEST_WAIT_S, STEADY_S = 0.5, 30.0, 60.0
STOP_S = 20.0


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """How the worker of one group is started: arguments, and the whole environment (its GPUs)."""

    group: str
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(slots=True)
class Supervisor:
    """Starts the workers in threads of its own and starts again what ends by itself, more slowly the sooner it ended."""

    root: Path
    commands: Sequence[WorkerCommand]
    _stopping: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self) -> None:
        """Start all workers."""
        self._threads = [threading.Thread(target=self._keep, args=(each,), daemon=True) for each in self.commands]
        for thread in self._threads:
            thread.start()

    def _keep(self, each: WorkerCommand) -> None:
        wait_s = FIRST_WAIT_S
        while not self._stopping.is_set():
            began = time.monotonic()
            process = subprocess.Popen(each.command, stdin=subprocess.PIPE, env=dict(each.environment))
            self._processes[each.group] = process
            code = process.wait()
            if self._stopping.is_set():
                return
            wait_s = FIRST_WAIT_S if time.monotonic() - began > STEADY_S else min(LONGEST_WAIT_S, wait_s * 2)
            logger.warning("worker %s ended with status %s; starting it again in %.1f s", each.group, code, wait_s)
            self._stopping.wait(wait_s)

    def alive(self) -> int:
        """How many groups have a worker now."""
        return sum(is_alive(self.root, each.group) for each in self.commands)

    def stop(self) -> None:
        """Ask every worker to stop at its next step, wait, and end what does not."""
        self._stopping.set()
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + STOP_S
        for process in self._processes.values():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join(5)
