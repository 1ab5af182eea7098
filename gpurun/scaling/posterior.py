"""Draw parameters that are consistent with measurements: Laplace's approximation, then importance sampling. Pure.

The prior of the parameters (`z`) is standard normal. The spread of the measurements is unknown, with an inverse gamma
prior. The integral over the spread gives log p(z) = -|z|²/2 - (ν + N)/2 · log(ν s² + Σ r²). The points come from a
quasi-random sequence, not from Markov chains: so no chain can get stuck, and a seed only shifts the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, fsum, log, sqrt
from statistics import NormalDist

# Small symmetric matrices, as lists of rows: the operations for a fit of about ten parameters. Pure.


Vector = list[float]
Matrix = list[list[float]]


def cholesky(matrix: Matrix) -> Matrix:
    """Return the lower triangular L with L·Lᵀ = matrix, which must be positive definite."""
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for row in range(size):
        for column in range(row + 1):
            left = matrix[row][column] - sum(a * b for a, b in zip(lower[row][:column], lower[column], strict=False))
            lower[row][column] = max(left, 1e-12) ** 0.5 if row == column else left / lower[column][column]
    return lower


def times(lower: Matrix, vector: Sequence[float]) -> Vector:
    """Return L·v."""
    return [sum(a * b for a, b in zip(row[: at + 1], vector, strict=False)) for at, row in enumerate(lower)]


def solve_lower(lower: Matrix, right: Sequence[float]) -> Vector:
    """Return the x with L·x = right."""
    found: Vector = []
    for row, value in zip(lower, right, strict=True):
        found.append((value - sum(a * b for a, b in zip(row, found, strict=False))) / row[len(found)])
    return found


def solve(lower: Matrix, right: Sequence[float]) -> Vector:
    """Return the x with L·Lᵀ·x = right."""
    found = solve_lower(lower, right)
    for row in range(len(lower) - 1, -1, -1):
        above = sum(lower[other][row] * found[other] for other in range(row + 1, len(lower)))
        found[row] = (found[row] - above) / lower[row][row]
    return found


def inverse(matrix: Matrix) -> Matrix:
    """Return the inverse of a positive definite matrix."""
    lower = cholesky(matrix)
    size = len(matrix)
    columns = [solve(lower, [float(row == at) for row in range(size)]) for at in range(size)]
    return [[(columns[a][b] + columns[b][a]) / 2 for a in range(size)] for b in range(size)]


def covariance(points: Sequence[Vector], weights: Sequence[float]) -> tuple[Vector, Matrix]:
    """Return mean and covariance of weighted points; the weights sum to 1."""
    size = len(points[0])
    mean = [sum(w * point[at] for w, point in zip(weights, points, strict=True)) for at in range(size)]
    spread = [[0.0] * size for _ in range(size)]
    for weight, point in zip(weights, points, strict=True):
        away = [value - middle for value, middle in zip(point, mean, strict=True)]
        for row in range(size):
            scaled = weight * away[row]
            for column in range(row + 1):
                spread[row][column] += scaled * away[column]
    for row in range(size):
        for column in range(row):
            spread[column][row] = spread[row][column]
    return mean, spread


PRIOR_WEIGHT = 4.0
"""ν: the prior of the spread counts as this many measurements."""

SCALES = ((1.0, 0.6), (1.6, 0.3), (2.6, 0.1))
"""Widths of the proposal's components, each with its share; the wide components reach the tails."""

ROUNDS = (500, 1000, 2000, 2000, 4000, 4000)
"""Points per round. Each round's proposal is fitted to the previous round; the first only fits the second's."""

LEAST_ROUNDS, ENOUGH = 3, 500.0
"""The rounds end after this many rounds, as soon as their points equal this many independent draws."""

DRAWS = 1000
STEPS = 60
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47)
_NORMAL = NormalDist()


@dataclass(frozen=True)
class Misfit:
    """The fitted problem.

    Attributes:
        size: number of parameters.
        residuals: z → differences of logarithms, measured minus computed.
        count: number of measurements; one with less weight counts as a part.
        spread: the expected relative spread of measurements.
    """

    size: int
    residuals: Callable[[Sequence[float]], Vector]
    count: float
    spread: float

    def scale(self, z: Sequence[float]) -> float:
        """Return ν s² + Σ r²."""
        return PRIOR_WEIGHT * self.spread**2 + fsum(r * r for r in self.residuals(z))

    @property
    def freedom(self) -> float:
        """ν + N."""
        return PRIOR_WEIGHT + self.count

    def log_density(self, z: Sequence[float]) -> float:
        """Return the logarithm of the posterior's density, except for a constant."""
        return -0.5 * fsum(x * x for x in z) - 0.5 * self.freedom * log(self.scale(z))


@dataclass(frozen=True)
class Posterior:
    """The result of a fit.

    Attributes:
        draws: equally likely parameters, each with the relative spread of a run.
        effective: the number of independent draws to which the weighted points are equivalent.
    """

    draws: tuple[tuple[tuple[float, ...], float], ...]
    effective: float


def sample(misfit: Misfit, seed: int = 0) -> Posterior:
    """Draw from the posterior. The same seed gives the same draws."""
    middle, spread = _laplace(misfit)
    points: list[Vector] = []
    weights: list[float] = []
    effective = 0.0
    for number, count in enumerate(ROUNDS):
        found, shares = _weighted(misfit, middle, spread, seed * len(ROUNDS) + number, count)
        middle, spread = covariance(found, shares)
        worth = 1.0 / fsum(share * share for share in shares)
        if number:
            points, effective = points + found, effective + worth
            weights += [worth * share for share in shares]
        if number + 1 >= LEAST_ROUNDS and effective >= ENOUGH:
            break
    chosen = [points[at] for at in _systematic([weight / effective for weight in weights], DRAWS)]
    uniform = sequence(1, seed, DRAWS)
    draws = tuple((tuple(z), _run_spread(misfit, z, u)) for z, (u,) in zip(chosen, uniform, strict=True))
    return Posterior(draws, effective)


def sequence(size: int, seed: int, count: int) -> Iterator[Vector]:
    """Return Richtmyer's quasi-random points in the open unit cube, shifted by the seed (Cranley and Patterson)."""
    roots = [sqrt(prime) for prime in PRIMES[:size]]
    shifts = [(seed + 1) * sqrt(prime * 2.0 + 1) * 0.618033988749895 for prime in PRIMES[:size]]
    for number in range(1, count + 1):
        yield [
            min(max((shift + number * root) % 1.0, 1e-9), 1 - 1e-9) for root, shift in zip(roots, shifts, strict=True)
        ]


def _laplace(misfit: Misfit) -> tuple[Vector, Matrix]:
    """Return the mode and the covariance there, by the Levenberg-Marquardt method from several starts."""
    starts = [[0.0] * misfit.size]
    for at in range(misfit.size):
        for value in (-1.5, 1.5):
            starts.append([value if other == at else 0.0 for other in range(misfit.size)])
    starts.sort(key=misfit.log_density, reverse=True)
    found = [_climb(misfit, start) for start in starts[:4]]
    mode = max(found, key=misfit.log_density)
    return mode, inverse(_curvature(misfit, mode)[0])


def _curvature(misfit: Misfit, z: Vector) -> tuple[Matrix, Vector]:
    """Return the Gauss-Newton matrix of -log p, and its gradient."""
    base = misfit.residuals(z)
    step = 1e-4
    slopes = []
    for at in range(misfit.size):
        moved = misfit.residuals([value + step * (other == at) for other, value in enumerate(z)])
        slopes.append([(b - a) / step for a, b in zip(base, moved, strict=True)])
    weight = misfit.freedom / misfit.scale(z)
    matrix = [
        [weight * fsum(x * y for x, y in zip(a, b, strict=True)) + (row == column) for column, b in enumerate(slopes)]
        for row, a in enumerate(slopes)
    ]
    gradient = [
        value + weight * fsum(x * r for x, r in zip(a, base, strict=True)) for value, a in zip(z, slopes, strict=True)
    ]
    return matrix, gradient


def _climb(misfit: Misfit, start: Vector) -> Vector:
    z, height, damping = start, misfit.log_density(start), 1e-2
    for _ in range(STEPS):
        matrix, gradient = _curvature(misfit, z)
        for _ in range(8):
            damped = [[v * (1 + damping * (r == c)) for c, v in enumerate(row)] for r, row in enumerate(matrix)]
            step = solve(cholesky(damped), gradient)
            moved = [value - change for value, change in zip(z, step, strict=True)]
            reached = misfit.log_density(moved)
            if reached > height:
                break
            damping *= 4
        else:
            return z
        gained, z, height, damping = reached - height, moved, reached, damping / 3
        if gained < 1e-6:
            return z
    return z


def _weighted(
    misfit: Misfit, middle: Vector, spread: Matrix, seed: int, count: int
) -> tuple[list[Vector], list[float]]:
    lower = cholesky(spread)
    points, logs = [], []
    for uniform in sequence(misfit.size + 1, seed, count):
        scale = _scale(uniform[0])
        away = [scale * _NORMAL.inv_cdf(u) for u in uniform[1:]]
        point = [value + x for value, x in zip(middle, times(lower, away), strict=True)]
        points.append(point)
        logs.append(misfit.log_density(point) - _proposed(away))
    most = max(logs)
    weights = [exp(value - most) for value in logs]
    total = fsum(weights)
    return points, [weight / total for weight in weights]


def _scale(uniform: float) -> float:
    for scale, share in SCALES:
        if uniform < share:
            return scale
        uniform -= share
    return SCALES[-1][0]


def _proposed(away: Vector) -> float:
    """Return the logarithm of the proposal's density, except for a constant."""
    squared, size = fsum(x * x for x in away), len(away)
    terms = [log(share) - size * log(scale) - 0.5 * squared / scale**2 for scale, share in SCALES]
    most = max(terms)
    return most + log(fsum(exp(term - most) for term in terms))


def _systematic(weights: Sequence[float], count: int) -> Iterator[int]:
    """Draw so many indices by weight, at even steps through the cumulative weights (systematic resampling)."""
    sums = list(accumulate(weights))
    at = 0
    for number in range(count):
        while at < len(sums) - 1 and sums[at] < (number + 0.5) / count:
            at += 1
        yield at


def _run_spread(misfit: Misfit, z: Vector, uniform: float) -> float:
    """Draw the relative spread of runs: inverse gamma, with its quantile by the Wilson-Hilferty formula."""
    freedom = misfit.freedom
    chi = freedom * (1 - 2 / (9 * freedom) + _NORMAL.inv_cdf(uniform) * sqrt(2 / (9 * freedom))) ** 3
    return sqrt(misfit.scale(z) / max(chi, 1e-3 * freedom))
