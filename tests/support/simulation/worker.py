"""A worker process of a simulation: the worker's services over a real engine core, scheduler and
connector, with a modelled rank and NIC.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from prometheus_client import CollectorRegistry

from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import EngineInfo, WorkerRole
from pdserve_common.types.kv import KVGroup, KVGroupKind, KVLayout, new_epoch
from pdserve_engine.assemble import LoadedEngine
from pdserve_engine.config import SchedulerConfig
from pdserve_engine.core.engine_core import EngineCore
from pdserve_engine.core.scheduler import Scheduler
from pdserve_engine.kv.block_pool import BlockPool
from pdserve_engine.kv.kv_cache_manager import KVCacheManager
from pdserve_engine.kv_transfer.base import ConnectorContext, KVIdentity
from pdserve_engine.kv_transfer.connectors.consumer import ConsumerConnector
from pdserve_engine.kv_transfer.connectors.producer import ProducerConnector
from pdserve_engine.request.watchdog import StepWatch
from pdserve_engine.runner.operate.control import EngineControl
from pdserve_worker.attach_service import EngineCoreServicer
from pdserve_worker.kv_link.links import carry_links
from pdserve_worker.process import STOP_GRACE_S, Worker
from support.fake_worker import engine_info
from support.modelled_rank import DEAD
from support.scripted_engine import BLOCK_SIZE, EOS, MAX_MODEL_LEN, check_containers
from support.simulation.engine import CheckedRank, VirtualEngineClient, VirtualExecutor
from support.simulation.loop import Process
from support.simulation.nic import SimulatedNic
from support.simulation.rpc import Channel, Server

if TYPE_CHECKING:
    from support.simulation.world import World

NUM_BLOCKS = 40
MAX_NUM_SEQS = 6
MAX_NUM_BATCHED_TOKENS = 16
VOCAB_SIZE = 1000
MODEL_NAME = "modelled"
SESSION_TIMEOUT_S = 20.0
DRAIN_TIMEOUT_S = 5.0


class SimulatedWorker:
    """One start of one worker: from its beginning to its end it has one epoch and one memory."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.address = f"{name}:1"
        self.role = WorkerRole.PREFILL if name.startswith("p") else WorkerRole.DECODE
        self.process = Process(world.loop, name)
        self.epoch = new_epoch()
        # Its system has taken its memory and its connections back.
        self.is_gone = False
        self.memory = np.full((NUM_BLOCKS, BLOCK_SIZE), DEAD, dtype=np.int64)
        self.pool = BlockPool(
            NUM_BLOCKS, enable_caching=world.has_prefix_caching, on_dead=self._poison
        )
        self.nic = SimulatedNic(self)
        rank = CheckedRank(self.memory, self._on_wrong_kv)
        self.executor = VirtualExecutor(rank, world.random)
        self._stop = asyncio.Event()
        self.task = self.process.create_task(self._serve())

    def stop(self) -> None:
        """SIGTERM."""
        self._stop.set()

    def kill(self) -> None:
        """SIGKILL."""
        self.is_gone = True
        self.world.network.drop(self.process)
        self.process.kill()

    async def _serve(self) -> None:
        world = self.world
        engine = VirtualEngineClient(self.executor, runtime=world.runtime, on_death=world.blame)
        self.engine = engine
        self._load(engine)
        worker = Worker(engine=engine)
        carry_links(
            worker,
            (self.connector,),
            lambda address: Channel(world.network, self.process, address),
        )
        server: Any = Server(world.network, self.process, self.address)
        servicer = EngineCoreServicer(engine, clock=world.loop.time)
        service_grpc.add_EngineCoreServiceServicer_to_server(servicer, server)
        for add_to_server in worker.services.values():
            add_to_server(server)
        await server.start()
        await self._stop.wait()
        # As pdserve_worker.process ends.
        servicer.announce_drain()
        await engine.drain(DRAIN_TIMEOUT_S)
        servicer.stop()
        await worker.close()
        await server.stop(STOP_GRACE_S)
        await engine.close()
        self.kill()

    def _load(self, engine: VirtualEngineClient) -> None:
        clock = self.world.loop.time
        kv = KVCacheManager(
            self.pool, BLOCK_SIZE, (None,), max_tokens_in_flight=2 * MAX_NUM_BATCHED_TOKENS
        )
        self.connector = self._make_connector(engine)
        is_producer = self.role is WorkerRole.PREFILL
        self.scheduler = Scheduler(
            SchedulerConfig(
                max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
            ),
            kv,
            **{"producer" if is_producer else "consumer": self.connector},
            wakeup=engine.wake,
            clock=clock,
        )
        core = EngineCore(
            scheduler=self.scheduler,
            executor=self.executor,
            max_model_len=MAX_MODEL_LEN,
            take_aborts=engine.take_aborts,
            clock=clock,
        )
        engine.open(
            LoadedEngine(
                core=core,
                info=self._info(),
                connector=self.connector,
                prefix_connector=None,
                offload=None,
                control=EngineControl(core, wakeup=engine.wake),
                step_watch=StepWatch(timeout_s=60.0, clock=clock),
                logs_iterations=False,
                compiler=None,
            )
        )
        engine.begin()

    def _make_connector(self, engine: VirtualEngineClient) -> Any:
        layout = KVLayout(
            groups=(KVGroup(id=0, layers=(0,), kind=KVGroupKind.FULL, window=0),),
            block_size=BLOCK_SIZE,
            block_bytes=8 * BLOCK_SIZE,
            num_kv_heads=1,
            head_bytes=8 * BLOCK_SIZE,
        )
        identity = KVIdentity(
            engine_id=self.name,
            epoch=self.epoch,
            compatibility_hash="same",
            layout=layout,
            vocab_size=VOCAB_SIZE,
        )
        kind = ProducerConnector if self.role is WorkerRole.PREFILL else ConsumerConnector
        context = ConnectorContext(
            transport=self.nic,
            identity=identity,
            metrics=KVTransferMetrics(CollectorRegistry()),
            wakeup=engine.wake,
            step_seq=engine.step_seq,
            session_timeout_s=SESSION_TIMEOUT_S,
            clock=self.world.loop.time,
        )
        return kind(context)

    def _info(self) -> EngineInfo:
        return engine_info(
            self.role,
            engine_id=self.name,
            epoch=self.epoch,
            model=MODEL_NAME,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            has_prefix_caching=self.world.has_prefix_caching,
        )

    def left_over(self) -> list[str]:
        """Return what it holds for nobody; raises AssertionError if its books are wrong."""
        self.scheduler.kv.check_integrity()
        check_containers(self.scheduler)
        found = {
            "requests": len(self.scheduler.requests),
            "blocks": self.pool.num_blocks - self.pool.num_free_blocks,
            "sessions": self.connector.num_open_sessions(),
            "owners": self.engine.num_owned,
            "READs": len(self.nic.reads),
        }
        return [f"{self.name} has {number} {name}" for name, number in found.items() if number]

    def _poison(self, block_ids: Sequence[int]) -> None:
        self.memory[list(block_ids)] = DEAD

    def _on_wrong_kv(self, request_id: str) -> None:
        request = self.scheduler.requests.get(request_id)
        if request is not None and not request.handoff.needs_remote_kv:
            self.world.blame(f"a step of {self.name} reads KV that is not {request_id}'s")
