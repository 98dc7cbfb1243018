"""The options of sparse attention as frozen values, checked when made; imports no torch and attaches nothing."""

from dataclasses import dataclass

from videogen.checks import check_flag
from videogen.errors import bad

TAILS = ("variance", "mean", "none")
BACKENDS = ("auto", "triton", "flex", "gather")


def _check_share(what: str, value: object, *, has_zero: bool = True) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= 1 or (value == 0 and not has_zero):  # type: ignore[operator]
        raise bad(what, value, "a share from 0 to 1" if has_zero else "a share above 0, up to 1", f"change {what}")


def _check_count(what: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise bad(what, value, f"a whole number of at least {least}", f"change {what}")


def _check_sizes(what: str, values: object, count: int) -> None:
    if values is None:
        return
    if not isinstance(values, tuple) or len(values) != count:
        raise bad(what, values, f"{count} whole numbers", f"change {what}")
    for value in values:
        _check_count(what, value, 1)


@dataclass(frozen=True, slots=True)
class Guard:
    """How sparse attention is watched: relative L2 of the attention output against exact rows.

    Every `every` sparse forwards a fifth of the layers is compared on `rows` video rows (all layers at their first). A head
    above `head` is widened, then dense; a layer above `layer` on average after that is dense; with more than the share
    `request` of layers dense, the rest of the request is.
    """

    every: int = 5
    rows: int = 64
    head: float = 0.25
    layer: float = 0.20
    request: float = 0.2

    def __post_init__(self) -> None:
        _check_count("sparse guard every", self.every, 1)
        _check_count("sparse guard rows", self.rows, 1)
        for name in ("head", "layer", "request"):
            _check_share(f"sparse guard {name}", getattr(self, name))


@dataclass(frozen=True, slots=True)
class SparseAttention:
    """Sparse attention of a recipe. `budget` is the share of video key blocks computed exactly; None is off.

    tail: what stands for the other blocks. dense_first: share of the forwards that stay dense at the beginning; dense_last:
    forwards at the end. refresh: sparse forwards that share one selection. tile (t, h, w) orders the rows, block (query, key)
    cuts them, min_rows is the shortest sequence worth it; None lets the back end decide. Text, sound and conditioning rows
    are exact both ways in any case. on_unsupported: `dense` (said in the record) or `error`.
    """

    budget: float | None = None
    tail: str = "variance"
    dense_first: float = 0.2
    dense_last: int = 0
    per_head: bool = True
    refresh: int = 1
    tile: tuple[int, int, int] | None = None
    block: tuple[int, int] | None = None
    min_rows: int | None = None
    backend: str = "auto"
    guard: Guard | None = Guard()
    on_unsupported: str = "dense"

    def __post_init__(self) -> None:
        if self.budget is not None:
            _check_share("sparse budget", self.budget, has_zero=False)
        _check_share("sparse dense_first", self.dense_first)
        check_flag("sparse per_head", self.per_head)
        if self.guard is not None and not isinstance(self.guard, Guard):
            raise bad("sparse guard", self.guard, "a Guard, or None", "change sparse guard")
        _check_count("sparse dense_last", self.dense_last, 0)
        _check_count("sparse refresh", self.refresh, 1)
        _check_sizes("sparse tile", self.tile, 3)
        _check_sizes("sparse block", self.block, 2)
        if self.min_rows is not None:
            _check_count("sparse min_rows", self.min_rows, 0)
        choices = {"tail": TAILS, "backend": BACKENDS, "on_unsupported": ("dense", "error")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise bad(f"sparse {name}", getattr(self, name), f"one of {', '.join(known)}", f"change {name}")

    @property
    def is_on(self) -> bool:
        """Whether anything is attached at all."""
        return self.budget is not None


OFF = SparseAttention()
