"""A configuration says exactly what is run, and what is wrong with it."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from pipeline.config import Config, DemoMedia, load_config, parse_config
from pipeline.errors import ConfigError
from pipeline.media.budget import TIERS

MINIMAL: dict[str, Any] = {"job": "caption_videos", "input": "m.jsonl", "model": "demo:captioner"}
ROOT = Path(__file__).parent.parent


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text("job: caption_videos\ninput: m.jsonl\nmodel: tiny\nbudget: default\nencode: {max_batch_items: 4}\n")
    return str(path)


def refusal(raw: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({**MINIMAL, **raw}, "job.yaml")
    message = str(caught.value)
    assert message.startswith("job.yaml: configuration refused\n")
    return message.partition("\n")[2]


@pytest.mark.parametrize(
    ("raw", "key", "hint"),
    [
        ({"promt": "x"}, "promt", "did you mean 'prompt'?"),
        ({"sampling": {"num_frame": 4}}, "sampling.num_frame", "did you mean 'num_frames'?"),
        ({"demo_media": {"image": 4}}, "demo_media.image", "did you mean 'images'?"),
        ({"budget": {"teir": "default"}}, "budget.teir", "did you mean 'tier'?"),
        (
            {"store": {"zzz": 1}},
            "store.zzz",
            "the keys here are cache_bytes, fetch_seconds, frames_max_bytes, gb_month, identity,",
        ),
        ({"sinks": {"qdrent": {}}}, "sinks.qdrent", "did you mean 'qdrant'?"),
        (
            {"sinks": {"lancedb": {"uri": "v", "collection": "c", "batch_point": 1}}},
            "sinks.lancedb.batch_point",
            "did you mean 'batch_points'?",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(raw: dict[str, Any], key: str, hint: str) -> None:
    assert refusal(raw).strip().startswith(f"{key}: unknown key; {hint}")


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"encode": {"max_batch_items": "many"}}, "encode.max_batch_items: Input should be a valid integer"),
        ({"encode": {"max_batch_items": 0}}, "encode.max_batch_items: Input should be greater than 0 (got 0)"),
        ({"generate": {"dtype": "int8"}}, "generate.dtype: Input should be 'float32', 'bfloat16' or 'float16'"),
        ({"generate": {"temperature": float("nan")}}, "generate.temperature: Input should be a finite number"),
        ({"sampling": {"fps": float("inf")}}, "sampling.fps: Input should be a finite number"),
        ({"prompt": 5}, "prompt: Input should be a valid string (got 5)"),
        ({"store": {"max_bytes": 0, "retention": "segment"}}, "store.max_bytes: Input should be greater than 0"),
        (
            {"store": {"ttl": "30d", "retention": "segment"}},
            "store.ttl (2.592e+06 s) is for features that are kept",
        ),
        ({"store": {"ttl": "a month"}}, "store.ttl"),
        (
            {"store": {"cache_bytes": 10**9}},
            "store.cache_bytes (1000000000) is to have room for two shards of store.shard_bytes (4294967296)",
        ),
        ({"limit": True, "encode": "fast"}, "encode: Input should be a valid dictionary"),
        ({"max_quarantined_fraction": 1.5}, "max_quarantined_fraction: Input should be less than or equal to 1"),
        ({"run_id": "../up"}, "run_id: String should match pattern"),
        ({"sampling": {"min_frames": 9, "max_frames": 8}}, "sampling: min_frames (9) is above max_frames (8)"),
        ({"input": None}, "input: Input should be a valid string (got None)"),
        ({"sinks": {"lancedb": {"uri": "v"}}}, "sinks.lancedb.collection: required"),
        (
            {"sinks": {"lancedb": {"uri": "v", "collection": "My docs"}}},
            "sinks.lancedb.collection: String should match pattern",
        ),
        ({"sinks": {"lancedb": {"uri": "db://x", "collection": "c"}}}, "sinks.lancedb.uri: db://x is a LanceDB server"),
        ({"sinks": {"qdrant": {"collection": "c"}}}, "sinks.qdrant: give either url (a server) or path (a folder)"),
        ({"sinks": {"qdrant": {"collection": "c", "url": "u", "path": "p"}}}, "sinks.qdrant: give either url"),
    ],
)
def test_a_wrong_value_names_its_key(raw: dict[str, Any], said: str) -> None:
    assert said in refusal(raw)


@pytest.mark.parametrize(
    "sinks",
    [
        {"pgvector": {"dsn_env": "postgresql://me:hunter2@host/db", "collection": "c"}},
        {"qdrant": {"api_key_env": "key-hunter2", "url": "https://qdrant.example.org", "collection": "c"}},
    ],
)
def test_a_secret_in_the_place_of_a_variables_name_is_not_repeated(sinks: dict[str, Any]) -> None:
    said = refusal({"sinks": sinks})
    assert "_env: expected the name of an environment variable" in said
    assert "hunter2" not in said


def test_local_paths_of_sinks_are_anchored() -> None:
    sinks = {"lancedb": {"uri": "vectors", "collection": "c"}, "qdrant": {"path": "q", "collection": "c"}}
    anchored = parse_config({**MINIMAL, "sinks": sinks}).anchored().sinks
    assert anchored.lancedb is not None
    assert anchored.qdrant is not None
    assert (anchored.lancedb.uri, anchored.qdrant.path) == (str(Path.cwd() / "vectors"), str(Path.cwd() / "q"))
    remote = {
        "lancedb": {"uri": "s3://bucket/vectors", "collection": "c"},
        "qdrant": {"url": "http://q", "collection": "c"},
    }
    config = parse_config({**MINIMAL, "sinks": remote})
    assert config.anchored().sinks == config.sinks


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({"job": "caption_videos", "inputs": "m", "limit": -1})
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == [
        "input",
        "model",
        "limit",
        "inputs",
    ]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        ("trusted_batch_job", {"max_frames": 2_048, "max_media_per_request": 256}),
        ({"tier": "trusted_batch_job", "limits": {"max_frames": 3}}, {"max_frames": 3, "max_media_per_request": 256}),
        ({"limits": {"max_bytes": 10}}, {"max_bytes": 10, "max_frames": 256}),
    ],
)
def test_a_budget_by_name_and_by_mapping(budget: Any, expected: dict[str, int]) -> None:
    limits = parse_config({**MINIMAL, "budget": budget}).limits()
    assert {name: getattr(limits, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("generous", f"budget: budget 'generous' is not known; the tiers are {', '.join(TIERS)}"),
        ({"limits": {"max_frame": 3}}, "budget: budget limit 'max_frame' is not known; the limits are max_bytes"),
        ({"limits": {"max_frames": -3}}, "budget.limits.max_frames: Input should be greater than 0"),
    ],
)
def test_an_unknown_tier_or_limit_is_refused(budget: Any, said: str) -> None:
    assert said in refusal({"budget": budget})


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("limit=5", "limit", 5),
        ("encode.max_batch_items=8", "encode.max_batch_items", 8),
        ("sampling.fps=0.5", "sampling.fps", 0.5),
        ("store.reuse=false", "store.reuse", False),
        ("decode.sandbox=on", "decode.sandbox", "on"),  # in YAML, on and off are no words
        ("decode.sandbox=off", "decode.sandbox", "off"),
        ("decode.sandbox=auto", "decode.sandbox", "auto"),
        ("generate.stop=[a, 'b c']", "generate.stop", ("a", "b c")),
        ("ray.num_cpus=null", "ray.num_cpus", None),
        ("budget=trusted_batch_job", "budget.tier", "trusted_batch_job"),
        ("budget.tier=trusted_batch_job", "budget.tier", "trusted_batch_job"),
        ("budget.limits.max_frames=9", "budget.limits", {"max_frames": 9.0}),
        ("demo_media.videos=2", "demo_media.videos", 2),
        ("demo_media={images: 1, videos: 0}", "demo_media.videos", 0),
        # Text stays text, whatever YAML would make of it.
        ("prompt=What colour is the shape?", "prompt", "What colour is the shape?"),
        ("prompt=Describe: what happens, and why", "prompt", "Describe: what happens, and why"),
        ("prompt=[a] {b} # c", "prompt", "[a] {b} # c"),
        ("prompt=a = b", "prompt", "a = b"),
        ("prompt=yes", "prompt", "yes"),
        ("prompt=42", "prompt", "42"),
        ("prompt=null", "prompt", "null"),
        ("run_id=20260131", "run_id", "20260131"),
        ("run_id=null", "run_id", None),
        ("sinks={pgvector: {dsn_env: DSN, collection: c}}", "sinks.pgvector.batch_points", 1024),
        ("generate.system=true: always", "generate.system", "true: always"),
    ],
)
def test_a_setting_reaches_its_key(file: str, setting: str, path: str, value: Any) -> None:
    found: Any = load_config(file, [setting])
    for name in path.split("."):
        found = getattr(found, name)
    assert found == value
    assert type(found) is type(value)


def test_settings_keep_their_neighbours_and_the_last_one_counts(file: str) -> None:
    config = load_config(file, ["encode.dtype=bfloat16", "limit=3", "limit=4"])
    assert (config.encode.max_batch_items, config.encode.dtype, config.limit) == (4, "bfloat16", 4)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("prompt", "--set takes key=value"),
        ("=5", "--set takes key=value"),
        ("prompt.text=x", "prompt: Input should be a valid string"),
        ("model.name=x", "'model' holds a single value and has no keys below it"),
        ("encode.max_batch_item=8", "did you mean 'max_batch_items'?"),
        ("encoder.max_batch_items=8", "did you mean 'encode'?"),
        ("limit=some", "limit: Input should be a valid integer"),
        ("limit=[unclosed", "limit: Input should be a valid integer"),
    ],
)
def test_a_wrong_setting_is_explained(file: str, setting: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, [setting])
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("job: [unclosed", "not valid YAML"),
        ("- a\n- b\n", "a configuration is a mapping of keys to values, got list"),
        ("", "got NoneType"),
        (b"job: \xff\xfe", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: str | bytes, said: str) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such configuration file"):
        load_config(str(tmp_path / "job.yaml"))


def digest(**changes: Any) -> str:
    return Config.model_validate({**MINIMAL, **changes}).digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"output": "s3://bucket/out"},
        {"input": "other.jsonl"},
        {"run_id": "nightly"},
        {"sinks": {"lancedb": {"uri": "vectors", "collection": "c"}}},
        {"store": {"path": "s3://bucket/store", "reuse": False, "retention": "segment", "max_bytes": 10**9}},
        {"store": {"cache_bytes": 10**10, "fetch_seconds": 5}},
        {"ray": {"address": "auto", "num_cpus": 4, "encode_workers": 2, "segment_windows": 3}},
        {"decode": {"io_threads": 2, "sandbox": "off", "item_seconds": 1.0}},
        {"sources": {"dns_seconds": 1, "connect_seconds": 1, "read_seconds": 1, "total_seconds": 1}},
        {"max_quarantined_fraction": 0.1},
        {"demo_media": {"images": 1}},
        {"prompt": "Describe this."},  # the default, written out
    ],
)
def test_the_digest_stays_when_the_results_do(changes: dict[str, Any]) -> None:
    assert digest(**changes) == digest()


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "Why?"},
        {"model": "other"},
        {"limit": 5},
        {"budget": "trusted_batch_job"},
        {"sampling": {"fps": 1}},
        {"sampling": {"policy": "uniform"}},
        {"decode": {"max_inline_bytes": 1}},
        {"sources": {"http": True}},
        {"sources": {"internal_domains": ["corp.example"]}},
        {"sources": {"roots": ["/data"]}},
        {"encode": {"dtype": "bfloat16"}},
        {"encode": {"max_batch_items": 2}},
        {"generate": {"max_new_tokens": 5}},
        {"generate": {"temperature": 0.5}},
        {"generate": {"seed": 1}},
        {"generate": {"system": "Be brief."}},
        {"ray": {"window_items": 64}},
        {"ray": {"first_window_items": 64}},
    ],
)
def test_the_digest_changes_when_the_results_may(changes: dict[str, Any]) -> None:
    assert digest(**changes) != digest()


def test_a_digest_is_sixteen_hex_digits_and_survives_the_round_trip() -> None:
    config = Config.model_validate({**MINIMAL, "generate": {"stop": ["x"]}})
    assert len(config.digest()) == 16
    assert int(config.digest(), 16) >= 0
    assert Config.model_validate(config.model_dump(mode="json")).digest() == config.digest()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_configuration_loads_as_it_is_written(path: Path) -> None:
    raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert load_config(str(path)).job == raw["job"]
    assert (ROOT / "jobs" / f"{raw['job']}.py").exists()  # what ray job submit starts
    with pytest.raises(ConfigError, match="modle: unknown key; did you mean 'model'"):
        load_config(str(path), ["modle=x"])
    if "demo_media" not in raw:
        assert f"`configs/{path.name}` | `{raw['job']}`" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_job_has_a_configuration_with_a_model_of_the_hub() -> None:
    found = [load_config(str(path)) for path in (ROOT / "configs").glob("*.yaml")]
    assert {each.job for each in found if ":" not in each.model} == set(get_args(Config.model_fields["job"].annotation))


def keys(section: BaseModel, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of everything that is not a section itself."""
    for name, value in section:
        if isinstance(value, BaseModel):
            yield from keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_the_readme_lists_every_key_with_its_default() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \| (.*?) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = dict(rows)
    for key, default in keys(Config.model_validate({**MINIMAL, "demo_media": DemoMedia()})):
        said = listed[key]
        if key in MINIMAL:
            assert said == "required"
        elif default is None or default in ((), {}):
            assert not said.startswith("`") or key == "ray.address"
        else:
            assert said == f"`{str(default).lower() if isinstance(default, bool) else default}`", key


def test_the_examples_of_the_readme_load() -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert examples
    for example in examples:
        parse_config(yaml.safe_load(example), "README.md")


@pytest.mark.parametrize(
    "sources, problem",
    [
        ({"internal_domains": ["*.corp.example"]}, "sources.internal_domains.0"),
        ({"internal_domains": ["https://corp.example"]}, "sources.internal_domains.0"),
        ({"internal_domains": [".corp.example"]}, "sources.internal_domains.0"),
        ({"internal_domains": ["Corp.example"]}, "sources.internal_domains.0"),
        ({"allowed_ports": [0]}, "sources.allowed_ports.0"),
        ({"allowed_ports": [65536]}, "sources.allowed_ports.0"),
        ({"total_seconds": 0}, "sources.total_seconds"),
        ({"max_redirects": -1}, "sources.max_redirects"),
    ],
)
def test_sources_that_make_no_sense(sources: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        parse_config({**MINIMAL, "sources": sources})


def test_roots_are_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = parse_config({**MINIMAL, "sources": {"roots": ["media", "/data"]}})
    assert config.anchored().source_policy().roots == (f"{tmp_path}/media", "/data")
