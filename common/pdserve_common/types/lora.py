"""LoRA adapters, as they cross between processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRARequest:
    """The adapter a request runs with. The digest is which one it is; the rest is for people."""

    lora_name: str
    # SHA-256 of what it computes with, in hex.
    digest: str
    lora_int_id: int = 0
    lora_path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAAdapter:
    """An adapter that a worker holds, under the name that clients ask for. Without one it serves
    requests that began with it: its name stands for another one by now.
    """

    name: str
    digest: str
    # The largest of its linears.
    rank: int
    # What AddLora loads it from, on workers with the same folders or the hub; empty: it cannot.
    path: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRAAdapters:
    """All adapters that a worker holds; `version` grows with each change."""

    version: int = 0
    adapters: tuple[LoRAAdapter, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedLoRA:
    """An adapter as its worker's operator sees it."""

    adapter: LoRAAdapter
    # It is not unloaded to make room for others.
    is_pinned: bool = False
    # It takes no requests any more, and goes with the last that has it.
    is_removed: bool = False
    num_requests: int = 0
