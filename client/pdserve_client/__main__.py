"""The `pdserve` command: up, run, generate, embed, bench, advise, ctl."""

import pdserve_common.rpc.grpc_verbosity  # noqa: F401

# isort: split
import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import get_args

import grpc

from pdserve_client.advisor.command import DESCRIPTION, add_advise_flags, run_advise
from pdserve_client.bench import add_bench_flags, add_router_flags, run_bench
from pdserve_client.client import Client, PoolPrompt, Prompt
from pdserve_client.config import StackConfig, api_key, tls_of
from pdserve_client.ctl import add_ctl_flags, run_ctl
from pdserve_client.stack import POLL_S, Stack, StackError
from pdserve_client.waterfall import format_waterfall
from pdserve_common.config import add_config_flags, build_config
from pdserve_common.model_files.model_folder import find_model, is_hub_id
from pdserve_common.processes.restarts import MAX_RESTARTS, WINDOW_S
from pdserve_common.rpc.addresses import join_address
from pdserve_common.types.pooling_params import EMBED, PoolingTask
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_common.version import VERSION

DEFAULT_PROMPT = "Tell me a story."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    args = _parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = args.command
    try:
        return command(args)
    except (StackError, OSError, ValueError) as error:
        print(f"pdserve: {error}", file=sys.stderr)
        return 1
    except grpc.RpcError as error:
        print(f"pdserve: {error.code().name}: {error.details()}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pdserve", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"pdserve {VERSION}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    up = commands.add_parser(
        "up",
        help="keep a whole stack serving on this machine until Ctrl-C",
        description="Keep a whole stack serving on this machine until Ctrl-C. What ends after it "
        f"was ready is started again, up to {MAX_RESTARTS} times in {WINDOW_S / 60:g} minutes; "
        "what cannot start, or ends more often, ends all.",
    )
    add_config_flags(up, StackConfig)
    up.set_defaults(command=_up)
    run = commands.add_parser(
        "run", help="start a stack, send one prompt, print its waterfall, stop"
    )
    add_config_flags(run, StackConfig)
    _add_generate_flags(run)
    run.set_defaults(command=_run)
    generate = commands.add_parser("generate", help="send one prompt to a router that is up")
    add_router_flags(generate)
    _add_generate_flags(generate)
    generate.set_defaults(command=_generate)
    embed = commands.add_parser(
        "embed",
        help="print vectors of texts, by a router that is up with a model that pools",
        description="Print a vector of each text, a line of JSON.",
    )
    add_router_flags(embed)
    _add_embed_flags(embed)
    embed.set_defaults(command=_embed)
    bench = commands.add_parser("bench", help="load a router that is up and print latencies")
    add_bench_flags(bench)
    bench.set_defaults(command=run_bench)
    advise = commands.add_parser(
        "advise",
        help="say how many prefill and decode workers a trace wants, by simulation",
        description=DESCRIPTION,
    )
    advise.set_defaults(command=run_advise)
    add_advise_flags(advise)
    ctl = commands.add_parser("ctl", help="pause, put to sleep, drain or inspect one worker")
    add_ctl_flags(ctl)
    ctl.set_defaults(command=run_ctl)
    return parser


def _add_generate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default=DEFAULT_PROMPT, help="the prompt (%(default)s)")
    parser.add_argument("--raw", action="store_true", help="send the text as it is, not as a chat")
    parser.add_argument("--max-tokens", type=int, default=128, help="at most (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy (%(default)s)")
    parser.add_argument("--seed", type=int, help="repeats an answer; drawn if unset")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="deadline (%(default)s)")


def _add_embed_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("texts", nargs="+", metavar="TEXT", help="a text")
    parser.add_argument(
        "--task",
        choices=get_args(PoolingTask),
        default=EMBED,
        help="embeddings, numbers for labels, or a score (%(default)s)",
    )
    parser.add_argument("--query", help="what each text is a pair with, for a model of pairs")
    parser.add_argument("--dimensions", type=int, help="leading dimensions; all if unset")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="deadline (%(default)s)")


def _stack_config(args: argparse.Namespace) -> StackConfig:
    flags = vars(args)
    if args.command is _run:
        # A single run needs no fixed ports: it must work beside a stack that is up.
        flags = {"grpc_port": 0, "http_port": 0, "metrics_port": 0, "worker_port": 0, **flags}
        flags.setdefault("log_dir", os.path.join(".run", "run"))
    names = {
        name: value for name, value in flags.items() if name in StackConfig.__dataclass_fields__
    }
    return _with_model(build_config(StackConfig, names, os.environ))


def _with_model(config: StackConfig) -> StackConfig:
    """The same with the model's folder: it is downloaded once, not by each service."""
    if not Path(config.model).is_dir() and is_hub_id(config.model):
        where = "the Hugging Face hub's cache, else on the hub"
        print(f"looking for {config.model} in {where}", file=sys.stderr, flush=True)
    # The library ends its downloads before it ends: after Ctrl-C that may take minutes.
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        model = find_model(config.model, revision=config.revision)
    finally:
        signal.signal(signal.SIGINT, handler)
    return dataclasses.replace(config, model=model, revision=None)


def _up(args: argparse.Namespace) -> int:
    config = _stack_config(args)
    stop_request = _StopRequest()
    stack = Stack(config)
    if stack.placement is not None:
        print(f"cores    {stack.placement}", flush=True)

    def check() -> None:
        stop_request.check()
        if not config.restart:
            stack.check_alive()
        for line in stack.restart_ended():
            print(f"{_clear_line()}pdserve: {line}", file=sys.stderr, flush=True)

    try:
        stack.start()
        _wait_until_ready(stack, check)
        _print_addresses(stack)
        while True:
            time.sleep(POLL_S)
            check()
    except KeyboardInterrupt:
        print(
            f"\nstopping: running requests may take up to {config.drain_timeout_s:g} s to finish; "
            "Ctrl-C again ends them",
            file=sys.stderr,
        )
        return 0
    finally:
        _stop(stack)


def _stop(stack: Stack) -> None:
    """Nothing is left behind, even if we are not to wait."""
    try:
        stack.stop()
    except KeyboardInterrupt:
        stack.kill()


class _StopRequest:
    """SIGINT and SIGTERM. The first waits to be asked for: raised in the midst of a service's start
    it could leave a process behind that nobody knows. The next ones raise KeyboardInterrupt.
    """

    def __init__(self) -> None:
        """Must run on the main thread."""
        self._has_come = False
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._handle)

    def check(self) -> None:
        """Raise KeyboardInterrupt if a signal has come."""
        if self._has_come:
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._has_come:
            raise KeyboardInterrupt
        self._has_come = True


def _run(args: argparse.Namespace) -> int:
    with Stack(_stack_config(args)) as stack:
        _wait_until_ready(stack)
        with Client(stack.grpc_address, tls=stack.tls, api_key=api_key()) as client:
            return _stream(client, args)


def _generate(args: argparse.Namespace) -> int:
    with Client(args.address.split(","), tls=tls_of(args), api_key=api_key()) as client:
        return _stream(client, args)


def _embed(args: argparse.Namespace) -> int:
    with Client(args.address.split(","), tls=tls_of(args), api_key=api_key()) as client:
        for text in args.texts:
            prompt: PoolPrompt = text if args.query is None else (args.query, text)
            answer = client.pool(
                prompt, args.task, dimensions=args.dimensions, timeout_s=args.timeout_s
            )
            print(json.dumps(list(answer.pooling_output)), flush=True)
    return 0


def _stream(client: Client, args: argparse.Namespace) -> int:
    prompt: Prompt = args.prompt if args.raw else [{"role": "user", "content": args.prompt}]
    params = SamplingParams(
        max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed
    )
    for output in client.generate(prompt, params, timeout_s=args.timeout_s):
        for completion in output.outputs:
            print(completion.reasoning + completion.text, end="", flush=True)
            if completion.HasField("error"):
                print(f"\npdserve: {completion.error.message}", file=sys.stderr)
                return 1
        if output.finished:
            print("\n")
            print(format_waterfall(output.metrics, output.usage))
    return 0


def _wait_until_ready(stack: Stack, check: Callable[[], None] | None = None) -> None:
    """Say what is waited for: one line that changes on a terminal, one line a change elsewhere.
    `check` is `Stack.wait_until_ready`'s.
    """
    start = time.monotonic()
    shown = ""
    is_terminal = sys.stderr.isatty()
    for waiting in stack.wait_until_ready(check):
        text = "; ".join(f"{name}: {message[:60]}" for name, message in waiting.items())
        if is_terminal:
            elapsed = time.monotonic() - start
            line = f"{_clear_line()}[{elapsed:5.1f} s] {text}"[:160]
            print(line, end="", file=sys.stderr, flush=True)
        elif text != shown and text:
            print(f"waiting for {text}", file=sys.stderr, flush=True)
        shown = text
    print(_clear_line(), end="", file=sys.stderr)
    elapsed = time.monotonic() - start
    print(f"ready after {elapsed:.1f} s: {len(stack.processes)} processes", file=sys.stderr)


def _print_addresses(stack: Stack) -> None:
    host = stack.config.host
    print(f"model    {stack.model_name}")
    print(f"gRPC     {stack.grpc_address}")
    scheme = "http" if stack.tls is None else "https"
    print(f"HTTP     {scheme}://{join_address(host, stack.http_port)}/v1")
    for process in stack.processes:
        print(
            f"metrics  http://{join_address(host, process.metrics_port)}/metrics  ({process.name})"
        )
    print(f"logs     {stack.config.log_dir}/*.log")
    print("Ctrl-C stops", flush=True)


def _clear_line() -> str:
    """What removes the line that says what is waited for."""
    return "\r\x1b[K" if sys.stderr.isatty() else ""


if __name__ == "__main__":
    sys.exit(main())
