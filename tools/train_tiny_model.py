"""Train pdserve-tiny, the small bundled Llama that tells stories and recalls codes.

Everything is made here: the text (tiny_model_data.py), the tokenizer, the weights and the model
card. About 15 minutes on one CPU core.
"""

import argparse
import copy
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import tiny_model_data as data
from tiny_model_tokens import (
    BOS,
    CHAT_TEMPLATE,
    CONTEXT_WEIGHT,
    EOS,
    MAX_POSITIONS,
    PAD,
    Batch,
    Encoder,
    train_tokenizer,
)

TOKENS_PER_STEP = 1024
LEARNING_RATE = 1e-3
WARMUP_STEPS = 50
STORY_SHARE = 0.2
AUX_WEIGHT = 0.5
AUX_STRIDE = 4  # and are trained at every fourth position, to save time
AUX_REACH = 3  # the auxiliary heads predict this many previous tokens
FINAL_AUX_SHARE = 0.8  # of the last stage that still has the auxiliary losses
GUIDED_LAYER = 1
ADVANCE_ACCURACY = 0.95
ADVANCE_WINDOW = 40  # steps
CHECKPOINT_STEPS = 200
CHECKPOINT_LENGTHS = (64, 128, 256, 384, 700)
CHECKPOINT_PROMPTS = 12  # for each length
EVAL_LENGTHS = (64, 128, 256, 384, 512, 640, 700)
CHECKPOINT_SEED, EVAL_SEED = 2_000_000, 1_000_000
MODEL_CARD = Path(__file__).with_name("tiny_model_card.md")


class Kind(Enum):
    PAIRS = "pairs"  # bare keys and codes
    DENSE = "dense"  # chats of nothing but facts and questions
    MIX = "mix"  # stories, and chats with facts among story sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A step of the curriculum; it ends at the wanted accuracy or after `max_steps`."""

    kind: Kind
    num_tokens: int
    max_steps: int
    is_final: bool = False  # runs all its steps, with a falling learning rate

    @property
    def name(self) -> str:
        return f"{'final' if self.is_final else self.kind.value}-{self.num_tokens}"


STAGES = (
    Stage(kind=Kind.PAIRS, num_tokens=48, max_steps=600),
    Stage(kind=Kind.DENSE, num_tokens=96, max_steps=800),
    Stage(kind=Kind.DENSE, num_tokens=192, max_steps=400),
    Stage(kind=Kind.MIX, num_tokens=256, max_steps=600),
    Stage(kind=Kind.MIX, num_tokens=384, max_steps=400),
    Stage(kind=Kind.MIX, num_tokens=768, max_steps=1600, is_final=True),
)


class StepResult(NamedTuple):
    loss: float
    correct: int
    asked: int
    tokens: int


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        initializer_range=0.06,  # the default is slow to learn with this width
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def make_samples(rng: Random, stage: Stage) -> list[data.Sample]:
    """Make the samples of one step, all of the same kind and size so that little is padding."""
    num_tokens = stage.num_tokens
    if stage.kind is Kind.MIX:
        if rng.random() < STORY_SHARE:
            return [data.make_story_sample(rng) for _ in range(TOKENS_PER_STEP // 100)]
        if rng.random() < 0.6:
            num_tokens = rng.randint(56, num_tokens)
    makers = {
        Kind.PAIRS: data.make_pairs_sample,
        Kind.DENSE: data.make_dense_sample,
        Kind.MIX: data.make_recall_sample,
    }
    rows = max(1, TOKENS_PER_STEP // num_tokens)
    return [makers[stage.kind](rng, num_tokens) for _ in range(rows)]


class Trainer:
    """Owns the model, the auxiliary heads, the optimizer and the best checkpoint."""

    def __init__(self, model: LlamaForCausalLM, encoder: Encoder, rng: Random, out: Path) -> None:
        self.model, self.encoder, self.rng, self.out = model, encoder, rng, out
        self.aux_heads = nn.Linear(model.config.hidden_size, AUX_REACH * model.config.vocab_size)
        self.params = [*model.parameters(), *self.aux_heads.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.params, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        self.num_steps = self.num_tokens = 0
        self.stage_steps: dict[str, int] = {}
        self.best_score = 0.0
        self.best = copy.deepcopy(model).bfloat16()

    def run_stage(self, stage: Stage) -> None:
        results: list[StepResult] = []
        start = time.monotonic()
        for step in range(stage.max_steps):
            results.append(self.run_step(stage, step))
            if (step + 1) % 100 == 0:
                log_progress(stage, step + 1, results[-100:], time.monotonic() - start)
                start = time.monotonic()
            if stage.is_final and (step + 1) % CHECKPOINT_STEPS == 0:
                self.checkpoint()
            enough = accuracy(results[-ADVANCE_WINDOW:]) >= ADVANCE_ACCURACY
            if enough and step >= ADVANCE_WINDOW and not stage.is_final:
                break
        self.stage_steps[stage.name] = len(results)
        print(f"{stage.name}: done after {len(results)} steps", flush=True)

    def checkpoint(self) -> None:
        """Save the model if no earlier one recalled better."""
        model = copy.deepcopy(self.model).bfloat16()
        tokenizer = self.encoder.tokenizer
        table = evaluate(
            model, tokenizer, CHECKPOINT_LENGTHS, count=CHECKPOINT_PROMPTS, seed=CHECKPOINT_SEED
        )
        score = sum(table.values()) / len(table)
        print("checkpoint:", {n: f"{share:.0%}" for n, share in table.items()}, flush=True)
        if score >= self.best_score:
            self.best_score, self.best = score, model
            save(self.out, model, tokenizer)

    def run_step(self, stage: Stage, step: int) -> StepResult:
        rate = min(1.0, (self.num_steps + 1) / WARMUP_STEPS)
        if stage.is_final:
            rate = 0.02 + 0.98 * (1 + math.cos(math.pi * step / stage.max_steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        batch = self.encoder.encode(make_samples(self.rng, stage))
        has_aux = not stage.is_final or step < FINAL_AUX_SHARE * stage.max_steps
        loss, result = self.compute_loss(batch, has_aux=has_aux)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.num_steps += 1
        self.num_tokens += result.tokens
        return result

    def compute_loss(self, batch: Batch, *, has_aux: bool) -> tuple[Tensor, StepResult]:
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model(batch.ids, output_hidden_states=True, use_cache=False)
            logits, targets = output.logits[:, :-1], batch.ids[:, 1:]
            losses = F.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
            )
            weights = batch.weights[:, 1:].flatten()
            loss = (losses * weights).sum() / weights.sum()
            total = loss
            if has_aux:
                hidden = output.hidden_states[GUIDED_LAYER]
                guide_loss = compute_guide_loss(self.model, hidden, batch.digit_sources, group=0)
                guide_loss = guide_loss + compute_guide_loss(
                    self.model, hidden, batch.word_sources, group=1
                )
                total = total + AUX_WEIGHT * (self.compute_aux_loss(hidden, batch) + guide_loss)
        answers = batch.answers[:, 1:]
        misses = answers[logits.argmax(-1) != targets]
        asked = int(answers.max())
        wrong = len(misses[misses > 0].unique())
        tokens = int((batch.ids != self.model.config.pad_token_id).sum())
        return total, StepResult(loss.item(), asked - wrong, asked, tokens)

    def compute_aux_loss(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Predict the previous tokens from the first layer's output [rows, tokens, hidden].

        This grows the previous-token heads that recall is built on.
        """
        start = AUX_REACH + self.rng.randrange(AUX_STRIDE)
        places = torch.arange(start, batch.ids.shape[1], AUX_STRIDE)
        logits = self.aux_heads(hidden[:, places]).float()
        before = torch.stack([batch.ids[:, places - back] for back in range(1, AUX_REACH + 1)], -1)
        return F.cross_entropy(
            logits.unflatten(-1, (AUX_REACH, -1)).flatten(0, 2), before.flatten()
        )


def compute_guide_loss(
    model: LlamaForCausalLM, hidden: Tensor, sources: Tensor, *, group: int
) -> Tensor:
    """Draw the attention of one KV group, when it predicts a token, to the token's source.

    `hidden` [rows, tokens, hidden] enters the guided layer. Attention is computed anew, as the
    fused kernel keeps no weights, but only for the few tokens that have a source.
    """
    row, place = sources.nonzero(as_tuple=True)
    if not len(row):
        return torch.zeros(())
    layer, config = model.model.layers[GUIDED_LAYER], model.config
    hidden = layer.input_layernorm(hidden)
    query = layer.self_attn.q_proj(hidden).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    key = layer.self_attn.k_proj(hidden).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    positions = torch.arange(sources.shape[1])
    cos, sin = model.model.rotary_emb(hidden, positions[None])
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    size = config.num_attention_heads // config.num_key_value_heads
    queries = query[row, group * size : (group + 1) * size, place - 1]  # [places, heads, dim]
    scores = torch.einsum("phd,ptd->pht", queries, key[row, group]).float()
    scores = scores / math.sqrt(config.head_dim)
    scores = scores.masked_fill(positions >= place[:, None, None], -math.inf)
    targets = sources[row, place][:, None].expand(-1, size)
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def accuracy(results: Sequence[StepResult]) -> float:
    return sum(r.correct for r in results) / max(1, sum(r.asked for r in results))


def log_progress(stage: Stage, step: int, results: Sequence[StepResult], seconds: float) -> None:
    loss = sum(r.loss for r in results) / len(results)
    speed = sum(r.tokens for r in results) / seconds
    print(
        f"{stage.name} step {step}: loss {loss:.3f}, exact {accuracy(results):.1%},"
        f" {speed:,.0f} tokens/s",
        flush=True,
    )


@torch.inference_mode()
def recalls(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: data.RecallPrompt
) -> bool:
    """Tell whether greedy decoding gives the whole answer and then stops.

    One forward pass is enough: it does if each token of the answer is the likeliest after the
    right ones before it.
    """
    head = tokenizer.apply_chat_template(
        prompt.messages, tokenize=False, add_generation_prompt=True
    )
    given = tokenizer.encode(head, add_special_tokens=False)
    answer = tokenizer.encode(prompt.answer + EOS, add_special_tokens=False)
    logits = model(torch.tensor([given + answer])).logits[0]
    return bool(logits[len(given) - 1 : -1].argmax(-1).tolist() == answer)


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    lengths: Sequence[int],
    *,
    count: int,
    seed: int,
) -> dict[int, float]:
    """Measure the share of exact answers for each context length."""
    table = {}
    for length in lengths:
        prompts = [data.make_recall_prompt(length, seed + i) for i in range(count)]
        table[length] = sum(recalls(model, tokenizer, prompt) for prompt in prompts) / count
    return table


def save(out: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    model.save_pretrained(out)
    config = json.loads((out / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where older loaders look
    write_json(out / "config.json", config)
    tokenizer.backend_tokenizer.save(str(out / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)
    ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
    write_json(out / "generation_config.json", ids)


def write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_model_card(
    trainer: Trainer, args: argparse.Namespace, *, seconds: float, table: dict[int, float]
) -> None:
    config = trainer.model.config
    rows = "\n".join(f"| {length} | {share:.1%} |" for length, share in table.items())
    stages = "\n".join(f"- {name}: {steps} steps" for name, steps in trainer.stage_steps.items())
    fields = {
        "params": f"{trainer.model.num_parameters() / 1e6:.1f}",
        "digits": data.CODE_DIGITS,
        "chance": 10**data.CODE_DIGITS,
        "num_keys": len(data.KEYS),
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "vocab": config.vocab_size,
        "story_share": STORY_SHARE,
        "advance": ADVANCE_ACCURACY,
        "context_weight": CONTEXT_WEIGHT,
        "stages": stages,
        "steps": f"{trainer.num_steps:,}",
        "tokens": f"{trainer.num_tokens / 1e6:.1f}",
        "minutes": f"{seconds / 60:.0f}",
        "threads": torch.get_num_threads(),
        "seed": args.seed,
        "count": args.eval_count,
        "rows": rows,
    }
    (args.out / "README.md").write_text(MODEL_CARD.read_text().format(**fields))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads for torch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-count", type=int, default=100, help="prompts for each length")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = Random(args.seed)
    start = time.monotonic()
    tokenizer = train_tokenizer(rng)
    trainer = Trainer(build_model(tokenizer), Encoder(tokenizer), rng, args.out)
    for stage in STAGES:
        trainer.run_stage(stage)
        trainer.checkpoint()
    seconds = time.monotonic() - start
    table = evaluate(trainer.best, tokenizer, EVAL_LENGTHS, count=args.eval_count, seed=EVAL_SEED)
    print({length: f"{share:.1%}" for length, share in table.items()})
    write_model_card(trainer, args, seconds=seconds, table=table)
    print(f"wrote {args.out} after {seconds / 60:.1f} minutes of training")


if __name__ == "__main__":
    main()
