"""Time to the first token of a conversation that comes back when the pool has it no more: loaded
from host memory, from the disk, and computed, on the model of `make_model.py`.

    python benchmarks/bench_kv_offload.py [--tokens 2048] [--rounds 7] [--folder FOLDER]

The three are by turns in each round, on engines of one process. The disk's files are in the page
cache, unless `--cold` asks the kernel to drop them first. Prints a table.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from make_model import DEFAULT_MODEL, make_model
from prometheus_client import CollectorRegistry

from pdserve_common.metrics.services import KVTransferMetrics
from pdserve_common.types.engine import EngineCoreRequest, Generate
from pdserve_common.types.sampling_params import SamplingParams
from pdserve_engine.assemble import LoadedEngine, load_engine
from pdserve_engine.config import EngineConfig
from support.waiting import wait_until

GIB = 1 << 30
NUM_NEW = 32


class Bench:
    """One engine, of which one conversation is known."""

    def __init__(self, model: Path, num_tokens: int, **tiers: object) -> None:
        self.engine: LoadedEngine = load_engine(
            EngineConfig(
                model=str(model),
                kv_connector="none",
                max_model_len=num_tokens + 2 * NUM_NEW,
                kv_offload_timeout_s=60.0,
                **tiers,  # type: ignore[arg-type]
            ),
            role="prefill",
            engine_id="bench",
            metrics=KVTransferMetrics(CollectorRegistry()),
        )
        self._num_requests = 0

    def ttft_s(self, prompt: list[int]) -> float:
        core = self.engine.core
        self._num_requests += 1
        request = EngineCoreRequest(
            request_id=f"r{self._num_requests}",
            prompt_token_ids=tuple(prompt),
            task=Generate(SamplingParams(temperature=0.0, max_tokens=1)),
        )
        start = time.perf_counter()
        core.add_request(request)
        while core.scheduler.has_requests():
            if core.has_work():
                core.step()
            else:
                core.poll()
                time.sleep(1e-4)
        return time.perf_counter() - start

    def forget(self) -> None:
        """The pool has nothing cached; what was offered is stored."""
        core, offload = self.engine.core, self.engine.offload

        def is_stored() -> bool:
            core.poll()
            return core.scheduler.kv.block_pool.reset_prefix_cache()

        wait_until(is_stored)
        if offload is not None:
            wait_until(lambda: not offload.num_open_stores())


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def bench(model: Path, folder: Path, args: argparse.Namespace) -> None:
    rng = random.Random(0)
    known = [rng.randrange(100, 30000) for _ in range(args.tokens)]
    engines = {
        "computed": Bench(model, args.tokens),
        "host": Bench(model, args.tokens, kv_offload_host_bytes=4 * GIB),
        "disk": Bench(
            model,
            args.tokens,
            kv_offload_disk_path=str(folder),
            kv_offload_disk_bytes=4 * GIB,
        ),
    }
    found: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.ttft_s(known)
        engine.forget()
    for _ in range(args.rounds):
        prompt = [*known, *(rng.randrange(100, 30000) for _ in range(NUM_NEW))]
        for name, engine in engines.items():
            if args.cold and name == "disk":
                drop_from_page_cache(folder)
            found[name].append(engine.ttft_s(prompt))
            engine.forget()
    computed = statistics.median(found["computed"])
    print(f"| {args.tokens} + {NUM_NEW} tokens | TTFT, s | computed / this |")
    print("|---|---|---|")
    for name, seconds in found.items():
        median = statistics.median(seconds)
        print(
            f"| {name} | {median:.3f} ({min(seconds):.3f} to {max(seconds):.3f}) "
            f"| {computed / median:.1f} |"
        )
    for engine in engines.values():
        engine.engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="On the disk that is meant; else a temporary.")
    parser.add_argument("--cold", action="store_true")
    args = parser.parse_args()
    make_model(args.model)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        bench(args.model, Path(folder), args)


if __name__ == "__main__":
    main()
