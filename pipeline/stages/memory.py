"""What a worker of each stage declares to Ray, in bytes: what was measured with `scripts/bench/memory`, and some room.

Measured is memory of the process's own (anonymous pages). What it maps of libraries is the same pages for all workers
of a node: 216 MB of a decoding worker, 150 of a planning one, 560 of one with torch and transformers.
"""

from __future__ import annotations

from pipeline.config import Config
from pipeline.media.sandbox import NUM_PROBERS
from pipeline.planning.buckets import MAX_FRAME_BYTES
from pipeline.stages.context import StageContext
from pipeline.stages.encode_plan import max_carried_bytes

_MB = 2**20
_PLAN = 250 * _MB  # 238, 4,096 small images in the window
_PROBER = 100 * _MB  # 88
_DECODE = 300 * _MB  # 123 and 88 of its sandbox, or 182 without; batches of 1 MB
_DECODE_BATCHES = 4  # the one being filled, the one on its way to the store and its place there, frames of items
_SANDBOX_BATCHES = 2  # frames of items in the sandbox, and what they are handed over in
_ENCODE = 650 * _MB  # 575, batches of 1 MB
_ENCODE_BATCHES = 17  # 1,651 MB with batches of 63 MB: float32 pixels and the processor's copies of them, activations
_KEPT_BATCHES = 3  # where frames are kept: a batch's until it is committed, differences and records; not measured
_PROMPT = 600 * _MB  # 526
_GENERATE = 650 * _MB  # 532
_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def plan_bytes(config: Config) -> int:
    """Of a task that plans a window, with its sandboxes and the small objects that it has read and hands on."""
    probers = NUM_PROBERS if config.decode.sandbox != "off" else 0
    return _PLAN + probers * _PROBER + max_carried_bytes(config)


def decode_bytes(context: StageContext) -> int:
    """Of a task that decodes, with its sandbox."""
    batches = _DECODE_BATCHES + (_SANDBOX_BATCHES if context.config.decode.sandbox != "off" else 0)
    return _DECODE + batches * batch_bytes(context)


def encode_bytes(context: StageContext) -> int:
    """Of an actor that encodes, with the weights of its half."""
    dtype = context.config.encode.dtype
    batches = _ENCODE_BATCHES + (_KEPT_BATCHES if context.config.store.keep_frames else 0)
    return _ENCODE + batches * batch_bytes(context) + _weights(context, "encoder", dtype)


def prompt_bytes() -> int:
    """Of a task that writes the prompts of a window."""
    return _PROMPT


def text_plan_bytes(config: Config) -> int:
    """Of a task that plans a window of texts, with the sandbox that reads the text of pages, one at a time."""
    reads_pages = config.job == "index_documents" and config.decode.sandbox != "off"
    return _PROMPT + (_PROBER if reads_pages else 0)


def generate_bytes(context: StageContext) -> int:
    """Of an actor that generates, with the weights of its half; what a batch takes depends on the answers."""
    return _GENERATE + _weights(context, "language", context.config.generate.dtype)


def pool_bytes(context: StageContext) -> int:
    """Of an actor that embeds or scores texts, with its weights. Not measured: as one that generates."""
    return _GENERATE + _weights(context, "text", context.config.text.dtype)


def batch_bytes(context: StageContext) -> int:
    """What the frames of a batch take at most, by its limits and the sizes that the model's processor allows.

    64 MB where frames come in their own size: an item of more, which is a batch by itself, is not counted.
    """
    budget, rules = context.batch_budget, context.checked.rules
    if rules.keys() != context.checked.verdicts.keys():
        return MAX_FRAME_BYTES
    patch = max(3 * rule.patch_size**2 * (rule.temporal_patch_size if m == "video" else 1) for m, rule in rules.items())
    most_frames = context.config.sampling.most_frames(context.config.limits().max_frames)
    item = 3 * max(rule.most_pixels(most_frames if m == "video" else 1) for m, rule in rules.items())
    return max(item, min(MAX_FRAME_BYTES, budget.max_tokens * patch, budget.max_items * item))


def _weights(context: StageContext, half: str, dtype: str) -> int:
    return context.checked.parameters[half] * _NUMBER_BYTES[dtype]
