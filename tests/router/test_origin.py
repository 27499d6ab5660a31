"""Where tokens come from, as clients keep it."""

from dataclasses import replace

import pytest

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.origin import UNKNOWN, Origin, joined
from support.fake_worker import engine_info

INFO = engine_info(WorkerRole.DECODE, vocab_size=10)
EXACT = Origin.of(INFO)
OTHER_NUMERICS = Origin.of(replace(INFO, numerics_id="other"))
CONSISTENT = Origin.of(replace(INFO, determinism="consistent"))


def test_weights_are_the_workers_digest_and_numerics_only_those_of_exact_workers() -> None:
    assert EXACT.weights == OTHER_NUMERICS.weights == CONSISTENT.weights
    assert EXACT.numerics != OTHER_NUMERICS.numerics
    assert CONSISTENT.numerics == ""
    assert Origin.of(replace(INFO, weights_digest="b" * 64)).weights == "b" * 16
    # As of workers with other blocks, which cannot exchange KV and compute the same.
    assert Origin.of(replace(INFO, kv_compatibility_hash="other")) == EXACT
    assert Origin.of(replace(INFO, engine_id="other", epoch="1" * 32)) == EXACT


@pytest.mark.parametrize("origin", [EXACT, CONSISTENT, UNKNOWN])
def test_what_is_told_is_understood(origin) -> None:
    assert Origin.parse(str(origin)) == origin
    assert len(str(origin)) <= 64


@pytest.mark.parametrize(
    "text", ["x", str(EXACT) + "0", str(EXACT).upper(), "-" + EXACT.numerics, "a" * 10**6, "é" * 16]
)
def test_anything_else_is_refused(text) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"resume\.origin is .* \(\d+ characters\)"
    ) as raised:
        Origin.parse(text)
    assert raised.value.field == "resume.origin"
    assert len(raised.value.message) < 400


@pytest.mark.parametrize(
    ("origins", "expected", "determinism"),
    [
        ([EXACT], EXACT, "exact"),
        ([EXACT, EXACT], EXACT, "exact"),
        ([EXACT, OTHER_NUMERICS], CONSISTENT, "consistent"),
        ([EXACT, CONSISTENT], CONSISTENT, "consistent"),
        ([UNKNOWN, EXACT], CONSISTENT, "consistent"),
        ([CONSISTENT], CONSISTENT, "consistent"),
        ([UNKNOWN], UNKNOWN, "consistent"),
        ([], UNKNOWN, "consistent"),
    ],
)
def test_an_answer_is_exact_only_where_all_parts_are_alike(origins, expected, determinism) -> None:
    assert joined(origins) == expected
    assert joined(origins).determinism == determinism
