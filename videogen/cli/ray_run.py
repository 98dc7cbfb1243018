"""`videogen render --engine ray`: the same jobs over the devices of a Ray cluster; the journal stays with this process."""

import argparse
import json
import logging
from functools import partial

from videogen.cli.fleet import WORKER_LOST, Machine, kind_of
from videogen.cli.planning import read_wanted
from videogen.cli.render import exit_code, opener, report, settle, signals
from videogen.errors import EnvironmentFault, bad, say
from videogen.jobs.journal import locked, read_journal
from videogen.jobs.run import sweep
from videogen.progress import StopFlag

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Render; exit codes as with `--gpus`."""
    if args.ulysses > 1 or args.weights == "fsdp":
        raise bad("--engine ray", "several devices a clip", "one device a clip", "drop --ulysses and --weights fsdp, or --engine ray")
    try:
        from videogen.parallel.ray_crew import RayCrew, connect
    except ImportError as error:
        raise EnvironmentFault(say("--engine ray", str(error), "Ray", "pip install videogen[ray]")) from None
    from videogen.parallel.crew import Driver

    wanted, stop = read_wanted(args), StopFlag()
    folder = wanted.folder.absolute()
    with signals(stop) as came, locked(folder):
        resources = connect(args.address)
        gpus = 0.0 if args.device == "cpu" else min(1.0, resources.get("GPU", 0.0))
        room = int(resources.get("GPU" if gpus else "CPU", 0))
        size = min(args.gpus, room)
        if size < args.gpus:
            logger.warning("the cluster has room for %d workers, not %d", room, args.gpus)
        journal = read_journal(folder)
        sweep(journal)
        clips = settle(wanted, args, journal)
        how = argparse.Namespace(device=args.device, weights=args.weights, text_encoder=args.text_encoder)
        crew = RayCrew(partial(opener, wanted, how), folder, wanted.encoding, gpus)
        with Machine(kind_of(args), sum(not clip.is_done for clip in clips), stop) as screen:
            driver = Driver(crew, size, journal, lambda worker, event: screen.line(worker, json.dumps(event)))
            summary = driver.run(clips, stop)
    report(args, wanted, summary, lost=driver.lost)
    return exit_code(summary, came) or (WORKER_LOST if driver.lost else 0)
