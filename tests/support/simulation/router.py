"""A router process of a simulation: the real core, from `submit` on."""

from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import RouterMetrics
from pdserve_router.config import RouterConfig
from pdserve_router.requests.input.input_processor import InputProcessor
from pdserve_router.requests.tenants.fair_queue import FairQueue
from pdserve_router.requests.tenants.quotas import Quotas, no_limits
from pdserve_router.router import Router
from pdserve_router.text.served_model import ServedModel
from pdserve_router.text.tokenizer import Tokenizer
from pdserve_router.workers.adapter_rollout import AdapterRollout
from pdserve_router.workers.adapter_scale_out import AdapterScaleOut
from pdserve_router.workers.clients.control_client import ControlClient
from pdserve_router.workers.clients.worker_client import WorkerClient
from pdserve_router.workers.routing.route_chooser import RoutingRules
from pdserve_router.workers.worker_pool import WorkerPool
from support.simulation.loop import Process
from support.simulation.rpc import Channel
from support.simulation.worker import MODEL_NAME

if TYPE_CHECKING:
    from support.simulation.world import World


def _default(name: str) -> Any:
    """What operators get who say nothing."""
    return RouterConfig.__dataclass_fields__[name].default


def make_router(world: "World", process: Process, tokenizer: Tokenizer) -> Router:
    """Assemble a router as RouterServer does, without its servers. Runs as `process`."""
    runtime = world.runtime
    metrics = RouterMetrics(CollectorRegistry())
    pool = WorkerPool(
        prefill=[f"{name}:1" for name in world.names if name.startswith("p")],
        decode=[f"{name}:1" for name in world.names if name.startswith("d")],
        connect=partial(
            WorkerClient,
            model=ServedModel(MODEL_NAME, ""),
            router_id="router",
            open_channel=lambda address: Channel(world.network, process, address),
            runtime=runtime,
        ),
        rules=RoutingRules(),
        metrics=metrics,
        on_change=lambda: None,
        runtime=runtime,
    )
    adapters = AdapterRollout(pool, ControlClient(None), runtime)
    return Router(
        pool=pool,
        adapters=adapters,
        scale_out=AdapterScaleOut(
            pool, adapters, max_requests=0, outcomes=metrics.lora.scale_outs, runtime=runtime
        ),
        tokenizer=tokenizer,
        input_processor=InputProcessor(
            tokenizer,
            model_name=MODEL_NAME,
            default_deadline_s=60.0,
            max_deadline_s=60.0,
            is_inline=True,
            clock=runtime.now,
        ),
        metrics=metrics,
        quotas=Quotas(
            no_limits,
            num_parts=1,
            turns=FairQueue(lambda: float("inf"), runtime),
            metrics=metrics.quotas,
            clock=runtime.now,
        ),
        model_name=MODEL_NAME,
        max_num_queued_requests=_default("max_num_queued_requests"),
        max_redrives=_default("max_redrives"),
        redrive_wait_s=_default("redrive_wait_s"),
        runtime=runtime,
    )
