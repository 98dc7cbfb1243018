"""`videogen audit RUN_FOLDER`: whether certificates keep their promise on the clips that were really made."""

import argparse
import json
import logging
from pathlib import Path
from typing import Any

from caches.audit import LEVEL, Audit, is_drawn
from eval.audit import SHOWN, Job, Pairs, run_audit, sort_out
from eval.audit_clips import Made, certificate_id, read_made
from eval.losses import Losses
from videogen.certificates import open_certificate
from videogen.config import DEVICES, Environment
from videogen.errors import RequestError, bad
from videogen.jobs.journal import locked
from videogen.recipes import PLANNED, shipped_certificates

logger = logging.getLogger(__name__)

SCHEMA = "videogen.audit/1"
OK, ALARM = 0, 4


def add_audit(commands: Any, environment: Environment) -> None:
    """Register the sub-command."""
    del environment
    parser = commands.add_parser("audit", help="test certificates on finished clips", allow_abbrev=False)
    parser.add_argument("folder", metavar="RUN_FOLDER", help="of `videogen render`, with nobody rendering into it")
    parser.add_argument(
        "--share", type=float, default=0.1, metavar="F", help="of the clips, drawn by their identity (default: %(default)s)"
    )
    parser.add_argument(
        "--certificate", nargs="+", default=[], metavar="FILE", help="only clips made under these; needed where sidecars keep a part"
    )
    parser.add_argument("--level", type=float, default=LEVEL, metavar="F", help="chance of a false alarm, ever (default: %(default)s)")
    parser.add_argument("--files", default=".", metavar="FOLDER", help="where the clips' pictures and adapter files are (default: here)")
    parser.add_argument("--model", metavar="NAME", help="the model that made them, if it moved")
    parser.add_argument("--device", choices=DEVICES, default="auto")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    parser.set_defaults(run=run, verbose=False, quiet=False)


def _drawn(clips: list[Made], share: float, level: float) -> list[Made]:
    try:
        Audit(0.5).is_alarm(level)
        return [clip for clip in clips if is_drawn(clip.identity, share)]
    except ValueError as error:
        raise RequestError(str(error)) from None


def run(args: argparse.Namespace) -> int:
    """Audit; exit code 0 without an alarm, 4 with one."""
    folder, files = Path(args.folder).expanduser(), Path(args.files).expanduser()
    given = {certificate_id(each): each for each in (open_certificate(Path(path).expanduser()) for path in args.certificate)}
    shipped = {certificate_id(each): each for name in PLANNED for each in shipped_certificates(name)}
    made = list(read_made(folder))
    covered = [clip for clip in made if clip.record["cache"]["certificate"]]
    if not covered:
        raise bad(f"run folder {folder}", f"{len(made)} clips, none under a certificate", "clips of one", "render with --certificate")
    drawn = _drawn(covered, args.share, args.level)
    with locked(folder):
        jobs, reasons = sort_out(drawn, Pairs(files, shipped | given, args.model, args.device))
        if drawn and not jobs:
            raise RequestError(next(iter(reasons)))
        report = _audit(args, folder, [job for job in jobs if not given or certificate_id(job.certificate) in given])
    report |= {"made": len(made), "under_a_certificate": len(covered), "drawn": len(drawn), "not_auditable": reasons}
    _say(args, report)
    return ALARM if any(each["is_alarm"] for each in report["certificates"]) else OK


def _audit(args: argparse.Namespace, folder: Path, jobs: list[Job]) -> dict[str, Any]:
    by_certificate: dict[str, list[Job]] = {}
    for job in jobs:
        by_certificate.setdefault(certificate_id(job.certificate), []).append(job)

    def tell(text: str) -> None:
        logger.info("%s", text)

    found = [run_audit(own, Losses(folder / f"audit-{name[:SHOWN]}.jsonl"), args.level, tell) for name, own in by_certificate.items()]
    return {"schema": SCHEMA, "folder": str(folder), "share": args.share, "level": args.level, "certificates": found}


def _say(args: argparse.Namespace, report: dict[str, Any]) -> None:
    if args.json:
        args.say(json.dumps(report, ensure_ascii=False))
        return
    for reason, clips in report["not_auditable"].items():
        args.say(f"{clips} drawn clips cannot be audited here: {reason}")
    for each in report["certificates"]:
        low, high = each["clopper_pearson_95"]
        args.say(f"certificate {each['certificate']} (lambda {each['lambda']:g}): {each['promise']}")
        args.say(f"  {each['violations']} of {each['clips']} audited clips violate, rate {low:.3f} to {high:.3f} with 95 %")
        args.say(f"  e-value {each['e_value']:.3g}, most {each['most']:.3g}; the alarm comes at {1 / args.level:g}")
        if each["other_than_delivered"]:
            told = "came out otherwise than delivered (another machine or number of threads): the audit is of clips as rendered here"
            args.say(f"  {each['other_than_delivered']} of them {told}")
        verdict = "no alarm"
        if each["is_alarm"]:
            verdict = f"ALARM: the promise is refuted, wrongly with chance at most {args.level:g}; stop using it, and calibrate again"
        args.say(f"  {verdict}")
    if not report["certificates"]:
        told = f"{report['drawn']} of {report['under_a_certificate']} clips under a certificate were drawn"
        args.say(f"nothing audited: {told}; raise --share, or check --certificate")
