"""The chart rendered by Helm itself, with a matrix of values."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent))  # test modules import helm_chart

from helm_chart import MATRIX, render


@pytest.fixture(params=MATRIX, scope="session")
def manifests(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the chart makes of each set of values."""
    return render(MATRIX[request.param])
