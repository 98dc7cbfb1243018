"""A real Ray cluster of two local nodes, one of which is taken away amid the clips; needs `pip install videogen[ray]`, so by hand:

`python -m tests.videogen.parallel.ray_trial [TRIALS]`. The renderer is a stand-in; actors, journal and files are the real ones.
"""

import random
import sys
import tempfile
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from tests.videogen.jobs.fakes import FakeRenderer, settle_prompts
from videogen.config import Recipe
from videogen.jobs.journal import locked, read_journal
from videogen.jobs.run import Renderer, Summary
from videogen.media import Encoding, probe
from videogen.parallel.crew import Driver
from videogen.parallel.ray_crew import RayCrew, connect
from videogen.progress import StopFlag


def make_opener(step_s: float) -> partial[Renderer]:
    """Opens the stand-in, on whatever node it is called."""
    return partial(_open, step_s)


def _open(step_s: float, recipe: Recipe) -> Renderer:
    return FakeRenderer(step_s=step_s)


def run(folder: Path, crew: RayCrew, workers: int, count: int) -> tuple[Summary, int]:
    """The clips of one folder over a crew; also how many workers were lost."""
    with locked(folder):
        journal = read_journal(folder)
        clips = settle_prompts(folder, journal, [{"prompt": f"clip {k}", "seed": k} for k in range(count)])
        driver = Driver(crew, workers, journal, lambda *_: None)
        return driver.run(clips, StopFlag()), driver.lost


def main(trials: int) -> None:
    """Each trial: 10 clips on two nodes; the second goes after a random while."""
    rng, counts = random.Random(5), Counter[str]()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    nodes = 1
    for _ in range(trials):
        second = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        resources = connect(cluster.address)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            crew = RayCrew(partial(make_opener, 0.5), folder, Encoding(), gpus=0)
            timer = threading.Timer(rng.uniform(4.0, 9.0), cluster.remove_node, (second, False))
            timer.start()
            summary, lost = run(folder, crew, 2, 10)
            timer.join()
            files = sorted(folder.glob("*.mp4"))
            dones = (folder / "run.jsonl").read_text().count('"event": "done"')
            whole = summary.count("done") == len(files) == dones == 10 and all(probe(path).frames == 5 for path in files)
        counts += Counter({"trials": 1, "every clip once": int(whole), "workers lost": lost})
        nodes = max(nodes, int(resources.get("CPU", 0)))
        sys.stdout.write(f"{dict(counts)}, most nodes {nodes}\n")
        sys.stdout.flush()
        time.sleep(1)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
