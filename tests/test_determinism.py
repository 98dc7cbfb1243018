"""One request is one clip, whichever way it comes and whatever came before."""

import json
from pathlib import Path
from typing import Any

import httpx

import app
from tests.videogen.serve.fakes import services_in, serving
from tests.videogen.serve.test_page import Visitor, filled
from videogen import Request, open_pipeline
from videogen.cli.main import main
from videogen.progress import StopFlag
from videogen.serve.figures import Figures
from videogen.serve.handlers import Handlers
from videogen.serve.library import Library
from videogen.serve.making import PipelineMaker
from videogen.serve.reports import Reports
from videogen.serve.worker import Worker

FIELDS = {"prompt": "a red circle", "size": "96x64", "frames": 22, "steps": 2, "seed": 3}


def digest(record: Any) -> tuple[str, str]:
    """Frames and sound as the model made them."""
    return record["output"]["frames_sha256"], record["output"]["audio_sha256"]


def rendered(model: Path, folder: Path, jobs: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    """The clips of a folder by prompt, after the command line has been through these jobs in it."""
    folder.mkdir(exist_ok=True)
    (folder / "jobs.jsonl").write_text("".join(json.dumps(job) + "\n" for job in jobs))
    assert main(["render", str(folder / "jobs.jsonl"), "--model", str(model), "-o", str(folder / "out"), "-q"]) == 0
    found = (json.loads(path.read_text()) for path in (folder / "out").glob("*.json"))
    return {record["resolved"]["prompt"]: digest(record) for record in found}


def test_one_request_is_one_clip_by_every_way(tiny_model: Path, tmp_path: Path) -> None:
    other = FIELDS | {"prompt": "two blue squares", "size": "64x96"}
    pipeline = open_pipeline(str(tiny_model))
    requests = [Request(**(each | {"size": size})) for each, size in ((FIELDS, (96, 64)), (other, (64, 96)))]  # type: ignore[arg-type]
    first, _, after = (digest(pipeline.render(request).record) for request in (*requests, requests[0]))
    ways = {"after others": after}
    rendered(tiny_model, tmp_path, [other])
    ways["resumed in a batch"] = rendered(tiny_model, tmp_path, [other, FIELDS])["a red circle"]
    services = services_in(tmp_path / "root")
    figures = Figures(services.store, services.desk.source, services.options.clips, Reports(None))
    handlers = Handlers(services, figures)
    app.build(handlers, Library(services, figures))
    with serving(services) as url:
        assert httpx.post(f"{url}/v1/videos", json=FIELDS).status_code == 200
    told, _ = handlers.submit(Visitor(), *filled(handlers, **(FIELDS | {"seconds": 0.0})))  # type: ignore[arg-type]
    assert "in the queue" in told
    maker = PipelineMaker(str(tiny_model), "cpu", tmp_path / "root", offline=True)
    assert Worker(tmp_path / "root", "0", maker, retention_s=10.0, stop=StopFlag()).run(until_idle=True) == 2
    page, api = (digest(job.record) for job in services.store.jobs())
    assert ways | {"api": api, "page": page} == dict.fromkeys([*ways, "api", "page"], first)
