"""A prefill worker without an engine, for test_kv_link.py: p_process.py ENGINE_ID HASH TRANSPORT.

Prints its port, then obeys lines on stdin: `prefill ID NUM_TOKENS` hands a request over as soon as
D has granted it, in chunks of 4 blocks; `state` prints what it holds as JSON.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.rpc.channels import RpcServer
from pdserve_common.types.engine import EngineCoreRequest, Generate, KVTransferParams
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.kv_transfer.base import ConnectorContext
from pdserve_engine.kv_transfer.connectors.producer import ProducerConnector
from pdserve_engine.kv_transfer.ports import BlocksFreed, StartAllowed
from pdserve_engine.request.request import Request, RequestStatus
from pdserve_worker.kv_link.service import SERVICE_NAME, KvTransferServicer
from support.handoff import BLOCK_SIZE, Blocks, fill, make_identity, make_pool, make_transport
from support.local_transport import LocalRegistry

CHUNK = 4 * BLOCK_SIZE


class Prefills:
    """What P's engine does, on the event loop."""

    def __init__(self, engine_id: str, compatibility_hash: str, require_transport: str) -> None:
        identity = make_identity(engine_id, compatibility_hash=compatibility_hash)
        self._loop = asyncio.get_running_loop()
        pool = make_pool(1)
        transport = make_transport(
            "nixl", identity, LocalRegistry(), pool, require_transport=require_transport
        )
        transport.self_check()
        context = ConnectorContext(
            transport=transport,
            identity=identity,
            metrics=KVTransferMetrics(CollectorRegistry()),
            wakeup=self._wake,
            step_seq=lambda: 0,
        )
        self.connector = ProducerConnector(context)
        fill(pool, 1)
        self.blocks = Blocks()

    def state(self) -> dict[str, Any]:
        return {
            "cpu_s": time.process_time(),
            "num_free": len(self.blocks.free),
            "sessions": self.connector.num_open_sessions(),
        }

    def ask(self, request_id: str, num_tokens: int) -> None:
        core = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=tuple(range(num_tokens)),
            task=Generate(SamplingParams(max_tokens=8)),
            kv_transfer_params=KVTransferParams(do_remote_decode=True, remote_engine_id="d0"),
        )
        self.connector.ask(Request(core, max_model_len=4096, seed=0))

    def take_events(self) -> None:
        for event in self.connector.take_events():
            match event:
                case BlocksFreed(block_ids=block_ids):
                    self.blocks.give(block_ids)
                case StartAllowed(request=request):
                    self.prefill(request)

    def _wake(self) -> None:
        self._loop.call_soon(self.take_events)  # not under the connector's lock

    def prefill(self, request: Request) -> None:
        if not self.connector.on_started(request):
            return
        tables = (self.blocks.take(-(-request.num_tokens // BLOCK_SIZE)),)
        for num_tokens in range(CHUNK, request.num_tokens, CHUNK):
            self.connector.on_blocks_computed(request, num_tokens, tables)
        request.append_output_token_ids((77,))
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        kept = self.connector.request_finished(request, tables)
        self.blocks.give([i for i in tables[0] if i not in kept])


async def main(engine_id: str, compatibility_hash: str, require_transport: str) -> None:
    prefills = Prefills(engine_id, compatibility_hash, require_transport)
    server = RpcServer("127.0.0.1", 0)
    servicer = KvTransferServicer(prefills.connector)
    servicer.add_to_server(server.server)
    await server.start([SERVICE_NAME])
    print(server.port, flush=True)
    loop = asyncio.get_running_loop()
    while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        if words[0] == "prefill":
            prefills.ask(words[1], int(words[2]))
        else:
            print(json.dumps(prefills.state()), flush=True)
    await servicer.close()
    await server.stop(1.0)
    prefills.connector.shutdown()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
