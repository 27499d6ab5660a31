"""What a worker serves of what requests can ask for."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve_common.errors import AdapterNotHeldError, InvalidRequestError
from pdserve_common.types.engine import EngineCoreRequest, EngineInfo
from pdserve_common.types.lora import LoRARequest
from pdserve_common.types.pooling_params import GENERATE
from pdserve_common.types.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a worker serves besides one sequence of plain tokens. The defaults are what every worker
    serves. Ask for it at each request: what an operator loads or unloads changes it.
    """

    # Names that SamplingParams.logits_processors may hold.
    logits_processors: tuple[str, ...] = ()
    # The tasks of PoolingParams that are served; to generate is one as well.
    tasks: frozenset[str] = frozenset((GENERATE,))
    # What PoolingParams.dimensions may be; empty: unset.
    dimensions: Sequence[int] = ()
    # Digests of LoRA adapters.
    adapters: frozenset[str] = frozenset()
    # The kinds of multimodal features: "image", "audio".
    modalities: frozenset[str] = frozenset()
    # Fields of EngineCoreRequest and SamplingParams that are served with any valid value.
    fields: frozenset[str] = frozenset()

    @classmethod
    def of(cls, info: EngineInfo) -> "Capabilities":
        """Return those of the worker that this describes."""
        return cls(
            logits_processors=info.logits_processors,
            tasks=frozenset(info.tasks),
            dimensions=_dimensions(info),
            adapters=frozenset(adapter.digest for adapter in info.adapters),
            modalities=frozenset(info.modalities),
            fields=frozenset(info.served_fields),
        )

    @classmethod
    def shared(cls, each: Iterable["Capabilities"]) -> "Capabilities":
        """Return what all of some workers serve; at least one."""
        first, *others = each
        return cls(
            logits_processors=tuple(
                name
                for name in first.logits_processors
                if all(name in other.logits_processors for other in others)
            ),
            tasks=first.tasks.intersection(*(other.tasks for other in others)),
            # Those of one model are equal.
            dimensions=first.dimensions
            if all(first.dimensions == other.dimensions for other in others)
            else (),
            adapters=first.adapters.intersection(*(other.adapters for other in others)),
            modalities=first.modalities.intersection(*(other.modalities for other in others)),
            fields=first.fields.intersection(*(other.fields for other in others)),
        )


NO_EXTRAS = Capabilities()


def _dimensions(info: EngineInfo) -> Sequence[int]:
    if not info.is_matryoshka:
        return ()
    return info.matryoshka_dimensions or range(1, info.embedding_size + 1)


_Serves = Callable[[Any, Capabilities], bool]
# Fields that not every worker serves: the value that asks for nothing, and who serves others. None:
# whoever names the field.
_OPTIONAL_FIELDS: Mapping[type, tuple[tuple[str, object, _Serves | None], ...]] = {
    SamplingParams: (("structured_outputs", None, None),),
    EngineCoreRequest: (
        ("mm_features", (), lambda features, can: {f.modality for f in features} <= can.modalities),
        ("prompt_embeds", None, None),
        ("prompt_is_token_ids", (), None),
        ("current_wave", 0, None),
        ("resumable", False, None),
        ("reasoning_ended", None, None),
        ("reasoning_parser_kwargs", {}, None),
    ),
}


def adapter_not_held(lora: LoRARequest) -> AdapterNotHeldError:
    """Return the refusal of a worker that does not hold the adapter, or of a router without one."""
    return AdapterNotHeldError(
        f"lora_request names the adapter {lora.lora_name[:64]!r} ({lora.digest[:16]}), which is "
        "not held here"
    )


def check_task(task: str, capabilities: Capabilities) -> None:
    """Raise InvalidRequestError if the model does not do what a request asks of it."""
    if task not in capabilities.tasks:
        raise InvalidRequestError(
            f"task is {task[:64]!r}, the model serves "
            f"{', '.join(sorted(capabilities.tasks)) or 'none'}",
            field="task",
        )


def check_served(value: EngineCoreRequest | SamplingParams, capabilities: Capabilities) -> None:
    """Raise InvalidRequestError for the first field that asks for what is not served, and
    AdapterNotHeldError for an adapter that others may have.
    """
    lora = value.lora_request if isinstance(value, EngineCoreRequest) else None
    if lora is not None and lora.digest not in capabilities.adapters:
        raise adapter_not_held(lora)
    if isinstance(value, SamplingParams):
        check_task(GENERATE, capabilities)
    for name, nothing, serves in _OPTIONAL_FIELDS[type(value)]:
        wanted = getattr(value, name)
        if wanted == nothing or name in capabilities.fields:
            continue
        if serves is None or not serves(wanted, capabilities):
            raise InvalidRequestError(f"{name} is set: not served yet, leave it unset", field=name)
