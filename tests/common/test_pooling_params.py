"""Pooling requests are served or refused by field, value and limit."""

import dataclasses
from typing import Any

import pytest

from pdserve_common.errors import InvalidRequestError
from pdserve_common.limits.request_validation import validate_engine_core_request
from pdserve_common.limits.validation import (
    PROBE_PRIORITY,
    validate_pooling_params,
    validate_sampling_params,
)
from pdserve_common.types import engine as types
from pdserve_common.types.capabilities import Capabilities
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from support.engine_info import make_info

INFO = make_info(
    role=types.WorkerRole.PREFILL,
    max_model_len=12,
    kv_transport="none",
    tasks=("embed",),
    embedding_size=64,
    pooling_type="last",
)
MATRYOSHKA = dataclasses.replace(INFO, is_matryoshka=True)
SOME_SIZES = dataclasses.replace(MATRYOSHKA, matryoshka_dimensions=(32, 48))
CLASSIFIER = dataclasses.replace(INFO, tasks=("classify",), embedding_size=3)
RERANKER = dataclasses.replace(INFO, tasks=("classify", "score"), embedding_size=1)
GENERATOR = dataclasses.replace(INFO, tasks=("generate",), embedding_size=0)
REQUEST = types.EngineCoreRequest(
    request_id="r", prompt_token_ids=(1, 2, 3), task=types.Pool(PoolingParams(task="embed"))
)


@pytest.mark.parametrize(
    ("info", "params"),
    [
        (INFO, PoolingParams(task="embed")),
        (INFO, PoolingParams(task="embed", use_activation=False)),
        (MATRYOSHKA, PoolingParams(task="embed", dimensions=1)),
        (MATRYOSHKA, PoolingParams(task="embed", dimensions=64)),
        (SOME_SIZES, PoolingParams(task="embed", dimensions=48)),
        (CLASSIFIER, PoolingParams(task="classify")),
        (RERANKER, PoolingParams(task="classify", use_activation=True)),
        (RERANKER, PoolingParams(task="score")),
    ],
)
def test_what_the_model_serves_is_taken(info: types.EngineInfo, params: PoolingParams) -> None:
    validate_engine_core_request(dataclasses.replace(REQUEST, task=types.Pool(params)), info)
    shared = Capabilities.shared([Capabilities.of(info), Capabilities.of(info)])
    validate_pooling_params(params, shared)


@pytest.mark.parametrize(
    ("info", "params", "field", "refusal"),
    [
        (INFO, PoolingParams(task="classify"), "task", "is 'classify', the model serves embed"),
        (INFO, PoolingParams(task=""), "task", "task is '', the model serves embed"),
        (CLASSIFIER, PoolingParams(task="score"), "task", "the model serves classify"),
        (RERANKER, PoolingParams(task="embed"), "task", "the model serves classify, score"),
        (GENERATOR, PoolingParams(task="embed"), "task", "the model serves generate"),
        (GENERATOR, PoolingParams(task="generate"), "task", "must be a pooling task"),
        (
            INFO,
            PoolingParams(task="embed", dimensions=64),
            "dimensions",
            "dimensions is 64, must be unset: the model has no Matryoshka embeddings",
        ),
        *(
            (MATRYOSHKA, PoolingParams(task="embed", dimensions=d), "dimensions", "be 1 to 64")
            for d in (0, 65, 2**31 - 1)
        ),
        (
            SOME_SIZES,
            PoolingParams(task="embed", dimensions=47),
            "dimensions",
            "dimensions is 47, must be one of 32, 48",
        ),
        (
            CLASSIFIER,
            PoolingParams(task="classify", dimensions=2),
            "dimensions",
            "must be unset if task is 'classify'",
        ),
    ],
)
def test_what_it_does_not_serve_is_refused(
    info: types.EngineInfo, params: PoolingParams, field: str, refusal: str
) -> None:
    with pytest.raises(InvalidRequestError, match=refusal) as error:
        validate_engine_core_request(dataclasses.replace(REQUEST, task=types.Pool(params)), info)
    assert error.value.field == field


def test_a_pooling_model_generates_nothing() -> None:
    request = types.EngineCoreRequest(
        request_id="r", prompt_token_ids=(1,), task=types.Generate(SamplingParams())
    )
    with pytest.raises(InvalidRequestError, match="task is 'generate', the model serves embed"):
        validate_engine_core_request(request, INFO)
    with pytest.raises(InvalidRequestError, match="the model serves classify"):
        validate_sampling_params(
            SamplingParams(), vocab_size=9, capabilities=Capabilities.of(CLASSIFIER)
        )


@pytest.mark.parametrize(
    "fields",
    [
        {
            "kv_transfer_params": types.KVTransferParams(
                do_remote_decode=True, remote_engine_id="d", remote_host="h", remote_port=1
            )
        },
        {"resume_output_token_ids": (1,)},
        {"fork_of": "q"},
        {"prediction_token_ids": (1,)},
    ],
)
def test_it_has_nothing_of_a_generation(fields: dict[str, Any]) -> None:
    (field,) = fields
    with pytest.raises(InvalidRequestError, match=f"{field} and pooling_params are both") as error:
        validate_engine_core_request(dataclasses.replace(REQUEST, **fields), INFO)
    assert error.value.field == field


def test_its_prompt_may_fill_the_context() -> None:
    fits = dataclasses.replace(REQUEST, prompt_token_ids=(1,) * 12)
    validate_engine_core_request(fits, INFO)
    too_long = dataclasses.replace(REQUEST, prompt_token_ids=(1,) * 13)
    with pytest.raises(InvalidRequestError, match="prompt has 13 tokens, at most 12 fit"):
        validate_engine_core_request(too_long, INFO)


def test_a_probe_is_tiny() -> None:
    probe = dataclasses.replace(REQUEST, priority=PROBE_PRIORITY, prompt_token_ids=(1,) * 8)
    validate_engine_core_request(probe, INFO)
    longer = dataclasses.replace(probe, prompt_token_ids=(1,) * 9)
    with pytest.raises(InvalidRequestError, match="the prompt has 9 tokens, at most 8"):
        validate_engine_core_request(longer, INFO)


def test_workers_that_differ_serve_no_dimensions() -> None:
    shared = Capabilities.shared([Capabilities.of(MATRYOSHKA), Capabilities.of(SOME_SIZES)])
    validate_pooling_params(PoolingParams(task="embed"), shared)
    with pytest.raises(InvalidRequestError, match="dimensions is 48, must be unset"):
        validate_pooling_params(PoolingParams(task="embed", dimensions=48), shared)
