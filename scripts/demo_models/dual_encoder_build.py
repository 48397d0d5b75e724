"""The dual encoder before training: a CLIP of 0.5 M parameters with its tokenizer, processor and initial weights."""

import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

from pipeline.demo import scenes
from scripts.demo_models.captioner_build import PATCH, dct_filters, fourier_positions

SIDE = 96
GRID = SIDE // PATCH
WIDTH = 96
VECTOR_SIZE = 64
MAX_TOKENS = 24

PAD, UNKNOWN, BEGIN, END = SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word of the scenes' captions; case and punctuation are ignored, any other word is `<unk>`.

    The end is not id 2: with that id CLIP pools at the highest token id instead of at the end.
    """
    captions = (scenes.caption(scene) for kind in scenes.QUESTIONS for scene in scenes.all_scenes(kind))
    words = sorted({word for caption in captions for word in caption.split()})
    vocabulary = {token: number for number, token in enumerate([*SPECIAL_TOKENS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[^\w\s]+"), " "),
            normalizers.Replace(Regex(r"\bgray\b"), "grey"),
            normalizers.Replace(Regex(r"\bcenter\b"), "centre"),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=[(BEGIN, vocabulary[BEGIN]), (END, vocabulary[END])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        model_max_length=MAX_TOKENS,
    )


def build_processor() -> CLIPProcessor:
    """Images are squeezed to 96 x 96 px, not cropped: what lies at the border of a wide picture counts."""
    image_processor = CLIPImageProcessor(
        size={"height": SIDE, "width": SIDE}, do_center_crop=False, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return CLIPProcessor(image_processor=image_processor, tokenizer=build_tokenizer())


def build_config(tokenizer: PreTrainedTokenizerFast) -> CLIPConfig:
    """Three vision layers and two text layers of width 96."""
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_attention_heads": 3,
        "projection_dim": VECTOR_SIZE,
        "hidden_act": "gelu",
        "initializer_factor": 2.0,
    }
    text = {
        **tower,
        "num_hidden_layers": 2,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": MAX_TOKENS,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {**tower, "num_hidden_layers": 3, "image_size": SIDE, "patch_size": PATCH}
    return CLIPConfig(text_config=text, vision_config=vision, projection_dim=VECTOR_SIZE, initializer_factor=2.0)


def build_model(tokenizer: PreTrainedTokenizerFast) -> CLIPModel:
    """The initial weights; draws from torch's global generator, so seed it first.

    The first layer starts as low-frequency DCT filters and the position table as Fourier features, as the captioner's.
    """
    model = CLIPModel(build_config(tokenizer))
    embeddings = model.vision_model.embeddings
    with torch.no_grad():
        # Every second filter of the captioner's is one over the sum of two frames; here there is one frame.
        embeddings.patch_embedding.weight.copy_(2 * dct_filters(2 * WIDTH)[::2, :, 0])
        embeddings.position_embedding.weight[1:].copy_(fourier_positions(GRID, WIDTH))
    return model
