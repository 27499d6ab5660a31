"""Train pdserve-tiny, the small bundled Llama that tells stories and recalls codes.

Everything is made here: the text (tiny_model_data.py), the tokenizer, the weights and the model
card. About 20 minutes on one CPU core.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import tiny_model_data as data
import torch
from tiny_model_tokens import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    MAX_POSITIONS,
    PAD,
    Batch,
    Encoder,
    train_tokenizer,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TOKENS_PER_STEP = 1024
LEARNING_RATE = 1e-3
WARMUP_STEPS = 50
STORY_SHARE = 0.12
AUX_WEIGHT = 0.5
AUX_STRIDE = 4  # and are trained at every fourth position, to save time
AUX_REACH = 3  # the auxiliary heads predict this many previous tokens
GUIDED_HEADS = 2  # heads of the second layer that are shown where to look
ADVANCE_ACCURACY = 0.93
ADVANCE_WINDOW = 40  # steps
EVAL_LENGTHS = (64, 128, 256, 384, 512, 640, 700)
EVAL_SEED = 1_000_000
MODEL_CARD = Path(__file__).with_name("tiny_model_card.md")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A step of the curriculum; it ends at the wanted accuracy or after `max_steps`."""

    name: str
    num_tokens: int
    max_steps: int
    drill: str = ""  # the form of a fact; empty for the real mix of stories and recall
    is_final: bool = (
        False  # runs all its steps with a falling learning rate and no auxiliary losses
    )


STAGES = (
    Stage(name="pairs-48", num_tokens=48, max_steps=800, drill="{key} {value}"),
    Stage(name="values-96", num_tokens=96, max_steps=800, drill="{key} is {value}."),
    Stage(name="facts-128", num_tokens=128, max_steps=500, drill="The code of {key} is {value}."),
    Stage(name="facts-192", num_tokens=192, max_steps=500, drill="The code of {key} is {value}."),
    Stage(name="mix-384", num_tokens=384, max_steps=900),
    Stage(name="mix-768", num_tokens=768, max_steps=300),
    Stage(name="final-768", num_tokens=768, max_steps=2000, is_final=True),
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
    if not stage.drill and rng.random() < STORY_SHARE:
        return [data.make_story_sample(rng) for _ in range(TOKENS_PER_STEP // 100)]
    num_tokens = stage.num_tokens
    if not stage.drill and rng.random() < 0.6:
        num_tokens = rng.randint(48, stage.num_tokens)
    rows = max(1, TOKENS_PER_STEP // num_tokens)
    if stage.drill:
        return [data.make_drill_sample(rng, stage.drill, num_tokens) for _ in range(rows)]
    return [data.make_recall_sample(rng, num_tokens) for _ in range(rows)]


class Trainer:
    """Owns the model, the auxiliary heads and the optimizer."""

    def __init__(self, model: LlamaForCausalLM, encoder: Encoder, rng: Random) -> None:
        self.model, self.encoder, self.rng = model, encoder, rng
        self.aux_heads = nn.Linear(model.config.hidden_size, AUX_REACH * model.config.vocab_size)
        self.params = [*model.parameters(), *self.aux_heads.parameters()]
        self.optimizer = torch.optim.AdamW(
            self.params, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True
        )
        self.num_steps = self.num_tokens = 0
        self.stage_steps: dict[str, int] = {}

    def run_stage(self, stage: Stage) -> None:
        results: list[StepResult] = []
        # The guide loss needs the attention weights, which the fused attention does not give.
        self.model.set_attn_implementation("sdpa" if stage.is_final else "eager")
        start = time.monotonic()
        for step in range(stage.max_steps):
            results.append(self.run_step(stage, step))
            if (step + 1) % 100 == 0:
                log_progress(stage, step + 1, results[-100:], time.monotonic() - start)
                start = time.monotonic()
            enough = accuracy(results[-ADVANCE_WINDOW:]) >= ADVANCE_ACCURACY
            if enough and step >= ADVANCE_WINDOW and not stage.is_final:
                break
        self.stage_steps[stage.name] = len(results)
        print(f"{stage.name}: done after {len(results)} steps", flush=True)

    def run_step(self, stage: Stage, step: int) -> StepResult:
        rate = min(1.0, (self.num_steps + 1) / WARMUP_STEPS)
        if stage.is_final:
            rate = 0.02 + 0.98 * (1 + math.cos(math.pi * step / stage.max_steps)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        batch = self.encoder.encode(make_samples(self.rng, stage))
        loss, result = self.compute_loss(batch, stage)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        self.num_steps += 1
        self.num_tokens += result.tokens
        return result

    def compute_loss(self, batch: Batch, stage: Stage) -> tuple[Tensor, StepResult]:
        with torch.autocast("cpu", torch.bfloat16):
            output = self.model(
                batch.ids,
                output_hidden_states=True,
                output_attentions=not stage.is_final,
                use_cache=False,
            )
            logits, targets = output.logits[:, :-1], batch.ids[:, 1:]
            losses = F.cross_entropy(
                logits.flatten(0, 1).float(), targets.flatten(), reduction="none"
            )
            weights = batch.weights[:, 1:].flatten()
            loss = (losses * weights).sum() / weights.sum()
            total = loss
            if not stage.is_final:
                total = total + AUX_WEIGHT * self.compute_aux_loss(output.hidden_states[1], batch)
                total = total + AUX_WEIGHT * compute_guide_loss(output.attentions[1], batch)
        hits = (logits.argmax(-1) == targets)[batch.is_first_digit[:, 1:]]
        tokens = int((batch.weights > 0).sum())
        return total, StepResult(loss.item(), int(hits.sum()), hits.numel(), tokens)

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


def compute_guide_loss(attention: Tensor, batch: Batch) -> Tensor:
    """Draw the attention [rows, heads, tokens, tokens] for a digit to where it was given."""
    row, place = batch.sources.nonzero(as_tuple=True)
    if not len(row):
        return torch.zeros(())
    share = attention[row, :GUIDED_HEADS, place - 1, batch.sources[row, place]].float().mean(-1)
    return -(share + 1e-6).log().mean()


def accuracy(results: Sequence[StepResult]) -> float:
    return sum(r.correct for r in results) / max(1, sum(r.asked for r in results))


def log_progress(stage: Stage, step: int, results: Sequence[StepResult], seconds: float) -> None:
    loss = sum(r.loss for r in results) / len(results)
    speed = sum(r.tokens for r in results) / seconds
    print(
        f"{stage.name} step {step}: loss {loss:.3f}, first digit {accuracy(results):.1%},"
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
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, count: int
) -> dict[int, float]:
    """Measure the share of exact answers for each context length."""
    table = {}
    for length in EVAL_LENGTHS:
        prompts = [data.make_recall_prompt(length, EVAL_SEED + i) for i in range(count)]
        table[length] = sum(recalls(model, tokenizer, prompt) for prompt in prompts) / count
        print(f"recall at {length} tokens: {table[length]:.1%}", flush=True)
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
    path: Path, trainer: Trainer, *, seconds: float, seed: int, table: dict[int, float]
) -> None:
    config = trainer.model.config
    rows = "\n".join(f"| {length} | {share:.1%} |" for length, share in table.items())
    stages = "\n".join(f"- {name}: {steps} steps" for name, steps in trainer.stage_steps.items())
    fields = {
        "params": f"{trainer.model.num_parameters() / 1e6:.1f}",
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "vocab": config.vocab_size,
        "stages": stages,
        "steps": f"{trainer.num_steps:,}",
        "tokens": f"{trainer.num_tokens / 1e6:.1f}",
        "minutes": f"{seconds / 60:.0f}",
        "threads": torch.get_num_threads(),
        "seed": seed,
        "rows": rows,
    }
    path.write_text(MODEL_CARD.read_text().format(**fields))


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
    trainer = Trainer(build_model(tokenizer), Encoder(tokenizer), rng)
    for stage in STAGES:
        trainer.run_stage(stage)
    seconds = time.monotonic() - start
    model = trainer.model.bfloat16()
    table = evaluate(model, tokenizer, args.eval_count)
    save(args.out, model, tokenizer)
    write_model_card(args.out / "README.md", trainer, seconds=seconds, seed=args.seed, table=table)
    print(f"wrote {args.out} after {seconds / 60:.1f} minutes of training")


if __name__ == "__main__":
    main()
