from math import inf
from pathlib import Path

import pytest

from pdserve_router.config import RouterConfig


def config(path: Path, **fields: object) -> RouterConfig:
    return RouterConfig(**{"model": str(path), "decode": ("d:1",), **fields})


def test_the_model_is_named_after_its_directory_unless_told_otherwise(tmp_path) -> None:
    assert config(tmp_path / ".").model_name == tmp_path.name
    assert config(tmp_path, served_model_name="m").model_name == "m"


def test_a_model_of_the_hubs_cache_has_the_hubs_name(tmp_path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / ("0a" * 20)
    snapshot.mkdir(parents=True)
    assert config(snapshot).model_name == "Qwen/Qwen3-0.6B"


def test_a_model_may_be_one_of_the_hub(tmp_path) -> None:
    assert config("Qwen/Qwen3-0.6B").model == "Qwen/Qwen3-0.6B"
    with pytest.raises(ValueError, match="or OWNER/NAME on the Hugging Face hub, got 'models/x'"):
        config("models/x")


def test_the_rules_of_routing_are_the_flags_of_the_same_names(tmp_path) -> None:
    rules = config(tmp_path, disaggregation=False, max_prefill_queue_tokens=3).rules
    assert (rules.disaggregation, rules.max_prefill_queue_tokens) == (False, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": "/nowhere"}, "model must be a directory"),
        ({"model": ""}, "model must be a directory"),
        ({"decode": ()}, "decode needs at least one worker: host:port, dns://"),
        ({"decode": ("dns://d",)}, "must be host:port, got 'd'"),
        ({"prefill": ("http://d:1",)}, "workers must be host:port, dns://"),
        ({"prefill": ("host",)}, "must be host:port, got 'host'"),
        ({"prefill": ("host:0",)}, "must be host:port"),
        ({"prefill": ("d:1",)}, "listed in both: d:1"),
        ({"prefill": ("p:1",), "disaggregation": False, "require_disaggregation": True}, "is off"),
        ({"require_disaggregation": True}, "prefill needs at least one worker"),
        ({"disaggregation_threshold_tokens": -1}, "disaggregation_threshold_tokens is -1"),
        ({"max_prefill_queue_tokens": -1}, "max_prefill_queue_tokens is -1"),
        ({"max_redrives": -1}, "max_redrives is -1"),
        ({"cell_size": 1}, "cell_size is 1, must be 0 or at least 2"),
        ({"cell_size": -1}, "cell_size is -1"),
        ({"redrive_wait_s": -1.0}, "redrive_wait_s is -1.0"),
        ({"routing_policy": "best"}, "known are power_of_two, prefix, round_robin"),
        ({"chat_format": "best"}, "known are auto, none, deepseek_r1, hermes"),
        ({"http_port": 70000}, "http_port is 70000"),
        ({"client_stall_timeout_s": 0.0}, "client_stall_timeout_s is 0.0, must be above 0"),
        ({"max_deadline_s": 1.0}, "at least default_deadline_s"),
        ({"default_deadline_s": inf, "max_deadline_s": inf}, "is inf, must be at most 604800"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s is -1.0"),
    ],
)
def test_a_bad_value_is_named(tmp_path, fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **fields)
