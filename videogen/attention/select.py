"""Which implementation attends, over which blocks, or why a request stays dense: decided on plain values."""

from dataclasses import dataclass

from videogen.attention.options import SparseAttention
from videogen.errors import EnvironmentFault, say

MIN_ROWS = 16_384  # on a GPU; below, routing costs what skipping saves
MIN_BLOCKS = 8  # key blocks: with fewer there is nothing to choose from
TRITON_DTYPES = ("float16", "bfloat16")
POWERS = (16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides which implementation can run. capability is CUDA's (major, minor), None elsewhere."""

    device: str
    capability: tuple[int, int] | None
    has_triton: bool
    dtype: str
    head_dim: int
    heads: int
    ring: int = 1
    ulysses: int = 1
    processor: str = ""  # of attention, where it is neither diffusers' own nor brings `project`


@dataclass(frozen=True, slots=True)
class Choice:
    """backend is `triton`, `flex`, `gather` or `dense`; reason says why dense. Rows before `first` are sinks."""

    backend: str
    reason: str = ""
    tile: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int] = (1, 1)
    first: int = 0

    @property
    def is_sparse(self) -> bool:
        """Whether anything is skipped."""
        return self.backend != "dense"


def choose(options: SparseAttention, machine: Machine, *, first: int, rows: int, grid: tuple[int, int, int]) -> Choice:
    """The implementation for a sequence of `rows` of which those from `first` on are video rows on `grid`.

    Raises EnvironmentFault where sparse attention cannot run and `on_unsupported` is `error`; too short a sequence never raises.
    """
    if not options.is_on:
        return Choice("dense", "off")
    if reason := _obstacle(options, machine, first, rows, grid):
        if options.on_unsupported == "error":
            raise EnvironmentFault(say("sparse attention", reason, "what it can run on", "drop --sparse-budget, or allow dense"))
        return Choice("dense", reason)
    backend = _backend(options, machine)
    tile, block, least = _sizes(options, backend, machine)
    if rows < least:
        return Choice("dense", f"short: {rows} rows, worth it from {least}")
    if backend == "flex":  # whole blocks of sinks
        first = -(-first // block[0]) * block[0]
    if (rows - first) < MIN_BLOCKS * block[1]:
        return Choice("dense", f"short: {rows - first} video rows are fewer than {MIN_BLOCKS} key blocks of {block[1]}")
    return Choice(backend, "", tile, block, first)


def _backend(options: SparseAttention, machine: Machine) -> str:
    if options.backend != "auto":
        return options.backend
    return "triton" if machine.device == "cuda" else "gather"


def _sizes(options: SparseAttention, backend: str, machine: Machine) -> tuple[tuple[int, int, int], tuple[int, int], int]:
    """Tile, block and shortest sequence: the options' own, else what fits the implementation (wide blocks are faster on Hopper)."""
    is_hopper = machine.capability is not None and machine.capability[0] == 9
    tile, block, least = {
        "triton": ((4, 4, 4), (128, 128 if is_hopper else 64), MIN_ROWS),
        "flex": ((4, 4, 4), (128, 128), MIN_ROWS),
        "gather": ((8, 2, 2), (32, 16), 1024),
    }[backend]
    least = least if options.min_rows is None else options.min_rows
    return options.tile or tile, options.block or block, least


def _obstacle(options: SparseAttention, machine: Machine, first: int, rows: int, grid: tuple[int, int, int]) -> str:
    """Why nothing sparse can run here, or an empty text."""
    if first + grid[0] * grid[1] * grid[2] != rows:
        return f"video rows from {first} to {rows} are no grid of {'x'.join(map(str, grid))}"
    if machine.processor:
        return f"attention processor {machine.processor}: it does not say how it projects"
    if machine.ring > 1:
        return f"ring attention over {machine.ring} devices: a device sees no whole sequence to choose from; Ulysses works"
    if machine.heads % machine.ulysses:
        return f"{machine.heads} heads over {machine.ulysses} devices"
    backend = _backend(options, machine)
    block = _sizes(options, backend, machine)[1]
    if backend == "gather":
        return "" if machine.device in ("cpu", "cuda") else f"device {machine.device}: untried"
    if backend == "flex":
        wrong = block != (128, 128)
        return f"flex on {machine.device}" if machine.device != "cuda" else f"flex with blocks {block}" if wrong else ""
    return _triton_obstacle(machine, block)


def _triton_obstacle(machine: Machine, block: tuple[int, int]) -> str:
    if not machine.has_triton:
        return "triton is not installed"
    if machine.capability is None or machine.capability < (8, 0):
        return f"the Triton kernel on {machine.device} {machine.capability or ''}".rstrip() + ": needs compute capability 8.0"
    if machine.dtype not in TRITON_DTYPES:
        return f"the Triton kernel in {machine.dtype}: needs float16 or bfloat16"
    if machine.head_dim not in POWERS:
        return f"the Triton kernel with heads of {machine.head_dim}: needs a power of two from 16 to 256"
    if block[0] not in POWERS or block[1] not in POWERS:
        return f"the Triton kernel with blocks {block}: needs powers of two from 16 to 256"
    return ""
