"""The captioner before training: a Qwen3-VL of 1.2 M parameters with its tokenizer, processor and initial weights."""

import math

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from pipeline.demo import scenes

PATCH = 16
MERGE = 2
TEMPORAL_PATCH = 2
# Merged tokens an image or a frame. 16 would give nearly every oblong picture the same 3 x 4 grid.
LARGEST_TOKENS = 20
LARGEST_PIXELS = LARGEST_TOKENS * (PATCH * MERGE) ** 2
SMALLEST_PIXELS = 64 * 64
MAX_FRAMES = 16
POSITION_TABLE_SIDE = 8
VOCABULARY = 448

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)

# The video placeholder stands bare: the processor (transformers 5.24) wraps each pair of frames in vision_start and
# vision_end itself, and a wrapped placeholder would come out wrapped twice.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' or 'image' in part or 'image_url' in part -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part['type'] == 'video' or 'video' in part -%}
{{- '<|video_pad|>' -}}
{%- elif 'text' in part -%}
{{- part['text'] -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with the words of the scenes; any other text falls back to bytes. Pads on the left."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_tokenizer_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        additional_special_tokens=list(SPECIAL_TOKENS[1:]),
        padding_side="left",
        model_max_length=2048,
    )


def _tokenizer_corpus() -> list[str]:
    corpus = ["<0.1 seconds>"] * 500 + ["user\n", "assistant\n", "system\n"] * 300
    for kind, questions in scenes.QUESTIONS.items():
        for question in questions:
            corpus += [question] * 300 + [scenes.answer(scene, question) for scene in scenes.all_scenes(kind)]
    return corpus


def build_processor() -> Qwen3VLProcessor:
    """Images of up to 20 merged tokens (143 x 143 px); clips of up to 16 frames of that size, capped per frame."""
    common = {
        "patch_size": PATCH,
        "merge_size": MERGE,
        "temporal_patch_size": TEMPORAL_PATCH,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(
            size={"shortest_edge": SMALLEST_PIXELS, "longest_edge": LARGEST_PIXELS}, **common
        ),
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": SMALLEST_PIXELS, "longest_edge": MAX_FRAMES * LARGEST_PIXELS},
            cap_pixels_per_frame=True,
            max_video_tokens=LARGEST_TOKENS,
            fps=2,
            min_frames=4,
            max_frames=MAX_FRAMES,
            **common,
        ),
        tokenizer=build_tokenizer(),
        chat_template=CHAT_TEMPLATE,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLConfig:
    """Two vision layers of width 96 with one deep-stack level, three text layers of width 128."""
    token_id = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        vision_config={
            "depth": 2,
            "hidden_size": 96,
            "intermediate_size": 192,
            "num_heads": 3,
            "patch_size": PATCH,
            "temporal_patch_size": TEMPORAL_PATCH,
            "spatial_merge_size": MERGE,
            "out_hidden_size": 128,
            "num_position_embeddings": POSITION_TABLE_SIDE**2,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.04,
        },
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "initializer_range": 0.04,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "pad_token_id": token_id(END_OF_TEXT),
            "eos_token_id": token_id(TURN_END),
            "bos_token_id": None,
        },
        image_token_id=token_id(IMAGE_PAD),
        video_token_id=token_id(VIDEO_PAD),
        vision_start_token_id=token_id(VISION_START),
        vision_end_token_id=token_id(VISION_END),
        tie_word_embeddings=True,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """The initial weights; draws from torch's global generator, so seed it first.

    The first layer starts as low-frequency DCT filters and the position table as Fourier features: with the default
    N(0, 0.04) for both, caption loss stayed on a plateau of 3-8 % exact answers.
    """
    model = Qwen3VLForConditionalGeneration(build_config(tokenizer))
    vision = model.model.visual
    width = vision.config.hidden_size
    with torch.no_grad():
        vision.pos_embed.weight.copy_(fourier_positions(POSITION_TABLE_SIDE, width))
        vision.patch_embed.proj.weight.copy_(dct_filters(width))
        vision.patch_embed.proj.bias.zero_()
    return _answer_greedily(model, tokenizer)


def _answer_greedily(
    model: Qwen3VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast
) -> Qwen3VLForConditionalGeneration:
    generation = model.generation_config
    generation.eos_token_id, generation.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    generation.bos_token_id = None
    generation.do_sample = False
    return model


def fourier_positions(side: int, width: int, amplitude: float = 0.5) -> torch.Tensor:
    """`(side * side, width)`: sines and cosines of both coordinates at `width / 4` frequencies."""
    line = torch.linspace(-1, 1, side)
    frequencies = math.pi / 2 * torch.logspace(math.log10(0.5), math.log10(4.0), width // 4)
    y, x = torch.meshgrid(line, line, indexing="ij")
    waves = [wave(axis[..., None] * frequencies) for axis in (y, x) for wave in (torch.sin, torch.cos)]
    return amplitude * torch.cat(waves, dim=-1).reshape(side * side, width)


def dct_filters(count: int) -> torch.Tensor:
    """`(count, 3, 2, PATCH, PATCH)`: DCT-II planes, lowest frequencies first, one colour channel each.

    Each plane comes twice, once over the sum of the two frames and once over their difference, which shows motion.
    """
    samples = torch.arange(PATCH) + 0.5
    waves = [torch.cos(math.pi * k * samples / PATCH) * math.sqrt((2 if k else 1) / PATCH) for k in range(8)]
    frequencies = sorted(((u, v) for u in range(8) for v in range(8)), key=lambda uv: (sum(uv), uv))
    filters = []
    for u, v in frequencies[: math.ceil(count / 6)]:
        plane = torch.outer(waves[u], waves[v]) * ((2.5 if u + v else 1.0) / PATCH)
        for channel in range(3):
            for sign in (1.0, -1.0):
                kernel = torch.zeros(3, TEMPORAL_PATCH, PATCH, PATCH)
                kernel[channel] = torch.stack([plane, sign * plane]) / 2
                filters.append(kernel)
    return torch.stack(filters[:count])
