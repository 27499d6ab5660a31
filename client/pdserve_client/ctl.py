"""`pdserve ctl`: the controls of one worker from the command line."""

import argparse
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import grpc

from pdserve.v1 import control_service_pb2 as control_pb2
from pdserve.v1 import control_service_pb2_grpc as control_grpc
from pdserve.v1 import engine_core_pb2 as core_pb2
from pdserve.v1 import engine_core_service_pb2 as service_pb2
from pdserve.v1 import engine_core_service_pb2_grpc as service_grpc
from pdserve_client.config import tls_of
from pdserve_common.config import add_config_flags
from pdserve_common.rpc.channels import open_blocking_channel
from pdserve_common.rpc.tls import TlsConfig
from pdserve_common.types.engine import EngineInfo, PauseMode, SchedulerStats
from pdserve_common.types.verbs import MAX_SLEEP_LEVEL, SLEEP_TAGS
from pdserve_common.wire import from_proto

DEFAULT_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 24 * 3600.0

MODES = [mode.name.lower() for mode in PauseMode]
MODE_HELP = (
    "what happens to requests: abort ends all of them, wait lets running ones finish, keep freezes "
    "them (%(default)s)"
)

ADVICE = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "what was begun goes on: `load` shows it, a longer "
    "--timeout-s waits for it",
    grpc.StatusCode.UNAVAILABLE: "ADDRESS must be the gRPC host:port of a worker that is up; one "
    "that speaks TLS wants all three files of --tls-*-file",
    grpc.StatusCode.UNIMPLEMENTED: "ADDRESS must be a worker's, a router has no controls",
}

Verb = Callable[[grpc.Channel, argparse.Namespace], None]


def add_ctl_flags(parser: argparse.ArgumentParser) -> None:
    """Add the address, --timeout-s and a subcommand for each verb."""
    parser.add_argument("address", metavar="ADDRESS", help="a worker's host:port")
    parser.add_argument(
        "--timeout-s",
        type=_seconds,
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help="give up the call after this long (%(default)g)",
    )
    add_config_flags(parser, TlsConfig)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    pause = _add(verbs, "pause", _pause, "start nothing new; requests that come in wait")
    _add_mode(pause, "wait")
    pause.add_argument("--clear-cache", action="store_true", help="forget cached prefixes too")
    _add(verbs, "resume", _resume, "end a pause")
    sleep = _add(verbs, "sleep", _sleep, "pause and give memory back")
    sleep.add_argument(
        "--level",
        type=int,
        choices=range(MAX_SLEEP_LEVEL + 1),
        default=1,
        help="0: only pause; 1: give the KV pool back, and a GPU's weights to the host; 2: drop "
        "the weights and read them again at wake-up (%(default)s)",
    )
    _add_mode(sleep, "wait")
    wake = _add(verbs, "wake", _wake, "take the memory back and go on")
    wake.add_argument(
        "tags", nargs="*", metavar="TAG", help=f"only some of {', '.join(SLEEP_TAGS)}; all if none"
    )
    drain = _add(verbs, "drain", _drain, "take no requests any more and follow until none is left")
    drain.add_argument(
        "--drain-timeout-s",
        type=_seconds,
        metavar="SECONDS",
        help="after this long what is left is handed back to routers, which send it elsewhere; the "
        "worker's own setting if unset",
    )
    _add(
        verbs, "reset-cache", _reset_cache, "forget cached prefixes; refused while blocks are held"
    )
    profile = _add(verbs, "profile", _profile, "record the engine's steps")
    profile.add_argument("action", choices=("start", "stop"), help="stop prints where the trace is")
    lora = verbs.add_parser("lora", help="LoRA adapters", description="LoRA adapters")
    _add_lora_verbs(lora.add_subparsers(required=True, metavar="VERB"))
    _add(verbs, "info", _info, "show what the worker is and can take")
    _add(verbs, "load", _load, "show the worker's state and load")


def run_ctl(args: argparse.Namespace) -> int:
    """Carry out the verb; the exit status. Raises grpc.RpcError, ValueError with advice, or OSError
    for a file that cannot be read.
    """
    verb: Verb = args.verb
    with open_blocking_channel(args.address, tls_of(args)) as channel:
        try:
            verb(channel, args)
        except grpc.RpcError as error:
            if error.code() not in ADVICE:
                raise
            message = f"{error.code().name}: {error.details()}; {ADVICE[error.code()]}"
            raise ValueError(message) from error
    return 0


def _add(verbs: Any, name: str, verb: Verb, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=text)
    parser.set_defaults(verb=verb)
    return parser


def _add_lora_verbs(verbs: Any) -> None:
    add = _add(verbs, "add", _add_lora, "load an adapter, or another one under the same name")
    remove = _add(
        verbs, "remove", _remove_lora, "take no more requests with it, unload it after the last"
    )
    pin = _add(verbs, "pin", _pin_lora, "never unload it to make room for others")
    unpin = _add(verbs, "unpin", _unpin_lora, "let it be unloaded to make room again")
    for verb in (add, remove, pin, unpin):
        verb.add_argument("name", metavar="NAME", help="what clients ask for")
    add.add_argument(
        "path",
        nargs="?",
        default="",
        metavar="PATH",
        help="its folder below the worker's --lora-root, that of its name if unset; or "
        "hf://OWNER/NAME@REVISION, with --lora-hub",
    )
    _add(verbs, "list", _list_loras, "show what is loaded")


def _add_mode(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--mode", choices=MODES, default=default, help=MODE_HELP)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not (math.isfinite(value) and 0 < value <= MAX_TIMEOUT_S):
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most {MAX_TIMEOUT_S:g}")
    return value


# ---- the verbs


def _control(channel: grpc.Channel) -> control_grpc.ControlServiceStub:
    return control_grpc.ControlServiceStub(channel)


def _mode(args: argparse.Namespace) -> Any:
    return PauseMode[args.mode.upper()].value


def _pause(channel: grpc.Channel, args: argparse.Namespace) -> None:
    request = control_pb2.PauseRequest(mode=_mode(args), clear_cache=args.clear_cache)
    _control(channel).Pause(request, timeout=args.timeout_s)
    print("paused")


def _resume(channel: grpc.Channel, args: argparse.Namespace) -> None:
    _control(channel).Resume(control_pb2.ResumeRequest(), timeout=args.timeout_s)
    print("resumed")


def _sleep(channel: grpc.Channel, args: argparse.Namespace) -> None:
    request = control_pb2.SleepRequest(level=args.level, mode=_mode(args))
    response = _control(channel).Sleep(request, timeout=args.timeout_s)
    print(f"asleep at level {args.level}, {response.freed_bytes / 2**20:.0f} MiB given back")


def _wake(channel: grpc.Channel, args: argparse.Namespace) -> None:
    _control(channel).WakeUp(control_pb2.WakeUpRequest(tags=args.tags), timeout=args.timeout_s)
    print(f"awake: {', '.join(args.tags or SLEEP_TAGS)}")


def _drain(channel: grpc.Channel, args: argparse.Namespace) -> None:
    request = control_pb2.DrainRequest()
    if args.drain_timeout_s is not None:
        request.timeout_ms = round(1000 * args.drain_timeout_s)
    shown = ""
    for progress in _control(channel).Drain(request, timeout=args.timeout_s):
        text = _drain_text(progress)
        if text != shown:
            print(text, flush=True)
        shown = text


def _drain_text(progress: control_pb2.DrainResponse) -> str:
    if not progress.drained:
        return f"{progress.num_requests} requests, {progress.num_open_kv_sessions} KV sessions"
    num = progress.num_handed_back
    return f"drained, {num} requests handed back" if num else "drained"


def _reset_cache(channel: grpc.Channel, args: argparse.Namespace) -> None:
    request = control_pb2.ResetPrefixCacheRequest()
    response = _control(channel).ResetPrefixCache(request, timeout=args.timeout_s)
    print(f"{response.num_blocks} cached blocks forgotten")


def _profile(channel: grpc.Channel, args: argparse.Namespace) -> None:
    request = control_pb2.ProfileRequest(start=args.action == "start")
    response = _control(channel).Profile(request, timeout=args.timeout_s)
    print(response.path or "profiling")


def _add_lora(channel: grpc.Channel, args: argparse.Namespace) -> None:
    lora = core_pb2.LoraRequest(lora_name=args.name, lora_path=args.path)
    request = control_pb2.AddLoraRequest(lora_request=lora)
    adapter = _control(channel).AddLora(request, timeout=args.timeout_s).adapter
    print(f"{adapter.name} is {adapter.digest}, rank {adapter.rank}")


def _remove_lora(channel: grpc.Channel, args: argparse.Namespace) -> None:
    request = control_pb2.RemoveLoraRequest(lora_name=args.name)
    _control(channel).RemoveLora(request, timeout=args.timeout_s)
    print("removed")


def _pin_lora(channel: grpc.Channel, args: argparse.Namespace) -> None:
    request = control_pb2.PinLoraRequest(lora_name=args.name)
    _control(channel).PinLora(request, timeout=args.timeout_s)
    print("pinned")


def _unpin_lora(channel: grpc.Channel, args: argparse.Namespace) -> None:
    request = control_pb2.UnpinLoraRequest(lora_name=args.name)
    _control(channel).UnpinLora(request, timeout=args.timeout_s)
    print("unpinned")


def _list_loras(channel: grpc.Channel, args: argparse.Namespace) -> None:
    response = _control(channel).ListLoras(control_pb2.ListLorasRequest(), timeout=args.timeout_s)
    for lora in response.loras:
        states = {"pinned": lora.is_pinned, "removed": lora.is_removed}
        words = [word for word, is_so in states.items() if is_so]
        print(
            f"{lora.adapter.name or '(no name)'}  {lora.adapter.digest}  rank {lora.adapter.rank}  "
            f"{lora.num_requests} requests  {' '.join(words)}".rstrip()
        )


def _info(channel: grpc.Channel, args: argparse.Namespace) -> None:
    stub = service_grpc.EngineCoreServiceStub(channel)
    response = stub.GetInfo(service_pb2.GetInfoRequest(), timeout=args.timeout_s)
    info = from_proto(EngineInfo, response.info)
    _print_table({field.name: _show(getattr(info, field.name)) for field in fields(info)})


def _load(channel: grpc.Channel, args: argparse.Namespace) -> None:
    response = _control(channel).GetLoad(control_pb2.GetLoadRequest(), timeout=args.timeout_s)
    stats = from_proto(SchedulerStats, response.scheduler_stats)
    rows = {"state": _state(response), "kv_cache_usage": f"{100 * stats.kv_cache_usage:.1f}%"}
    rows |= {field.name: _show(getattr(stats, field.name)) for field in fields(SchedulerStats)}
    _print_table(rows)


def _state(load: control_pb2.GetLoadResponse) -> str:
    if load.draining:
        return "draining"
    if load.HasField("sleep_level"):
        return f"asleep at level {load.sleep_level}"
    return "paused" if load.paused else "serving"


def _show(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return f"{value:g}"
    return str(getattr(value, "name", value)) or "none"


def _print_table(rows: dict[str, str]) -> None:
    width = max(map(len, rows))
    for name, value in rows.items():
        print(f"{name:<{width}}  {value}")
