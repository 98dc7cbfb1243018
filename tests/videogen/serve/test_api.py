"""The real OpenAI client against the server: states that are true, errors that name the field, aborts that stop, clips by range."""

import io
import json
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from tests.videogen.serve.fakes import CLIP, services_in, serving, working
from videogen.jobs.database import COMPLETED, QUEUED, RUNNING
from videogen.jobs.store import Limits
from videogen.serve.api import Services

warnings.filterwarnings("ignore", message=".*Sora.*")


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Services:
    return services_in(tmp_path_factory.mktemp("api"), abort_wait_s=5.0)


@pytest.fixture(scope="module")
def address(services: Services) -> Iterator[str]:
    with working(services.options.root), serving(services) as url:
        yield url


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(api_key="none", base_url=f"{address}/v1", max_retries=0)


def finished(client: openai.OpenAI, video_id: str) -> Any:
    for _ in range(400):
        video = client.videos.retrieve(video_id)
        if video.status in ("completed", "failed"):
            return video
        time.sleep(0.02)
    raise AssertionError(video)


def picture(kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), "red").save(buffer, kind)
    return buffer.getvalue()


def test_a_clip_from_prompt_to_bytes(client: openai.OpenAI, services: Services) -> None:
    video = client.videos.create(prompt="a red circle", model="pocket", seconds="1", extra_body={"steps": 4, "seed": 9})  # type: ignore[arg-type]
    assert (video.object, video.status, video.progress, video.size, video.seconds) == ("video", "queued", 0, "160x96", "1.625")
    done = finished(client, video.id)
    assert (done.status, done.progress, done.error) == ("completed", 100, None) and done.expires_at > done.completed_at >= done.created_at
    assert done.extra["seed"] == 9 and done.extra["frames"] == 39 and done.extra["notes"]
    assert client.videos.download_content(video.id).read() == CLIP + video.id.encode()
    assert json.loads(client.videos.download_content(video.id, variant="sidecar").read())["status"] == "completed"  # type: ignore[arg-type]
    assert services.store.history(video.id) == [QUEUED, RUNNING, COMPLETED]
    assert client.videos.delete(video.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(video.id)
    assert not list(services.options.clips.glob(f"{video.id}*"))


def test_pictures_are_kept_under_names_of_ours(client: openai.OpenAI, services: Services, address: str) -> None:
    video = client.videos.create(prompt="it moves", input_reference=("../../evil.png", picture("JPEG"), "image/png"))
    assert finished(client, video.id).extra["workflow"] == "fl2va"
    files = [("references", ("a", picture())), ("references", ("b", picture("BMP")))]
    answer = httpx.post(f"{address}/v1/videos", data={"prompt": "the same object"}, files=files)
    assert answer.status_code == 200 and answer.json()["extra"]["workflow"] == "ref2va"
    names = {path.name for path in services.options.uploads.iterdir()}
    assert len(names) == 3 and all(len(name) == 36 and name.endswith(".png") for name in names)
    client.videos.delete(video.id)
    assert len(list(services.options.uploads.iterdir())) == 2


BAD = [
    ({"prompt": " "}, "prompt"),
    ({"size": "17x33"}, "size"),
    ({"seconds": "99"}, "seconds"),
    ({"steps": "many"}, "steps"),
    ({"seed": -7}, "seed"),
    ({"model": "sora-2"}, "model"),
    ({"recipe": "magic"}, "recipe"),
    ({"output_path": "/tmp/x"}, "output_path"),
    ({"num_frames": 39, "frames": 39}, "frames"),
    ({"lora": "/etc/passwd"}, "lora"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"input_reference": {"image_url": "http://169.254.169.254/"}}, "input_reference"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_an_error_names_its_field(address: str, fields: dict[str, Any], param: str) -> None:
    answer = httpx.post(f"{address}/v1/videos", json={"prompt": "x"} | fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param and "got" in answer.json()["error"]["message"]


def test_other_refusals(address: str) -> None:
    url = f"{address}/v1/videos"
    assert httpx.post(url, content="{", headers={"content-type": "application/json"}).status_code == 400
    assert httpx.post(url, content="x", headers={"content-type": "text/plain"}).status_code == 415
    assert [httpx.get(url, params={"limit": n}).status_code for n in ("0", "101", "x", "5")] == [400, 400, 400, 200]
    assert httpx.get(f"{url}/video_none").status_code == httpx.delete(f"{url}/video_none").status_code == 404
    assert httpx.get(f"{address}/health").json() == {"status": "ok", "workers": 1}
    metrics = httpx.get(f"{address}/metrics").text
    assert 'videogen_jobs{state="queued"}' in metrics and 'status="4xx"' in metrics


def test_delete_stops_a_running_clip_and_says_so(client: openai.OpenAI, services: Services) -> None:
    video = client.videos.create(prompt="slow one")
    while client.videos.retrieve(video.id).status == "queued":
        time.sleep(0.01)
    with pytest.raises(openai.ConflictError):
        client.videos.download_content(video.id)
    gone = client.videos.delete(video.id)
    assert gone.deleted and gone.aborted and gone.status == "failed"  # type: ignore[attr-defined]
    kept = client.videos.retrieve(video.id)
    assert kept.status == "failed" and kept.error is not None and kept.error.code == "cancelled" and kept.extra["cancelled"]
    after = client.videos.create(prompt="fail please")
    assert finished(client, after.id).error.message == "no luck"


def test_idempotency_range_and_events(client: openai.OpenAI, address: str) -> None:
    body, key = {"prompt": "once"}, {"Idempotency-Key": "k1"}
    first, again = (httpx.post(f"{address}/v1/videos", json=body, headers=key) for _ in range(2))
    assert first.json()["id"] == again.json()["id"] and again.headers["idempotent-replay"] == "true"
    assert httpx.post(f"{address}/v1/videos", json={"prompt": "other"}, headers=key).status_code == 409
    video_id, seen = first.json()["id"], []
    with httpx.stream("GET", f"{address}/v1/videos/{video_id}/events") as events:
        seen = [json.loads(line[6:]) for line in events.iter_lines() if line.startswith("data: ")]
    order = ["queued", "in_progress", "completed"]
    assert seen[-1]["status"] == "completed" and [order.index(e["status"]) for e in seen] == sorted(order.index(e["status"]) for e in seen)
    part = httpx.get(f"{address}/v1/videos/{video_id}/content", headers={"range": "bytes=4-7"})
    assert (part.status_code, part.content, part.headers["content-type"]) == (206, b"ftyp", "video/mp4")
    assert httpx.get(f"{address}/v1/videos/{video_id}/content", headers={"range": "bytes=999999-"}).status_code == 416
    page = client.videos.list(limit=1)
    assert page.has_more and page.data[0].id == video_id


def test_many_clients_lose_nothing_and_see_no_state_go_back(tmp_path: Path) -> None:
    services = services_in(tmp_path)
    order, faults, ids = ["queued", "in_progress", "completed"], [], []
    with working(tmp_path), working(tmp_path, "1"), serving(services) as url:

        def visit(number: int) -> None:
            with httpx.Client(base_url=url) as visitor:
                mine = [visitor.post("/v1/videos", json={"prompt": f"{number} {k}"}).json()["id"] for k in range(3)]
                ids.extend(mine)
                last = dict.fromkeys(mine, 0)
                while any(state < 2 for state in last.values()):
                    for each in mine:
                        state = order.index(visitor.get(f"/v1/videos/{each}").json()["status"])
                        faults.extend([each] if state < last[each] else [])
                        last[each] = state
                    time.sleep(0.02)

        threads = [threading.Thread(target=visit, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not faults and len(set(ids)) == 24
    assert {tuple(services.store.history(each)) for each in ids} == {(QUEUED, RUNNING, COMPLETED)}
    assert all((services.options.clips / f"{each}.mp4").read_bytes() == CLIP + each.encode() for each in ids)


def test_limits_refuse_with_a_time_to_wait(tmp_path: Path) -> None:
    limits = Limits(max_waiting=1)
    with serving(services_in(tmp_path, limits=limits, max_submits_per_minute=9)) as url:
        answers = [httpx.post(f"{url}/v1/videos", json={"prompt": "x"}) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 429, 429, 429] and all("retry-after" in a.headers for a in answers[1:])
    assert "queue" in answers[1].json()["error"]["message"] and "rate" in answers[3].json()["error"]["message"]
