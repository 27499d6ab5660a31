import dataclasses
import math
import time

import pytest

from pdserve_common.engine_types import (
    EngineCoreRequest,
    EngineInfo,
    KVTransferParams,
    SamplingParams,
    WorkerRole,
)
from pdserve_common.errors import InvalidRequestError
from pdserve_common.validation import validate_engine_core_request, validate_sampling_params

INFO = EngineInfo(
    engine_id="e",
    epoch="f",
    role=WorkerRole.DECODE,
    model="m",
    max_model_len=8,
    vocab_size=100,
    eos_token_ids=(0,),
    block_size=4,
    num_blocks=5,
    max_num_seqs=6,
    max_num_batched_tokens=7,
    dtype="float32",
    kv_compatibility_hash="h",
    kv_transport="shm",
    determinism="exact",
    version="v",
)
REQUEST = EngineCoreRequest(
    request_id="r", prompt_token_ids=(1, 2, 3), sampling_params=SamplingParams()
)


def test_good_parameters_pass() -> None:
    validate_sampling_params(
        SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, stop=("x",), seed=2**64 - 1),
        vocab_size=100,
    )
    validate_engine_core_request(REQUEST, INFO)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n is 0, must be at least 1"),
        ({"n": 2}, "n is 2: more than 1 is not served yet"),
        ({"temperature": -0.1}, "temperature is -0.1, must be at least 0 and at most 100"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"top_p": 0.0}, "top_p is 0.0, must be above 0 and at most 1"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"min_p": 2.0}, "min_p is 2.0"),
        ({"top_k": -2}, "top_k is -2"),
        ({"seed": -1}, "seed is -1, must be 0 to 18446744073709551615"),
        ({"max_tokens": 0}, "max_tokens is 0, must be at least 1"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, must be at most max_tokens"),
        ({"stop": ("",)}, "stop has a string of 0 characters"),
        ({"stop": ("x",) * 17}, "stop has 17 strings, at most 16"),
        ({"stop": ("x",), "detokenize": False}, "stop needs detokenize"),
        ({"stop_token_ids": (100,)}, "stop_token_ids has 100, token ids are 0 to 99"),
        ({"stop_token_ids": (1,) * 257}, "stop_token_ids has 257 ids"),
        ({"logprobs": 1}, "logprobs is 1: not served yet"),
        ({"presence_penalty": 0.5}, "presence_penalty is 0.5: not served yet"),
        ({"logit_bias": {1: 1.0}}, "logit_bias is"),
        ({"use_beam_search": True}, "use_beam_search is True"),
        ({"length_penalty": 2.0}, "length_penalty is 2.0: not served yet"),
    ],
)
def test_a_bad_parameter_is_named_with_its_value_and_limit(
    fields: dict[str, object], message: str
) -> None:
    params = dataclasses.replace(SamplingParams(), **fields)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=message.replace("(", r"\(")) as error:
        validate_sampling_params(params, vocab_size=100)
    assert error.value.field in (*fields, "stop")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_token_ids": ()}, "prompt is empty"),
        ({"prompt_token_ids": (1,) * 8}, "prompt has 8 tokens, at most 7 fit"),
        ({"prompt_token_ids": (1, 100)}, "prompt_token_ids has 100, token ids are 0 to 99"),
        ({"request_id": ""}, "request_id has 0 characters"),
        ({"request_id": "x" * 257}, "request_id has 257 characters"),
        ({"request_id": "a\nb"}, "request_id must be printable ASCII"),
        ({"sampling_params": None}, "sampling_params is unset"),
        ({"resumable": True}, "resumable is set: not served yet"),
        ({"resume_output_token_ids": (1,)}, "resume_output_token_ids is set"),
        ({"kv_transfer_params": KVTransferParams()}, "needs exactly one of"),
        (
            {"kv_transfer_params": KVTransferParams(do_remote_decode=True, remote_engine_id="d")},
            "is for a prefill worker, this is a decode worker",
        ),
        (
            {"kv_transfer_params": KVTransferParams(do_remote_prefill=True)},
            "remote_engine_id is empty",
        ),
        (
            {
                "kv_transfer_params": KVTransferParams(
                    do_remote_prefill=True, remote_engine_id="p", remote_host="h", remote_port=70000
                )
            },
            "no address to pull from",
        ),
        ({"deadline": time.monotonic() + 1e10}, "s, must be at most 604800 s"),
        ({"eos_token_id": 100}, "eos_token_id has 100"),
    ],
)
def test_a_worker_checks_requests_itself(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        validate_engine_core_request(
            dataclasses.replace(REQUEST, **fields),  # type: ignore[arg-type]
            INFO,
        )
