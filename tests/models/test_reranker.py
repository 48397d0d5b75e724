"""Scores equal `sentence_transformers.CrossEncoder.predict` and transformers' own logits, whatever the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from sentence_transformers import CrossEncoder

from pipeline.errors import ConfigError
from pipeline.language.batching import in_input_order, plan_text_batches
from pipeline.models.reranker import Scorer, ScorerFacts, TokenizedText
from tests.models.text_folders import TEXTS, bert, byte_pairs, change_json, qwen2, save_plain

PAIRS = [(query, document) for query in TEXTS[:4] for document in TEXTS]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def scorer(folder: Path, **options: Any) -> Scorer:
    return Scorer(ScorerFacts.load(str(folder), **options), dtype="float32", device="cpu")


def score_pairs(folder: Path, prompt_name: str | None = None, **options: Any) -> np.ndarray:
    ours = scorer(folder, **options)
    return ours.score(ours.facts.tokenize_pairs(PAIRS, prompt_name))


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    assert ours.dtype == np.float32 and ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, atol=2e-5, rtol=1e-4)
    assert ours.std() > 1e-3  # not all the same, which would prove little


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("base", ["bert", "qwen2"])
@pytest.mark.parametrize("saved_by", ["transformers", "sentence-transformers"])
def test_scores_equal_cross_encoder(base: str, num_labels: int, saved_by: str, tmp_path: Path) -> None:
    if base == "bert":
        model, tokenizer = bert(hf.BertForSequenceClassification, num_labels=num_labels)
    else:
        model, tokenizer = qwen2(hf.Qwen2ForSequenceClassification, num_labels=num_labels)
    folder = save_plain(tmp_path / "plain", model, tokenizer)
    theirs = CrossEncoder(str(folder), device="cpu")
    if saved_by == "sentence-transformers":
        folder = tmp_path / "saved"
        theirs.save(str(folder))
    ours = score_pairs(folder)
    assert ours.shape == ((len(PAIRS),) if num_labels == 1 else (len(PAIRS), 3))
    assert_same(ours, theirs.predict(PAIRS))
    assert ScorerFacts.load(str(folder)).labels == tuple(f"LABEL_{i}" for i in range(num_labels))


@pytest.mark.parametrize(
    ("num_labels", "changes"),
    [
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.0"}}),
        (3, {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "4.0"}}),
        (1, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
        (3, {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"}),
    ],
)
def test_activations_named_in_the_configuration_are_applied(
    num_labels: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=num_labels))
    default = score_pairs(folder)
    change_json(folder / "config.json", **changes)
    assert_same(score_pairs(folder), CrossEncoder(str(folder), device="cpu").predict(PAIRS))
    assert not np.allclose(score_pairs(folder), default, atol=1e-3)


def test_activations_saved_beside_the_configuration_are_applied(tmp_path: Path) -> None:
    plain = save_plain(tmp_path / "plain", *bert(hf.BertForSequenceClassification, num_labels=1))
    theirs = CrossEncoder(str(plain), device="cpu", activation_fn=torch.nn.Tanh())
    theirs.save(str(tmp_path / "saved"))
    assert ScorerFacts.load(str(tmp_path / "saved")).activation == "torch.nn.modules.activation.Tanh"
    assert_same(score_pairs(tmp_path / "saved"), theirs.predict(PAIRS))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_tokens", [9, 24])
def test_the_longer_text_is_cut_first(side: str, max_tokens: int, tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=1))
    change_json(folder / "tokenizer_config.json", truncation_side=side)
    ours = score_pairs(folder, pooling={"truncation": {"max_tokens": max_tokens}})
    assert_same(ours, CrossEncoder(str(folder), device="cpu", max_length=max_tokens).predict(PAIRS))
    facts = ScorerFacts.load(str(folder), {"truncation": {"max_tokens": max_tokens}})
    [text] = facts.tokenize_pairs([("a b c", "word " * 60)])
    assert len(text.input_ids) == max_tokens and text.type_ids is not None
    assert text.type_ids.count(0) == 5  # [CLS] a b c [SEP]: the query is whole


@pytest.mark.parametrize("name", [None, "query", "web"])
def test_prompts_are_put_before_the_query(name: str | None, tmp_path: Path) -> None:
    plain = save_plain(tmp_path / "plain", *bert(hf.BertForSequenceClassification, num_labels=1))
    prompts = {"query": "query: ", "web": "The quick "}
    theirs = CrossEncoder(str(plain), device="cpu", prompts=prompts, default_prompt_name="web")
    theirs.save(str(tmp_path / "saved"))
    assert_same(score_pairs(tmp_path / "saved", name), theirs.predict(PAIRS, prompt_name=name))


@pytest.mark.parametrize(("base", "side"), [("bert", "right"), ("qwen2", "right"), ("qwen2", "left")])
def test_scores_are_those_of_the_pair_alone_in_any_batch(base: str, side: str, tmp_path: Path) -> None:
    if base == "bert":
        model, tokenizer = bert(hf.BertForSequenceClassification, num_labels=1)
    else:
        model, tokenizer = qwen2(hf.Qwen2ForSequenceClassification, num_labels=1)
    folder = save_plain(tmp_path, model, tokenizer)
    ours = scorer(folder, pooling={"padding": {"side": side}})
    texts = ours.facts.tokenize_pairs(PAIRS)
    alone = np.concatenate([ours.score([text]) for text in texts])
    rng = random.Random(4)
    for most in (2, 5, 32):
        lengths = [len(text.input_ids) for text in texts]
        batches = plan_text_batches(lengths, max_batch_tokens=10_000, max_batch_items=most)
        rng.shuffle(batches)
        results = [ours.score([texts[position] for position in batch]).tolist() for batch in batches]
        assert_same(np.array(in_input_order(batches, results), np.float32), alone)


def test_a_head_that_reads_padding_is_refused(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=1))
    with pytest.raises(ConfigError, match="its head reads the padding, which is on the left"):
        scorer(folder, pooling={"padding": {"side": "left"}})


def test_single_texts_are_classified(tmp_path: Path) -> None:
    model, tokenizer = bert(hf.BertForSequenceClassification, num_labels=3, id2label={0: "cat", 1: "dog", 2: "mill"})
    ours = scorer(save_plain(tmp_path, model, tokenizer))
    assert ours.facts.labels == ("cat", "dog", "mill")
    encoded = tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")
    with torch.inference_mode():
        expected = model(**encoded).logits.numpy()
    assert_same(ours.score(ours.facts.tokenize_texts(TEXTS)), expected)


def test_chats_are_scored_in_the_models_template(tmp_path: Path) -> None:
    tokenizer = byte_pairs()
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
    model, _ = qwen2(hf.Qwen2ForSequenceClassification, num_labels=1)
    folder = save_plain(tmp_path, model, tokenizer)
    change_json(folder / "config.json", sentence_transformers={"activation_fn": "torch.nn.modules.linear.Identity"})
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "b c"}]
        for text in ("a", "a wheel", "x y z")
    ]
    ours = scorer(folder)
    scores = ours.score(ours.facts.tokenize_chats(chats))
    for chat, score in zip(chats, scores, strict=True):
        rendered = f"[user] {chat[0]['content']}<|im_end|>[assistant] b c<|im_end|>"
        ids = tokenizer(rendered, add_special_tokens=False, return_tensors="pt")["input_ids"]
        with torch.inference_mode():
            assert model(ids).logits.item() == pytest.approx(score, abs=2e-5)
    with pytest.raises(ConfigError, match="pairs for its chat template are not supported"):
        ours.facts.tokenize_pairs(PAIRS)


@pytest.mark.parametrize("base", ["bert", "qwen2"])
def test_token_scores_are_the_logits_of_the_text_alone(base: str, tmp_path: Path) -> None:
    if base == "bert":
        model, tokenizer = bert(hf.BertForTokenClassification, num_labels=3)
    else:
        model, tokenizer = qwen2(hf.Qwen2ForTokenClassification, num_labels=1)
    ours = scorer(save_plain(tmp_path, model, tokenizer), per_token=True)
    texts = ours.facts.tokenize_texts(TEXTS)
    for text, scores in zip(texts, ours.score_tokens(texts), strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([text.input_ids])).logits[0].numpy()
        np.testing.assert_allclose(scores, expected, atol=2e-5, rtol=1e-4)
        assert scores.dtype == np.float32 and len(scores) == len(text.input_ids)
    assert ours.facts.contract.output.shape == "token_scores"


def test_the_contract_says_what_was_read(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=1))
    assert ScorerFacts.load(str(folder)).contract.as_dict() == {
        "method": "model",
        "normalisation": {"kind": "none", "when": "after"},
        "truncation": {"side": "right", "max_tokens": 64},
        "padding": {"side": "right", "to": "longest", "excluded": True},
        "output": {"shape": "scores", "dimensions": None},
        "item_order": "input",
    }


@pytest.mark.parametrize(
    ("pooling", "message"),
    [
        ({"method": "mean"}, "only truncation and padding"),
        ({"output": {"dimensions": 2}}, "only truncation and padding"),
        ({"padding": {"to": "max_tokens"}}, "padding is to the longest text"),
        ({"truncation": {"max_tokens": 65}}, "has 64 positions"),
        ({"truncation": None}, "truncation and padding are needed for texts"),
    ],
)
def test_contracts_the_model_cannot_keep_are_refused(pooling: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=1))
    with pytest.raises(ConfigError, match=message):
        ScorerFacts.load(str(folder), pooling)


def test_the_digest_covers_what_is_not_weights(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=1))
    facts = ScorerFacts.load(str(folder))
    facts.tokenize_pairs(PAIRS)  # which leaves its limits in the tokenizer
    digests = [facts.processing_digest, ScorerFacts.load(str(folder)).processing_digest]
    assert digests[0] == digests[1]
    digests.append(ScorerFacts.load(str(folder), {"truncation": {"max_tokens": 9}}).processing_digest)
    change_json(folder / "tokenizer_config.json", do_lower_case=False)
    digests.append(ScorerFacts.load(str(folder)).processing_digest)
    change_json(folder / "config.json", sbert_ce_default_activation_function="torch.nn.modules.linear.Identity")
    digests.append(ScorerFacts.load(str(folder)).processing_digest)
    assert len(set(digests)) == 4


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    facts = ScorerFacts.load(str(save_plain(tmp_path, *bert())))
    with pytest.raises(ConfigError, match=r"BertForSequenceClassification needs weights that it lacks: .*classifier"):
        Scorer(facts, dtype="float32", device="cpu")


def test_an_activation_that_is_not_torchs_is_refused(tmp_path: Path) -> None:
    folder = save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=1))
    change_json(folder / "config.json", sbert_ce_default_activation_function="my.code.Activation")
    with pytest.raises(ConfigError, match=r"'my\.code\.Activation' is not a module of torch\.nn"):
        ScorerFacts.load(str(folder))


def test_the_yes_and_no_of_a_language_model_is_refused(tmp_path: Path) -> None:
    model, tokenizer = qwen2(hf.Qwen2ForCausalLM)
    tokenizer.add_tokens(["yes", "no"])
    model.resize_token_embeddings(len(tokenizer))
    theirs = CrossEncoder(str(save_plain(tmp_path / "plain", model, tokenizer)), device="cpu")
    theirs.save(str(tmp_path / "saved"))
    with pytest.raises(ConfigError, match="its modules are Transformer, LogitScore"):
        ScorerFacts.load(str(tmp_path / "saved"))


def test_nothing_is_tokenized_to_nothing(tmp_path: Path) -> None:
    facts = ScorerFacts.load(str(save_plain(tmp_path, *bert(hf.BertForSequenceClassification, num_labels=1))))
    assert facts.tokenize_pairs([]) == facts.tokenize_texts([]) == []
    assert facts.tokenize_texts(["a"]) == [TokenizedText(input_ids=[2, 5, 3], type_ids=[0, 0, 0])]
