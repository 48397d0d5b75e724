"""Tiny text models with random weights, saved as plain transformers folders and by sentence-transformers itself."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from pipeline.models.location import resolve_model

WIDTH = 32
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "initializer_range": 0.5,
}
# Of one token to many more than the models below take; upper case, accents and signs beside words.
TEXTS = [
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "Été à la PLAGE, 42 coquillages !",
    "word " * 60,
    "Wasser rinnt durch den Mühlgraben, und das Rad dreht sich.",
    "b c d",
    "ohne ende " * 9,
    "query: what turns the wheel?",
]


def wordpiece(**options: Any) -> Any:
    """A BERT tokenizer whose vocabulary is single characters and a few words."""
    characters = [*string.ascii_letters, *string.digits, *string.punctuation, *"éàüÉ"]
    words = ["the", "quick", "word", "query", "The"]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *characters, *(f"##{c}" for c in characters), *words]
    return hf.BertTokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, model_max_length=64, **options)


def byte_pairs(*, end: bool = True) -> Any:
    """The demo model's byte-level vocabulary as a tokenizer of no family, with an end token after each text."""
    demo = hf.AutoTokenizer.from_pretrained(resolve_model("demo:captioner"))
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=demo.backend_tokenizer,
        eos_token=demo.eos_token,
        pad_token=demo.pad_token,
        padding_side="left",
        model_max_length=64,
    )
    if end:
        name, number = tokenizer.eos_token, tokenizer.eos_token_id
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {name}", pair=f"$A {name} $B {name}", special_tokens=[(name, number)]
        )
    return tokenizer


def metaspace() -> Any:
    """A SentencePiece-like tokenizer, which begins every text with a space of its own."""
    words = ["▁the", "▁wheel", "▁mill", "ter", "The"]
    vocabulary = [("<unk>", -9.0), ("</s>", 0.0), *((word, -2.0) for word in words)]
    vocabulary += [(character, -4.0) for character in [*string.ascii_letters, *string.digits, *string.punctuation, "▁"]]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return hf.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")


def bert(head: Any = hf.BertModel, **options: Any) -> tuple[Any, Any]:
    tokenizer = wordpiece()
    config = hf.BertConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=64, **options)
    return _random(head, config), tokenizer


def mpnet() -> tuple[Any, Any]:
    """Positions are counted from 2, as in RoBERTa."""
    tokenizer = wordpiece()
    config = hf.MPNetConfig(**SIZES, vocab_size=len(tokenizer), max_position_embeddings=66, pad_token_id=1)
    return _random(hf.MPNetModel, config), tokenizer


def qwen2(head: Any = hf.Qwen2Model, **options: Any) -> tuple[Any, Any]:
    """A decoder, padded on the left."""
    tokenizer = byte_pairs()
    config = hf.Qwen2Config(
        **SIZES,
        num_key_value_heads=1,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        **options,
    )
    return _random(head, config), tokenizer


def qwen3() -> tuple[Any, Any]:
    tokenizer = byte_pairs()
    config = hf.Qwen3Config(
        **SIZES, num_key_value_heads=1, head_dim=16, vocab_size=len(tokenizer), max_position_embeddings=64
    )
    return _random(hf.Qwen3ForCausalLM, config), tokenizer


def gpt2() -> tuple[Any, Any]:
    """A decoder with absolute positions."""
    tokenizer = byte_pairs()
    config = hf.GPT2Config(
        n_embd=WIDTH, n_layer=2, n_head=2, vocab_size=len(tokenizer), n_positions=64, initializer_range=0.5
    )
    return _random(hf.GPT2Model, config), tokenizer


def t5() -> tuple[Any, Any]:
    """Encoder and decoder, of which the encoder is used."""
    tokenizer = byte_pairs()
    tokenizer.padding_side = "right"
    config = hf.T5Config(
        d_model=WIDTH, d_kv=16, d_ff=64, num_layers=2, num_heads=2, vocab_size=len(tokenizer), pad_token_id=0
    )
    return _random(hf.T5Model, config), tokenizer


BASES = {"bert": bert, "mpnet": mpnet, "qwen2": qwen2, "qwen3": qwen3, "t5": t5}


def _random(kind: Any, config: Any) -> Any:
    torch.manual_seed(3)
    return kind(config).eval()


def save_plain(folder: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_sentence_folder(
    folder: Path,
    base: str,
    *modules: Any,
    pooling: Any = "mean",
    include_prompt: bool = True,
    truncation_side: str = "right",
    max_seq_length: int | None = None,
    prompts: dict[str, str] | None = None,
    default_prompt_name: str | None = None,
) -> Path:
    """Writes `folder`/model with sentence-transformers: the base, its pooling, then `modules`."""
    model, tokenizer = BASES[base]()
    plain = str(save_plain(folder / "plain", model, tokenizer))
    transformer = Transformer(plain, max_seq_length=max_seq_length)
    pooled = Pooling(WIDTH, pooling, include_prompt=include_prompt)
    whole = SentenceTransformer(
        modules=[transformer, pooled, *modules], prompts=prompts, default_prompt_name=default_prompt_name, device="cpu"
    )
    whole.save(str(folder / "model"))
    change_json(folder / "model" / "tokenizer_config.json", truncation_side=truncation_side)
    return folder / "model"


def change_json(file: Path, **changes: Any) -> None:
    """Replaces keys of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
