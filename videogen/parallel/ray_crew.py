"""A crew of Ray actors (`pip install videogen[ray]`), one a device, over all nodes of a cluster."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from videogen.config import Recipe
from videogen.errors import EnvironmentFault, say
from videogen.jobs.plan import Clip
from videogen.jobs.run import Renderer
from videogen.media import Encoding
from videogen.parallel.crew import Replica, WorkerLost


def connect(address: str) -> dict[str, float]:
    """Join the cluster, or start one here where no address is given; its resources. Raises EnvironmentFault."""
    try:
        ray.init(address=address or None, log_to_driver=False, ignore_reinit_error=True, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise EnvironmentFault(say("--address", address, "a Ray cluster that answers", f"start one ({error})")) from None
    return dict(ray.cluster_resources())


@dataclass(frozen=True, slots=True)
class RayCrew:
    """`Crew` over a connected cluster. `make_opener` runs on the worker's node; `folder` is the same storage on every node."""

    make_opener: Callable[[], Callable[[Recipe], Renderer]]
    folder: Path
    encoding: Encoding
    gpus: float = 1.0  # of one actor; 0 takes a processor core

    def hire(self, number: int) -> Any:
        """An actor wherever there is room for it; Ray does not start it again, its clip goes to another."""
        where = {"num_gpus": self.gpus} if self.gpus else {"num_cpus": 1}
        actor = ray.remote(Replica).options(max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD", **where)
        return actor.remote(self.make_opener, self.folder, self.encoding)

    def give(self, worker: Any, clip: Clip) -> Any:
        """The clip by value, pictures by path."""
        return worker.render.remote(clip)

    def first(self, tickets: Sequence[Any], timeout_s: float) -> Any:
        """The first that is over."""
        ready, _ = ray.wait(list(tickets), num_returns=1, timeout=timeout_s)
        return ready[0] if ready else None

    def result(self, ticket: Any) -> dict[str, Any]:
        """The worker's answer; the error that it raised, as itself."""
        try:
            made: dict[str, Any] = ray.get(ticket)
        except RayActorError as error:
            raise WorkerLost(str(error).strip().split("\n")[0]) from error
        except RayTaskError as error:
            if isinstance(error.cause, EnvironmentFault):
                raise error.cause from None
            raise
        return made

    def dismiss(self, worker: Any) -> None:
        """Kill the actor."""
        ray.kill(worker)
