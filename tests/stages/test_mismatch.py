"""An item whose features are not as many as were planned fails by itself; the rest of its batch is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from pipeline.config import Config
from pipeline.planning.windows import Window
from pipeline.stages.encode_plan import PlanEncodeWindow, written_plan
from pipeline.stages.window_plan import plan_name
from tests.models.families import save_family
from tests.stages import line as stages

WRONG = 2


class MisledPlan(PlanEncodeWindow):
    """A written plan is followed: in this one an item has a feature too many."""

    def __call__(self, windows: pa.Table) -> Iterator[pa.Table]:
        for row in windows.to_pylist():
            plan = written_plan(self.context, Window(**row)).to_json()
            plan["media"][WRONG]["geometry"]["feature_length"] += 1
            self.context.folder.write_json(plan_name(row["index"]), plan)
        yield from super().__call__(windows)


@pytest.mark.parametrize("family", ["by rule", "llava_next"])
def test_it_is_that_item_and_not_its_batch(
    family: str,
    make_config: Callable[..., Config],
    write_manifest: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(1)
    for k in range(4):
        Image.fromarray(rng.integers(0, 256, (96, 128, 3), np.uint8)).save(tmp_path / f"{k}.png")
    manifest = write_manifest([{"id": str(k), "uri": f"{tmp_path}/{k}.png"} for k in range(4)])
    model = "demo:captioner" if family == "by rule" else str(save_family(family, tmp_path / "model"))
    config = make_config(manifest, model=model, generate={"max_new_tokens": 4})
    monkeypatch.setattr(stages, "PlanEncodeWindow", MisledPlan)
    line = stages.Line(config)
    assert [row["status"] for row in line.rows] == ["ok", "ok", "quarantined", "ok"]
    assert line.rows[WRONG]["code"] == "feature_length_mismatch"
    assert "were planned" in line.rows[WRONG]["message"]
    [receipt] = [receipt for receipt in line.receipts if receipt.stage == "encode"]  # they were one batch
    assert receipt.quarantine == {"feature_length_mismatch": 1}
    assert receipt.counts["encodes"] == 4
