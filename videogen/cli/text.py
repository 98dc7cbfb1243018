"""`videogen text info|expand|serve|bench`: a language model beside the video: what it is, prompts completed, served, measured."""

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from videogen.config import DEVICES, DTYPES, Environment, child_environment, read_api_keys, read_environment
from videogen.errors import EnvironmentFault, bad, say

_LEVELS = "open loop: arrivals in units of what one request after the other allows; closed loop: clients (default: 0.5 4)"
_SOURCES = "pocket, embedded, a folder, a .gguf file, a cached hub id"


def add_command(commands: Any, environment: Environment) -> None:
    """Register the sub-commands."""
    del environment
    parser = commands.add_parser("text", help="language models: info, expand, serve, bench")
    inner = parser.add_subparsers(dest="text_command", required=True, metavar="info|expand|serve|bench")
    info = inner.add_parser("info", help="where a text model lies, what it is, which engine it gets and why")
    expand = inner.add_parser("expand", help="complete a prompt as `render --expand` would")
    expand.add_argument("prompt")
    expand.add_argument("--source", default="template", help=f"template, {_SOURCES}, or an http(s) address (default: %(default)s)")
    expand.add_argument("--form", choices=("film", "pocket"), default="film", help="whose prompts (default: %(default)s)")
    expand.add_argument("--seed", type=int, default=0)
    serve = inner.add_parser("serve", help="OpenAI's /v1/chat/completions and /v1/completions for one model", allow_abbrev=False)
    bench = inner.add_parser("bench", help="prefill, decode, time to first token, context", allow_abbrev=False)
    for each in (info, serve, bench):
        each.add_argument("source", nargs="?", default="pocket", help=f"{_SOURCES}, or random:NAME (default: %(default)s)")
    _add_engine(serve, ("auto", "batching", "snapshots", "transformers"))
    _add_engine(bench, ("auto", "batching", "snapshots"))
    _add_serve(serve)
    _add_bench(bench)
    for each, run in ((info, run_info), (expand, run_expand), (serve, run_serve), (bench, run_bench)):
        each.add_argument("--device", choices=DEVICES, default="auto")
        each.add_argument("--dtype", choices=DTYPES, default="auto")
        each.add_argument("--json", action="store_true", help="one JSON object on standard output")
        each.set_defaults(run=run, verbose=False, quiet=False)


def _add_engine(parser: argparse.ArgumentParser, names: tuple[str, ...]) -> None:
    parser.add_argument("--engine", choices=names, default="auto", help="auto goes by the model's layers")
    parser.add_argument("--page", type=int, default=32, metavar="N", help="tokens a page of the paged cache (default: %(default)s)")
    parser.add_argument("--pages", type=int, default=1024, metavar="N", help="pages, 0 for what memory allows (default: %(default)s)")
    parser.add_argument("--prefill", type=int, default=2048, metavar="N", help="most tokens of a prefill forward (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=0, metavar="N", help="most requests decoding together, 0 for no limit")
    parser.add_argument("--max-queue", type=int, default=256, metavar="N", help="most requests in hand; then 429 (default: %(default)s)")
    parser.add_argument("--no-reuse", action="store_true", help="never reuse a cached prefix")


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="any but loopback needs VIDEOGEN_API_KEY")
    parser.add_argument("--port", type=int, default=8001, metavar="N", help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--name", help="the model's name to clients (default: the source)")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shared", type=int, default=2048, metavar="N", help="tokens of the shared prefix (default: %(default)s)")
    parser.add_argument("--own", type=int, default=32, metavar="N", help="tokens of its own a prompt has (default: %(default)s)")
    parser.add_argument("--write", type=int, default=16, metavar="N", help="tokens written (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=5, metavar="N", help="cold and warm pairs (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=20, metavar="N", help="requests a load (default: %(default)s)")
    parser.add_argument("--concurrency", type=float, nargs="*", default=[0.5, 4], metavar="C", help=_LEVELS)
    parser.add_argument("--mix", type=float, nargs="*", default=[0.5], metavar="F", help="share of prompts with the prefix (default: 0.5)")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 2048], metavar="N", help="prefill lengths (default: 512 2048)")
    parser.add_argument("--flood", type=int, default=100, metavar="N", help="requests from ten clients at once (default: %(default)s)")
    parser.add_argument("--needles", type=int, nargs="*", default=[], metavar="N", help="text lengths to hide needles in")
    parser.add_argument("--out", metavar="FILE", help="write the report as JSON")


def _where(args: argparse.Namespace) -> tuple[Any, Any]:
    from videogen.load import pick_device, pick_dtype

    device = pick_device(args.device)
    return device, pick_dtype(args.dtype, device)


def run_info(args: argparse.Namespace) -> int:
    """Say what a source is; loads no weight."""
    from videogen.text.choose import choose
    from videogen.text.source import find_text_source, read_config

    source = find_text_source(args.source)
    told = {"source": source.name, "kind": source.kind, "place": source.place, "identity": source.identity}
    if source.kind == "folder":
        config = read_config(Path(source.place))
        choice = choose(config)
        told |= {"model_type": str(config.get("model_type")), "engine": choice.engine, "reason": choice.reason}
    print(json.dumps(told) if args.json else "\n".join(f"{name:<11} {value}" for name, value in told.items() if value))
    return 0


def run_expand(args: argparse.Namespace) -> int:
    """Print the completed prompt."""
    from videogen.text.expand import Expander
    from videogen.text.film import FilmForm
    from videogen.text.grammar import GrammarForm
    from videogen.text.source import find_text_source

    source = find_text_source("pocket" if args.source == "own" else args.source)
    expander = Expander(FilmForm() if args.form == "film" else GrammarForm(), *_where(args))
    made = expander.expand(source, args.prompt, args.seed, own=lambda: "no pipeline here")
    if args.json:
        print(json.dumps(made.record(), ensure_ascii=False))
        return 0
    print(made.text)
    if made.reason:
        print(f"videogen: by template, {made.reason}", file=sys.stderr)
    return 0


def _paging(args: argparse.Namespace) -> Any:
    from videogen.text.loop import Paging

    return Paging(args.page, args.pages, args.prefill, args.at_once)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal comes."""
    if args.engine == "transformers":
        return _transformers_server(args)
    import uvicorn

    from videogen.serve.auth import Keys
    from videogen.serve.gate import Gate
    from videogen.serve.options import ServeOptions, parse_keys
    from videogen.text.metrics import Requests
    from videogen.text.opening import budget, open_engine, open_text
    from videogen.text.server import TextService, make_text_app

    keys = parse_keys(read_api_keys())
    options = ServeOptions(root=Path(), host=args.host, port=args.port, keys=keys, max_body_bytes=8_000_000, max_submits_per_minute=12_000)
    paging = _paging(args)
    if args.source.startswith("random:"):
        raise bad("text serve", args.source, "a model with a tokenizer", f"use one of {_SOURCES}")
    text, weights = open_text(args.source, *_where(args))
    how: dict[str, Any] = {"paging": paging, "chunk": args.prefill, "max_queue": args.max_queue, "budget": budget(reuse=not args.no_reuse)}
    engine = open_engine(text, weights, args.engine, sampling=True, **how)
    app = make_text_app(TextService(text, engine, args.name or args.source, Keys(keys), Requests()))
    config = uvicorn.Config(Gate(app, options), host=args.host, port=args.port, log_level="warning", server_header=False, ws="none")
    config.timeout_graceful_shutdown = 3
    try:
        listener = config.bind_socket()
    except SystemExit:  # uvicorn logs the reason and leaves
        engine.close()
        raise EnvironmentFault(say("address", f"{args.host}:{args.port}", "one that is free here", "use another --port")) from None
    host, port = listener.getsockname()[:2]
    shown = "127.0.0.1" if options.is_loopback else host
    print(f"videogen: {engine.name}, http://{shown}:{port}/v1 (Ctrl-C stops)", flush=True)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        engine.close()
    return 0


def _transformers_server(args: argparse.Namespace) -> int:
    """Become transformers' own server on the same model: more endpoints, no policy, no admission."""
    import os
    from importlib.util import find_spec

    from videogen.serve.options import LOOPBACK_NAMES
    from videogen.text.source import find_text_source

    source = find_text_source(args.source)
    if args.host not in LOOPBACK_NAMES:
        raise bad("--host", args.host, "a loopback address for transformers' server, which has no keys", "use --engine auto")
    if source.kind != "folder" or Path(source.tokenizer) != Path(source.place):
        raise bad("text serve --engine transformers", args.source, "the folder of a transformers model", "use --engine auto")
    if find_spec("openai") is None:
        raise EnvironmentFault(say("transformers serve", "no package openai", "it installed", "pip install openai"))
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", source.place, "--host", args.host, "--port", str(args.port)]
    environment = child_environment(HF_HUB_OFFLINE="1")
    print(f"videogen: transformers serve, http://{args.host}:{args.port}/v1 (Ctrl-C stops)", flush=True)
    os.execve(sys.executable, [*command, "--continuous-batching"], environment)


def run_bench(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from videogen.text.bench import Load
    from videogen.text.opening import open_text
    from videogen.text.report import lines, measure

    for noisy in ("transformers", "ContinuousBatchingLogger"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    load = Load(args.shared, args.own, args.write, args.requests)
    paging = _paging(args)
    text, weights = open_text(args.source, *_where(args))
    sizes = {"pairs": args.pairs, "lengths": args.lengths, "levels": args.concurrency, "mixes": args.mix, "needles": args.needles}
    if args.flood < 1:
        raise bad("--flood", args.flood, "at least 1", "change it")
    report = measure(text, weights, args.engine, load, paging, reuse=not args.no_reuse, at_once=args.flood, **sizes)
    report = {"source": args.source, "environment": read_environment().record()} | report
    if args.out:
        try:
            Path(args.out).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise EnvironmentFault(say("--out", args.out, "a file that can be written", error.strerror or str(error))) from None
    print(json.dumps(report) if args.json else "\n".join(lines(report)))
    return 0
