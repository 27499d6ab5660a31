"""Tensor parallelism: which part of a model a rank has.

Source of the design: Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053). Products before a
nonlinearity are cut by outputs, those behind it by inputs; sums over inputs meet between ranks.
"""

from dataclasses import dataclass

from pdserve_engine.models.config import LlamaConfig, ModelError
from pdserve_kernels.groups import NUM_SUMS
from pdserve_kernels.sampling_batch import MASK_BITS

SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `size` ranks."""

    rank: int = 0
    size: int = 1

    def part(self, count: int) -> slice:
        """Return this rank's of so many things, of which each rank has equally many."""
        share = count // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def num_sums(self, in_features: int) -> int:
        """Return in how many sums this rank adds up its part of so many inputs: all ranks together
        have NUM_SUMS, or each has one where the inputs have not so many equal parts.
        """
        return NUM_SUMS // self.size if in_features % (2 * NUM_SUMS) == 0 else 1

    def kv_heads(self, num_kv_heads: int) -> slice:
        """Return this rank's KV heads: those of its query heads. Where there are more ranks than
        heads, neighbours have the same one.
        """
        if num_kv_heads >= self.size:
            return self.part(num_kv_heads)
        head = self.rank * num_kv_heads // self.size
        return slice(head, head + 1)

    def vocabulary(self, vocab_size: int) -> slice:
        """Return this rank's token ids; they begin at a word of a mask, and the last rank may have
        fewer.
        """
        share = vocab_share(vocab_size, self.size)
        return slice(min(vocab_size, self.rank * share), min(vocab_size, (self.rank + 1) * share))


WHOLE = Shard()


def vocab_share(vocab_size: int, size: int) -> int:
    """Return how many tokens each of `size` ranks has, but the last."""
    return -(-vocab_size // (size * MASK_BITS)) * MASK_BITS


def check_shards(config: LlamaConfig, size: int) -> None:
    """Raise ModelError, with the numbers, if the model cannot be cut in so many ranks."""
    if size == 1:
        return
    if size not in SIZES:
        sizes = ", ".join(map(str, SIZES))
        raise ModelError(f"tensor_parallel_size is {size}, must be one of {sizes}")
    heads, kv_heads = config.num_attention_heads, config.num_kv_heads
    inputs = {
        "num_attention_heads * head_dim": heads * config.head_dim,
        "intermediate_size": config.intermediate_size,
    }
    problems = [
        f"{name} is {count}, which has no {NUM_SUMS} equal parts of an even number"
        for name, count in inputs.items()
        if count % (2 * NUM_SUMS)
    ]
    if heads % size:
        problems.append(f"num_attention_heads is {heads}")
    if kv_heads % size and size % kv_heads:
        problems.append(f"num_key_value_heads is {kv_heads}")
    if (size - 1) * vocab_share(config.vocab_size, size) >= config.vocab_size:
        problems.append(f"vocab_size is {config.vocab_size}, a rank takes {MASK_BITS} at a time")
    if problems:
        raise ModelError(
            f"tensor_parallel_size is {size}, the model cannot be cut so: {'; '.join(problems)}"
        )
