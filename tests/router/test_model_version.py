"""Where tokens come from, as clients keep it."""

from dataclasses import replace

import pytest

from pdserve_common.errors import InvalidRequestError
from pdserve_common.types.engine import WorkerRole
from pdserve_router.workers.model_version import UNKNOWN, ModelVersion, joined
from support.fake_worker import engine_info

INFO = engine_info(WorkerRole.DECODE, vocab_size=10)
EXACT = ModelVersion.of(INFO)
OTHER_NUMERICS = ModelVersion.of(replace(INFO, numerics_id="other"))
CONSISTENT = ModelVersion.of(replace(INFO, determinism="consistent"))


def test_weights_are_the_workers_digest_and_numerics_only_those_of_exact_workers() -> None:
    assert EXACT.weights == OTHER_NUMERICS.weights == CONSISTENT.weights
    assert EXACT.numerics != OTHER_NUMERICS.numerics
    assert CONSISTENT.numerics == ""
    assert ModelVersion.of(replace(INFO, weights_digest="b" * 64)).weights == "b" * 16
    # As of workers with other blocks, which cannot exchange KV and compute the same.
    assert ModelVersion.of(replace(INFO, kv_compatibility_hash="other")) == EXACT
    assert ModelVersion.of(replace(INFO, engine_id="other", epoch="1" * 32)) == EXACT


@pytest.mark.parametrize("model_version", [EXACT, CONSISTENT, UNKNOWN])
def test_what_is_told_is_understood(model_version) -> None:
    assert ModelVersion.parse(str(model_version)) == model_version
    assert len(str(model_version)) <= 64


@pytest.mark.parametrize(
    "text", ["x", str(EXACT) + "0", str(EXACT).upper(), "-" + EXACT.numerics, "a" * 10**6, "é" * 16]
)
def test_anything_else_is_refused(text) -> None:
    with pytest.raises(
        InvalidRequestError, match=r"resume\.model_version is .* \(\d+ characters\)"
    ) as raised:
        ModelVersion.parse(text)
    assert raised.value.field == "resume.model_version"
    assert len(raised.value.message) < 400


@pytest.mark.parametrize(
    ("versions", "expected", "determinism"),
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
def test_an_answer_is_exact_only_where_all_parts_are_alike(versions, expected, determinism) -> None:
    assert joined(versions) == expected
    assert joined(versions).determinism == determinism
