"""Linear least squares for a few coefficients that are not negative, in plain Python."""

from collections.abc import Sequence
from typing import NamedTuple

# Below this share of its largest value a pivot counts as 0.
_SINGULAR = 1e-12


class Fit(NamedTuple):
    """Coefficients, and how far measured values are from what they say, as shares of the values."""

    coefficients: tuple[float, ...]
    median_error: float
    max_error: float


def fit(rows: Sequence[Sequence[float]], values: Sequence[float]) -> Fit:
    """Return coefficients c >= 0 of least squared relative error of `rows` x c to `values` (above
    0). A coefficient that would be negative is 0, as times are not: those that are left are
    fitted again.
    """
    scaled = [[x / y for x in row] for row, y in zip(rows, values, strict=True)]
    active = list(range(len(rows[0])))
    while active:
        found = _solve([[row[i] for i in active] for row in scaled])
        worst = min(range(len(active)), key=lambda i: found[i])
        if found[worst] >= 0:
            break
        del active[worst]
    coefficients = [0.0] * len(rows[0])
    for place, i in enumerate(active):
        coefficients[i] = found[place]
    errors = sorted(
        abs(sum(c * x for c, x in zip(coefficients, row, strict=True)) - 1) for row in scaled
    )
    return Fit(tuple(coefficients), errors[len(errors) // 2], errors[-1])


def _solve(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the least squares of `rows` x c to 1, by the normal equations of columns of norm 1. A
    column that the others make up gets 0.
    """
    size = len(rows[0])
    norms = [max(sum(row[i] ** 2 for row in rows) ** 0.5, 1e-100) for i in range(size)]
    matrix = [
        [sum(row[i] * row[j] for row in rows) / (norms[i] * norms[j]) for j in range(size)]
        + [sum(row[i] for row in rows) / norms[i]]
        for i in range(size)
    ]
    solved: list[int] = []
    for column in range(size):
        pivot = matrix[column]
        if abs(pivot[column]) < _SINGULAR:
            continue
        solved.append(column)
        for i in range(size):
            if i != column:
                factor = matrix[i][column] / pivot[column]
                matrix[i] = [a - factor * b for a, b in zip(matrix[i], pivot, strict=True)]
    return [matrix[i][size] / matrix[i][i] / norms[i] if i in solved else 0.0 for i in range(size)]
