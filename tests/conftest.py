"""Fixtures shared by the suites: small random models and what transformers generates with them."""

import functools
import gc
import json
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A failed assertion of a harness says as much as one of a test.
pytest.register_assert_rewrite("support")

from pdserve_common.processes import child  # noqa: E402
from support import fork_server  # noqa: E402
from support.certificates import CertificateAuthority  # noqa: E402
from support.hub import FakeHub  # noqa: E402
from support.models import (  # noqa: E402
    LLAVA,
    SERVED_VOCAB_SIZE,
    build_model,
    save_byte_tokenizer,
    save_preprocessor_config,
)

pytest_plugins = ["support.run_log", "support.forks"]

# The same examples in every run, on a machine however busy: a run must not fail by chance.
settings.register_profile(
    "pdserve", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("pdserve")

# UCX takes all network devices that it finds at its start, and READs hang when one of them is gone.
# Those of the fault tests' networks come and go beside other tests.
os.environ.setdefault("UCX_NET_DEVICES", "lo")


@pytest.fixture(scope="session", autouse=True)
def _forked_children() -> Iterator[None]:
    """The children of engines and routers in this process are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "spawn", fork_server.spawn)
        yield


@pytest.fixture(scope="session")
def make_certificate_authority(
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[], CertificateAuthority]:
    """Skips the test where there is no openssl command."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made by the openssl command")
    return lambda: CertificateAuthority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with the bundled model in it, and files beside it that nobody serves from."""
    files = tmp_path / "hub-files"
    shutil.copytree(Path(__file__).parent.parent / "models" / "pdserve-tiny", files)
    for name in ("pytorch_model.bin", "code.py", "consolidated.safetensors", "onnx/a.json"):
        (files / name).parent.mkdir(exist_ok=True)
        (files / name).write_bytes(b"not to be had")
    hub = FakeHub(files, tmp_path / "hub-home")
    yield hub
    hub.close()


# As it is before it is patched.
unfreeze_garbage = gc.unfreeze


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: collections of garbage would find nothing there."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Nor would later ones, half a second each, of which each start of an engine makes two. Those
    that follow are for what tests make, and for all of it.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None


def pytest_unconfigure() -> None:
    """Libraries that look for leaks at the end find none."""
    unfreeze_garbage()


def pytest_configure() -> None:
    """A shell starts what it puts in the background with SIGINT ignored; children would inherit
    that, and no test could interrupt them.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if os.environ.get("TRITON_INTERPRET") == "1":
        from support.interpreted import prepare_interpreter

        prepare_interpreter()


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_model(architecture, *, shard_size=None, dtype="float32", **config_overrides) -> folder.

    Small models with random weights, biases and norms; the same arguments give the same folder.
    """
    import torch

    folders: dict[str, Path] = {}

    def make(
        architecture: str = "LlamaForCausalLM",
        *,
        shard_size: str | None = None,
        dtype: str = "float32",
        **overrides: Any,
    ) -> Path:
        key = json.dumps([architecture, shard_size, dtype, overrides], sort_keys=True)
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("model")
            model = build_model(architecture, overrides).to(getattr(torch, dtype))
            model.save_pretrained(folders[key], max_shard_size=shard_size or "5GB")
            if architecture == LLAVA:
                save_preprocessor_config(folders[key])
        return folders[key]

    return make


@pytest.fixture(scope="session")
def make_served_model(make_model: Callable[..., Path]) -> Callable[..., Path]:
    """make_model's random models with what a router needs besides: a byte-level tokenizer."""

    def make(architecture: str, **overrides: object) -> Path:
        folder = make_model(architecture, vocab_size=SERVED_VOCAB_SIZE, **overrides)
        if not (folder / "tokenizer.json").exists():
            save_byte_tokenizer(folder, has_pictures=architecture == LLAVA)
        return folder

    return make


@pytest.fixture(scope="session")
def hf_model() -> Callable[..., Any]:
    """hf_model(model_dir, dtype="float32") -> the transformers model, which never stops early."""

    @functools.cache
    def load(model_dir: Path, dtype: str = "float32") -> Any:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        has_softcap = getattr(AutoConfig.from_pretrained(model_dir), "attn_logit_softcapping", None)
        model = AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=getattr(torch, dtype),
            # Not all versions refuse SDPA, which knows of no softcap.
            attn_implementation="eager" if has_softcap else None,
        )
        model.generation_config.eos_token_id = None
        return model.eval()

    return load


@pytest.fixture(scope="session")
def hf_greedy(hf_model: Callable[..., Any]) -> Callable[[Path, list[int], int], list[int]]:
    """hf_greedy(model_dir, prompt_token_ids, n) -> the n tokens transformers generates in fp32."""

    def generate(model_dir: Path, prompt_token_ids: list[int], n: int) -> list[int]:
        import torch

        prompt = torch.tensor([prompt_token_ids])
        generated = hf_model(model_dir).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=n,
            do_sample=False,
            pad_token_id=0,
        )
        return generated[0, len(prompt_token_ids) :].tolist()

    return generate
