"""What is given back while an engine sleeps, by itself."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pdserve_engine.kv.kv_cache import KVCache, KVCacheSpec
from pdserve_engine.kv.memory import used_bytes
from pdserve_engine.models.registry import load_model, read_model_config
from pdserve_engine.runner.operate.sleep import SleepingMemory, tensors_of

CPU = torch.device("cpu")
MIB = 1 << 20


class Owner:
    """Holds a model as the runner does."""

    def __init__(self, model: object) -> None:
        self.model = model


def load(folder: Path, device: torch.device) -> object:
    return load_model(folder, read_model_config(folder), device=device)


def make_pool(folder: Path, device: torch.device, num_bytes: int) -> KVCache:
    spec = KVCacheSpec.from_model(read_model_config(folder), block_size=16, device=device)
    return KVCache(spec, num_blocks=spec.num_blocks_for_budget(num_bytes), device=device)


@pytest.mark.parametrize(
    "architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"]
)
def test_every_weight_of_a_model_is_found(
    make_model: Callable[..., Path], architecture: str
) -> None:
    folder = make_model(architecture)
    # Packed weights on the CPU have no storage to look at.
    found = {id(t): t.numel() * t.element_size() for t in tensors_of(load(folder, CPU))}
    checkpoint = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert sum(found.values()) > 0.98 * checkpoint


def test_a_pool_gives_its_memory_back_and_keeps_its_address(
    make_model: Callable[..., Path],
) -> None:
    pool = make_pool(make_model(), CPU, 64 * MIB)
    address, view = pool.data_ptr, pool.tensor[:1]
    pool.tensor.fill_(1.0)
    full = used_bytes(CPU)
    pool.release()
    assert full - used_bytes(CPU) > 60 * MIB
    pool.restore()
    assert full - used_bytes(CPU) < 4 * MIB, "taken when it wakes up, not when it is used"
    assert pool.data_ptr == address
    assert not view.any()
    pool.close()


def test_a_pool_that_peers_have_open_stays(make_model: Callable[..., Path]) -> None:
    folder = make_model()
    pool = make_pool(folder, CPU, MIB)
    pool.tensor.fill_(1.0)
    owner = Owner(object())
    memory = SleepingMemory(owner, pool, device=CPU, load_model=lambda: "again")
    memory.release(2, keeps_pool=True)
    assert owner.model is None
    memory.restore_weights()
    memory.restore_kv_cache()
    assert owner.model == "again"
    assert pool.tensor.all()
    pool.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpus_weights_go_to_the_host_and_come_back(make_model: Callable[..., Path]) -> None:
    device = torch.device("cuda")
    folder = make_model()
    pool = make_pool(folder, device, 64 * MIB)
    owner = Owner(load(folder, device))
    before = [tensor.cpu().clone() for tensor in tensors_of(owner.model)]
    memory = SleepingMemory(owner, pool, device=device, load_model=lambda: None)
    assert memory.release(1) > 60 * MIB
    memory.restore_weights()
    memory.restore_kv_cache()
    after = list(tensors_of(owner.model))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(before, after, strict=True))
    assert not pool.tensor.any()
