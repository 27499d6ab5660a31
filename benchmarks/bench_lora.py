"""What LoRA adapters cost in a decode step on CPU: the decoder and the choice of tokens of a model
of Qwen3-0.6B's shape with random weights, with adapters for none, all, one or each of the rows.

Run: python benchmarks/bench_lora.py [--rank 16] [--num-seqs 8] [--threads 2] [--rounds 40]
Prints medians of steps that take turns, and their ratios to the model alone.
"""

import argparse
import statistics
import time
from collections.abc import Sequence

import torch

from pdserve_kernels import cpu
from pdserve_kernels.decoder import Attention, Decoder, DecoderLayer, DenseMlp
from pdserve_kernels.groups import NUM_SUMS
from pdserve_kernels.lora import LoraPart, LoraSegment
from pdserve_kernels.metadata import AttentionMetadata

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 1024, 16, 8, 128, 3072, 28
VOCABULARY = 151_936
CONTEXT, BLOCK = 100, 16
BLOCKS_OF_SEQ = -(-CONTEXT // BLOCK)
# Outputs of the linears that are stored as one.
QKV = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)


def weight(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * columns**-0.5).bfloat16()


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def make_layer(index: int) -> DecoderLayer:
    return DecoderLayer(
        input_norm=ones(HIDDEN),
        attention=Attention(
            qkv=cpu.pack_linear(weight(sum(QKV), HIDDEN)),
            q_norm=ones(HEAD_DIM),
            k_norm=ones(HEAD_DIM),
            output=cpu.pack_linear(weight(HIDDEN, HEADS * HEAD_DIM), num_sums=NUM_SUMS),
            group=0,
            slot=index,
            window=None,
        ),
        post_attention_norm=ones(HIDDEN),
        mlp=DenseMlp(
            gate_up=cpu.pack_linear(weight(2 * INNER, HIDDEN), num_parts=2),
            down=cpu.pack_linear(weight(HIDDEN, INNER), num_sums=NUM_SUMS),
        ),
    )


def make_decoder() -> Decoder:
    frequencies = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.outer(torch.arange(2.0 * CONTEXT), frequencies)
    return Decoder(
        layers=tuple(map(make_layer, range(LAYERS))),
        final_norm=ones(HIDDEN),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rms_norm_eps=1e-6,
        cos_sin_cache=torch.cat((angles.cos(), angles.sin()), -1),
    )


def parts(outputs: Sequence[int], inputs: int, rank: int) -> list[LoraPart]:
    firsts = [sum(outputs[:index]) for index in range(len(outputs))]
    return [
        LoraPart(first, weight(rank, inputs), weight(size, rank), 1.0)
        for first, size in zip(firsts, outputs, strict=True)
    ]


def make_adapter(decoder: Decoder, rank: int) -> object:
    """One on all linears."""
    of_linear = {
        "qkv": parts(QKV, HIDDEN, rank),
        "attention_output": parts([HIDDEN], HEADS * HEAD_DIM, rank),
        "gate_up": parts([INNER, INNER], HIDDEN, rank),
        "down": parts([HIDDEN], INNER, rank),
    }
    return cpu.pack_adapter(
        [
            {name: cpu.pack_lora(of_linear[name], packed) for name, packed in layer.linears.items()}
            for layer in decoder.layers
        ]
    )


def make_metadata(num_seqs: int) -> AttentionMetadata:
    tables = torch.arange(num_seqs * BLOCKS_OF_SEQ, dtype=torch.int32)
    return AttentionMetadata(
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32),
        seq_lens=torch.full((num_seqs,), CONTEXT, dtype=torch.int32),
        block_table=tables.view(num_seqs, BLOCKS_OF_SEQ),
        slot_mapping=torch.arange(num_seqs) * BLOCKS_OF_SEQ * BLOCK + CONTEXT - 1,
        query_lens_host=(1,) * num_seqs,
        seq_lens_host=(CONTEXT,) * num_seqs,
        num_decodes=num_seqs,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--num-seqs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    num = args.num_seqs
    decoder = make_decoder()
    packed, head = cpu.pack_decoder(decoder), cpu.pack_linear(weight(VOCABULARY, HIDDEN))
    adapters = [make_adapter(decoder, args.rank) for _ in range(num)]
    cache = torch.zeros(
        num * BLOCKS_OF_SEQ, KV_HEADS, LAYERS, 2, BLOCK, HEAD_DIM, dtype=torch.bfloat16
    )
    x, positions = torch.randn(num, HIDDEN).bfloat16(), torch.full((num,), CONTEXT - 1)
    metadata = (make_metadata(num),)
    cases: dict[str, Sequence[LoraSegment]] = {
        "model alone": (),
        "one for all": [LoraSegment(0, num, adapters[0])],
        "one for one": [LoraSegment(0, 1, adapters[0])],
        "each its own": [LoraSegment(i, i + 1, adapters[i]) for i in range(num)],
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(args.rounds):
        for name, segments in cases.items():
            began = time.perf_counter()
            hidden = cpu.run_decoder(x, packed, positions, cache, metadata, segments)
            cpu.linear_argmax(hidden, head)
            times[name].append(time.perf_counter() - began)
    base = statistics.median(times["model alone"])
    for name, each in times.items():
        median = statistics.median(each)
        print(f"{name:13} {1e3 * median:7.2f} ms  x{median / base:.3f}")


if __name__ == "__main__":
    main()
