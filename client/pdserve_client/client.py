"""Typed Python clients for a router's InferenceService: `Client` blocks, `AsyncClient` awaits.

    with Client("127.0.0.1:50051") as client:
        for output in client.generate("Once upon a time", SamplingParams(max_tokens=32)):
            print(output.outputs[0].text, end="")

An answer outlives its router: see docs/client.md. The stubs under the clients
(`pdserve.v1.inference_service_pb2_grpc`) can be used directly, from any language.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import grpc

from pdserve.v1 import inference_service_pb2 as pb2
from pdserve.v1 import inference_service_pb2_grpc as pb2_grpc
from pdserve_client.attempts import Attempts
from pdserve_client.resumable_answer import ResumableAnswer
from pdserve_common.rpc.channels import open_blocking_channel, open_channel
from pdserve_common.rpc.tls import Tls
from pdserve_common.types.pooling_params import EMBED, PoolingParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.wire import to_proto

# Text, a chat as mappings with the fields of ChatMessage, or token ids. A message that shows
# something has `parts`: {"text": "What is it?"}, {"picture": Path("a.png").read_bytes()}.
Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]
# Text, two texts that belong together, or token ids.
PoolPrompt = str | tuple[str, str] | Sequence[int]

DEFAULT_MAX_RESUMES = 3


def build_request(
    prompt: Prompt, params: SamplingParams | None = None, **fields: Any
) -> pb2.GenerateRequest:
    """Return the request for `prompt`; `fields` are those of GenerateRequest (model, priority,
    ...).
    """
    request = pb2.GenerateRequest(**fields)
    if params is not None:
        request.sampling_params.CopyFrom(to_proto(params))
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        for message in prompt:
            request.chat.messages.add(**message)  # type: ignore[arg-type]
    else:
        request.tokens.token_ids.extend(prompt)  # type: ignore[arg-type]
    return request


def build_pool_request(
    prompt: PoolPrompt,
    task: str,
    *,
    dimensions: int | None = None,
    use_activation: bool | None = None,
    **fields: Any,
) -> pb2.PoolRequest:
    """Return the request for a vector of `prompt`; `fields` are those of PoolRequest."""
    request = pb2.PoolRequest(**fields)
    params = PoolingParams(task=task, dimensions=dimensions, use_activation=use_activation)
    request.pooling_params.CopyFrom(to_proto(params))
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], str):
        request.pair.text, request.pair.text_pair = cast("tuple[str, str]", prompt)
    else:
        request.tokens.token_ids.extend(cast("Sequence[int]", prompt))
    return request


class _Routers:
    """One stub for each router, and which of them is asked first."""

    def __init__(self, channels: Sequence[Any], max_resumes: int, api_key: str | None) -> None:
        if max_resumes < 0:
            raise ValueError(f"max_resumes is {max_resumes}, must be at least 0")
        self._channels = channels
        self._stubs = [pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        self._max_resumes = max_resumes
        # Every call says who is calling.
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        # Moves on when a router is lost, so that later calls do not try it first.
        self._router = 0

    @property
    def stub(self) -> pb2_grpc.InferenceServiceStub:
        """Of the router that is asked first."""
        return self._stubs[self._router]

    def _begin(self, request: pb2.GenerateRequest, timeout_s: float | None) -> ResumableAnswer:
        return ResumableAnswer(
            request,
            num_routers=len(self._stubs),
            router=self._router,
            max_resumes=self._max_resumes,
            timeout_s=timeout_s,
        )

    def _attempts(self, timeout_s: float | None) -> Attempts:
        return Attempts(
            num_routers=len(self._stubs),
            router=self._router,
            max_resumes=self._max_resumes,
            timeout_s=timeout_s,
        )

    def _pool(self, request: pb2.PoolRequest, attempts: Attempts) -> Any:
        self._router = attempts.router
        stub = self._stubs[attempts.router]
        return stub.Pool(request, timeout=attempts.remaining_s, metadata=self._metadata)

    def _send(self, answer: ResumableAnswer) -> Any:
        answer.begin_stream()
        stub = self._stubs[answer.router]
        return stub.Generate(answer.request, timeout=answer.remaining_s, metadata=self._metadata)

    def _on_end(self, answer: ResumableAnswer) -> float | None:
        """Return in how many seconds to send the request on; None if this was the end."""
        self._router = answer.router
        return answer.resume_delay_s

    def _on_loss(self, answer: ResumableAnswer, error: grpc.RpcError) -> float | None:
        if answer.is_finished:  # only the trailers are missing
            return None
        if answer.resume_delay_s is None:
            answer.resume_delay_s = answer.on_loss(error)
        return self._on_end(answer)


def _addresses(routers: str | Sequence[str]) -> Sequence[str]:
    addresses = [routers] if isinstance(routers, str) else routers
    if not addresses:
        raise ValueError("routers is empty, needs at least 1 address")
    return addresses


class Client(_Routers):
    """A blocking client of one router, or of several that serve the same workers; usable from
    several threads.
    """

    def __init__(
        self,
        routers: str | Sequence[str],
        *,
        max_resumes: int = DEFAULT_MAX_RESUMES,
        tls: Tls | None = None,
        api_key: str | None = None,
    ) -> None:
        """`routers` are host:port, in plain text without `tls`. Raises ValueError."""
        channels = [open_blocking_channel(each, tls) for each in _addresses(routers)]
        super().__init__(channels, max_resumes, api_key)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Iterator[pb2.RequestOutput]:
        """Yield the answer as it comes; the last one has `finished` set. With n > 1 the completions
        of an output are told apart by their `index`. Raises grpc.RpcError; a lost router
        does only if no other can go on within `timeout_s` and after `max_resumes` tries.

        Closing the iterator cancels the request.
        """
        answer = self._begin(build_request(prompt, params, **fields), timeout_s)
        while True:
            call = self._send(answer)
            try:
                for response in call:
                    if (output := answer.take(response.output)) is not None:
                        yield output
                delay_s = self._on_end(answer)
            except grpc.RpcError as error:
                delay_s = self._on_loss(answer, error)
            finally:
                call.cancel()
            if delay_s is None:
                return
            time.sleep(delay_s)

    def pool(
        self, prompt: PoolPrompt, task: str, *, timeout_s: float | None = None, **fields: Any
    ) -> pb2.PoolResponse:
        """Return what a model that pools makes of `prompt`: for the task "embed" its embedding, for
        "classify" a number for each label, for "score" one number. `fields` are those of
        `build_pool_request`. Raises grpc.RpcError; while routers are lost the request is sent to
        the next one, `max_resumes` times within `timeout_s`.
        """
        request = build_pool_request(prompt, task, **fields)
        attempts = self._attempts(timeout_s)
        while True:
            try:
                response: pb2.PoolResponse = self._pool(request, attempts)
                return response
            except grpc.RpcError as error:
                time.sleep(attempts.on_loss(error))

    def embed(
        self, prompt: PoolPrompt, *, timeout_s: float | None = None, **fields: Any
    ) -> list[float]:
        """Return the embedding of `prompt`; see `pool`."""
        return list(self.pool(prompt, EMBED, timeout_s=timeout_s, **fields).pooling_output)

    def list_models(self, timeout_s: float = 5.0) -> list[pb2.ModelInfo]:
        request = pb2.ListModelsRequest()
        response = self.stub.ListModels(request, timeout=timeout_s, metadata=self._metadata)
        return list(response.models)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class AsyncClient(_Routers):
    """The same for asyncio; create it inside the running loop."""

    def __init__(
        self,
        routers: str | Sequence[str],
        *,
        max_resumes: int = DEFAULT_MAX_RESUMES,
        tls: Tls | None = None,
        api_key: str | None = None,
    ) -> None:
        """`routers` are host:port, in plain text without `tls`. Raises ValueError."""
        channels = [open_channel(each, tls) for each in _addresses(routers)]
        super().__init__(channels, max_resumes, api_key)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncIterator[pb2.RequestOutput]:
        """Yield the answer as it comes; the last one has `finished` set. Raises
        grpc.aio.AioRpcError, for a lost router as `Client.generate` does.
        """
        answer = self._begin(build_request(prompt, params, **fields), timeout_s)
        while True:
            call = self._send(answer)
            try:
                async for response in call:
                    if (output := answer.take(response.output)) is not None:
                        yield output
                delay_s = self._on_end(answer)
            except grpc.aio.AioRpcError as error:
                delay_s = self._on_loss(answer, error)
            finally:
                call.cancel()
            if delay_s is None:
                return
            await asyncio.sleep(delay_s)

    async def pool(
        self, prompt: PoolPrompt, task: str, *, timeout_s: float | None = None, **fields: Any
    ) -> pb2.PoolResponse:
        """Return what a model that pools makes of `prompt`. Raises grpc.aio.AioRpcError, as
        `Client.pool` does.
        """
        request = build_pool_request(prompt, task, **fields)
        attempts = self._attempts(timeout_s)
        while True:
            try:
                response: pb2.PoolResponse = await self._pool(request, attempts)
                return response
            except grpc.aio.AioRpcError as error:
                delay_s = attempts.on_loss(error)
            await asyncio.sleep(delay_s)

    async def embed(
        self, prompt: PoolPrompt, *, timeout_s: float | None = None, **fields: Any
    ) -> list[float]:
        """Return the embedding of `prompt`; see `Client.pool`."""
        answer = await self.pool(prompt, EMBED, timeout_s=timeout_s, **fields)
        return list(answer.pooling_output)

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()
