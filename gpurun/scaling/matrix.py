"""Small symmetric matrices, as lists of rows: the operations for a fit of about ten parameters. Pure."""

from __future__ import annotations

from collections.abc import Sequence

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
