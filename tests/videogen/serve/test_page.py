"""The page: a field for every request field, jobs through the same desk, no file by path, a login where there are keys."""

import base64
import io
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from gradio.utils import get_upload_folder
from PIL import Image

import app
from tests.videogen.serve.fakes import StandIn, services_in, serving
from videogen.adapters import settle
from videogen.config import Request
from videogen.jobs.files import read_jobs
from videogen.media import Encoding, write_clip
from videogen.progress import StopFlag
from videogen.serve import html
from videogen.serve.comparing import psnr
from videogen.serve.figures import Figures
from videogen.serve.forms import form_fields, plain_values, prompts_of
from videogen.serve.handlers import Handlers
from videogen.serve.library import Library
from videogen.serve.reports import Reports
from videogen.serve.worker import Worker

KEY = "page-secret-0123456789"


class Visitor:
    """What handlers need of gr.Request."""

    def __init__(self, username: str | None = None) -> None:
        self.username = username


def page_in(root: Path) -> tuple[Handlers, Library]:
    services = services_in(root)
    figures = Figures(services.store, services.desk.source, services.options.clips, Reports(None))
    handlers, library = Handlers(services, figures), Library(services, figures)
    app.build(handlers, library)
    return handlers, library


def filled(handlers: Handlers, prompt: str, recipe: str = "exact", **more: Any) -> list[Any]:
    given = {"prompt": prompt, "size": "", "seconds": 1.2, "seed": -1, "frames": 0, "steps": 0, "round_size": False} | more
    return [*(given.get(name) for name in handlers.names), [], recipe, more.get("lines", False), more.get("repeats", 1)]


def test_the_form_has_every_field_of_a_request(tmp_path: Path) -> None:
    handlers, _ = page_in(tmp_path)
    assert sorted(handlers.names) == sorted(each.name for each in fields(Request)) and all(each.label for each in form_fields())
    assert plain_values({"seconds": 2.0, "frames": 39, "steps": 0, "seed": 0, "size": ""}) == {"frames": 39, "seed": 0}
    assert prompts_of("a\n\n b \n", is_one_per_line=True) == ["a", "b"]


def test_from_the_form_to_the_gallery_and_back(tmp_path: Path) -> None:
    handlers, library = page_in(tmp_path)
    me, other = Visitor(), Visitor("other")
    told, _ = handlers.submit(me, *filled(handlers, "one\ntwo", lines=True, repeats=2, seed=5))  # type: ignore[arg-type]
    assert "4 in the queue" in told and [job.summary["seed"] for job in handlers.store.waiting()] == [5, 6, 5, 6]
    told, _ = handlers.submit(me, *filled(handlers, "x", size="17x17"))  # type: ignore[arg-type]
    assert 'role="alert"' in told and "size" in told and len(handlers.store.waiting()) == 4
    assert "2 prompts x 2 = 4 clips" in handlers.count(*filled(handlers, "one\ntwo", lines=True, repeats=2))
    first = handlers.store.waiting()[0]
    assert "done" in handlers.act("down")(first.id, me) and handlers.store.waiting()[1].id == first.id
    assert "Not done" in handlers.act("stop")(first.id, other)
    assert "saved" in handlers.edit(first.id, "<b>one</b>", -2, "plain", me)  # type: ignore[arg-type]
    handlers.store.pause(True)
    *shown, state = handlers.tick("", {}, me)  # type: ignore[arg-type]
    assert "paused" in shown[3] and "&lt;b&gt;one" in shown[3] and handlers.tick(shown[5], state, me)[2] == {"__type__": "update"}  # type: ignore[arg-type]
    handlers.store.pause(False)
    Worker(tmp_path, "0", StandIn(), retention_s=10.0, stop=StopFlag()).run(until_idle=True)
    clips, choice = library.gallery("plain", 1, me)  # type: ignore[arg-type]
    assert "1 clips" in clips and [value for _, value in choice["choices"]] == [first.id] and "0 clips" in library.gallery("", 1, other)[0]  # type: ignore[arg-type]
    values = dict(zip(["prompt", "size", "seconds", "seed"], handlers.settings_of(["prompt", "size", "seconds", "seed"])(first.id, me)))
    assert values == {"prompt": "<b>one</b>", "size": "", "seconds": 1.2, "seed": 5}
    assert "Not done" in library.delete(first.id, False, me) and "deleted" in library.delete(first.id, True, me)  # type: ignore[arg-type]
    running = handlers.load(me)  # type: ignore[arg-type]
    assert "done" in running[1] and str(tmp_path) not in "".join(str(each) for each in (*running, library.system()))


def test_a_queue_is_saved_and_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    handlers, _ = page_in(tmp_path / "a")
    me, other = Visitor(), Visitor("other")
    handlers.submit(me, *filled(handlers, "</a><b>é\ntwo", lines=True, repeats=2, seed=5))  # type: ignore[arg-type]
    handlers.submit(me, *filled(handlers, "pictured", image=picture()))  # type: ignore[arg-type]
    told = handlers.save(me)  # type: ignore[arg-type]
    assert "4 jobs" in told and "1 with pictures" in told and "Nothing to save" in handlers.save(other)  # type: ignore[arg-type]
    data = base64.b64decode(told.partition("base64,")[2].partition('"')[0])
    (tmp_path / "queue.jsonl").write_bytes(data)
    assert [raw.values["seed"] for raw in read_jobs(tmp_path / "queue.jsonl")] == [5, 6, 5, 6]
    second, _ = page_in(tmp_path / "b")
    assert second.load_file(data, me) == '<p role="status">4 in the queue</p>'  # type: ignore[arg-type]
    old, new = ([job.settings for job in each.store.waiting() if "image" not in job.settings] for each in (handlers, second))
    assert old == new
    for wrong in (b'{"prompt": "x"}\n{"prompt": "x", "image": "/etc/passwd"}', b'{"prompt": "x", "lora": "/etc/x"}', b"\xff", b"[]", b""):
        assert "Not done" in second.load_file(wrong, me) and len(second.store.waiting()) == 4, wrong  # type: ignore[arg-type]
    assert "queue.jsonl:2: image" in second.load_file(b'{"prompt": "x"}\n{"prompt": "x", "image": "y"}', me)  # type: ignore[arg-type]


def test_a_form_of_many_clips_is_queued_whole_or_not_and_a_pair_keeps_each_recipes_steps(tmp_path: Path) -> None:
    handlers, _ = page_in(tmp_path)
    me = Visitor()
    told, _ = handlers.submit(me, *filled(handlers, f"one\n{'x' * 20_001}", lines=True, image=picture()))  # type: ignore[arg-type]
    assert "Not done: prompt" in told and not handlers.store.waiting() and not list((tmp_path / "uploads").iterdir())
    handlers.desk.read_adapters = lambda recipe: settle(recipe, handlers.desk.source)
    told, _ = handlers.submit_pair(me, *filled(handlers, "one", "turbo", steps=6))  # type: ignore[arg-type]
    found = [(job.summary["recipe"], job.summary["steps"], job.summary["seed"]) for job in handlers.store.waiting()]
    assert [each[:2] for each in found] == [("exact", 6), ("turbo", 4)] and found[0][2] == found[1][2] and "4 (turbo) against 6" in told


def picture() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(buffer, "PNG")
    return buffer.getvalue()


def test_a_pair_is_compared_with_its_timeline(tmp_path: Path) -> None:
    handlers, library = page_in(tmp_path)
    me = Visitor()
    assert "Not done" in handlers.submit_pair(me, *filled(handlers, "one"))[0]  # type: ignore[arg-type]
    assert "2 in the queue" in handlers.submit_pair(me, *filled(handlers, "one", "plain"))[0]  # type: ignore[arg-type]
    Worker(tmp_path, "0", StandIn(), retention_s=10.0, stop=StopFlag()).run(until_idle=True)
    left, right = (update["value"] for update in library.newest_pair(me))  # type: ignore[arg-type]
    videos, numbers = library.compare(left, right, me)  # type: ignore[arg-type]
    assert videos.count("<video") == 2 and "vg-sync" in videos and "not computed here" in numbers
    steps = [{"action": a, "reason": "r", "risk": 0.1, "drift": {"video": 0.2}} for a in ("compute", "reuse")]
    line = html.timeline({"cache": {"steps": steps}})
    assert line.count("<rect x=") == 2 and line.count('fill="url(#vg-hatch)"') == 1 and ">r</text>" in line and "<table" in line
    frames = np.full((5, 32, 32, 3), 100, np.uint8)
    for name, shift in (("a", 0), ("b", 10)):
        write_clip(
            tmp_path / f"{name}.mp4", frames + np.uint8(shift), None, fps=24, sampling_rate=8000, encoding=Encoding(crf=0), comment=""
        )
    curve = psnr(tmp_path / "a.mp4", tmp_path / "b.mp4", 1)
    assert curve is not None and all(abs(value - 28.13) < 1 for value in curve)


def test_the_page_serves_no_file_by_path_and_asks_who_it_is(tmp_path: Path) -> None:
    secret = tmp_path / "clips" / "x.mp4"
    secret.parent.mkdir()
    secret.write_bytes(b"secret")

    def mounted(api: Any, services: Any) -> Any:
        return app.mount(api, services, None)

    with serving(services_in(tmp_path), mounted) as url:
        assert httpx.get(url).status_code == 200 and "videogen" in httpx.get(url).text
        for target in (secret, tmp_path / "queue.sqlite3", Path("/etc/passwd"), Path(app.__file__)):
            for prefix in ("/gradio_api/file=", "/file="):
                answer = httpx.get(f"{url}{prefix}{target}")
                assert answer.status_code in (403, 404) and b"secret" not in answer.content
        assert httpx.get(f"{url}/gradio_api/file=http://127.0.0.1:1/x").status_code in (400, 403, 404)
        assert httpx.get(f"{url}/monitoring/summary").status_code in (403, 404)
    with serving(services_in(tmp_path / "b", keys=(("me", KEY),)), mounted) as url:
        assert httpx.get(f"{url}/config").status_code == 401 and "vg-prompt" not in httpx.get(url).text
        for path in ("upload", "call/submit", "queue/join"):
            assert httpx.post(f"{url}/gradio_api/{path}", files={"files": ("x", b"x")}).status_code == 401, path
        assert httpx.post(f"{url}/login", data={"username": "me", "password": "x"}).status_code == 400
        with httpx.Client(base_url=url) as browser:
            assert browser.post("/login", data={"username": "me", "password": KEY}).status_code == 200
            assert "vg-prompt" in browser.get("/config").text
        codes = [httpx.post(f"{url}/login", data={"username": "me", "password": str(k)}).status_code for k in range(8)]
        assert codes[0] == 400 and codes[-1] == 429, "guesses must run out"


def submitted(url: str, config: Any, file: Any) -> tuple[int, str]:
    """What the page's own endpoint answers to a form with this file as its first frame."""
    known = {each["id"]: each["props"] for each in config["components"]}
    (inputs,) = (each["inputs"] for each in config["dependencies"] if each["api_name"] == "submit")
    special = {"vg-prompt": "from outside", "vg-image": file}
    data = [special.get(known[i].get("elem_id"), known[i].get("value")) for i in inputs]
    answer = httpx.post(f"{url}/gradio_api/run/submit", json={"data": data})
    if answer.status_code == 403:  # the ways through Gradio's queue lead past the same wall
        assert httpx.post(f"{url}/gradio_api/call/submit", json={"data": data}).status_code == 403
    return answer.status_code, answer.text


def test_a_form_takes_uploaded_files_and_nothing_a_client_names(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_bytes(picture())
    services, meta = services_in(tmp_path), {"_type": "gradio.FileData"}
    with serving(services, lambda api, parts: app.mount(api, parts, None)) as url:
        (uploaded,) = httpx.post(f"{url}/gradio_api/upload", files={"files": ("../../x.png", picture())}).json()
        config = httpx.get(f"{url}/config").json()
        assert Path(uploaded).resolve().is_relative_to(Path(get_upload_folder()).resolve())
        climbing = f"{Path(uploaded).parent}/../../../..{tmp_path}/mine.png"
        for path in (f"{tmp_path}/mine.png", "/etc/hostname", climbing, "http://127.0.0.1:1/x.png", "file:///etc/hostname", "x.png"):
            for file in ({"path": path, "meta": meta}, {"path": path}, {"url": path, "meta": meta}, [{"path": path, "meta": meta}]):
                assert submitted(url, config, file)[0] == 403, file
        assert not services.store.jobs() and not services.options.uploads.exists()
        code, told = submitted(url, config, {"path": uploaded, "meta": meta})
    assert code == 200 and "1 in the queue" in told and services.store.jobs()[0].summary["workflow"] == "fl2va"


def test_gradio_is_a_version_without_the_known_holes() -> None:
    import gradio

    assert tuple(int(part) for part in gradio.__version__.split(".")[:2]) >= (6, 31)


@pytest.mark.parametrize("name", ["../x", "nothing"])
def test_reports_are_read_by_listed_name_only(tmp_path: Path, name: str) -> None:
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "bench.md").write_text("# fast")
    reports = Reports(tmp_path / "r")
    assert reports.names() == ["r (bench)"] and reports.text("r (bench)") == "# fast" and reports.text(name) == ""


def test_a_report_of_eval_says_its_figures_and_no_path(tmp_path: Path) -> None:
    values = {"psnr": {"clips": 2, "identical": 0, "mean": {"value": 27.21}}, "ssim": {"clips": 2, "identical": 2, "mean": None}}
    report: dict[str, Any] = {
        "recipes": {"new": {"name": "turbo"}, "reference": {"name": "exact"}},
        "speed_up": {"value": 6.52, "low": None, "high": None},
        "clips": [{"files": {"new": "/home/me/a.mp4"}}] * 2,
        "summary": {name: {"new": found} for name, found in values.items()},
    }
    for name, text in (("a", json.dumps(report)), ("b", json.dumps(report | {"speed_up": None})), ("c", "[]"), ("d", "{}")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "eval.md").write_text("# x\n| 3 s/clip | /home/me/a.mp4 against `/tmp/b.mp4` | https://a.example/x/y")
        (tmp_path / name / "eval.json").write_text(text)
    reports = Reports(tmp_path)
    lines = [("a (eval)", "6.52 times as fast as exact, psnr 27.2, ssim identical (n=2)"), ("b (eval)", "psnr 27.2, ssim identical (n=2)")]
    assert reports.measured("turbo") == lines and reports.measured("exact") == []
    assert reports.text("a (eval)").endswith("| 3 s/clip | a.mp4 against `b.mp4` | https://a.example/x/y")
