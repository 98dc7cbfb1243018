"""The page in Debian's Chromium with the real pocket model; skipped by name where Chromium or Playwright is not installed.

By hand: `apt-get install chromium && pip install playwright && pytest tests/videogen/serve/test_browser.py`. With
VIDEOGEN_SCREENSHOTS=DIR it also writes pictures of the page at desktop and phone width.
"""

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

CHROMIUM = shutil.which("chromium")
HAS_PLAYWRIGHT = importlib.util.find_spec("playwright") is not None
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: the page was not tried in a browser"),
    pytest.mark.skipif(not HAS_PLAYWRIGHT, reason="playwright is not installed: the page was not tried in a browser"),
]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync", "--autoplay-policy=no-user-gesture-required"]
PROMPT = "a large red circle moves right on a navy background, a low tone"
LONG_MS = 120_000
SHOTS = os.environ.get("VIDEOGEN_SCREENSHOTS")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = tmp_path_factory.mktemp("browser")
    command = [sys.executable, "-m", "videogen", "ui", "--port", str(port), "--root", str(root), "--preview-every", "1"]
    process = subprocess.Popen(command)
    yield f"http://127.0.0.1:{port}/"
    process.terminate()
    process.wait(60)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    profile = tmp_path_factory.mktemp("profile")
    with sync_playwright() as playwright:
        options: dict[str, Any] = {"executable_path": CHROMIUM, "headless": True, "args": FLAGS}
        found = playwright.chromium.launch_persistent_context(str(profile), viewport={"width": 1280, "height": 960}, **options)
        yield found
        found.close()


@pytest.fixture(scope="module")
def page(context: Any, address: str) -> Any:
    found = context.new_page()
    for _ in range(240):
        try:
            found.goto(address)
            break
        except Exception:  # noqa: BLE001 - the server is still starting
            time.sleep(0.5)
    found.wait_for_selector("#vg-prompt textarea", timeout=LONG_MS)
    return found


def fill(page: Any, prompt: str, steps: int, frames: int = 22) -> None:
    page.get_by_role("tab", name="Render").click()
    page.fill("#vg-prompt textarea", prompt)
    if not page.locator("#vg-steps input").is_visible():
        page.locator("#vg-more button.label-wrap").click()
    page.fill("#vg-steps input", str(steps))
    page.fill("#vg-frames input", str(frames))
    page.keyboard.press("Tab")


def job_shown(page: Any) -> str:
    return str(page.get_attribute("#vg-status", "data-job") or "")


def submit(page: Any) -> str:
    """Add to queue, and wait until the page shows the new job."""
    before = job_shown(page)
    page.click("#vg-submit")
    job = "const job = (document.querySelector('#vg-status') || {dataset: {}}).dataset.job;"
    page.wait_for_function(f"before => {{ {job} return job && job !== before; }}", arg=before)
    return job_shown(page)


def wait_state(page: Any, state: str) -> None:
    page.wait_for_selector(f'#vg-status[data-state="{state}"]', timeout=LONG_MS)


def shoot(page: Any, name: str) -> None:
    """A picture of the page, small enough for the repository."""
    if SHOTS is None:
        return
    path = Path(SHOTS) / f"{name}.png"
    page.screenshot(path=str(path))
    with Image.open(path) as image:
        image.convert("RGB").quantize(64).save(path, optimize=True)


def percents(page: Any, seconds: float) -> list[int]:
    seen: list[int] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and page.get_attribute("#vg-status", "data-state") in ("queued", "in_progress"):
        value = int(page.get_attribute("#vg-progress [role=progressbar]", "aria-valuenow") or 0)
        seen += [value] if not seen or value != seen[-1] else []
        page.wait_for_timeout(250)
    return seen


def is_playing(page: Any, selector: str) -> bool:
    """Whether the player really moves when it is started."""
    page.wait_for_selector(selector)
    page.eval_on_selector(selector, "v => { v.muted = true; return v.play(); }")
    page.wait_for_function("s => { const v = document.querySelector(s); return v.readyState >= 2 && v.currentTime > 0.2; }", arg=selector)
    return bool(page.eval_on_selector(selector, "v => v.videoWidth === 160 && !v.error"))


def test_prompt_to_playing_clip_through_a_reload(page: Any) -> None:
    fill(page, PROMPT, 24, frames=39)
    page.wait_for_function("document.querySelector('#vg-count').innerText.includes('39 frames')")
    job = submit(page)
    wait_state(page, "in_progress")
    first = percents(page, 6)
    page.reload()
    page.wait_for_selector(f'#vg-status[data-job="{job}"]', timeout=LONG_MS)
    assert page.get_attribute("#vg-status", "data-state") == "completed" or "Running clip found" in page.inner_text("#vg-status")
    page.wait_for_selector("#vg-player img, #vg-player video", timeout=LONG_MS)
    shoot(page, "page-rendering")
    seen = first + percents(page, 200)
    wait_state(page, "completed")
    assert len(set(seen)) >= 3 and seen == sorted(seen), seen
    assert is_playing(page, "#vg-player video") and job_shown(page) == job
    shoot(page, "page-render")


def test_a_reference_picture_and_its_settings_back(page: Any, tmp_path: Path) -> None:
    Image.new("RGB", (96, 96), (200, 30, 30)).save(tmp_path / "object.png")
    page.locator("#vg-pictures button.label-wrap").click()
    page.set_input_files("#vg-references input[type=file]", str(tmp_path / "object.png"))
    page.wait_for_selector("#vg-references :text('object.png')", timeout=LONG_MS)
    fill(page, "the same object moves left", 2)
    submit(page)
    wait_state(page, "completed")
    assert "ref2va" in page.inner_text("#vg-progress")
    page.fill("#vg-prompt textarea", "something else")
    page.click("#vg-use")
    page.wait_for_function("document.querySelector('#vg-prompt textarea').value === 'the same object moves left'")
    assert page.input_value("#vg-steps input") == "2" and page.input_value("#vg-frames input") == "22"
    assert page.input_value("#vg-seed input") in page.inner_text("#vg-progress")


def test_cancel_stops_a_running_clip(page: Any) -> None:
    page.reload()
    page.wait_for_selector("#vg-status", timeout=LONG_MS)
    fill(page, "a long one", 600)
    submit(page)
    page.wait_for_function("/step [1-9]/.test(document.querySelector('#vg-status').innerText)", timeout=LONG_MS)
    page.click("#vg-cancel")
    wait_state(page, "cancelled")


def test_dense_beside_turbo(page: Any) -> None:
    fill(page, PROMPT, 0)
    page.fill("#vg-seed input", "7")
    page.locator("#vg-recipe label", has_text="turbo:").click()
    page.wait_for_selector("#vg-recipe-told :text('published in docs/lora.md')")
    page.click("#vg-both")
    page.wait_for_selector("#vg-message :text('2 in the queue, steps 4 (turbo) against 49 (exact)')")
    page.get_by_role("tab", name="Queue").click()
    page.wait_for_selector("#vg-queue .vg-card", timeout=LONG_MS)
    shoot(page, "page-queue")
    page.wait_for_selector("#vg-queue :text('Nothing is waiting')", timeout=LONG_MS)
    page.get_by_role("tab", name="Compare").click()
    page.click("#vg-pair")
    page.wait_for_selector("#vg-numbers table", timeout=LONG_MS)
    assert page.locator("#vg-compared video").count() == 2
    assert is_playing(page, "#vg-compared figure:nth-of-type(1) video")
    pair = "const [a, b] = document.querySelectorAll('#vg-compared video');"
    page.wait_for_function(f"() => {{ {pair} return !b.paused && Math.abs(a.currentTime - b.currentTime) < 0.3; }}")
    numbers = page.inner_text("#vg-numbers")
    assert "PSNR of the stored files" in numbers and "[measured on this queue]" in numbers and "[published in docs/lora.md]" in numbers
    shoot(page, "page-compare")
    page.reload()
    page.wait_for_selector("#vg-recipe label:has-text('turbo:'):has-text('measured on this queue')", timeout=LONG_MS)


def test_a_queue_goes_through_a_file(page: Any, tmp_path: Path) -> None:
    page.get_by_role("tab", name="Queue").click()
    page.click("#vg-pause")
    page.wait_for_selector("#vg-queue-message :text('paused')")
    fill(page, "saved and loaded", 2)
    submit(page)
    page.get_by_role("tab", name="Queue").click()
    page.locator("#vg-files button.label-wrap").click()
    page.click("#vg-save-queue")
    with page.expect_download() as download:
        page.click("#vg-saved a")
    path = tmp_path / "queue.jsonl"
    download.value.save_as(path)
    assert path.read_text().count('"saved and loaded"') == 1
    page.set_input_files("#vg-queue-file input[type=file]", str(path))
    page.wait_for_selector("#vg-queue-file :text('⇣')", timeout=LONG_MS)  # the arrow of what was uploaded
    page.click("#vg-load-queue")
    page.wait_for_selector("#vg-queue-message :text('1 in the queue')")
    page.wait_for_function("document.querySelectorAll('#vg-queue .vg-card').length === 2")
    page.click("#vg-go")
    page.wait_for_selector("#vg-queue :text('Nothing is waiting')", timeout=LONG_MS)


def test_the_doctor_looks_while_the_page_goes_on(page: Any) -> None:
    page.get_by_role("tab", name="System").click()
    page.click("#vg-doctor-ask")
    page.wait_for_selector('#vg-doctor [data-state="wanted"], #vg-doctor [data-state="running"]')
    page.get_by_role("tab", name="Gallery").click()
    page.click("#vg-gallery-show")
    page.wait_for_selector("#vg-gallery video", timeout=5000)  # other tabs answer meanwhile
    page.get_by_role("tab", name="System").click()
    page.wait_for_selector('#vg-doctor [data-state="done"]', timeout=LONG_MS)
    told = page.inner_text("#vg-doctor")
    assert "recipe exact" in told and "video vae" in told.lower() and "Attention candidates" in told
    shoot(page, "page-system")


def test_a_second_browser_on_a_phone_finds_it_all(context: Any, address: str) -> None:
    phone = context.new_page()
    phone.set_viewport_size({"width": 390, "height": 844})
    phone.goto(address)
    phone.wait_for_selector('#vg-status[data-state="completed"]', timeout=LONG_MS)
    width = phone.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, f"the page is {width} pixels wide on a phone of 390"
    shoot(phone, "page-phone")
    phone.close()
