"""The proxy before vLLM's pair, for its environment: proxy.py PORT PREFILL_URL DECODE_URL

Prefill first, as its KV connector wants it: P computes one token and says where the KV lies, then D
gets the request with that answer and streams.
"""

import sys
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

HAND_OVER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Pair:
    def __init__(self, prefill_url: str, decode_url: str) -> None:
        self._urls = prefill_url, decode_url
        self._http = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        headers = {"x-request-id": str(uuid.uuid4())}
        body["kv_transfer_params"] = await self._prefill(body, headers)
        return StreamingResponse(self._decode(body, headers), media_type="text/event-stream")

    async def _prefill(self, body: dict[str, Any], headers: dict[str, str]) -> Any:
        body = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": HAND_OVER}
        body.pop("stream_options", None)
        url = f"{self._urls[0]}/v1/completions"
        answer = (await self._http.post(url, json=body, headers=headers)).raise_for_status()
        return answer.json()["kv_transfer_params"]

    async def _decode(self, body: dict[str, Any], headers: dict[str, str]) -> AsyncIterator[bytes]:
        url = f"{self._urls[1]}/v1/completions"
        async with self._http.stream("POST", url, json=body, headers=headers) as answer:
            async for data in answer.aiter_raw():
                yield data


def main(port: str, prefill_url: str, decode_url: str) -> None:
    pair = Pair(prefill_url, decode_url)
    app = Starlette(routes=[Route("/v1/completions", pair.completions, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
