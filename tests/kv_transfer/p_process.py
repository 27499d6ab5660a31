"""A prefill worker without an engine, for test_kv_link.py: p_process.py HASH TRANSPORT.

Prints its port, then obeys lines on stdin: `prefill ID NUM_TOKENS` hands a request over, `state`
prints what it holds as JSON.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from prometheus_client import CollectorRegistry

import conftest as kit
from pdserve_common.engine_types import EngineCoreRequest, KVTransferParams, SamplingParams
from pdserve_common.metrics import KVTransferMetrics
from pdserve_common.rpc import RpcServer
from pdserve_engine.core.request import Request, RequestStatus
from pdserve_engine.kv_transfer.factory import make_transport
from pdserve_engine.kv_transfer.producer import ProducerConnector
from pdserve_prefill.service import SERVICE_NAME, KvTransferServicer

blocks = kit.Blocks()


async def main(compatibility_hash: str, require_transport: str) -> None:
    identity = kit.make_identity("p0", compatibility_hash=compatibility_hash)
    connector = ProducerConnector(
        make_transport("nixl", identity, require_transport=require_transport),
        identity=identity,
        metrics=KVTransferMetrics(CollectorRegistry()),
        wakeup=lambda: None,
        step_seq=lambda: 0,
    )
    connector.register_kv_cache(kit.make_pool(1))
    server = RpcServer("127.0.0.1", 0)
    servicer = KvTransferServicer(connector)
    servicer.add_to_server(server.server)
    await server.start([SERVICE_NAME])
    print(server.port, flush=True)
    loop = asyncio.get_running_loop()
    while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        blocks.give(connector.take_output().released_block_ids)
        if words[0] == "prefill":
            prefill(connector, words[1], int(words[2]))
        else:
            state = {"cpu_s": time.process_time(), "num_free": len(blocks.free)}
            print(json.dumps(state | {"sessions": connector.num_open_sessions()}), flush=True)
    await servicer.close()
    await server.stop(1.0)
    connector.shutdown()


def prefill(connector: ProducerConnector, request_id: str, num_tokens: int) -> None:
    core = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tuple(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=8),
        kv_transfer_params=KVTransferParams(do_remote_decode=True, remote_engine_id="d0"),
    )
    request = Request(core, max_model_len=4096, seed=0)
    request.append_output_token_ids((77,))
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    connector.request_finished(request, (blocks.take(-(-num_tokens // kit.BLOCK_SIZE)),))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
