"""Any decoder-only model that transformers can build, with our paged attention inside.

transformers lets a function of ours take the place of attention in all its layers; everything else
(embeddings, norms, rotary embeddings, MLPs, experts, the head) is its own code. All requests of a
step go through it as one sequence of tokens, which only attention and positions tell apart.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from pdserve_engine.kv.kv_groups import group_layers, slots_of
from pdserve_engine.lora.adapter import LoraAdapter
from pdserve_engine.lora.adapter_config import Targets
from pdserve_engine.models.base import ForwardInputs
from pdserve_engine.models.config import ModelConfig, ModelError, cut_windows
from pdserve_engine.models.transformers_backend.config import causal_lm_class, load_hf_config
from pdserve_engine.models.transformers_backend.packed_linears import PackedLinears
from pdserve_engine.models.transformers_backend.weights import load_pretrained
from pdserve_engine.models.weights.loader import Checkpoint
from pdserve_kernels import KernelSet, select
from pdserve_kernels.metadata import AttentionMetadata
from pdserve_kernels.sampling_batch import Argmax

logger = logging.getLogger(__name__)

# The name under which transformers' layers find our attention. As it has no mask function of the
# same name, transformers builds no masks for it.
PAGED_ATTENTION = "pdserve_paged"
# The same for one forward pass after loading, in which masks are markers.
PROBED_ATTENTION = "pdserve_probed"
# Arguments of attention that `_PagedAttention` takes into account, or that change nothing here.
KNOWN_ARGUMENTS = frozenset(
    ("scaling", "sliding_window", "softcap", "dropout", "position_ids", "cache_position")
)
NUM_PROBE_TOKENS = 2
# Tokens of these are compared with transformers' own in the tests; others should work as well.
CHECKED_ARCHITECTURES = frozenset(
    (
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "GPT2LMHeadModel",
        "GPTBigCodeForCausalLM",
        "GPTNeoXForCausalLM",
        "GraniteForCausalLM",
        "HunYuanMoEV1ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Olmo2ForCausalLM",
        "OPTForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
    )
)


class _Attention(Protocol):
    """What stands in for attention in one forward pass."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        """query, key, value are [1, heads, num_tokens, head_dim]; return query's [1, num_tokens,
        heads, head_dim].
        """
        ...


class TransformersModel:
    """A model of transformers behind the interface of `models.base.Model`."""

    # Experts, norms and activations are torch's, whose bits depend on the batch.
    is_row_independent = False
    can_be_captured = False  # what it runs is not ours to know

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, device: torch.device) -> None:
        self.config = config
        self.device = device
        self._kernels = select(device)
        self._windows = config.attention_windows
        self._slots = slots_of(group_layers(config.attention_windows))
        if config.architecture not in CHECKED_ARCHITECTURES:
            logger.warning("%s is not among the architectures we test", config.architecture)
        _register()
        hf_config = load_hf_config(checkpoint.folder)
        model = load_pretrained(
            causal_lm_class(hf_config, [config.architecture]),
            hf_config,
            checkpoint,
            dtype=config.dtype,
            attention=PROBED_ATTENTION,
        ).to(device)  # type: ignore[arg-type]
        self._linears = PackedLinears(model, self._kernels)
        self._decoder, self._head = _split(model)
        self._probe()
        self._decoder.set_attn_implementation(PAGED_ATTENTION)

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs) -> torch.Tensor:
        """See `models.base.Model`."""
        attention = _PagedAttention(
            self._kernels, self._windows, self._slots, inputs.kv_cache, inputs.metadata
        )
        lora = inputs.lora
        assert isinstance(lora, Sequence), "segments, of a model that cannot be captured"
        with self._linears.adapted(lora):
            return _decode(self._decoder, inputs.token_ids, inputs.positions, attention)

    @torch.inference_mode()
    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """See `models.base.Model`. Whatever transformers does to logits is done: caps, scales."""
        output = self._head(inputs_embeds=hidden_rows[None], use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits

    @torch.inference_mode()
    def choose_greedily(
        self, hidden_rows: torch.Tensor, *, mask: torch.Tensor | None = None
    ) -> Argmax:
        """See `models.base.Model`."""
        best: Argmax = self._kernels.argmax(self.compute_logits(hidden_rows), mask=mask)
        return best

    @property
    def lora_targets(self) -> Targets:
        """See `models.base.SupportsLora`."""
        return self._linears.lora_targets

    def max_adapter_bytes(self, max_rank: int) -> int:
        """See `models.base.SupportsLora`."""
        num_features = sum(map(sum, self.lora_targets.values()))
        return max_rank * num_features * self.config.dtype.itemsize

    def pack_adapter(self, adapter: LoraAdapter) -> Any:
        """See `models.base.SupportsLora`."""
        return self._linears.pack_adapter(adapter)

    def _probe(self) -> None:
        """Run two tokens; raise ModelError unless each layer attends once, as the config says."""
        probe = _Probe(self.config)
        token_ids = torch.arange(NUM_PROBE_TOKENS, device=self.device)
        try:
            with torch.inference_mode(), self._linears.watched(NUM_PROBE_TOKENS):
                hidden_states = _decode(self._decoder, token_ids, token_ids, probe)
            self.compute_logits(hidden_states)
        except (ModelError, torch.OutOfMemoryError):
            raise
        # Some 200 architectures want what a decoder step or a head has not, each in its own way.
        except Exception as error:
            raise ModelError(
                f"{self.config.architecture} cannot be taken apart: its code needs more than"
                f" tokens, positions and attention, or hidden rows for its head"
                f" ({type(error).__name__}: {error})"
            ) from error
        if probe.layers != list(range(self.config.num_layers)):
            raise ModelError(
                f"{self.config.architecture} attends in layers {probe.layers}, supported is once"
                f" in each of the {self.config.num_layers} in order"
            )


class _PagedAttention(NamedTuple):
    """Attention over the paged cache for one step."""

    kernels: KernelSet
    windows: tuple[int | None, ...]
    slots: tuple[tuple[int, int], ...]
    kv_cache: torch.Tensor
    metadata: tuple[AttentionMetadata, ...]

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        layer = _layer_of(module)
        group, slot = self.slots[layer]
        metadata = self.metadata[group]
        q, k, v = (x[0].transpose(0, 1).to(self.kv_cache.dtype) for x in (query, key, value))
        self.kernels.reshape_and_cache(k, v, self.kv_cache, slot, metadata.slot_mapping)
        attended: torch.Tensor = self.kernels.paged_attention(
            q.contiguous(),
            self.kv_cache,
            slot,
            metadata,
            arguments.get("scaling") or query.shape[-1] ** -0.5,
            window=self.windows[layer],
            softcap=arguments.get("softcap") or 0.0,
        )
        return attended[None].to(query.dtype)


class _Probe:
    """Stands in for attention once, and refuses a model whose layers want another kind of it."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self.layers: list[int] = []

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        arguments: Mapping[str, Any],
    ) -> torch.Tensor:
        layer = _layer_of(module)
        self.layers.append(layer)
        self._check_shapes(layer, query, key, value)
        self._check_window(layer, mask, arguments.get("sliding_window"))
        if not getattr(module, "is_causal", True):
            raise ModelError(f"layer {layer} has attention that is not causal, not supported")
        given = {name for name, argument in arguments.items() if not _is_off(argument)}
        if unknown := given - KNOWN_ARGUMENTS:
            raise ModelError(
                f"attention of layer {layer} has {', '.join(sorted(unknown))}, not supported"
            )
        return query.transpose(1, 2)

    def _check_shapes(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        config = self._config
        kv_shape = (1, config.num_kv_heads, NUM_PROBE_TOKENS, config.head_dim)
        expected = ((1, config.num_attention_heads, *kv_shape[2:]), kv_shape, kv_shape)
        if (shapes := tuple(tuple(x.shape) for x in (query, key, value))) != expected:
            raise ModelError(
                f"layer {layer} has queries, keys and values of shapes {shapes}, supported are"
                f" {expected} in all layers"
            )

    def _check_window(
        self, layer: int, mask: torch.Tensor | None, sliding_window: int | None
    ) -> None:
        """The mask is `_mark_mask`'s: its last size is the window."""
        if mask is None or mask.device.type != "meta":
            raise ModelError(f"layer {layer} has a mask of its own, supported are causal masks")
        windows = {mask.shape[-1] or None}
        if sliding_window is not None:
            windows.add(sliding_window)
        expected = self._config.attention_windows[layer]
        found = set(cut_windows(windows, self._config.max_model_len))
        if found != {expected}:
            raise ModelError(f"layer {layer} has a window of {found}, the config says {expected}")


@dataclass
class _DecoderOutput(MoeModelOutputWithPast):
    """All fields that a head may ask for."""

    cross_attentions: tuple[torch.Tensor, ...] | None = None


class _HiddenRows(nn.Module):
    """Stands where the decoder was, so that the model's own forward pass computes the head only."""

    @property
    def decoder(self) -> "_HiddenRows":
        """What a head calls that knows of a decoder within the model's base, as OPT's."""
        return self

    def forward(self, *_: object, inputs_embeds: torch.Tensor, **__: object) -> _DecoderOutput:
        return _DecoderOutput(last_hidden_state=inputs_embeds)


def _register() -> None:
    AttentionInterface.register(PAGED_ATTENTION, _attention_forward)
    AttentionInterface.register(PROBED_ATTENTION, _attention_forward)
    AttentionMaskInterface.register(PROBED_ATTENTION, _mark_mask)


def _attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pdserve_attention: _Attention | None = None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in every layer; the step's state travels with the call."""
    if pdserve_attention is None:
        raise ModelError(
            f"{type(module).__name__} does not get what a forward pass is called with: its layers"
            " pass no arguments on to attention"
        )
    return pdserve_attention(module, query, key, value, attention_mask, arguments), None


def _mark_mask(*, local_size: int = 0, **_: object) -> torch.Tensor:
    """Return [1, 1, 1, window] that holds nothing, in place of a mask; window 0 means all."""
    return torch.empty(1, 1, 1, local_size, device="meta")


def _is_off(argument: object) -> bool:
    return argument is None or argument is False


def _layer_of(module: nn.Module) -> int:
    layer: int = module.layer_idx  # type: ignore[assignment]
    return layer


def _split(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the decoder, and the model without it, which turns hidden rows into logits."""
    decoder = model.base_model
    if decoder is model or not isinstance(decoder, PreTrainedModel):
        raise ModelError(f"{type(model).__name__} has no decoder apart from its head")
    setattr(model, model.base_model_prefix, _HiddenRows())
    return decoder, model


def _decode(
    decoder: nn.Module, token_ids: torch.Tensor, positions: torch.Tensor, attention: _Attention
) -> torch.Tensor:
    output = decoder(
        input_ids=token_ids[None],
        position_ids=positions[None],
        use_cache=False,
        pdserve_attention=attention,
    )
    hidden_states: torch.Tensor = output.last_hidden_state[0]
    return hidden_states
