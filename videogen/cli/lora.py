"""`videogen lora inspect|convert|merge`: what an adapter file is, the same in another layout, several in one (`distil`: beside)."""

import argparse
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from videogen.cli.lora_distil import add_distil
from videogen.config import Environment, read_environment
from videogen.errors import bad
from videogen.recipes import parse_adapter
from videogen.source import find_model

_SCHEMA = "videogen.adapter/1"
_LAYOUTS = ("diffusers", "diffusers-bare", "original", "comfyui", "kohya", "diffsynth")  # lora.write's, which loads torch
_METHODS = ("linear", "ties", "dare-ties")


def add_command(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    del environment
    parser = commands.add_parser("lora", help="inspect, convert, merge and train adapters")
    inner = parser.add_subparsers(dest="lora_command", required=True, metavar="inspect|convert|merge|distil")
    inspect = inner.add_parser("inspect", help="layout, ranks, scale, contract and size of the change")
    inspect.add_argument("file", metavar="FILE", help="a safetensors file, or a peft folder")
    inspect.add_argument("--json", action="store_true", help="the whole report")
    _add_reading(inspect)
    convert = inner.add_parser("convert", help="write the same adapter in another layout")
    convert.add_argument("file", metavar="IN")
    convert.add_argument("out", metavar="OUT")
    convert.add_argument("--to", choices=_LAYOUTS, required=True)
    convert.add_argument("--rank", type=int, help="reduce to this rank by SVD, and say what is kept")
    _add_reading(convert)
    merge = inner.add_parser("merge", help="several adapters of one base in one file")
    merge.add_argument("files", metavar="FILE[:WEIGHT]", nargs="+", help="two or more inputs, then the output")
    merge.add_argument("--method", choices=_METHODS, default="linear")
    merge.add_argument("--rank", type=int, help="reduce to this rank; needed by ties and dare-ties")
    merge.add_argument("--density", type=float, default=0.5, help="share of entries that ties and dare-ties keep (%(default)s)")
    merge.add_argument("--seed", type=int, default=0, help="draws what dare-ties drops (%(default)s)")
    merge.add_argument("--to", choices=_LAYOUTS, default="diffusers")
    merge.add_argument("--model", default="pocket", help="the model the files are for (%(default)s); random:h3 for the released sizes")
    for writer in (convert, merge):
        writer.add_argument("--overwrite", action="store_true", help="replace the output if it exists")
    for each, run in ((inspect, run_inspect), (convert, run_convert), (merge, run_merge)):
        each.set_defaults(run=run, verbose=False, quiet=False)
    add_distil(inner)


def _add_reading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="pocket", help="the model the file is for (%(default)s); random:h3 for the released sizes")
    parser.add_argument("--partition", choices=("transformer", "transformer_ref"), help="which one, where the file holds both")
    parser.add_argument("--alpha", type=float, help="for a file that declares none and is known to need one")
    parser.add_argument("--qkv-order", choices=("stacked", "interleaved"), help="rows of fused q/k/v, where the file does not tell")
    parser.add_argument("--gate-first", choices=("true", "false"), help="SwiGLU rows begin with the gate, against the names' habit")
    parser.add_argument("--contract", metavar="FIELD=VALUE", action="append", default=[], help="forwards=4, shift_video=12, ...")


@contextmanager
def _translated() -> Iterator[None]:
    """Faults of the file become bad input, faults of the disk a lacking environment."""
    from videogen.adapters import adapter_errors

    with adapter_errors():
        yield


def _target(model: str) -> Any:
    """Names and shapes of a model's transformer."""
    from videogen.adapters import model_target

    return model_target(find_model(model, offline=read_environment().offline))


def _read(args: argparse.Namespace) -> tuple[Any, Any, Any]:
    """(adapter, contract, target) of the file named."""
    from lora.contract import parse_value, resolve_contract
    from lora.convert import ReadOptions, load_adapter

    gate_first = None if args.gate_first is None else args.gate_first == "true"
    options = ReadOptions(alpha=args.alpha, qkv_order=args.qkv_order, gate_first=gate_first, partition=args.partition)
    flags = {}
    for item in args.contract:
        name, separator, text = item.partition("=")
        if not separator:
            raise bad("--contract", item, "FIELD=VALUE", "write --contract forwards=4")
        flags[name] = parse_value(name, text)
    target = _target(args.model)
    adapter = load_adapter(args.file, target, options)
    contract = resolve_contract(args.file, adapter.metadata, partition=adapter.partition, flags=flags)
    return adapter, contract, target


def _report(file: str, adapter: Any, contract: Any) -> dict[str, Any]:
    from lora.apply import Use, delta_norms

    norms = delta_norms(Use(adapter))
    fields = ("forwards", "shift_video", "shift_audio", "sigmas", "partition", "strength", "size")
    values = {name: getattr(contract, name) for name in fields}
    return {
        "schema": _SCHEMA,
        "file": file,
        "digest": adapter.digest,
        "layout": adapter.layout,
        "modules": len(adapter.factors),
        "payloads": len(adapter.patches),
        "ranks": {str(rank): count for rank, count in adapter.ranks().items()},
        "scales": [{"scale": scale, "from": origin, "modules": count} for (scale, origin), count in adapter.scales().items()],
        "contract": {name: {"value": value, "from": contract.sources[name]} for name, value in values.items() if value is not None},
        "grid_points": contract.grid_points(),
        "schedule": contract.schedule(),
        "delta_norm": sum(norm**2 for norm in norms.values()) ** 0.5,
        "largest_deltas": dict(sorted(norms.items(), key=lambda item: -item[1])[:5]),
        "notes": [*adapter.notes, *contract.notes],
    }


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    yield f"file      {report['file']}"
    yield f"layout    {report['layout']}"
    ranks = ", ".join(f"{rank} ({count})" for rank, count in report["ranks"].items())
    yield f"modules   {report['modules']} low-rank, {report['payloads']} full-rank payloads; ranks {ranks or 'none'}"
    for scale in report["scales"]:
        yield f"scale     {scale['scale']:g} on {scale['modules']} modules, by {scale['from']}"
    for name, value in report["contract"].items():
        yield f"contract  {name} {value['value']}, by {value['from']}"
    if not report["contract"]:
        yield "contract  none: nothing says how many forwards or which shift"
    if report["grid_points"] is not None:
        yield f"run with  {report['grid_points'] - 1} forwards (num_inference_steps {report['grid_points']} in diffusers)"
    for name, sigmas in (report["schedule"] or {}).items():
        yield f"sigmas    {name} " + " ".join(f"{sigma:.4f}" for sigma in sigmas)
    yield f"delta     norm {report['delta_norm']:.4g} in all"
    for name, norm in report["largest_deltas"].items():
        yield f"          {norm:.4g} {name}"
    for note in report["notes"]:
        yield f"note      {note}"


def run_inspect(args: argparse.Namespace) -> int:
    """Print what the file is; exit code 0."""
    with _translated():
        adapter, contract, _ = _read(args)
        report = _report(args.file, adapter, contract)
    print(json.dumps(report) if args.json else "\n".join(_lines(report)))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Write the file in another layout, with its contract; exit code 0."""
    with _translated():
        from lora.merge import reduce_rank
        from lora.write import write_adapter

        adapter, contract, target = _read(args)
        reduced = None if args.rank is None else reduce_rank(adapter, args.rank)
        adapter = adapter if reduced is None else reduced.adapter
        write_adapter(adapter, target, args.to, Path(args.out).expanduser(), contract.to_metadata(), overwrite=args.overwrite)
    for note in (*adapter.notes, *contract.notes):
        print(f"note      {note}")
    if reduced is not None:
        print(f"rank      {args.rank}: {100 * reduced.energy:.2f} % of the energy kept")
    print(f"wrote     {args.out}: {len(adapter.factors)} modules as {args.to}, read back and compared")
    return 0


def run_merge(args: argparse.Namespace) -> int:
    """Merge files and print the energy kept; exit code 0."""
    if len(args.files) < 3:
        raise bad("merge", args.files, "two or more inputs and an output", "write videogen lora merge A B OUT")
    with _translated():
        from lora.contract import common, resolve_contract
        from lora.convert import load_adapter
        from lora.merge import merge
        from lora.write import write_adapter

        target, out = _target(args.model), Path(args.files[-1]).expanduser()
        asked = [(use.file, 1.0 if use.strength is None else use.strength) for use in map(parse_adapter, args.files[:-1])]
        inputs = [(load_adapter(name, target), weight, name) for name, weight in asked]
        contract = common(resolve_contract(name, adapter.metadata, partition=adapter.partition) for adapter, _, name in inputs)
        pairs = [(adapter, weight) for adapter, weight, _ in inputs]
        merged = merge(pairs, args.method, rank=args.rank, density=args.density, seed=args.seed)
        write_adapter(merged.adapter, target, args.to, out, contract.to_metadata(), overwrite=args.overwrite)
    for note in contract.notes:
        print(f"note      {note}")
    print(f"wrote     {out}: {len(merged.adapter.factors)} modules by {args.method}, {100 * merged.energy:.2f} % of the energy kept")
    return 0
