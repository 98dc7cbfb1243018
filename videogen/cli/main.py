"""The `videogen` command: parses, dispatches, and turns errors into messages and exit codes."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from videogen import __version__
from videogen.cli import doctor, lora, models, plan, render, serve, status, text
from videogen.cli import inspect as inspect_command
from videogen.config import Environment, read_environment
from videogen.errors import DoesNotFit, EnvironmentFault, RequestError, VideogenError

_ABOVE = {
    "audit": "whether certificates keep their promise on finished clips",
    "bench": "clips per hour",
    "calibrate": "how far the step cache may go, with a certificate",
    "compare": "two bench reports side by side",
    "eval": "what a recipe costs in quality",
}

OK, SOME_FAILED, USAGE, ENVIRONMENT, GATE, WORKER_LOST, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 4, 5, 130, 143


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(prog="videogen", description="Render clips with open video diffusion models.")
    parser.add_argument("--version", action="version", version=f"videogen {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    environment = read_environment()
    for module in (render, plan, status, inspect_command, models, lora, serve, doctor, text):
        module.add_command(commands, environment)
    for entry in sorted(entry_points(group="videogen.commands"), key=lambda e: e.name):
        _add_from_above(commands, environment, entry)
    return parser


def _add_from_above(commands: Any, environment: Environment, entry: EntryPoint) -> None:
    """Register a command of a package above this one (eval), loading it only when it is the one that runs.

    Its options are its own: everything after the name is handed on. It speaks through `args.say` and its logger.
    """
    stub = commands.add_parser(entry.name, help=_ABOVE.get(entry.name, entry.value), add_help=False, prefix_chars="\0")
    stub.add_argument("rest", nargs="*")

    def run(args: argparse.Namespace) -> int:
        inner = argparse.ArgumentParser(prog="videogen", allow_abbrev=False)
        entry.load()(inner.add_subparsers(), environment)
        parsed = inner.parse_args([entry.name, *args.rest], argparse.Namespace(say=print))
        logging.getLogger(entry.module.partition(".")[0]).setLevel(logging.INFO)
        return int(parsed.run(parsed))

    stub.set_defaults(run=run, verbose=False, quiet=False)


def _set_up_logging(args: argparse.Namespace) -> None:
    level = logging.DEBUG if args.verbose else logging.ERROR if args.quiet else logging.WARNING
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.WARNING, force=True)
    logging.getLogger("videogen").setLevel(level)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 some clips failed, 2 usage, 3 environment, 4 a gate failed, 5 a worker
    died, 130/143 stopped."""
    args = make_parser().parse_args(argv, argparse.Namespace(words=list(sys.argv[1:] if argv is None else argv)))
    _set_up_logging(args)
    try:
        return int(args.run(args))
    except RequestError as error:
        print(f"videogen: {error}", file=sys.stderr)
        return USAGE
    except (EnvironmentFault, DoesNotFit) as error:
        print(f"videogen: {error}", file=sys.stderr)
        return ENVIRONMENT
    except VideogenError as error:  # a rank that shares this one's clips is gone
        print(f"videogen: {error}", file=sys.stderr)
        return WORKER_LOST
    except KeyboardInterrupt:
        print("videogen: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return OK
