"""Which models pool, and how: from architectures, Sentence-Transformers' files and flags."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve_common.model_files.model_folder import pools
from pdserve_engine.models.config import ModelError, PoolerConfig
from pdserve_engine.models.pooler_config import read_pooler_config

RAW: dict[str, Any] = {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 64}
LAST = PoolerConfig(
    tasks=("embed",), pooling_type="last", activation="normalize", use_activation=True
)
TWO_LABELS = PoolerConfig(
    tasks=("classify",),
    pooling_type="last",
    num_labels=2,
    activation="softmax",
    use_activation=True,
)


def raw(architecture: str, **fields: Any) -> dict[str, Any]:
    return RAW | {"architectures": [architecture]} | fields


def read(
    folder: Path,
    content: Mapping[str, Any] = RAW,
    *,
    runner: Any = "auto",
    convert: Any = "auto",
    overrides: str | None = None,
) -> PoolerConfig | None:
    return read_pooler_config(folder, content, runner=runner, convert=convert, overrides=overrides)


def write_modules(folder: Path, kinds: list[str], pooling: Mapping[str, Any]) -> None:
    types = [f"sentence_transformers.models.{kind}" for kind in kinds]
    paths = ["", "1_Pooling", *map(str, range(2, len(kinds)))]
    entries = [{"type": kind, "path": path} for kind, path in zip(types, paths, strict=False)]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


@pytest.mark.parametrize(
    ("content", "flags", "expected"),
    [
        (RAW, {}, None),
        (RAW, {"runner": "generate", "convert": "none"}, None),
        (raw("MambaForCausalLM"), {}, None),
        (RAW, {"runner": "pooling"}, LAST),
        (RAW, {"runner": "pooling", "convert": "embed"}, LAST),
        (RAW, {"runner": "pooling", "convert": "classify"}, TWO_LABELS),
        (raw("LlamaModel"), {}, LAST),
        (raw("Qwen3ForSequenceClassification"), {}, TWO_LABELS),
        (raw("Qwen3ForSequenceClassification"), {"convert": "embed"}, LAST),
    ],
)
def test_architecture_and_flags_say_what_a_model_does(
    tmp_path: Path, content: Any, flags: Any, expected: PoolerConfig | None
) -> None:
    assert read(tmp_path, content, **flags) == expected


@pytest.mark.parametrize(
    ("fields", "num_labels", "activation"),
    [
        ({"id2label": {"0": "a", "1": "b", "2": "c"}}, 3, "softmax"),
        ({"id2label": {"0": "a"}}, 1, "sigmoid"),
        ({"num_labels": 4, "problem_type": "single_label_classification"}, 4, "softmax"),
        ({"num_labels": 4, "problem_type": "multi_label_classification"}, 4, "sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, 1, "identity"),
        (
            {
                "num_labels": 1,
                "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity",
            },
            1,
            "identity",
        ),
        (
            {
                "num_labels": 3,
                "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
            },
            3,
            "sigmoid",
        ),
    ],
)
def test_a_classifier_has_the_labels_and_activation_of_its_config(
    tmp_path: Path, fields: Any, num_labels: int, activation: str
) -> None:
    config = read(tmp_path, raw("LlamaForSequenceClassification", **fields))
    assert config is not None
    assert (config.num_labels, config.activation) == (num_labels, activation)
    assert config.tasks == (("classify", "score") if num_labels == 1 else ("classify",))


@pytest.mark.parametrize("normalizes", [True, False])
@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "last"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": True}, "mean"),
        ({"pooling_mode": "lasttoken", "include_prompt": False}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_files_of_sentence_transformers_say_how_a_model_embeds(
    tmp_path: Path, pooling: Any, expected: str, normalizes: bool
) -> None:
    write_modules(tmp_path, ["Transformer", "Pooling"] + ["Normalize"] * normalizes, pooling)
    config = read(tmp_path)
    assert config is not None
    assert (config.pooling_type, config.use_activation) == (expected, normalizes)
    assert read(tmp_path, runner="generate") is None


@pytest.mark.parametrize(
    ("fields", "overrides", "expected"),
    [
        ({}, "{}", ("last", True, False, ())),
        ({}, '{"pooling_type": "MEAN", "use_activation": false}', ("mean", False, False, ())),
        ({"is_matryoshka": True}, None, ("last", True, True, ())),
        ({"matryoshka_dimensions": [64, 32]}, None, ("last", True, True, (32, 64))),
        ({}, '{"matryoshka_dimensions": [8]}', ("last", True, True, (8,))),
        (
            {"is_matryoshka": True, "matryoshka_dimensions": [32]},
            '{"is_matryoshka": false}',
            ("last", True, False, ()),
        ),
        ({"matryoshka_dimensions": [32]}, '{"use_activation": true}', ("last", True, True, (32,))),
    ],
)
def test_the_operator_and_the_config_say_the_rest(
    tmp_path: Path, fields: Any, overrides: str | None, expected: Any
) -> None:
    config = read(tmp_path, RAW | fields, runner="pooling", overrides=overrides)
    assert config is not None
    assert expected == (
        config.pooling_type,
        config.use_activation,
        config.is_matryoshka,
        config.matryoshka_dimensions,
    )


@pytest.mark.parametrize(
    ("content", "flags", "refusal"),
    [
        (raw("LlamaModel"), {"runner": "generate"}, "runner is generate, .*has no lm_head"),
        (RAW, {"convert": "embed"}, "convert is embed, must be auto or none if runner is gen"),
        (RAW, {"overrides": "{}"}, "pooler_config is set, must be unset if runner is generate"),
        (RAW, {"runner": "pooling", "convert": "none"}, "convert is none, must be auto, embed"),
        (raw("Qwen2Model", is_causal=False), {}, "is_causal is false: .*supported is causal"),
        (raw("Qwen2ForCausalLM", is_causal=False), {}, "is_causal is false: .*supported is causal"),
        (raw("LlamaModel", use_bidirectional_attention=True), {}, "use_bidirectional_attention is"),
        (raw("LlamaModel"), {"overrides": "["}, "pooler_config is not valid JSON"),
        (raw("LlamaModel"), {"overrides": '{"a":' * 50_000}, "pooler_config is not valid JSON: it"),
        (raw("LlamaModel"), {"overrides": "[]"}, "pooler_config is a JSON list"),
        (raw("LlamaModel"), {"overrides": '{"step": 1}'}, "pooler_config has step, supported"),
        (raw("LlamaModel"), {"overrides": '{"pooling_type": "CLS"}'}, "pooling_type is CLS, supp"),
        (raw("LlamaModel"), {"overrides": '{"use_activation": 1}'}, "use_activation is 1, must"),
        *(
            (RAW, {"runner": "pooling", "overrides": f'{{"classifier_from_token": {value}}}'}, said)
            for value, said in (
                ('["no"]', "must be a list of two tokens: no and yes"),
                ('["no", 1]', "must be a list of two tokens: no and yes"),
                ('["no", "yes"]', "has no tokenizer.json"),
            )
        ),
        (
            RAW,
            {
                "runner": "pooling",
                "convert": "embed",
                "overrides": '{"classifier_from_token": ["no", "yes"]}',
            },
            "classifier_from_token is set, must be unset if convert is embed",
        ),
        *(
            (raw("LlamaModel", matryoshka_dimensions=value), {}, "must be a list of numbers from 1")
            for value in ([0], [65], [1.5], [True], 3)
        ),
        (
            raw("LlamaForSequenceClassification", problem_type="x"),
            {},
            "problem_type is x, supported are regression",
        ),
        (
            raw("LlamaForSequenceClassification", num_labels=0),
            {},
            "num_labels is 0, expected int >= 1",
        ),
        (
            raw(
                "LlamaForSequenceClassification", sentence_transformers={"activation_fn": "a.Tanh"}
            ),
            {},
            "activation_fn is a.Tanh, supported are Identity, Sigmoid",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, content: Any, flags: Any, refusal: str
) -> None:
    with pytest.raises(ModelError, match=refusal):
        read(tmp_path, content, **flags)


@pytest.mark.parametrize(
    ("kinds", "pooling", "refusal"),
    [
        (["Transformer", "Pooling", "Dense"], {}, "has Transformer, Pooling, Dense, supported"),
        (["CLIPModel"], {}, "has CLIPModel, supported"),
        (["Transformer", "Pooling"], {}, "has no pooling mode, supported is one of"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, "pooling_mode_cls_token, s"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "pooling_mode_lasttoken, pooling_mode_mean_tokens, supported is one of",
        ),
        (["Transformer", "Pooling"], {"pooling_mode": "cls"}, "has cls, supported is one of"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "include_prompt": False},
            "include_prompt false",
        ),
    ],
)
def test_modules_that_are_not_served_are_refused_by_name(
    tmp_path: Path, kinds: list[str], pooling: Any, refusal: str
) -> None:
    write_modules(tmp_path, kinds, pooling)
    for runner in ("auto", "pooling"):
        with pytest.raises(ModelError, match=refusal):
            read(tmp_path, runner=runner)
    # It needs none of them.
    assert read(tmp_path, runner="generate") is None


def list_modules(path: str) -> str:
    """Return a list whose Pooling module has that path."""
    kinds = {"Transformer": "", "Pooling": path}
    return json.dumps([{"type": kind, "path": path} for kind, path in kinds.items()])


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (json.dumps([{"type": "x" * 5000, "path": ""}]), None),
        (list_modules(""), None),
        *(
            (None, json.dumps({name: value}))
            for name in ("pooling_type", "use_activation", "classifier_from_token", "x" * 5000)
            for value in ("x" * 5000, ["x" * 5000])
        ),
        (None, json.dumps({"classifier_from_token": ["x" * 5000, "no"]})),
    ],
)
def test_a_long_value_is_cut_in_the_message(
    tmp_path: Path, text: str | None, overrides: str | None
) -> None:
    if text is not None:
        (tmp_path / "modules.json").write_text(text)
        (tmp_path / "config.json").write_text(json.dumps({"pooling_mode": "x" * 5000}))
    with pytest.raises(ModelError) as raised:
        read(tmp_path, runner="pooling", overrides=overrides)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("path", ["a" * 5000, "a\0b", "none"])
def test_a_module_without_a_config_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "modules.json").write_text(list_modules(path))
    with pytest.raises(
        ModelError, match=r"config\.json (cannot|is not)|none does not exist"
    ) as raised:
        read(tmp_path)
    assert len(str(raised.value)) < 600


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_a_broken_tokenizer_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    overrides = '{"classifier_from_token": ["no", "yes"]}'
    with pytest.raises(ModelError, match=r"tokenizer\.json is damaged or no tokenizer: "):
        read(tmp_path, runner="pooling", overrides=overrides)


@pytest.mark.parametrize(
    "text", ["{", "{}", "[1]", '[{"type": "a.Transformer"}]', "[" * 100_000], ids=range(5)
)
def test_a_damaged_list_of_modules_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=r"modules\.json"):
        read(tmp_path)


def test_classifier_from_token_names_tokens_of_the_model(
    make_served_model: Callable[..., Path],
) -> None:
    folder = make_served_model("Qwen3ForCausalLM")
    for overrides in ('["n", "y"]', '["n", "yes"]'):
        text = f'{{"classifier_from_token": {overrides}}}'
        if "yes" in overrides:
            with pytest.raises(ModelError, match="has 'yes', which is no token of the model"):
                read(folder, runner="pooling", overrides=text)
            continue
        config = read(folder, runner="pooling", overrides=text)
        assert config is not None
        assert (config.tasks, config.num_labels) == (("classify", "score"), 1)
        assert config.activation == "sigmoid"
        assert len(config.classifier_token_ids) == 2


@pytest.mark.parametrize("has_modules", [False, True])
@pytest.mark.parametrize("kind", ["ForCausalLM", "Model", "ForSequenceClassification"])
def test_pdserve_up_knows_what_workers_will_do(
    tmp_path: Path, kind: str, *, has_modules: bool
) -> None:
    content = raw(f"Qwen3{kind}")
    (tmp_path / "config.json").write_text(json.dumps(content))
    if has_modules:
        write_modules(tmp_path, ["Transformer", "Pooling"], {"pooling_mode_lasttoken": True})
    assert pools(tmp_path) == (read(tmp_path, content) is not None)
