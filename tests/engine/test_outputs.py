"""What a request's outputs say of where its time went."""

from support.clock import Clock
from support.scripted_engine import ON_D, decode_engine


def test_the_wait_for_the_next_step_is_part_of_the_admission(clock: Clock) -> None:
    """The consumer is done in the middle of a step; the scheduler hears of it after that."""
    engine = decode_engine(clock=clock)
    engine.add("a", list(range(10)), max_tokens=3, kv_transfer_params=ON_D)
    engine.step()
    engine.consumer.claim("a")
    engine.step()
    engine.consumer.finish_load("a")
    clock.now_s += 30
    engine.rank.on_step = lambda step: setattr(clock, "now_s", clock.now_s + 2)
    engine.run()
    first, *others = [output.kv_transfer_stats for output in engine.outputs["a"]]
    assert first is not None
    assert (first.decode_admit_s, first.first_decode_step_s) == (30, 2)
    assert others == [None] * len(others), "the stages are told once"


def test_only_the_worker_that_computes_the_prompt_tells_how_long_it_took() -> None:
    engine = decode_engine()
    engine.add("local", list(range(10)), max_tokens=3)
    engine.run()
    engine.add("pulled", list(range(20, 30)), max_tokens=3, kv_transfer_params=ON_D)
    engine.step()
    engine.consumer.claim("pulled")
    engine.step()
    engine.consumer.finish_load("pulled")
    engine.run()
    first, *others = [output.prefill_stats for output in engine.outputs["local"]]
    assert first is not None
    assert (first.num_prompt_tokens, first.num_cached_tokens) == (10, 0)
    assert first.decode_queue_s == first.queue_s, "nobody else makes it wait"
    assert not any([*others, *(output.prefill_stats for output in engine.outputs["pulled"])])
