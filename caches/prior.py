"""How the residuals of one schedule's steps resemble each other, measured once, and the best linear prediction that follows; pure.

With the inner products G of a residual at every two steps (summed over a few clips' uncached runs), the combination of the computed
steps nearest to step t in the mean square is `G[known, known]^-1 G[known, t]`, and what it misses is known beforehand: that is the
normal equation of linear prediction (Wiener; kriging in geostatistics). No polynomial has to be assumed.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA = "videogen.cache-prior/1"
RIDGE = 1e-10  # of a step's own square: what rounding leaves of equal steps

Gram = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Prior:
    """Inner products of every two steps (N x N for N forwards), by channel: of the probe, and of what a reused step replaces.

    sigmas are each channel's at those steps, without the last 0; clips is how many were summed.
    """

    sigmas: Mapping[str, tuple[float, ...]]
    probe: Mapping[str, Gram]
    rest: Mapping[str, Gram]
    clips: int

    def __post_init__(self) -> None:
        for channel, sigmas in self.sigmas.items():
            for kind in (self.probe, self.rest):
                gram = kind.get(channel, ())
                if len(gram) != len(sigmas) or any(len(row) != len(sigmas) for row in gram):
                    raise ValueError(
                        f"cache prior {channel}: got {len(gram)} steps, expected {len(sigmas)} by {len(sigmas)}; measure again"
                    )
                if not all(math.isfinite(value) for row in gram for value in row) or not all(gram[k][k] > 0 for k in range(len(gram))):
                    raise ValueError(
                        f"cache prior {channel}: got a value that is not finite or a zero square, expected neither; measure again"
                    )

    def of(self, channel: str, sigmas: Sequence[float]) -> tuple[Gram, Gram]:
        """What is known of a channel's probe and of the rest.

        Raises ValueError for another schedule than the one measured.
        """
        known = self.sigmas.get(channel, ())
        if len(known) != len(sigmas) or not all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-7) for a, b in zip(known, sigmas)):
            raise ValueError(f"cache prior {channel}: got another schedule, expected the {len(known)} steps it is of; measure again")
        return self.probe[channel], self.rest[channel]

    @property
    def digest(self) -> str:
        """Identity of the measurement, for records."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_plain(self) -> dict[str, Any]:
        """Plain data, for JSON; only the lower triangles, which hold everything."""

        def halves(kind: Mapping[str, Gram]) -> dict[str, list[list[float]]]:
            return {name: [[float(f"{value:.12g}") for value in row[: k + 1]] for k, row in enumerate(gram)] for name, gram in kind.items()}

        sigmas = {channel: list(values) for channel, values in self.sigmas.items()}
        return {"sigmas": sigmas, "probe": halves(self.probe), "rest": halves(self.rest), "clips": self.clips}

    def to_json(self) -> str:
        """The prior file's text."""
        return json.dumps({"schema": SCHEMA} | self.to_plain(), separators=(",", ":"), sort_keys=True) + "\n"


def prior_of(value: Mapping[str, Any]) -> Prior:
    """A prior from its plain data.

    Raises ValueError when it is not one.
    """

    def whole(kind: Mapping[str, Any]) -> dict[str, Gram]:
        return {channel: _mirrored(rows) for channel, rows in kind.items()}

    try:
        sigmas = {str(channel): tuple(map(float, values)) for channel, values in value["sigmas"].items()}
        return Prior(sigmas, whole(value["probe"]), whole(value["rest"]), int(value["clips"]))
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"cache prior: got {error!r}, expected sigmas, probe, rest and clips; measure again") from None


def read_prior(text: str, what: str) -> Prior:
    """A prior from its file's text; `what` names the file in messages.

    Raises ValueError when it is not one.
    """
    try:
        value: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"cache prior {what}: got {error}, expected JSON; measure again") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ValueError(f"cache prior {what}: got another schema, expected {SCHEMA}; measure again with this version")
    return prior_of(value)


def _mirrored(rows: Sequence[Sequence[float]]) -> Gram:
    size = len(rows)
    return tuple(tuple(float(rows[max(i, j)][min(i, j)]) for j in range(size)) for i in range(size))


def foretell(gram: Gram, known: Sequence[int], step: int) -> tuple[list[float], float]:
    """Weights of the `known` steps that predict `step`, and the error expected of it, relative to its size."""
    table = [[gram[i][j] + (RIDGE * gram[i][i] if i == j else 0.0) for j in known] for i in known]
    weights = _solve(table, [gram[i][step] for i in known])
    left = gram[step][step] - 2 * sum(w * gram[i][step] for w, i in zip(weights, known))
    left += sum(v * w * gram[i][j] for v, i in zip(weights, known) for w, j in zip(weights, known))
    return weights, math.sqrt(max(left, 0.0) / gram[step][step])


def _solve(table: list[list[float]], right: list[float]) -> list[float]:
    """Gauss with pivots on a few unknowns."""
    rows = [[*row, value] for row, value in zip(table, right)]
    size = len(rows)
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k])]
    found = [0.0] * size
    for k in reversed(range(size)):
        found[k] = (rows[k][size] - sum(rows[k][j] * found[j] for j in range(k + 1, size))) / rows[k][k]
    return found
