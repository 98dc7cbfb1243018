"""The commands that start a run's workers, through accelerate: one process a replica, or accelerate's own launcher for several ranks."""

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from accelerate.commands.launch import launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from videogen.config import child_environment
from videogen.errors import EnvironmentFault, say
from videogen.parallel.fleet import Command
from videogen.parallel.mesh import Place

_NONE: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Launch:
    """What is to be started: so many processes, in replicas of `ulysses` ranks, on these devices (none: the CPU)."""

    world_size: int
    ulysses: int
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        Place(0, 0, self.world_size, self.ulysses)
        if self.devices and len(self.devices) < self.world_size:
            raise EnvironmentFault(say("--gpus", self.world_size, f"at most the {len(self.devices)} devices here", "change --gpus"))

    @property
    def replicas(self) -> int:
        """Workers that claim clips."""
        return self.world_size // self.ulysses

    def of_replica(self, number: int) -> str:
        """The devices of one replica, as accelerate takes them."""
        return ",".join(self.devices[number * self.ulysses : (number + 1) * self.ulysses])


def visible_devices(device: str, visible: str) -> tuple[str, ...]:
    """The CUDA devices a run may use, by the names CUDA_VISIBLE_DEVICES gives them; none where it runs on the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return ()
    return tuple(visible.split(",")) if visible else tuple(str(index) for index in range(torch.cuda.device_count()))


def worker_commands(launch: Launch, words: Sequence[str], run: str, stdin: str = "", settings: Mapping[str, str] = _NONE) -> list[Command]:
    """A command for each replica that runs `videogen WORDS` as a worker of this run, `settings` in its environment."""
    threads = str(max(1, (os.cpu_count() or 1) // launch.world_size))
    told = {"VIDEOGEN_RUN": run, **settings}
    numbers = range(launch.replicas)
    return [_command(launch, number, words, threads, told | {"VIDEOGEN_WORKER": str(number)}, stdin) for number in numbers]


def _command(launch: Launch, number: int, words: Sequence[str], threads: str, told: dict[str, str], stdin: str) -> Command:
    if launch.ulysses > 1:
        devices = ("--gpu_ids", launch.of_replica(number)) if launch.devices else ()
        many = ("--multi_gpu", "--num_machines", "1", "--num_processes", str(launch.ulysses), "--main_process_port", str(_free_port()))
        quiet = ("--mixed_precision", "no", "--dynamo_backend", "no", "--num_cpu_threads_per_process", threads)
        started = (sys.executable, "-m", "videogen.cli.agent", *many, *quiet, *devices, "-m", "videogen", *words)
        return Command(started, child_environment(**told), stdin)
    where = ("--gpu_ids", launch.of_replica(number)) if launch.devices else ("--cpu",)
    options = ("--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", *where)
    given = ("--num_cpu_threads_per_process", child_environment().get("OMP_NUM_THREADS", threads))
    args = launch_command_parser().parse_args([*options, *given, "-m", "videogen", *words])
    args.use_cpu = args.cpu  # the one value that accelerate's own command fills in, all others being given
    started_words, environment = prepare_simple_launcher_cmd_env(args)
    environment.pop("VIDEOGEN_API_KEY", None)
    return Command(tuple(started_words), environment | told, stdin)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
