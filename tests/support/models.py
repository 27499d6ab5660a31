"""Small random models and what transformers generates with them."""

import json
import re
from pathlib import Path
from typing import Any

SMALL_SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CONFIG_CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "GPT2LMHeadModel": "GPT2Config",
    "GPTBigCodeForCausalLM": "GPTBigCodeConfig",
    "GPTNeoXForCausalLM": "GPTNeoXConfig",
    "GptOssForCausalLM": "GptOssConfig",
    "GraniteForCausalLM": "GraniteConfig",
    "HunYuanMoEV1ForCausalLM": "HunYuanMoEV1Config",
    "MixtralForCausalLM": "MixtralConfig",
    "NemotronForCausalLM": "NemotronConfig",
    "Olmo2ForCausalLM": "Olmo2Config",
    "OlmoeForCausalLM": "OlmoeConfig",
    "OPTForCausalLM": "OPTConfig",
    "Phi3ForCausalLM": "Phi3Config",
    "Qwen2MoeForCausalLM": "Qwen2MoeConfig",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
}
# They have no such fields, and would keep what they are given.
NO_GQA = ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTNeoXForCausalLM", "OPTForCausalLM")
# Their norms multiply by 1 + weight.
CENTERED_NORMS = ("Gemma2ForCausalLM", "Gemma3ForCausalLM")
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# Of a model that looks at pictures: a message is a text, or a list of parts.
PICTURE_CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SERVED_VOCAB_SIZE = 300
# The <image> token of save_byte_tokenizer, behind <bos>, <eos> and the bytes.
IMAGE_TOKEN_ID = 258
# Pictures of these models: IMAGE_SIZE x IMAGE_SIZE pixels, NUM_IMAGE_TOKENS tokens.
IMAGE_SIZE, PATCH_SIZE = 24, 6
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
IMAGE_MEAN, IMAGE_STD = (0.48, 0.45, 0.4), (0.26, 0.27, 0.28)
VISION_SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}
LLAVA = "LlavaForConditionalGeneration"
# Large enough that greedy text does not settle on one token.
WEIGHT_STD = 0.35
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
WINDOW = 32
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
# (architecture, overrides) of models that our own code runs, by what is special about them.
NATIVE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied-sharded": (
        "LlamaForCausalLM",
        {"tie_word_embeddings": True, "shard_size": "100KB"},
    ),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "linear-rope": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "mistral": ("MistralForCausalLM", {}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": 32}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-window": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1},
    ),
    "qwen2-tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-window": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3-wide-heads": ("Qwen3ForCausalLM", {"head_dim": 32, "attention_bias": True}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4, "sliding_window": WINDOW}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", EXPERTS | {"num_experts": 6}),
    "qwen2-moe-mixed": (
        "Qwen2MoeForCausalLM",
        EXPERTS
        | {"num_experts": 5, "num_experts_per_tok": 3, "norm_topk_prob": True, "qkv_bias": False}
        | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
        | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3-moe": (
        "Qwen3MoeForCausalLM",
        EXPERTS | {"num_experts": 6, "norm_topk_prob": True},
    ),
    "qwen3-moe-mixed": (
        "Qwen3MoeForCausalLM",
        EXPERTS
        | {"num_experts": 4, "num_experts_per_tok": 3, "mlp_only_layers": [1]}
        | {"attention_bias": True, "use_sliding_window": True, "sliding_window": WINDOW},
    ),
}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": 16, "pad_token_id": 0}
# The same of models that run on the transformers backend.
BACKEND_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2ForCausalLM",
        GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        GEMMA
        | {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    ),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "phi3-window": ("Phi3ForCausalLM", {"pad_token_id": 0, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", {}),
    "gpt-bigcode-mha": ("GPTBigCodeForCausalLM", {"multi_query": False, "n_head": 4}),
    "opt": ("OPTForCausalLM", {"ffn_dim": 96, "pad_token_id": 0}),
    "opt-projected": (
        "OPTForCausalLM",
        {"ffn_dim": 96, "pad_token_id": 0, "word_embed_proj_dim": 32},
    ),
    "hunyuan-moe": ("HunYuanMoEV1ForCausalLM", {"num_experts": 4, "moe_topk": 2}),
    "gpt-neox": ("GPTNeoXForCausalLM", {"rotary_pct": 0.5}),
    "granite": ("GraniteForCausalLM", {"residual_multiplier": 0.7, "logits_scaling": 2.0}),
    "olmoe": ("OlmoeForCausalLM", {"num_experts_per_tok": 2, "num_experts": 4}),
}


def build_model(architecture: str, overrides: dict[str, Any]) -> Any:
    """Return a transformers model with random weights, biases and norms, the same each time. It
    may be one that classifies, or has no head.
    """
    import torch
    import transformers

    if architecture == LLAVA:
        return _build_llava(**overrides)
    family = architecture
    if family not in CONFIG_CLASSES:
        family = re.sub("(Model|ForSequenceClassification)$", "ForCausalLM", architecture)
    config_class = getattr(transformers, CONFIG_CLASSES[family])
    fields: dict[str, Any] = SMALL_SHAPE | {"tie_word_embeddings": False} | overrides
    if architecture == "MistralForCausalLM":
        fields = {"sliding_window": None} | fields
    if architecture in NO_GQA:
        fields = {k: v for k, v in fields.items() if k not in ("num_key_value_heads", "head_dim")}
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config_class(**fields))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=WEIGHT_STD)
            is_norm = re.search(r"(norm|\bln_\w+)\.weight$", name) is not None
            if is_norm and architecture not in CENTERED_NORMS:
                weight.add_(1.0)
    return model


def _build_llava(
    text: str = "LlamaForCausalLM",
    tower: str = "CLIPVisionConfig",
    vision_feature_layer: int | list[int] = -2,
    **overrides: Any,
) -> Any:
    """The same of one in LLaVA-1.5's format. SigLIP has no token that stands for the picture, which
    "default" would leave out.
    """
    import torch
    import transformers

    fields: dict[str, Any] = SMALL_SHAPE | {"sliding_window": None} | overrides
    config = transformers.LlavaConfig(
        text_config=getattr(transformers, CONFIG_CLASSES[text])(architectures=[text], **fields),
        vision_config=getattr(transformers, tower)(**VISION_SHAPE),
        image_token_index=min(IMAGE_TOKEN_ID, fields["vocab_size"] - 1),
        image_seq_length=NUM_IMAGE_TOKENS,
        vision_feature_layer=vision_feature_layer,
        vision_feature_select_strategy="default" if tower == "CLIPVisionConfig" else "full",
        tie_word_embeddings=fields.get("tie_word_embeddings", False),
    )
    torch.manual_seed(0)
    model: Any = transformers.LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(std=WEIGHT_STD)
            if "norm" in name and name.endswith("weight"):
                weight.add_(1.0)
    return model


def save_preprocessor_config(folder: Path) -> None:
    """Write how pictures are made ready for a model that looks at them."""
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    fields = {
        "image_processor_type": "CLIPImageProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"shortest_edge": IMAGE_SIZE},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": IMAGE_MEAN,
        "image_std": IMAGE_STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(fields))


def save_byte_tokenizer(folder: Path, *, has_pictures: bool = False) -> None:
    """Write a tokenizer of which each byte is a token, and perhaps <image>."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(ByteLevel.alphabet())
    vocab = {"<bos>": 0, "<eos>": 1} | {char: i + 2 for i, char in enumerate(alphabet)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    if has_pictures:
        tokenizer.add_special_tokens(["<image>"])
        assert tokenizer.token_to_id("<image>") == IMAGE_TOKEN_ID
    names = {"bos_token": "<bos>", "eos_token": "<eos>"}
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)  # type: ignore[no-untyped-call]
    fast.chat_template = PICTURE_CHAT_TEMPLATE if has_pictures else CHAT_TEMPLATE
    fast.save_pretrained(folder)
