"""Typed Python clients for a router's InferenceService: `Client` blocks, `AsyncClient` awaits.

    with Client("127.0.0.1:50051") as client:
        for output in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text, end="")

The stubs under them (`pdserve.v1.inference_service_pb2_grpc`) can be used directly, from any
language.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

import grpc

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_common.engine_types import SamplingParams
from pdserve_common.rpc import channel_options
from pdserve_common.wire import sampling_params_to_proto

# Text, a chat as mappings with "role" and "content", or token ids.
Prompt = str | Sequence[Mapping[str, str]] | Sequence[int]


def build_request(
    prompt: Prompt, params: SamplingParams | None = None, **fields: Any
) -> pb2.GenerateRequest:
    """Return the request for `prompt`; `fields` are those of GenerateRequest (model, priority,
    ...).
    """
    request = pb2.GenerateRequest(**fields)
    if params is not None:
        request.sampling_params.CopyFrom(sampling_params_to_proto(params))
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        for message in prompt:
            request.chat.messages.add(role=message["role"], content=message["content"])  # type: ignore[index]
    else:
        request.tokens.token_ids.extend(prompt)  # type: ignore[arg-type]
    return request


class Client:
    """A blocking client; one channel, usable from several threads."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, options=channel_options())
        self.stub = pb2_grpc.InferenceServiceStub(self._channel)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Iterator[pb2.RequestOutput]:
        """Yield the answer as it comes; the last one has `finished` set. With n > 1 the completions
        with news are told apart by their `index`. Raises grpc.RpcError.

        Closing the iterator cancels the request.
        """
        call = self.stub.Generate(build_request(prompt, params, **fields), timeout=timeout_s)
        try:
            for response in call:
                yield response.output
        finally:
            call.cancel()

    def list_models(self, timeout_s: float = 5.0) -> list[pb2.ModelInfo]:
        return list(self.stub.ListModels(pb2.ListModelsRequest(), timeout=timeout_s).models)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient:
    """The same for asyncio; create it inside the running loop."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=channel_options())
        self.stub = pb2_grpc.InferenceServiceStub(self._channel)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncIterator[pb2.RequestOutput]:
        """Yield the answer as it comes; the last one has `finished` set. Raises
        grpc.aio.AioRpcError.
        """
        call = self.stub.Generate(build_request(prompt, params, **fields), timeout=timeout_s)
        try:
            async for response in call:
                yield response.output
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()
