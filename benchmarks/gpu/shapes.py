"""The models that `bench_gpu.py` measures, what they take at least, and how much is measured."""

from typing import Any, NamedTuple

# Tokens.
BLOCK_SIZE = 64
# Of weights that are drawn.
WEIGHT_STD = 0.02


class Shape(NamedTuple):
    """A model as its config.json says it."""

    name: str
    config: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.config[name]


def _shape(name: str, architecture: str, model_type: str, **fields: Any) -> Shape:
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 32768,
        "bos_token_id": 1,
        "eos_token_id": 0,
    }
    return Shape(name, common | fields)


LARGE = _shape(
    "8B",
    "LlamaForCausalLM",
    "llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)
SMALL = _shape(
    "0.6B",
    "Qwen3ForCausalLM",
    "qwen3",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=28,
    num_attention_heads=16,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)


def shrink(shape: Shape) -> Shape:
    """Return a model of the same kind for which a CPU is fast enough."""
    small = {
        "vocab_size": 1024,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    return Shape(f"tiny {shape.name}", shape.config | small)


class Cost(NamedTuple):
    """What a model's tokens take at least."""

    # Read by each step.
    weight_bytes: int
    kv_bytes_per_token: int
    # Of each token's products but the last one's, with the vocabulary.
    flops_per_token: int

    @classmethod
    def of(cls, shape: Shape) -> "Cost":
        hidden = shape.hidden_size
        q_size = shape.num_attention_heads * shape.head_dim
        kv_size = shape.num_key_value_heads * shape.head_dim
        layer = hidden * (2 * q_size + 2 * kv_size + 3 * shape.intermediate_size)
        weights = layer * shape.num_hidden_layers
        return cls(
            weight_bytes=2 * (weights + shape.vocab_size * hidden),
            kv_bytes_per_token=2 * 2 * kv_size * shape.num_hidden_layers,
            flops_per_token=2 * weights,
        )


def attention_flops(shape: Shape, length: int) -> float:
    """Of one prompt in one layer: half of two products, as the causal mask leaves it."""
    return 2 * 2 * length * length / 2 * shape.num_attention_heads * shape.head_dim


class Sizes(NamedTuple):
    """How much is done."""

    copy_bytes: int
    matrix: int
    # Of one measurement.
    seconds: float
    # (requests, context).
    decode_attention: list[tuple[int, int]]
    # (requests, tokens of each).
    prefill_attention: list[tuple[int, int]]
    linear_rows: list[int]
    # Tokens of the prompts of whole engines that decode.
    context: int
    # By the model's name.
    decode_batches: dict[str, list[int]]
    num_steps: int
    num_profiled_steps: int
    # (requests, tokens of each).
    prefill: tuple[int, int]
    chunks: list[int]
    # (requests, tokens of a prompt, new tokens).
    hf: tuple[int, int, int]
    handoff_blocks: list[int]
    handoff_lengths: list[int]


FULL = Sizes(
    copy_bytes=4 << 30,
    matrix=8192,
    seconds=0.2,
    decode_attention=[(64, 4096), (1, 32768)],
    prefill_attention=[(1, 8192), (8, 2048)],
    linear_rows=[1, 64, 16384],
    context=1024,
    decode_batches={"8B": [1, 64], "0.6B": [1, 64, 256]},
    num_steps=64,
    num_profiled_steps=20,
    prefill=(8, 2048),
    chunks=[2048, 8192, 16384],
    hf=(256, 128, 128),
    handoff_blocks=[1, 32, 128, 512],
    handoff_lengths=[512, 2048, 8192],
)
TINY = Sizes(
    copy_bytes=1 << 20,
    matrix=128,
    seconds=0.01,
    decode_attention=[(4, 64), (1, 256)],
    prefill_attention=[(1, 128), (4, 32)],
    linear_rows=[1, 4, 32],
    context=32,
    decode_batches={"tiny 8B": [1, 4], "tiny 0.6B": [1, 8]},
    num_steps=8,
    num_profiled_steps=4,
    prefill=(4, 32),
    chunks=[32, 128],
    hf=(8, 8, 8),
    handoff_blocks=[1, 4],
    handoff_lengths=[64],
)
