"""What a planned item's features take in the store, before they are made."""

from __future__ import annotations

import json

from pipeline.features.identity import canonical_json
from pipeline.stages.context import StageContext
from pipeline.stages.identity import sha256_content
from pipeline.stages.rows import PlannedMedia

_UNKNOWN_CONTENT = sha256_content(b"")
_FRAME_BYTES = 32  # its time, and what stands for it in a prompt: measured in the families tried
_MOST_FRAME_BYTES = 64
# What names more tiles, and has longer numbers, than the record that was measured: 10 in the families tried, whose
# processors are set to few tiles.
_LONGER_BYTES = 1024


def record_bytes(context: StageContext, media: PlannedMedia) -> int:
    """The bytes of the record that a planned item's features become, at most."""
    return _record_bytes(context, media, _MOST_FRAME_BYTES) + _LONGER_BYTES


def expected_record_bytes(context: StageContext, media: PlannedMedia) -> int:
    """As `record_bytes`, as many as there will be."""
    return _record_bytes(context, media, _FRAME_BYTES)


def _record_bytes(context: StageContext, media: PlannedMedia, frame_bytes: int) -> int:
    size = context.checked.sizes[media.probe.modality]
    terms = context.identity.key_terms(media, media.content or _UNKNOWN_CONTENT)
    described = json.dumps(canonical_json(terms.as_dict()).decode())  # a record has its terms as text in a text
    rows = size.row_bytes * media.geometry.feature_length
    return rows + size.other_bytes + len(described) + frame_bytes * len(media.requested)
