"""The messages of Pool, as requests and answers have them."""

from typing import Any

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve_common import wire
from pdserve_common.types.engine import EngineCoreRequest
from pdserve_common.types.pooling_params import PoolingParams
from pdserve_router.requests.input.pooling_input import PoolingInput
from pdserve_router.requests.output.outputs import RequestOutput


def pooling_input(request: pb2.PoolRequest, **call: Any) -> PoolingInput:
    """Return what a message asks for; `call` is what is known besides."""
    kind = request.WhichOneof("prompt")
    cuts, adds = (request.HasField(f) for f in ("truncate_prompt_tokens", "add_special_tokens"))
    prompts: dict[str | None, dict[str, Any]] = {
        None: {},
        "text": {"text": request.text},
        "pair": {"text": request.pair.text, "text_pair": request.pair.text_pair},
        "tokens": {"token_ids": tuple(request.tokens.token_ids)},
    }
    return PoolingInput(
        model=request.model,
        lora_name=request.lora_name,
        pooling_params=wire.from_proto(PoolingParams, request.pooling_params),
        priority=request.priority,
        cache_salt=request.cache_salt if request.HasField("cache_salt") else None,
        truncate_prompt_tokens=request.truncate_prompt_tokens if cuts else None,
        keeps_end=request.truncate_start,
        add_special_tokens=request.add_special_tokens if adds else True,
        **prompts[kind],
        **call,
    )


def pool_response(
    output: RequestOutput, request: EngineCoreRequest, model_name: str
) -> pb2.PoolResponse:
    """Return the answer to a request that has ended well."""
    assert output.usage is not None, "it has ended"
    lora = request.lora_request
    return pb2.PoolResponse(
        request_id=output.request_id,
        model=model_name if lora is None else lora.lora_name,
        pooling_output=output.pooling_output,
        num_prompt_tokens=output.usage.num_prompt_tokens,
        num_cached_tokens=output.usage.num_cached_tokens,
    )
