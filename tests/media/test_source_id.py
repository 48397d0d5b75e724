from __future__ import annotations

from typing import Any

import pytest

from pipeline.media.source_id import SourceFacts, as_given, object_version
from pipeline.schema import MediaItem

S3, GS = "s3://bucket/x", "gs://bucket/x"


@pytest.mark.parametrize(
    ("uri", "info", "expected"),
    [
        (S3, {"ETag": '"d4"', "LastModified": "today"}, (f"etag:{S3}:d4:9", "strong")),
        (S3, {"ETag": '"d4"', "VersionId": "null"}, (f"etag:{S3}:d4:9", "strong")),
        (S3, {"ETag": '"d4"', "VersionId": "L4k"}, (f"etag:{S3}:d4:9:L4k", "strong")),
        (S3, {"LastModified": "today"}, (f"object:{S3}:9:today", "weak")),
        # An ETag of GCS changes with an object's metadata, too; the generation with its bytes alone.
        (GS, {"etag": "CJ", "generation": "1760", "updated": "today"}, (f"generation:{GS}:1760:9", "strong")),
        (GS, {"etag": "CJ"}, (f"etag:{GS}:CJ:9", "weak")),
        ("memory://x", {"created": "today"}, ("object:memory://x:9:today", "weak")),
    ],
)
def test_what_storage_says_of_an_object(uri: str, info: dict[str, Any], expected: tuple[str, str]) -> None:
    assert object_version(uri.partition(":")[0], uri, {"size": 9, **info}) == expected


def test_what_the_caller_says_comes_first() -> None:
    found = SourceFacts(source_id="file:/x:9:1", strength="weak", num_bytes=9)
    assert as_given(MediaItem(uri="/x"), found) is found
    assert as_given(MediaItem(uri="/x", version="7"), found).strength == "strong"
    assert as_given(MediaItem(uri="/x", version="7", sha256="ab"), found).strength == "content"
