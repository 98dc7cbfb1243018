"""`videogen serve`, `ui` and `worker`: the queue over HTTP, with the page, and the processes that render."""

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from videogen.cli.planning import adapter_reader
from videogen.config import DEVICES, Environment, child_environment, read_api_keys, read_environment
from videogen.errors import EnvironmentFault, bad, say
from videogen.families.limits import check_limits
from videogen.jobs.store import Limits, Store
from videogen.progress import StopFlag
from videogen.recipes import find_recipe
from videogen.source import find_model, open_family

logger = logging.getLogger(__name__)

WORKER_WAIT_S = 600.0  # a worker of an earlier server may still be in a long step


def add_command(commands: Any, environment: Environment) -> None:
    """Register the sub-commands."""
    for name, told in (("serve", "queue, /v1/videos and the web page on one port"), ("ui", "the same, and say where the page is")):
        parser = commands.add_parser(name, help=told, allow_abbrev=False)
        _add_common(parser, environment)
        _add_server(parser)
        parser.set_defaults(run=run_server)
    parser = commands.add_parser("worker", help="render the jobs of a queue on this GPU group (serve starts its own)", allow_abbrev=False)
    _add_common(parser, environment)
    parser.add_argument("--group", default="0", metavar="NAME", help="its GPU group; one worker per group (default: %(default)s)")
    parser.add_argument("--until-input-ends", action="store_true", help="stop when standard input ends, as it does when the server dies")
    parser.set_defaults(run=run_worker)


def _add_common(parser: argparse.ArgumentParser, environment: Environment) -> None:
    parser.add_argument("--model", "-m", default="pocket", metavar="NAME", help="pocket, random, a folder or a hub id")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    default = str(Path(environment.output_dir) / "server")
    parser.add_argument("--root", "-o", default=default, metavar="DIR", help="queue, uploads and clips (default: %(default)s)")
    parser.add_argument("--retention-days", type=float, default=30.0, metavar="D", help="finished jobs are removed after D days")
    parser.add_argument("--preview-every", type=int, default=5, metavar="K", help="a preview at most every K steps, 0 for none")
    how = "where the denoiser's weights live, as `videogen render` has it; fsdp is not for a server"
    parser.add_argument("--weights", choices=("auto", "whole", "parked", "offload", "offload-idle"), default="auto", help=how)
    how = "where the text encoder lives: resident on the device, or in host memory and for every new prompt visiting as a whole, "
    how += "or (offload) layer by layer"
    parser.add_argument("--text-encoder", choices=("auto", "resident", "visiting", "offload"), default="auto", help=how)
    parser.add_argument("-v", "--verbose", action="store_true", help="debug messages")
    parser.add_argument("-q", "--quiet", action="store_true", help="errors only")


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; any but loopback needs VIDEOGEN_API_KEY")
    parser.add_argument("--port", type=int, default=8000, metavar="N", help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--gpus", nargs="+", metavar="GROUP", help="a worker for each group of GPUs, such as 0 1 or 0,1 2,3")
    parser.add_argument("--no-workers", action="store_true", help="only accept; `videogen worker` renders")
    parser.add_argument("--no-page", action="store_true", help="only the API")
    parser.add_argument("--adapters", metavar="DIR", help="adapter files (.safetensors) that clients may choose from")
    parser.add_argument("--reports", metavar="DIR", help="bench.json and eval.json files the page shows")
    parser.add_argument("--quota-gb", type=float, default=20.0, metavar="G", help="most space for clips; then jobs are refused")
    parser.add_argument("--max-queue", type=int, default=1000, metavar="N", help="most unfinished jobs")
    parser.add_argument("--max-upload-mb", type=float, default=64.0, metavar="M", help="largest request")


def list_adapters(folder: str | None) -> dict[str, Path]:
    """Adapter files by name; only safetensors, since other formats can run code when they are read."""
    if folder is None:
        return {}
    place = Path(folder).expanduser().absolute()
    if not place.is_dir():
        raise bad("--adapters", folder, "a folder", "check the path")
    return {path.name: path for path in sorted(place.glob("*.safetensors")) if path.is_file() and not path.is_symlink()}


def run_server(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    import uvicorn

    from videogen.serve.assemble import make_app, make_services
    from videogen.serve.desk import Desk
    from videogen.serve.options import ServeOptions, parse_keys
    from videogen.serve.supervisor import Supervisor

    limits = Limits(
        max_waiting=args.max_queue,
        max_waiting_per_owner=args.max_queue,
        quota_bytes=int(args.quota_gb * 1e9),
        retention_s=args.retention_days * 86_400,
    )
    options = ServeOptions(
        root=Path(args.root).expanduser().absolute(),
        host=args.host,
        port=args.port,
        keys=parse_keys(read_api_keys()),
        limits=limits,
        max_body_bytes=int(args.max_upload_mb * 1e6),
    )
    source = find_model(args.model, offline=read_environment().offline)
    family, reader, adapters = open_family(source), adapter_reader(source), list_adapters(args.adapters)
    check_limits(source, family, find_recipe("exact"), args.weights)

    def make_desk(store: Store) -> Desk:
        return Desk(store, source, family, options, reader, adapters)

    supervisor = None if args.no_workers else Supervisor(options.root, _commands(args, options.root))
    services = make_services(options, make_desk, supervisor)
    page = None if args.no_page else _page(args)
    app = make_app(services, page, supervisor)
    _warm_up(services.desk.recipes(), reader)
    quiet: dict[str, Any] = {"log_level": "warning", "server_header": False, "ws": "none", "proxy_headers": False}
    config = uvicorn.Config(app, host=args.host, port=args.port, **quiet)
    config.timeout_graceful_shutdown = 3
    logging.getLogger("uvicorn.error").addFilter(lambda record: not _is_cancelled(record))
    try:
        listener = config.bind_socket()
    except SystemExit:  # uvicorn logs the reason and leaves
        raise EnvironmentFault(say("address", f"{args.host}:{args.port}", "one that is free here", "use another --port")) from None
    host, port = listener.getsockname()[:2]
    print(f"videogen: http://{'127.0.0.1' if options.is_loopback else host}:{port}/ (Ctrl-C stops)", flush=True)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _is_cancelled(record: logging.LogRecord) -> bool:
    """Whether a log line is about a connection that was cut because the server stops: an open page always has some."""
    return record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)


def _page(args: argparse.Namespace) -> Callable[..., Any]:
    app = import_module("app")
    reports = None if args.reports is None else Path(args.reports).expanduser().absolute()
    return lambda api, services: app.mount(api, services, reports)


def _commands(args: argparse.Namespace, root: Path) -> list[Any]:
    from videogen.serve.supervisor import WorkerCommand

    common = ["--model", args.model, "--device", args.device, "--root", str(root), "--until-input-ends"]
    common += ["--retention-days", str(args.retention_days), "--preview-every", str(args.preview_every)]
    common += ["--weights", args.weights, "--text-encoder", args.text_encoder]
    commands = []
    for index, gpus in enumerate(args.gpus or [None]):
        environment = child_environment() if gpus is None else child_environment(CUDA_VISIBLE_DEVICES=gpus)
        environment.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads beside a server and ffmpeg slow all of them down
        command = (sys.executable, "-m", "videogen", "worker", "--group", str(index), *common)
        commands.append(WorkerCommand(str(index), command, environment))
    return commands


def _warm_up(recipes: list[str], reader: Callable[..., Any]) -> None:
    """Read the adapters of the model's own recipes beside the start, so that the first job does not wait for it."""

    def read() -> None:
        for name in recipes:
            reader(find_recipe(name))

    if any(find_recipe(name).adapters.uses for name in recipes):
        threading.Thread(target=read, daemon=True).start()


def run_worker(args: argparse.Namespace) -> int:
    """Render jobs until a signal comes, or standard input ends."""
    from videogen.parallel.weights import Placement
    from videogen.serve.making import PipelineMaker, as_it_is
    from videogen.serve.preview import previews
    from videogen.serve.worker import run_worker as work

    stop = StopFlag()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    if args.until_input_ends:
        threading.Thread(target=_watch_input, args=(stop,), daemon=True).start()
    if args.group != Path(args.group).name or args.group.startswith("."):
        raise bad("--group", args.group, "a plain name", "use 0, 1, ...")
    root = Path(args.root).expanduser().absolute()
    around = previews(args.preview_every) if args.preview_every > 0 else as_it_is
    placement = Placement(args.weights, text=args.text_encoder)
    maker = PipelineMaker(args.model, args.device, root, offline=read_environment().offline, around=around, placement=placement)
    retention_s = args.retention_days * 86_400
    work(root, args.group, maker, retention_s=retention_s, stop=stop, wait_s=WORKER_WAIT_S, examine=maker.examine)
    return 0


def _watch_input(stop: StopFlag) -> None:
    while os.read(0, 4096):
        pass
    stop.set()
