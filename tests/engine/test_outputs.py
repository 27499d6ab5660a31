"""What a request's outputs say of where its time went."""

import time

from scripted_engine import ON_D, Engine, ScriptedConnector

PAUSE_S = 0.03


def test_the_wait_for_the_next_step_is_part_of_the_admission() -> None:
    """The connector is done in the middle of a step; the scheduler hears of it after that."""
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    engine.add("a", list(range(10)), max_tokens=3, kv_transfer_params=ON_D)
    engine.step()
    connector.claim("a")
    engine.step()
    started = time.monotonic()
    connector.finish_load("a")
    time.sleep(PAUSE_S)
    engine.run()
    took_s = time.monotonic() - started
    first, *others = [output.kv_transfer_stats for output in engine.outputs["a"]]
    assert first is not None
    assert PAUSE_S <= first.decode_admit_s <= took_s
    assert 0 < first.first_decode_step_s <= took_s - PAUSE_S
    assert others == [None] * len(others), "the stages are told once"


def test_only_the_worker_that_computes_the_prompt_tells_how_long_it_took() -> None:
    connector = ScriptedConnector()
    engine = Engine(connector=connector)
    engine.add("local", list(range(10)), max_tokens=3)
    engine.run()
    engine.add("pulled", list(range(20, 30)), max_tokens=3, kv_transfer_params=ON_D)
    engine.step()
    connector.claim("pulled")
    engine.step()
    connector.finish_load("pulled")
    engine.run()
    first, *others = [output.prefill_stats for output in engine.outputs["local"]]
    assert first is not None
    assert (first.num_prompt_tokens, first.num_cached_tokens, first.grant_s) == (10, 0, 0)
    assert not any([*others, *(output.prefill_stats for output in engine.outputs["pulled"])])
