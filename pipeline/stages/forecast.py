"""What planned batches will come to, as counts that travel with the receipts of their plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pipeline.language.batching import RUN_TOKENS, length_runs, plan_language_batches
from pipeline.planning.buckets import PlannedBatch
from pipeline.planning.estimate import EncodedMedia, Work, encode_work, prompt_work, text_work
from pipeline.runs.summary import FORECAST_COUNT
from pipeline.stages.context import StageContext
from pipeline.stages.record_size import expected_record_bytes
from pipeline.stages.rows import PlannedMedia


def forecast_counts(work: Work) -> dict[str, int]:
    """As a receipt has them; what is 0 is left out."""
    return {f"{FORECAST_COUNT}{name}": count for name, count in work.as_dict().items() if count}


def forecast_work(counts: Mapping[str, int]) -> Work:
    """What `forecast_counts` put among the counts of receipts, summed over them."""
    return Work.from_counts({name.removeprefix(FORECAST_COUNT): n for name, n in counts.items() if _is_forecast(name)})


def _is_forecast(name: str) -> bool:
    return name.startswith(FORECAST_COUNT)


def planned_encode_work(context: StageContext, batches: Sequence[PlannedBatch], media: Sequence[PlannedMedia]) -> Work:
    """Of a window's encoder batches; `media` by position."""

    def encoded(position: int) -> EncodedMedia:
        item = media[position]
        return EncodedMedia(
            grid=item.geometry.grid,
            feature_length=item.geometry.feature_length,
            frame_bytes=item.shaped.frame_bytes,
            store_bytes=expected_record_bytes(context, item),
            decode_seconds=item.decode_seconds,
        )

    items = [(batch.computed_tokens, [encoded(item.position) for item in batch.items]) for batch in batches]
    return encode_work(items, context.checked.network("encoder"))


def planned_prompt_work(context: StageContext, lengths: Sequence[int], media: Sequence[PlannedMedia]) -> Work:
    """Of a window's prompts, by their lengths, and the `media` that they show, whose features are read."""
    generate = context.config.generate
    kv_cache = context.facts.kv_cache(generate.dtype)
    batches = plan_language_batches(
        lengths,
        max_new_tokens=context.answer_tokens,
        kv_bytes_per_token=kv_cache,
        max_batch_bytes=generate.max_batch_bytes,
        max_batch_items=generate.max_batch_items,
    )
    work = prompt_work(
        [[lengths[position] for position in batch] for batch in batches],
        context.checked.network("language"),
        max_new_tokens=context.answer_tokens,
        kv_cache=kv_cache,
    )
    return work + Work(feature_bytes_read=sum(expected_record_bytes(context, item) for item in media))


def planned_text_work(context: StageContext, batches: Sequence[Sequence[int]]) -> Work:
    """Of batches of texts or pairs, given by their lengths, longest first, as they are computed: in runs."""
    least_tokens = RUN_TOKENS["cuda" if context.config.text.device == "cuda" else "cpu"]
    runs = [lengths[run] for lengths in batches for run in length_runs(lengths, least_tokens=least_tokens)]
    return text_work(runs, context.checked.network("text"))
