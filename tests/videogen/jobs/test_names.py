"""Names are safe, short and distinct whatever the prompt holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videogen.errors import RequestError
from videogen.jobs.names import DEFAULT_TEMPLATE, check_template, distinct, render_name, safe

VALUES = {"index": 1, "id": "1", "seed": 7, "model": "m", "recipe": "exact", "size": "1x1", "frames": 5, "steps": 2, "stem": ""}


@given(st.text(max_size=6000))
def test_any_prompt_makes_a_safe_name(prompt: str) -> None:
    name = render_name(DEFAULT_TEMPLATE, VALUES | {"prompt": prompt})
    assert 0 < len(name.encode()) <= 180
    assert all(character.isalnum() or character in "._-" for character in name) and name.isascii()
    assert name[0] not in ".-" and ".." not in name


@pytest.mark.parametrize("prompt", ["../../etc/passwd", "a/b\\c", 'say "hi"\n', "nul\0byte", "🦊🦊", "x" * 5000, "CON", "   "])
def test_hard_prompts(prompt: str) -> None:
    name = render_name("{prompt}", VALUES | {"prompt": prompt})
    assert "/" not in name and "\0" not in name and 0 < len(name) <= 180


def test_prompts_equal_in_front_get_distinct_names() -> None:
    taken: set[str] = set()
    for tail in ("one", "two", "three"):
        name = distinct(render_name("{prompt:40}", VALUES | {"prompt": "p" * 200 + tail}), taken.__contains__)
        assert name.lower() not in taken
        taken.add(name.lower())
    assert len(taken) == 3


@pytest.mark.parametrize("template", ["{nope}", "{index", "{index:zz}", "a/{index}", "{}", "{prompt.__class__}"])
def test_a_wrong_template_is_refused_at_once(template: str) -> None:
    with pytest.raises(RequestError, match="name template"):
        check_template(template)


def test_safe_never_returns_nothing() -> None:
    assert safe("///") == "clip" and safe("") == "clip"
