"""Blocks whose weights lie in host memory: laid out once, at most two away, at home whatever happens; on a GPU the same clip in less."""

import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.videogen.parallel.worlds import CPU
from videogen import Request
from videogen.load import _building, _sent_home
from videogen.parallel import visits
from videogen.parallel.visits import comes_alone, largest_stack, send_home, settle_down, take_turns
from videogen.parallel.weights import Placement
from videogen.pipeline import open_pipeline

GPU = torch.device("cuda")


class Row(nn.Module):
    """Layers one after another; which of them run is said from outside."""

    def __init__(self, count: int = 4, width: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, 1)

    def forward(self, rows: torch.Tensor, ran: tuple[int, ...]) -> torch.Tensor:
        for number in ran:
            rows = self.layers[number](rows)
        return rows


def away_from(layers: nn.ModuleList) -> Callable[[], list[int]]:
    """Asks which layers' weights are not where they were when this was made."""
    homes = [layer.weight.data_ptr() for layer in layers]  # type: ignore[union-attr]
    return lambda: [number for number, home in enumerate(homes) if layers[number].weight.data_ptr() != home]  # type: ignore[union-attr]


def test_weights_lie_in_one_stretch_of_their_own_size() -> None:
    layer = nn.Linear(96, 64).double()
    twice = [layer.weight, layer.bias, layer.weight]
    wanted = [each.detach().clone() for each in (layer.weight, layer.bias)]
    home = settle_down(twice, CPU)
    assert len(home.memory) == 96 * 64 * 8 + 512  # the bias is 512 bytes; the weight that came twice lies there once
    assert [each.data_ptr() - home.memory.data_ptr() for each in (layer.weight, layer.bias)] == [0, 96 * 64 * 8]
    assert torch.equal(layer.weight, wanted[0]) and torch.equal(layer.bias, wanted[1])
    home.visit(torch.empty_like(home.memory))
    layer.weight.data.zero_()
    home.leave()
    assert torch.equal(layer.weight, wanted[0])  # what was written to a visitor is not taken home
    assert len(settle_down([], CPU).memory) == 0


@pytest.mark.parametrize("ran", [(0, 1, 2, 3), (0, 3), (0,), (2, 0, 1), (3, 3), (1, 3, 0)])
def test_whatever_runs_gives_the_same_and_at_most_two_are_away(ran: tuple[int, ...]) -> None:
    row, given = Row(), torch.randn(2, 3)
    wanted = row(given, ran)
    take_turns(row, [[layer] for layer in row.layers], CPU)
    away, seen = away_from(row.layers), list[list[int]]()
    for layer in row.layers:
        layer.register_forward_pre_hook(lambda *_: seen.append(away()))
    for _ in range(2):
        seen.clear()
        assert torch.equal(row(given, ran), wanted) and away() == []
        assert seen == [[number for number in (now, now + 1) if number < 4] for now in ran]


def test_a_failure_and_a_write_between_forwards_find_all_at_home() -> None:
    row, given = Row(), torch.randn(2, 3)
    take_turns(row, [[layer] for layer in row.layers], CPU)
    away = away_from(row.layers)
    with pytest.raises(IndexError):
        row(given, (0, 1, 9))
    assert away() == []
    stop = row.layers[1].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        row(given, (0, 1))
    stop.remove()
    assert away() == []
    row(given, (0,))  # the next one was under way
    row.layers[1].weight.data.mul_(2)  # type: ignore[union-attr, operator]
    wanted = row.layers[1](row.layers[0](given))
    assert torch.equal(row(given, (0, 1)), wanted)


def test_a_block_that_ran_by_itself_is_sent_home_before_weights_are_written() -> None:
    row, given = Row(), torch.randn(2, 3)
    take_turns(row, [[layer] for layer in row.layers], CPU)
    away = away_from(row.layers)
    handle = row.layers[0].register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(IndexError))
    with pytest.raises(IndexError):
        row.layers[0](given)  # not through its owner, as doctor runs parts of a block
    handle.remove()
    assert away() == [0, 1]
    send_home(nn.Sequential(row))
    assert away() == []


def test_what_cannot_visit_is_refused() -> None:
    row = Row()
    row.layers[2].weight = row.layers[0].weight  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="two blocks"):
        take_turns(row, [[layer] for layer in row.layers], CPU)
    with pytest.raises(MemoryError, match="of host memory"):
        visits._pages(2**60)


class Runtime:
    """CUDA's two functions: says `code`, and remembers what is locked."""

    def __init__(self, code: int) -> None:
        self.code, self.locked = code, dict[int, int]()

    def cudaHostRegister(self, address: int, num_bytes: int, _flags: int) -> int:
        self.locked |= {} if self.code else {address: num_bytes}
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        del self.locked[address]


def test_memory_is_locked_as_long_as_weights_live_there_and_ordinary_memory_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="videogen")
    for code in (0, 1):
        runtime = Runtime(code)
        monkeypatch.setattr(torch.cuda, "cudart", lambda runtime=runtime: runtime)
        layer = nn.Linear(64, 64)
        home = settle_down(layer.parameters(), CPU)
        visits._lock(home, CPU)
        assert runtime.locked == ({} if code else {home.memory.data_ptr(): 64 * 64 * 4 + 512}) and bool(caplog.messages) == bool(code)
        home.visit(torch.empty_like(home.memory))
        home.leave()
        del home
        gc.collect()
        assert runtime.locked == {}


def test_the_largest_stack_is_found_and_the_rest_is_not_marked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Row(), nn.ModuleDict({"more": Row(2, 9)}))
    owner, blocks = largest_stack(model)
    assert owner is model[2]["more"] and blocks == [*owner.layers]  # type: ignore[index, misc]
    take_turns(owner, [[block] for block in blocks], CPU)
    assert {comes_alone(each) for block in blocks for each in block.parameters()} == {True}
    assert sum(map(comes_alone, model.parameters())) == 4
    with pytest.raises(ValueError):
        largest_stack(nn.Linear(1, 1))


def test_what_is_drawn_and_sent_home_is_what_stays() -> None:
    made = []
    for scope in (False, True):
        with _building(CPU, torch.float32):
            if scope:
                with _sent_home():
                    made.append(Row())
            else:
                made.append(Row())
    assert all(torch.equal(*pair) for pair in zip(made[0].parameters(), made[1].parameters()))


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    yield GPU


@pytest.mark.gpu
def test_a_stack_on_a_gpu_computes_the_same_in_the_memory_of_two_blocks(gpu: torch.device) -> None:
    row = Row(16, 2048)
    given, ran = torch.randn(64, 2048, device=gpu), tuple(range(16))
    whole = Row(16, 2048)
    whole.load_state_dict(row.state_dict())
    wanted = whole.to(gpu)(given, ran)
    del whole
    torch.cuda.empty_cache()
    take_turns(row, [[layer] for layer in row.layers], gpu)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(20):  # many rounds in flight: rooms are used again before the device has caught up
        assert torch.equal(row(given, ran), wanted)
        row(given, (0, 5))
    size = 4 * (2048 * 2048 + 2048)
    assert torch.cuda.max_memory_allocated() - before < 2 * size + 14e6 and all(each.device == CPU for each in row.parameters())
    assert all(each.is_pinned() for layer in row.layers for each in layer.parameters())


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["exact", "plain"])
def test_a_clip_on_a_gpu_is_the_same_wherever_weights_live(gpu: torch.device, recipe: str) -> None:
    request = Request("a red ring moves left", size=(160, 96), frames=22, steps=4, seed=1)
    made = []
    for model in ("pocket", "random"):
        for placement in (Placement(), Placement("parked", text="visiting"), Placement("offload", text="offload")):
            pipeline = open_pipeline(model, recipe, device=str(gpu), placement=placement)
            made.append([pipeline.render(request).record["output"] for _ in range(2)])
    assert made[0] == made[1] == made[2] and made[3] == made[4] == made[5] and made[0] != made[3]


@pytest.mark.gpu
def test_page_locked_memory_is_given_back(gpu: torch.device) -> None:
    code = (
        "import torch; from torch import nn; from videogen.parallel.visits import settle_down\n"
        "for _ in range(50):\n"
        "    layer = nn.Linear(8192, 8192); home = settle_down(layer.parameters(), torch.device('cuda')); assert layer.weight.is_pinned()\n"
        "    del layer, home\n"
        "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and int(done.stdout) < 6e6, done.stderr  # kilobytes; fifty layers are 13.4 GB
