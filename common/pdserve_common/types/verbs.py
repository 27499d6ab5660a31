"""What an operator can have an engine do: one class for each verb, in one table, VERBS.

A verb is a dataclass of its arguments, with the type of its result. It is validated when it is
made. ControlService has an RPC of the same name for each: the request's fields are its arguments,
the response's only field is its result.
"""

from dataclasses import dataclass
from typing import Any

from pdserve_common.config import MAX_NAME_CHARS, is_adapter_name
from pdserve_common.errors import InvalidRequestError
from pdserve_common.processes.calls import Call
from pdserve_common.types.engine import PauseMode
from pdserve_common.types.lora import LoadedLoRA, LoRAAdapter, LoRARequest

# What sleeping gives up and waking up takes back, in the order in which it is taken back.
SLEEP_TAGS = ("weights", "kv_cache", "scheduling")
MAX_SLEEP_LEVEL = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Call[None]):
    """Start nothing new; requests that come in wait.

    ABORT ends all requests there are. WAIT returns when those that run are over; waiting ones stay.
    KEEP freezes running ones where they are. `clear_cache` forgets cached prefixes, and fails as
    ResetPrefixCache does.
    """

    mode: PauseMode = PauseMode.ABORT
    clear_cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume(Call[None]):
    """End a pause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep(Call[int]):
    """Pause and give memory back: at level 1 the KV pool's, and a GPU's weights to the host; at
    level 2 the weights are dropped. Return the number of bytes the device got back.

    Fails, with ABORT and WAIT after a while, if KV blocks are still held. Raises
    InvalidRequestError for an unknown level.
    """

    level: int
    mode: PauseMode = PauseMode.ABORT

    def __post_init__(self) -> None:
        if not 0 <= self.level <= MAX_SLEEP_LEVEL:
            raise InvalidRequestError(
                f"level is {self.level}, must be 0 to {MAX_SLEEP_LEVEL}", field="level"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeUp(Call[None]):
    """Take back what sleep gave up: those of SLEEP_TAGS named, or all if none is; "scheduling"
    resumes. Raises InvalidRequestError for an unknown tag.
    """

    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for tag in self.tags:
            if tag not in SLEEP_TAGS:
                raise InvalidRequestError(
                    f"tags has {tag[:32]!r}, known tags are {', '.join(SLEEP_TAGS)}", field="tags"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetPrefixCache(Call[int]):
    """Forget all cached prefixes and return how many blocks held one. Fails while requests or KV
    sessions hold blocks. `keeps_tiers`: what is stored besides the pool stays.
    """

    keeps_tiers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Call[str]):
    """Start a profile of the next steps and return "", or stop it and return its file's path. It
    ends by itself after some steps: taking it in holds everything up.
    """

    IS_CONTAINED = True

    start: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AddLora(Call[LoRAAdapter]):
    """Load an adapter from a folder below the worker's `lora_root`, by default that of its name,
    or from the hub.

    A name that is taken stands for the new one from then on; older requests keep theirs. Fails if
    the folder is no such adapter, if it has another digest than the one that is asked for, and if
    there is no room: with `keep_others` nothing goes to make some. Raises InvalidRequestError for a
    name that cannot be one.
    """

    lora_request: LoRARequest
    keep_others: bool = False

    def __post_init__(self) -> None:
        _check_adapter_name("lora_request.lora_name", self.lora_request.lora_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveLora(Call[None]):
    """Take no requests with a name's adapters any more, and unload them after the last; with a
    digest only that one, and the name stands for what it did before. Fails if there is none.
    """

    lora_name: str
    digest: str = ""

    def __post_init__(self) -> None:
        _check_adapter_name("lora_name", self.lora_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListLoras(Call[tuple[LoadedLoRA, ...]]):
    """Return all adapters that are loaded."""

    IS_CONTAINED = True


@dataclass(frozen=True, slots=True, kw_only=True)
class PinLora(Call[None]):
    """Never unload what a name stands for to make room for others. Fails if there is none of that
    name.
    """

    IS_CONTAINED = True

    lora_name: str

    def __post_init__(self) -> None:
        _check_adapter_name("lora_name", self.lora_name)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpinLora(Call[None]):
    """Undo PinLora; those that the worker has begun with are pinned too. Fails if there is none of
    that name; one that is not pinned stays so.
    """

    IS_CONTAINED = True

    lora_name: str

    def __post_init__(self) -> None:
        _check_adapter_name("lora_name", self.lora_name)


def _check_adapter_name(field: str, name: str) -> None:
    if not is_adapter_name(name):
        raise InvalidRequestError(
            f"{field} is {name[:32]!r} ({len(name)} characters), must be 1 to {MAX_NAME_CHARS} "
            "characters of ASCII",
            field=field,
        )


VERBS: tuple[type[Call[Any]], ...] = (
    Pause,
    Resume,
    Sleep,
    WakeUp,
    ResetPrefixCache,
    Profile,
    AddLora,
    RemoveLora,
    ListLoras,
    PinLora,
    UnpinLora,
)
# Those that change nothing and wait for nothing: they need not wait for others to end.
READING_VERBS: tuple[type[Call[Any]], ...] = (ListLoras,)
