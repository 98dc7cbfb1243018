"""The queue keeps what it accepted, in order, under every owner's eyes only, and every job ends exactly once."""

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from videogen.jobs.claims import MAX_ATTEMPTS, Claims, group_lock, is_alive
from videogen.jobs.database import CANCELLED, COMPLETED, FAILED, QUEUED, RUNNING, Job
from videogen.jobs.store import Conflict, Limits, QueueFull, Store


def submit(store: Store, name: str = "a", owner: str = "me", **options: object) -> Job:
    return store.submit(owner, {"prompt": name}, {"prompt": name}, **options)[0]  # type: ignore[arg-type]


def claims_of(store: Store, group: str = "0") -> Claims:
    return Claims(store.database, group, retention_s=100.0)


def names(jobs: list[Job]) -> list[str]:
    return [job.summary["prompt"] for job in jobs]


def test_order_edit_and_owners(tmp_path: Path) -> None:
    store = Store(tmp_path)
    a, b, c = (submit(store, name) for name in "abc")
    other = submit(store, "other", owner="you")
    store.move(c.id, "me", -2)
    store.move(a.id, "me", 5)
    assert names(store.waiting("me")) == ["c", "b", "a"] and names(store.waiting()) == ["c", "b", "a", "other"]
    assert store.edit(b.id, "me", {"prompt": "b2"}, {"prompt": "b2"}).settings == {"prompt": "b2"}
    for act in (store.cancel, store.remove, lambda i, o: store.move(i, o, 1), lambda i, o: store.edit(i, o, {}, {})):
        with pytest.raises(LookupError):
            act(other.id, "me")
    assert store.get(other.id, "me") is None and names(store.jobs("you")) == ["other"]
    page = store.jobs(limit=2)
    assert names(page) == ["other", "c"] and names(store.jobs(limit=9, after=page[-1].id)) == ["b2", "a"]
    with pytest.raises(Conflict):
        store.remove(a.id, "me")


def test_a_claimed_job_reports_ends_once_and_cannot_be_edited(tmp_path: Path) -> None:
    store = Store(tmp_path)
    job, worker = submit(store), claims_of(store)
    taken = worker.claim()
    assert taken is not None and taken.state == RUNNING and taken.attempt == 1 and store.jobs()[0].percent == 0
    assert worker.report(taken, "denoise", 3, 4) and store.jobs()[0].percent == 75
    assert worker.report(taken, "encode", 0, 0) and store.jobs()[0].percent == 99
    with pytest.raises(Conflict):
        store.edit(job.id, "me", {}, {})
    assert worker.complete(taken, {"a": 1}, 10) == COMPLETED and worker.complete(taken, {"a": 2}, 10) == ""
    worker.fail(taken, "broken", "too late")
    done = store.jobs()[0]
    assert (done.percent, done.record, done.bytes) == (100, {"a": 1}, 10) and store.history(job.id) == [QUEUED, RUNNING, COMPLETED]
    assert store.expired(time.time() + 99) == [] and store.expired(time.time() + 101) == [done]
    assert store.remove(job.id, "me").id == job.id and store.jobs() == []


def test_cancel_pause_and_limits(tmp_path: Path) -> None:
    store = Store(tmp_path, Limits(max_waiting=3, max_waiting_per_owner=2, quota_bytes=100))
    worker = claims_of(store)
    a, b = submit(store, "a", size_bytes=40), submit(store, "b", size_bytes=40)
    with pytest.raises(QueueFull, match="queue"):
        submit(store, "c")
    with pytest.raises(QueueFull, match="disk quota"):
        submit(store, "d", owner="you", size_bytes=30)
    store.pause(True)
    assert worker.claim() is None and store.is_paused
    store.pause(False)
    taken = worker.claim()
    assert taken is not None and taken.id == a.id
    assert store.cancel(a.id, "me").cancelling and not worker.report(taken, "denoise", 1, 4)
    worker.fail(taken, "cancelled", "stopped at step 1")
    assert store.cancel(b.id, "me").state == CANCELLED and store.history(a.id) == [QUEUED, RUNNING, CANCELLED]
    assert store.used_bytes() == 0 and store.cancel(a.id, "me").state == CANCELLED
    raced = submit(store, "e")
    taken = worker.claim()
    assert taken is not None
    store.cancel(raced.id)
    assert worker.complete(taken, {}, 1) == CANCELLED


def test_an_idempotency_key_makes_one_job(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.submit("me", {}, {}, key="k", digest="1")
    again = store.submit("me", {}, {}, key="k", digest="1")
    assert first[1] and not again[1] and first[0].id == again[0].id and len(store.jobs()) == 1
    assert store.submit("you", {}, {}, key="k", digest="2")[1]
    with pytest.raises(Conflict, match="Idempotency-Key"):
        store.submit("me", {}, {}, key="k", digest="2")


def test_many_threads_claim_each_job_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    wanted = {submit(store, str(k)).id for k in range(24)}
    seen: list[str] = []

    def work(group: str) -> None:
        with group_lock(tmp_path, group, wait_s=1):
            worker = claims_of(store, group)
            while job := worker.claim():
                assert worker.report(job, "denoise", 1, 1) and worker.complete(job, {}, 0) == COMPLETED
                seen.append(job.id)

    threads = [threading.Thread(target=work, args=(str(k),)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == sorted(wanted)


def _hold(root: str, group: str, pipe: "multiprocessing.connection.Connection") -> None:
    with group_lock(Path(root), group, wait_s=5):
        job = Claims(Store(Path(root)).database, group, retention_s=1).claim()
        pipe.send(None if job is None else job.id)
        time.sleep(60)


def test_a_killed_workers_job_goes_to_the_next_one(tmp_path: Path) -> None:
    store, context = Store(tmp_path), multiprocessing.get_context("fork")
    job = submit(store)
    here, there = context.Pipe()
    process = context.Process(target=_hold, args=(str(tmp_path), "0", there))
    process.start()
    assert here.recv() == job.id
    assert is_alive(tmp_path, "0") and claims_of(store, "1").claim() is None
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    assert not is_alive(tmp_path, "0")
    taken = claims_of(store, "1").claim()
    assert taken is not None and taken.id == job.id and taken.attempt == 2
    claims_of(store, "0").fail(job, "late", "the dead one's hand")  # a stale claim changes nothing
    claims_of(store, "1").let_go(taken)
    for _ in range(MAX_ATTEMPTS - 1):
        assert claims_of(store, "0").claim() is not None
    assert claims_of(store, "0").claim() is None and store.jobs()[0].state == FAILED
    assert store.jobs()[0].error_code == "interrupted" and store.history(job.id)[-1] == FAILED
