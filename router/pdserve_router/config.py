"""The router's flags."""

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdserve_common.config import LogLevel, Transport, opt
from pdserve_common.limits.validation import MAX_TIMEOUT_S
from pdserve_common.model_files.model_folder import is_hub_id, model_name
from pdserve_common.observability.tracing_config import check_endpoint, endpoint_opt
from pdserve_common.rpc.tls import TlsConfig
from pdserve_router.chat_formats.registry import AUTO, FORMATS, NONE
from pdserve_router.requests.input.request_limits import MAX_PICTURES
from pdserve_router.workers.clients.held_tensors import DEFAULT_MAX_BYTES
from pdserve_router.workers.discovery import SOURCES, parse_sources
from pdserve_router.workers.routing.prefix_policy import RoutingWeights
from pdserve_router.workers.routing.route_chooser import RoutingRules
from pdserve_router.workers.routing.routing_policy import ROUTING_POLICIES

# More than a machine has cores for.
MAX_WORKERS = 256
MAX_QUOTA_REPLICAS = 10_000
_HOST = re.compile(r"\*|[A-Za-z0-9_][A-Za-z0-9_.-]*")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/?#,\s]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig(TlsConfig):
    """The public end of pdserve: takes requests over gRPC and OpenAI-compatible HTTP and sends
    each to a prefill and a decode worker.
    """

    model: str = opt(
        "", "Directory with the model's tokenizer, or OWNER/NAME on the Hugging Face hub."
    )
    revision: str | None = opt(
        None, "Branch, tag or commit of a model on the hub; its main branch if unset."
    )
    served_model_name: str | None = opt(
        None, "Name clients ask for; unset: OWNER/NAME of a model on the hub, the directory's name."
    )
    prefill: tuple[str, ...] = opt(
        (),
        "Prefill workers: host:port of their gRPC servers, dns://name:port for all addresses of a "
        "name (asked every 5 s), file:///path with one host:port a line (read every 1 s).",
    )
    decode: tuple[str, ...] = opt(
        (), "Decode workers, in the same forms; none for a model that pools."
    )
    chat_format: str = opt(
        AUTO,
        f"How the model writes reasoning and calls of tools: {', '.join(sorted(FORMATS))}; {AUTO}: "
        f"as its chat template says, {NONE}: answers are text only.",
    )
    host: str = opt("0.0.0.0", "Address to listen on.")
    grpc_port: int = opt(50051, "Port of the gRPC API; 0 takes a free one.")
    http_port: int = opt(8000, "Port of the OpenAI-compatible API; 0 takes a free one.")
    metrics_port: int = opt(9090, "Port of /metrics, /live and /ready; 0 takes a free one.")
    workers: int = opt(
        1,
        "Router processes on the same gRPC and HTTP ports, each with its share of the connections "
        "and limits of its own. Workers know them as ROUTER_ID-0, ROUTER_ID-1, ...; their metrics "
        "and probes are on METRICS_PORT, METRICS_PORT + 1, ...",
    )
    router_id: str = opt("router", "Stable name of this router, shown to workers and in logs.")
    cell_size: int = opt(
        64,
        "Workers that this router attaches to, of a longer list a share with the list's ratio of "
        "prefill to decode; 0: all.",
    )
    cell: str = opt(
        "",
        "Routers of the same name here share a cell of workers; names that end in -0, -1, ... take "
        "the cells in turn. Unset: router_id.",
    )
    routing_policy: str = opt(
        "prefix",
        f"How workers are chosen: {', '.join(sorted(ROUTING_POLICIES))}. prefix: prefill and "
        "decode together, by what they have cached of the prompt and what waits there.",
    )
    routing_queue_weight: float = opt(
        1.0,
        "What a prompt token costs that waits on prefill before the request; costs are in prompt "
        "tokens to compute.",
    )
    routing_decode_weight: float = opt(16.0, "What each request on decode costs.")
    routing_room_weight: float = opt(
        1.0, "What each token costs that decode has no free block for."
    )
    routing_transfer_weight: float = opt(
        0.1, "What each token costs whose KV has to move to decode."
    )
    routing_topology_weight: float = opt(
        32.0, "What it costs if prefill and decode have addresses on different hosts."
    )
    routing_zone_weight: float = opt(
        256.0, "What it costs besides if they are known to be in different zones."
    )
    disaggregation: bool = opt(True, "Prefill on prefill workers; off: decode workers do it all.")
    require_disaggregation: bool = opt(
        False,
        "Refuse a request rather than have decode do it alone for want of a prefill worker, a "
        "proven pair or room in prefill's queue. What needs no handoff stays on decode as ever: "
        "short prompts, max_tokens=1, beam search; but no prompt for what should be cached there.",
    )
    require_transport: Transport = opt(
        "any",
        "Use a pair of workers only if its KV blocks were seen to travel this way, and no longer "
        "once they were seen to travel another.",
    )
    require_determinism: Literal["any", "exact"] = opt(
        "any",
        "exact: use only workers that are exact and whose arithmetic is the same to the bit, so "
        "that an answer does not depend on which of them it meets.",
    )
    disaggregation_threshold_tokens: int = opt(
        0,
        "Prompts of which decode has to compute at most this many tokens stay there; what it has "
        "cached need not be computed. 0: all of more than one token go to prefill.",
    )
    max_prefill_queue_tokens: int = opt(
        0,
        "Prefill workers with more waiting tokens get no more; if all have more, decode works "
        "alone. 0: no limit.",
    )
    max_num_queued_requests: int = opt(
        1024, "Requests that wait for their first token; one more is refused with 429."
    )
    max_redrives: int = opt(
        3,
        "How often a request whose worker failed is sent to another; then it fails. Drains and "
        "workers without room do not count, and 512 new tokens give one back.",
    )
    redrive_wait_s: float = opt(
        60.0,
        "How long such a request waits, within its deadline, while no worker of its weights is "
        "ready, or none has room.",
    )
    default_deadline_s: float = opt(600.0, "Deadline of requests that bring none.")
    max_deadline_s: float = opt(3600.0, "Longer deadlines are cut to this.")
    client_stall_timeout_s: float = opt(10.0, "A client that reads nothing for this long is cut.")
    max_body_bytes: int = opt(
        8 * 1024 * 1024,
        "Larger HTTP bodies (413) and gRPC messages (RESOURCE_EXHAUSTED) are refused.",
    )
    max_images_per_prompt: int = opt(
        8,
        "Pictures of a request, of a model that takes any; 0: none. In HTTP they are base64 in the "
        "body, which max_body_bytes bounds.",
    )
    max_held_tensor_bytes: int = opt(
        DEFAULT_MAX_BYTES,
        "Pixels of the requests that run, which stay here until their ends; a request whose "
        "pictures do not fit is refused (429).",
    )
    max_http_connections: int = opt(
        4096,
        "HTTP connections served at a time, fewer if the limit of open files (ulimit -n) is low; "
        "those without a request make room for others, one more is refused with 503.",
    )
    max_http_connections_of_address: int = opt(
        0,
        "The same of one client address; 0: three quarters of all. Behind a proxy or balancer, "
        "which is one address, set it to max_http_connections.",
    )
    http_idle_timeout_s: float = opt(
        60.0,
        "A connection without a request is closed after this. Behind a balancer that keeps "
        "connections longer, set it higher than that: else what it sends just then is lost, a 502.",
    )
    max_grpc_connections: int = opt(
        1024, "gRPC connections at a time, fewer if the limit of open files is low."
    )
    api_keys_file: str | None = opt(
        None,
        "File with one API key a line, `key` or `name:key`, and limits of the name behind it "
        "(docs/security.md), read again when it changes; requests without one of them are refused. "
        "Unset: everybody is served.",
    )
    quota_replicas: int = opt(
        1,
        "Routers that clients spread over: each gives this part of the limits in api_keys_file, as "
        "they share nothing. Several workers of one router divide its part further.",
    )
    fair_queue_steps: float = opt(
        0.0,
        "With API keys: requests are sent to prefill workers while these have fewer prompt tokens "
        "to compute than fill so many of their steps, such as 4. What is above waits at the "
        "router, where names take turns by their shares. 0: off.",
    )
    share_prefixes: bool = opt(
        False, "API keys of different names use what is cached of each other's prompts."
    )
    cors_origins: tuple[str, ...] = opt(
        (),
        "Origins whose pages may use the HTTP API in browsers, such as https://chat.example.com; "
        "*: all. Unset: none.",
    )
    allowed_hosts: tuple[str, ...] = opt(
        ("localhost",),
        "Without api_keys_file: names, without ports, that HTTP requests may have in Host besides "
        "addresses; others are refused (403), as any page's name could lead here. *: all.",
    )
    allowed_origins: tuple[str, ...] = opt(
        (),
        "Without api_keys_file: origins whose pages' HTTP requests are not refused (403), besides "
        "the host that is asked and cors_origins, such as that of a proxy which sends another "
        "Host. *: all.",
    )
    lora_updates: bool = opt(
        False,
        "Serve /v1/load_lora_adapter and /v1/unload_lora_adapter: whoever may send requests may "
        "then change the adapters of all workers.",
    )
    lora_scale_out_requests: int = opt(
        32,
        "With lora_updates: when each worker that holds an adapter has more requests than this, "
        "the router adds it to another pair that has room, and adds adapters again to workers that "
        "had them before they started again; 0: nothing is added.",
    )
    drain_timeout_s: float = opt(30.0, "How long running requests may take after SIGTERM.")
    log_level: LogLevel = opt("info", "What is logged.")
    otlp_traces_endpoint: str | None = endpoint_opt()
    log_requests: bool = opt(
        True, "A line at info for each request when it ends; nothing of its text is in it."
    )

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is another class than the one that it was made from.
        TlsConfig.__post_init__(self)
        if self.tls_ca_file and not self.tls_cert_file:
            raise ValueError(
                "tls_ca_file is set, tls_cert_file must be set as well: workers ask routers for one"
            )
        if not self.model or not (Path(self.model).is_dir() or is_hub_id(self.model)):
            raise ValueError(
                "model must be a directory with a tokenizer, or OWNER/NAME on the Hugging Face "
                f"hub, got {self.model!r}"
            )
        if not self.decode and not self.prefill:
            raise ValueError(
                f"decode needs at least one worker: {SOURCES}; of a model that pools prefill does"
            )
        for entries in (self.prefill, self.decode):
            parse_sources(entries)
        if both := set(self.prefill) & set(self.decode):
            raise ValueError(f"workers have one role, listed in both: {', '.join(sorted(both))}")
        if self.routing_policy not in ROUTING_POLICIES:
            known = ", ".join(sorted(ROUTING_POLICIES))
            raise ValueError(f"routing_policy is {self.routing_policy!r}, known are {known}")
        if self.chat_format not in (AUTO, NONE, *FORMATS):
            known = ", ".join((AUTO, NONE, *sorted(FORMATS)))
            raise ValueError(f"chat_format is {self.chat_format!r}, known are {known}")
        if self.require_disaggregation and not self.disaggregation:
            raise ValueError("require_disaggregation is on while disaggregation is off")
        if self.require_disaggregation and not self.prefill:
            raise ValueError("require_disaggregation is on, prefill needs at least one worker")
        for name in ("cors_origins", "allowed_origins"):
            for origin in getattr(self, name):
                if not _ORIGIN.fullmatch(origin):
                    raise ValueError(
                        f"{name} has {origin!r}, must be * or scheme://host[:port] without a path"
                    )
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ValueError(f"allowed_hosts has {host!r}, must be * or a name without a port")
        check_endpoint(self.otlp_traces_endpoint)
        self._check_numbers()

    def _check_numbers(self) -> None:
        for name in ("grpc_port", "http_port", "metrics_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ValueError(f"{name} is {getattr(self, name)}, must be 0 to 65535")
            if self.workers > 1 and not getattr(self, name) and name != "metrics_port":
                raise ValueError(f"{name} is 0, which {self.workers} workers cannot share")
        if not 1 <= self.quota_replicas <= MAX_QUOTA_REPLICAS:
            raise ValueError(
                f"quota_replicas is {self.quota_replicas}, must be 1 to {MAX_QUOTA_REPLICAS}"
            )
        if not 1 <= self.workers <= MAX_WORKERS:
            raise ValueError(f"workers is {self.workers}, must be 1 to {MAX_WORKERS}")
        if self.metrics_port + self.workers - 1 > 65535:
            raise ValueError(
                f"metrics_port is {self.metrics_port}, with {self.workers} workers the last one "
                f"has {self.metrics_port + self.workers - 1}, must be at most 65535"
            )
        for name in (
            "max_num_queued_requests",
            "default_deadline_s",
            "client_stall_timeout_s",
            "max_body_bytes",
            "max_http_connections",
            "http_idle_timeout_s",
            "max_grpc_connections",
        ):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}, must be above 0")
        if not self.max_deadline_s >= self.default_deadline_s:
            raise ValueError(
                f"max_deadline_s is {self.max_deadline_s}, must be at least default_deadline_s "
                f"({self.default_deadline_s})"
            )
        if not 0 <= self.max_images_per_prompt <= MAX_PICTURES:
            raise ValueError(
                f"max_images_per_prompt is {self.max_images_per_prompt}, must be 0 to "
                f"{MAX_PICTURES}"
            )
        if self.max_deadline_s > MAX_TIMEOUT_S:
            raise ValueError(
                f"max_deadline_s is {self.max_deadline_s}, must be at most {MAX_TIMEOUT_S}"
            )
        if self.cell_size == 1:
            raise ValueError("cell_size is 1, must be 0 or at least 2: a worker of each role")
        for name in (
            "cell_size",
            "fair_queue_steps",
            "max_held_tensor_bytes",
            "lora_scale_out_requests",
            "drain_timeout_s",
            "disaggregation_threshold_tokens",
            "max_prefill_queue_tokens",
            "max_redrives",
            "redrive_wait_s",
            "max_http_connections_of_address",
            *(field.name for field in dataclasses.fields(RoutingWeights)),
        ):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, must be at least 0")

    def of_process(self, index: int) -> "RouterConfig":
        """Return the config of one of `workers` processes."""
        return dataclasses.replace(
            self,
            router_id=f"{self.router_id}-{index}",
            cell=self.cell or self.router_id,  # they share their connections, and so their cell
            metrics_port=self.metrics_port + index if self.metrics_port else 0,
        )

    @property
    def rules(self) -> RoutingRules:
        return RoutingRules(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(RoutingRules)}
        )

    @property
    def model_name(self) -> str:
        return self.served_model_name or model_name(self.model)
