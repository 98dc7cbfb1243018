"""A Wan model behind the API and the page: its own sizes and lengths, guidance, a clip from the queue; what is H3's is refused by name."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.videogen.families.wan_toy import save
from videogen.adapters import settle
from videogen.errors import RequestError
from videogen.jobs.database import COMPLETED
from videogen.parallel.weights import Placement
from videogen.progress import StopFlag
from videogen.serve.api import Services
from videogen.serve.assemble import make_services
from videogen.serve.desk import Desk
from videogen.serve.forms import lengths, sizes
from videogen.serve.making import PipelineMaker
from videogen.serve.options import ServeOptions
from videogen.serve.preview import previews
from videogen.serve.worker import Worker
from videogen.source import find_model, open_family

TINY: dict[str, Any] = {"prompt": "a fox", "size": "64x32", "frames": 5, "steps": 8, "seed": 3, "recipe": "plain"}


def served(model: Path, root: Path) -> Services:
    options, source = ServeOptions(root=root), find_model(str(model))
    return make_services(options, lambda store: Desk(store, source, open_family(source), options, lambda recipe: settle(recipe, source)))


def test_a_clip_of_two_experts_comes_out_of_the_queue(tmp_path: Path) -> None:
    model = save(tmp_path / "two", "two")
    services = served(model, tmp_path / "root")
    good, _ = services.desk.submit("me", TINY | {"negative_prompt": "blur", "guidance": "4,3"})
    other, _ = services.desk.submit("me", TINY | {"guidance": 2.5})
    assert (good.summary["workflow"], good.summary["fps"], good.summary["request"]["guidance"]) == ("t2v", 16, "4,3")
    waiting = Placement("offload-idle", text="visiting")
    maker = PipelineMaker(str(model), "cpu", tmp_path / "root", offline=True, around=previews(1), placement=waiting)
    assert Worker(tmp_path / "root", "0", maker, retention_s=10.0, stop=StopFlag()).run(until_idle=True) == 2
    jobs = [services.store.get(job.id) for job in (good, other)]
    for job, guidance in zip(jobs, ([4.0, 3.0], [2.5, 2.5])):
        assert job is not None and job.state == COMPLETED and job.record["resolved"]["guidance"] == guidance
        assert job.record["output"]["audio_codec"] is None and job.record["placement"]["weights"] == "offload-idle"
    with pytest.raises(RequestError, match="MiniMax-H3"):
        maker.examine()
    refused = [({"guidance": "1,3"}, "guidance"), ({"guidance": "x"}, "guidance"), ({"guidance": 1, "negative_prompt": "x"}, "negative")]
    for wrong, told in refused:
        with pytest.raises(RequestError, match=told):
            services.desk.submit("me", TINY | wrong)
    again = services.desk.duplicate("me", good.id, {"seed": 4})
    assert again.summary["request"] | {"seed": 3} == good.summary["request"]


def test_the_form_offers_what_the_model_can_make(tmp_path: Path) -> None:
    model = save(tmp_path / "5b", "5b")
    desk = served(model, tmp_path / "root").desk
    least, usual, most = lengths(desk.family)
    assert (least, usual, most) == (0.3, 5.0, 20.1)
    for value in [each for _, each in sizes(desk.family)] + [""]:
        for seconds in (least, usual, most):
            asked = {"prompt": "a", "size": value, "seconds": seconds}
            assert desk.check({name: each for name, each in asked.items() if each != ""}, {}).summary["notes"] is not None
    picture = tmp_path / "a.png"
    Image.new("RGB", (64, 64)).save(picture)
    assert desk.check({"prompt": "a"}, {"image": [picture.read_bytes()]}).summary["workflow"] == "i2v"
    with pytest.raises(RequestError, match="no reference workflow"):
        desk.check({"prompt": "a"}, {"references": [picture.read_bytes()]})
