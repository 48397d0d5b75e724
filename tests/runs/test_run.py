"""A run is found again by what it computes, and refuses to become another."""

import json
import re
import uuid
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError, RunLockedError
from pipeline.runs.manifest import read_range
from pipeline.runs.run import derive_run_id, output_folder, start_run


@pytest.fixture(params=["local", "memory"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "out") if request.param == "local" else f"memory://{uuid.uuid4().hex}/out"


def config_for(tmp_path: Path, output: str, items: int = 3, **changes: Any) -> Config:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(f'{{"id": "{n}", "uri": "{n}.mp4"}}\n' for n in range(items)))
    return Config.model_validate(
        {"job": "caption_videos", "input": str(path), "output": output, "model": "tiny", **changes}
    )


def test_ids_come_from_both_digests() -> None:
    assert derive_run_id("0123456789abcdef", "f" * 64, job="caption_videos") == "caption-01234567-ffffffff"


@pytest.mark.parametrize("run_id", [None, "nightly"])
def test_a_started_run_has_its_listing_and_configuration(tmp_path: Path, output: str, run_id: str | None) -> None:
    config = config_for(tmp_path, output, run_id=run_id)
    with start_run(config) as run:
        run.lock.check()
        assert re.fullmatch(run_id or rf"caption-{config.digest()[:8]}-[0-9a-f]{{8}}", run.run_id)
        assert [request.id for request in read_range(run.folder, 0, run.manifest.num_items)] == ["0", "1", "2"]
        written = run.folder.read_json("_run/config.json")
        assert written == {"digest": config.digest(), "config": json.loads(config.model_dump_json())}
        assert output_folder(config).read_bytes("latest") == f"{run.run_id}\n".encode()
    with start_run(config) as again:
        assert (again.run_id, again.manifest, again.config_digest) == (run.run_id, run.manifest, run.config_digest)


def test_a_named_run_resumes_without_its_input(tmp_path: Path, output: str) -> None:
    config = config_for(tmp_path, output, run_id="nightly")
    with start_run(config):
        pass
    (tmp_path / "m.jsonl").unlink()
    with start_run(config) as run:
        assert run.manifest.num_items == 3


def test_another_prompt_or_listing_is_another_run(tmp_path: Path, output: str) -> None:
    ids = set()
    for changes in ({}, {"prompt": "Why?"}, {"items": 4}, {"limit": 2}, {"encode": {"dtype": "bfloat16"}}):
        with start_run(config_for(tmp_path, output, **changes)) as run:
            ids.add(run.run_id)
    assert len(ids) == 5
    with start_run(config_for(tmp_path, output, ray={"num_cpus": 1})) as run:
        assert run.run_id in ids


@pytest.mark.parametrize(
    ("changes", "said"), [({"prompt": "Why?"}, "another configuration"), ({"input": "elsewhere"}, "another input")]
)
def test_a_named_run_refuses_to_become_another(tmp_path: Path, output: str, changes: dict[str, str], said: str) -> None:
    with start_run(config_for(tmp_path, output, run_id="nightly")):
        pass
    with (
        pytest.raises(ConfigError, match=rf"out/nightly: .*{said} .*use another run_id or output"),
        start_run(config_for(tmp_path, output, run_id="nightly", **changes)),
    ):
        pass


def test_a_run_is_held_while_the_block_runs(tmp_path: Path, output: str) -> None:
    config = config_for(tmp_path, output)
    with start_run(config), pytest.raises(RunLockedError), start_run(config):
        pass


def test_a_relative_output_is_the_same_folder_for_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_folder(config_for(tmp_path, "out")).url == str(tmp_path / "out")
