"""Job files: every format gives the same jobs; a wrong line is named."""

from pathlib import Path

import pytest

from videogen.errors import RequestError
from videogen.jobs.files import RawJob, read_jobs
from videogen.jobs.plan import make_request


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_four_formats_agree(tmp_path: Path) -> None:
    files = [
        write(tmp_path, "a.jsonl", '{"prompt": "one", "seed": 3}\n\n{"prompt": "two, with comma", "num_frames": 124}\n'),
        write(tmp_path, "a.csv", '\ufeffprompt,seed,frames\none,3,\n"two, with comma",,124\n'),
        write(tmp_path, "a.yaml", "jobs:\n  - prompt: one\n    seed: 3\n  - {prompt: 'two, with comma', frames: 124}\n"),
    ]
    wanted = [("one", 3, None), ("two, with comma", None, 124)]
    for path in files:
        requests = [make_request(raw) for raw in read_jobs(path)]
        assert [(r.prompt, r.seed, r.frames) for r in requests] == wanted
    text = write(tmp_path, "a.txt", "# a comment\n\none\n  two, with comma \n")
    assert [raw.values["prompt"] for raw in read_jobs(text)] == ["one", "two, with comma"]


def test_relative_pictures_start_at_the_job_file(tmp_path: Path) -> None:
    path = write(tmp_path, "j.jsonl", '{"prompt": "p", "image": "pics/a.png"}\n{"prompt": "p", "references": ["/abs/b.png"]}\n')
    first, second = (make_request(raw) for raw in read_jobs(path))
    assert first.image == tmp_path / "pics" / "a.png"
    assert second.references == (Path("/abs/b.png"),)


def test_yaml_matrix_zips_by_default_and_multiplies_on_request(tmp_path: Path) -> None:
    body = "defaults: {steps: 4}\njobs: [a, b]\nmatrix: {seed: [1, 2], frames: [124, 141]}\n"
    zipped = read_jobs(write(tmp_path, "z.yaml", body))
    assert [(r.values["prompt"], r.values["seed"], r.values["frames"]) for r in zipped] == [
        ("a", 1, 124),
        ("a", 2, 141),
        ("b", 1, 124),
        ("b", 2, 141),
    ]
    assert all(raw.values["steps"] == 4 for raw in zipped)
    assert len(read_jobs(write(tmp_path, "p.yaml", body + "pairing: product\n"))) == 8
    with pytest.raises(RequestError, match="equal length"):
        read_jobs(write(tmp_path, "u.yaml", "jobs: [a]\nmatrix: {seed: [1, 2], frames: [124]}\n"))


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.jsonl", '{"prompt": "ok"}\n{"promt": "typo"}\n', "a.jsonl:2: key"),
        ("a.jsonl", '{"prompt": "ok"}\nnot json\n', "a.jsonl:2: line"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: line"),
        ("a.csv", "prompt,colour\nx,red\n", "a.csv:2: key"),
        ("a.csv", "prompt,seed\nx,1,2\n", "a.csv:2: row"),
        ("a.csv", 'prompt\n"open\n', "a.csv"),
        ("a.yaml", "jobs:\n  - prompt: a\n    prompt: b\n", "a.yaml:3"),
        ("a.yaml", "jobs: [\n", "a.yaml:2"),
        ("a.yaml", "jobbs: []\n", "a.yaml: key"),
        ("a.yaml", "!!python/object/apply:os.system ['true']\n", "a.yaml"),
        ("a.txt", "# nothing\n", "job file"),
        ("a.doc", "x", "job file"),
        ("a.jsonl", '{"frames": 124, "num_frames": 124, "prompt": "x"}\n', "a.jsonl:1: key"),
    ],
)
def test_a_wrong_file_names_the_place(tmp_path: Path, name: str, text: str, place: str) -> None:
    with pytest.raises(RequestError, match=place.replace(".", r"\.")):
        read_jobs(write(tmp_path, name, text))


@pytest.mark.parametrize(
    "values",
    [
        {"seed": "x"},
        {"seed": 1.5},
        {"steps": True},
        {"frames": [1]},
        {"seconds": "long"},
        {"size": "96"},
        {"size": "96x64x2"},
        {"size": "96x64", "width": 96},
        {"width": 96},
        {"image": 5},
        {"image": "https://example.com/a.png"},
        {"image": "a\0b"},
        {"round_size": "perhaps"},
    ],
)
def test_a_wrong_value_names_the_place(values: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"^here: "):
        make_request(RawJob({"prompt": "p"} | values, "here"))


def test_spellings_of_good_values() -> None:
    request = make_request(RawJob({"prompt": "p", "size": "96×64", "seed": "-1", "seconds": "5s", "round_size": "yes"}, "here"))
    assert (request.size, request.seed, request.seconds, request.round_size) == ((96, 64), None, 5.0, True)
