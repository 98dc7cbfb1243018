"""Worker processes from start to end: their lines as they come, signals handed on, what became of each; knows nothing of clips."""

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from videogen.errors import EnvironmentFault, say
from videogen.progress import StopFlag

OnLine = Callable[[int, str], None]
OnExit = Callable[[int, int], None]
_TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class Command:
    """What starts one worker: the words, its environment, and what it reads on standard input."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    stdin: str = ""


def watch(commands: Sequence[Command], on_line: OnLine, on_exit: OnExit, stop: StopFlag) -> list[int]:
    """Run the workers side by side until all have ended; their exit codes, negative where a signal ended one.

    on_line hears every line of standard error, with the worker's number from 0. A wish to stop is handed on once; whatever
    ends this function early ends the workers too. Raises EnvironmentFault where a worker cannot be started.
    """
    said: queue.Queue[tuple[int, str | None]] = queue.Queue()
    workers: list[subprocess.Popen[str]] = []
    codes: dict[int, int] = {}
    is_told = False
    try:
        for number, command in enumerate(commands):
            workers.append(_start(command))
            threading.Thread(target=_read, args=(number, workers[-1].stderr, said), daemon=True).start()
        while len(codes) < len(workers):
            if stop.wanted and not is_told:
                is_told = True
                _signal(workers, signal.SIGTERM)
            try:
                number, line = said.get(timeout=_TICK_S)
            except queue.Empty:
                continue
            if line is not None:
                on_line(number, line)
                continue
            codes[number] = workers[number].wait()
            on_exit(number, codes[number])
    finally:
        _signal(workers, signal.SIGKILL)
        for worker in workers:
            worker.wait()
    return [codes[number] for number in range(len(workers))]


def _start(command: Command) -> "subprocess.Popen[str]":
    """A session of its own, so that a terminal's Ctrl-C comes through us once, not to every process at once."""
    try:
        worker = subprocess.Popen(
            command.words,
            env=dict(command.environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise EnvironmentFault(say("worker", command.words[0], "a program that starts", error.strerror or str(error))) from None
    assert worker.stdin is not None
    try:
        worker.stdin.write(command.stdin)
        worker.stdin.close()
    except BrokenPipeError:
        pass  # it ended before it read; its exit code says why
    return worker


def _read(number: int, stream: IO[str] | None, said: "queue.Queue[tuple[int, str | None]]") -> None:
    assert stream is not None
    for line in stream:
        said.put((number, line.rstrip("\n")))
    said.put((number, None))


def _signal(workers: "Sequence[subprocess.Popen[str]]", number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            try:
                os.killpg(worker.pid, number)
            except ProcessLookupError:
                continue
