"""The summary has the promised fields, and no number when items do not add up."""

import importlib.metadata
import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.runs.summary import build_summary, describe_environment, write_summary
from pipeline.storage import Folder

# From DESIGN.md, "What scripts and schedulers may rely on".
FIELDS = """run_id, config_digest, status, items_in, items_written, items_reused, items_quarantined, items_skipped,
    media_in, fetches, bytes_fetched, fetch_retries, frames_decoded, images_decoded, encodes, features_reused,
    fallbacks, computed_tokens, padded_tokens, prompt_tokens, prompt_padded_tokens, generated_tokens, decode_slots,
    idle_decode_slots, pages_decoded, texts_embedded, pairs_scored, texts_scored, text_tokens, text_padded_tokens,
    items_carried, frames_reused, frames_missed, frames_fallbacks, frames_bytes_read, frames_bytes_written, oom_splits,
    evictions, evicted_bytes, seconds, quarantine, forecast, environment, store_peak_bytes, points, sandbox,
    fallback_shards, sample_fraction, cpu_seconds, accelerator_seconds, tiers"""


def summary(items_in: int, **counts: int) -> dict[str, Any]:
    return build_summary(
        run_id="r",
        config_digest="c",
        status="done",
        items_in=items_in,
        counts=counts,
        seconds={"decode": 2.5, "total": 9.0},
        quarantine={"too_large": 1},
        environment={"python": "3"},
        store_peak_bytes=70_000,
        points={"a__12345678": 9},
    )


def test_fields_are_exactly_those_promised() -> None:
    found = summary(6, items_written=3, items_quarantined=1, items_skipped=2, encodes=3, batches=5)
    assert list(found) == [name.strip() for name in FIELDS.split(",")]
    assert (found["items_in"], found["encodes"], found["fetches"]) == (6, 3, 0)
    assert found["seconds"] == {
        "encode_pass": 0.0,
        "generate_pass": 0.0,
        "pool_pass": 0.0,
        "total": 9.0,
        "ray_startup": 0.0,
        "decode": 2.5,
    }
    assert (found["quarantine"], found["forecast"], found["environment"]) == ({"too_large": 1}, {}, {"python": "3"})
    assert (found["store_peak_bytes"], found["points"]) == (70_000, {"a__12345678": 9})
    assert found["sandbox"] == {}


def test_media_are_counted_by_what_kept_their_decoder_in() -> None:
    found = summary(3, items_written=3, **{"sandbox:network_namespace+seccomp": 5, "sandbox:off": 1})
    assert found["sandbox"] == {"network_namespace+seccomp": 5, "off": 1}


def test_what_was_forecast_stands_beside_what_was_found() -> None:
    found = build_summary(
        run_id="r",
        config_digest="c",
        status="done",
        items_in=2,
        counts={
            **{"items_written": 2, "media_in": 2, "encodes": 1, "feature_tokens": 90, "text_tokens": 7},
            **{"forecast:encodes": 2, "forecast:feature_tokens": 100, "forecast:decode_core_ms": 1500},
        },
        seconds={"media_decode": 3.0, "mm_processor": 1.0, "vision_encode": 4.0, "total": 9.0},
        quarantine={},
        environment={},
        store_peak_bytes=None,
        points={},
        stage_seconds={"vision_encode": 4.5, "media_decode": 2.5, "total": 12.0},
    )
    assert found["forecast"] == {
        "encodes": {"forecast": 2, "found": 1},
        "feature_tokens": {"forecast": 100, "found": 90},
        "text_tokens": {"forecast": 0, "found": 7},
        "decode_core_seconds": {"forecast": 1.5, "found": 3.0},
        "seconds": {
            "media_decode": {"forecast": 2.5, "found": 3.0},
            "vision_encode": {"forecast": 4.5, "found": 5.0},
            "total": {"forecast": 12.0, "found": 9.0},
        },
    }


def test_a_run_that_reuses_everything_forecasts_that() -> None:
    counts = {"items_written": 1, "media_in": 1, "forecast:prompt_tokens": 40, "prompt_tokens": 41}
    forecast = build_summary(
        run_id="r",
        config_digest="c",
        status="done",
        items_in=1,
        counts=counts,
        seconds={},
        quarantine={},
        environment={},
        store_peak_bytes=None,
        points={},
    )["forecast"]
    assert forecast == {
        "encodes": {"forecast": 0, "found": 0},
        "prompt_tokens": {"forecast": 40, "found": 41},
    }


@pytest.mark.parametrize("items_in", [5, 7])
def test_items_that_do_not_add_up_raise(items_in: int) -> None:
    said = f"{items_in} items in, but 3 written + 1 quarantined + 2 skipped = 6"
    with pytest.raises(RuntimeError, match=re.escape(said)):
        summary(items_in, items_written=3, items_quarantined=1, items_skipped=2)


def test_the_file_is_plain_json(tmp_path: Path) -> None:
    write_summary(Folder(str(tmp_path)), summary(0))
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


def test_the_environment_names_what_bits_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "torch":
            raise importlib.metadata.PackageNotFoundError(package)
        return f"{package}-1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = describe_environment(["NVIDIA H200"])
    packages = {name: found[name] for name in ("ray", "torch", "transformers", "av", "pillow")}
    assert packages == {
        "ray": "ray-1",
        "torch": None,
        "transformers": "transformers-1",
        "av": "av-1",
        "pillow": "pillow-1",
    }
    assert found["python"] == platform.python_version()
    assert found["devices"] == ["NVIDIA H200"]
    assert found["cpu_model"]
    assert found["cpu_count"] > 0
