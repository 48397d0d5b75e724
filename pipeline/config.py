"""One YAML file = one complete run: parsed, checked, resolved and digested here."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from pipeline.errors import ConfigError
from pipeline.logs import LogFormat
from pipeline.media.budget import Budget, resolve_budget
from pipeline.media.url_policy import SourcePolicy
from pipeline.planning.windows import full_window_items
from pipeline.schema import ImageRules

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """A part of the configuration: unknown keys refused, values immutable, numbers finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class BudgetSection(Section):
    """A named tier, and single limits replaced. `budget: default` is short for `budget: {tier: default}`."""

    tier: str = "default"
    limits: dict[str, Annotated[float, Field(gt=0)]] = {}


class DemoMedia(Section):
    """Media to draw at `input` when nothing is there yet: for jobs that index documents PDFs, for others a manifest.

    `captions` adds to the manifest as many texts that say what the first images and videos show.
    """

    images: Annotated[int, Field(ge=0)] = 36
    videos: Annotated[int, Field(ge=0)] = 24
    captions: Annotated[int, Field(ge=0)] = 0
    documents: Annotated[int, Field(ge=0)] = 12
    seed: int = 7


Domain = Annotated[str, Field(pattern=r"^[a-z0-9-]+(\.[a-z0-9-]+)*$", max_length=253)]
Seconds = Annotated[float, Field(gt=0)]


class Sources(Section):
    """Where media may be read from, and how long one at a URL may take: see `SourcePolicy`."""

    http: bool = False
    internal_domains: tuple[Domain, ...] = ()
    allowed_ports: tuple[Annotated[int, Field(gt=0, lt=65536)], ...] = ()
    max_redirects: Annotated[int, Field(ge=0)] = 5
    dns_seconds: Seconds = 5.0
    connect_seconds: Seconds = 10.0
    read_seconds: Seconds = 15.0
    total_seconds: Seconds = 300.0
    roots: tuple[str, ...] = ()


class Sampling(Section):
    """Which frames of a video are taken. `fps`: at k / fps seconds; `every_n_seconds`: at k times that many;
    `uniform`: num_frames from first to last; `timestamps`: at these seconds; `keyframes`, which is approximate: as
    `uniform`, but of each the keyframe before; `model`: those that the model's own video processor would choose.
    """

    policy: Literal["fps", "uniform", "every_n_seconds", "timestamps", "keyframes", "model"] = "fps"
    fps: Annotated[float, Field(gt=0)] = 2.0
    every_n_seconds: Annotated[float, Field(gt=0)] = 1.0
    timestamps: tuple[Annotated[float, Field(ge=0)], ...] = ()
    num_frames: Positive = 8
    min_frames: Positive = 4
    max_frames: Positive = 64

    def most_frames(self, limit: int) -> int:
        """Of one video, of which a budget allows `limit`."""
        match self.policy:
            case "fps" | "every_n_seconds":
                return self.max_frames
            case "uniform" | "keyframes":
                return self.num_frames
            case "timestamps":
                return len(self.timestamps)
            case "model":
                return limit

    @model_validator(mode="after")
    def _ordered(self) -> Sampling:
        if self.min_frames > self.max_frames:
            raise ValueError(f"min_frames ({self.min_frames}) is above max_frames ({self.max_frames})")
        return self

    @model_validator(mode="after")
    def _timestamps_are_given(self) -> Sampling:
        if bool(self.timestamps) != (self.policy == "timestamps"):
            raise ValueError(f"timestamps are for policy: timestamps, which needs some; got {self.policy!r}")
        if list(self.timestamps) != sorted(self.timestamps):
            raise ValueError(f"timestamps have to ascend, got {list(self.timestamps)}")
        return self


class Decode(Section):
    """Reading and decoding. `resize: reference` equals the model's own processor; `fast` has JPEGs scaled by their
    decoder first. `background` lies behind transparent pixels; `truncated: keep` takes what can be decoded of an image
    whose file ends early, and grey for the rest.

    `sandbox: auto` probes and decodes in child processes, kept in as well as the machine allows; `on` refuses to do
    with less than no network, `off` has the worker itself do it. In a child an item has `item_seconds`, and more for
    many pixels.

    Of videos in MP4, MOV and Matroska above `max_whole_bytes` the index or cues are read, and what the planned frames
    need. They are identified by their source id, for nobody sees all of their bytes.
    """

    resize: Literal["reference", "fast"] = "reference"
    background: Annotated[str, Field(pattern=r"^#[0-9a-f]{6}$")] = "#ffffff"
    truncated: Literal["quarantine", "keep"] = "quarantine"
    sandbox: Literal["auto", "on", "off"] = "auto"
    item_seconds: Annotated[float, Field(gt=0)] = 120.0
    max_inline_bytes: Positive = 256 * 1024
    max_whole_bytes: Positive = 64 * 2**20
    io_threads: Positive = 8

    @field_validator("sandbox", mode="before")
    @classmethod
    def _as_written(cls, value: Any) -> Any:
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value  # what YAML makes of the words

    @model_validator(mode="after")
    def _what_is_inline_is_whole(self) -> Decode:
        if self.max_whole_bytes < self.max_inline_bytes:
            raise ValueError(
                f"max_whole_bytes ({self.max_whole_bytes}) is below max_inline_bytes ({self.max_inline_bytes}), up to "
                "which objects are read whole"
            )
        return self

    @property
    def image_rules(self) -> ImageRules:
        """Of images, where their files leave a choice."""
        return ImageRules(background=self.background, keep_truncated=self.truncated == "keep")


class Document(Section):
    """Pages of PDFs: dots an inch of the picture of a page, which is then made to fit the model."""

    dpi: Annotated[float, Field(gt=0)] = 144.0


class Encode(Section):
    """The encode pass: what one batch of the vision tower may hold, in patches, padding included.

    `max_batch_tokens` None: as suits the device (4,096 on a CPU, 16,384 on a GPU).
    """

    max_batch_items: Positive = 256
    max_batch_tokens: Positive | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention: str | None = None


class Generate(Section):
    """The generate pass. Greedy when `temperature` is 0; otherwise sampled with a seed of its own per item."""

    max_new_tokens: Positive = 128
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    system: str | None = None
    max_prompt_tokens: Positive = 16_384
    max_batch_items: Positive = 32
    max_batch_bytes: Positive = 2 * 2**30
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention: str | None = None


class Pooling(Section):
    """A pooling contract where it differs from what the model itself says, or the model says nothing.

    Its fields are those of `pipeline.pooling.contract`, whole or in part.
    """

    method: Literal["mean", "cls", "last_token", "none"] | None = None
    normalisation: dict[str, str] | None = None
    truncation: dict[str, str | int] | None = None
    padding: dict[str, str | bool] | None = None
    output: dict[str, str | int] | None = None
    item_order: Literal["input"] = "input"

    def contract(self) -> dict[str, Any]:
        """The fields that are given."""
        return self.model_dump(exclude_none=True, exclude={"video", "item_order"})


class MediaPooling(Pooling):
    """The contract of `model`; `video` is how a video's vector is made of its frames'."""

    video: Literal["mean", "trend"] = "mean"


class Text(Section):
    """Texts to vectors or scores. `model` None: the job's own model embeds texts.

    `prompt_name` is the model's prompt before texts, `query_prompt_name` before what is searched for. Documents are cut
    into chunks of `chunk_tokens`, None: as many as the model takes. A batch has at most `max_batch_tokens`, padding
    included; None: as suits the device (4,096 on a CPU, 16,384 on a GPU).
    """

    model: str | None = None
    pooling: Pooling = Pooling()
    prompt_name: str | None = None
    query_prompt_name: str | None = None
    chunk_tokens: Positive | None = None
    chunk_overlap_tokens: Annotated[int, Field(ge=0)] = 16
    max_batch_items: Positive = 512
    max_batch_tokens: Positive | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention: str | None = None


class Rank(Section):
    """Reranking. A request with more documents is quarantined, or only its first are scored."""

    max_documents: Positive = 1_000
    above: Literal["quarantine", "truncate"] = "quarantine"


class Score(Section):
    """Classifiers and reward models: scores of a text, or with `per_token` of each of its tokens; of media.

    `activation` is applied to the logits. auto: what transformers' pipeline for the task applies (softmax over several
    labels, sigmoid of one, nothing for regression). A `video` has the scores of its frames' mean logits, or of each
    label the highest score (max); with `per_frame` its frames' own are kept, too.
    """

    per_token: bool = False
    per_frame: bool = False
    video: Literal["mean", "max"] = "mean"
    activation: Literal["auto", "none", "sigmoid", "softmax"] = "auto"


_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


class Store(Section):
    """The feature store. A remote `path` (s3://…) keeps open shards in `local_path` until they are sealed.

    A shard is sealed when it holds `shard_bytes` or what one worker encoded of `shard_windows` windows: on a cluster, a
    lost node costs no more than that.

    `max_bytes` is what the store may take. As scratch, it keeps to it all the time: windows are planned before their
    segment starts, and what they read then does not travel on: objects up to `decode.max_inline_bytes` are fetched
    twice, and counted twice. Kept, it is brought down to it when a run ends. Records older than `ttl`, in seconds or
    such as `30d`, go before a run starts and when it ends.

    `auto` keeps what costs less to hold for `ttl`, at `gb_month` for a GB (10^9 bytes) a month, than the workers' time
    that making it took, at `worker_hour` an hour of one; other records go when a run ends.

    Of a remote store each machine keeps shards that it has read, up to `cache_bytes`, else until its disk is almost
    full. One that is not there within `fetch_seconds` is not waited for: what it holds is encoded again.

    `identity` is how known media are known again. `version`: by what the storage says of them, so that they are not
    fetched. `content`: by the hash of their bytes, which are read each time. `auto`: by version where the storage
    promises that it is another for other bytes (S3, GCS, a `version` in the manifest), else by content.

    `keep_frames` keeps decoded frames, too, and looks for them: of known media nothing is then fetched or decoded for
    another model that takes the same frames in the same size. They have `frames_max_bytes` of `max_bytes`.
    """

    path: str = "headrace_store"
    local_path: str | None = None
    identity: Literal["content", "version", "auto"] = "version"
    retention: Literal["keep", "segment", "auto"] = "keep"
    max_bytes: Positive | None = None
    frames_max_bytes: Positive | None = None
    ttl: Annotated[float, Field(gt=0)] | None = None
    gb_month: Annotated[float, Field(ge=0)] | None = None
    worker_hour: Annotated[float, Field(gt=0)] | None = None
    shard_bytes: Positive = 4 * 2**30
    shard_windows: Positive = 16
    cache_bytes: Positive | None = None
    fetch_seconds: Annotated[float, Field(gt=0)] = 600.0
    reuse: bool = True
    keep_frames: bool = False

    @model_validator(mode="after")
    def _frames_are_kept(self) -> Store:
        if self.keep_frames and self.retention == "segment":
            raise ValueError(
                f"store.keep_frames keeps frames for later runs, and store.retention is {self.retention!r}, of which "
                "nothing is left; set store.retention: keep, or leave store.keep_frames out"
            )
        return self

    @model_validator(mode="after")
    def _frames_have_a_part(self) -> Store:
        if self.frames_max_bytes is None:
            return self
        if not self.keep_frames:
            raise ValueError("store.frames_max_bytes is for frames that are kept; set store.keep_frames: true")
        if self.max_bytes is not None and self.frames_max_bytes > self.max_bytes:
            raise ValueError(
                f"store.frames_max_bytes ({self.frames_max_bytes}) is a part of store.max_bytes ({self.max_bytes})"
            )
        return self

    @model_validator(mode="after")
    def _shards_fit_the_cache(self) -> Store:
        if self.cache_bytes is not None and self.cache_bytes < 2 * self.shard_bytes:
            raise ValueError(
                f"store.cache_bytes ({self.cache_bytes}) is to have room for two shards of store.shard_bytes "
                f"({self.shard_bytes}), which may be larger by a batch; raise the one or lower the other"
            )
        return self

    @field_validator("ttl", mode="before")
    @classmethod
    def _as_seconds(cls, value: Any) -> Any:
        said = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", value) if isinstance(value, str) else None
        return float(said[1]) * _UNIT_SECONDS[said[2]] if said else value

    @model_validator(mode="after")
    def _what_is_weighed_has_prices(self) -> Store:
        prices = {"ttl": self.ttl, "gb_month": self.gb_month, "worker_hour": self.worker_hour}
        missing = [f"store.{name}" for name, value in prices.items() if value is None]
        if self.retention == "auto" and missing:
            raise ValueError(f"store.retention: auto weighs holding against making again, for which set {missing}")
        if self.retention != "auto" and (self.gb_month is not None or self.worker_hour is not None):
            raise ValueError("store.gb_month and store.worker_hour are for store.retention: auto")
        return self

    @model_validator(mode="after")
    def _age_is_of_what_is_kept(self) -> Store:
        if self.ttl is not None and self.retention == "segment":
            raise ValueError(
                f"store.ttl ({self.ttl:g} s) is for features that are kept, and store.retention is {self.retention!r}, "
                "of which nothing is left; set store.retention: keep, or leave store.ttl out"
            )
        return self


CollectionName = Annotated[str, Field(pattern=r"^[a-z](_?[a-z0-9])*$", max_length=41)]


class LanceDBSection(Section):
    """A LanceDB at `uri`, a folder or object storage. Below `index_min_points` a search compares with every point."""

    uri: Annotated[str, Field(min_length=1)]
    collection: CollectionName
    batch_points: Positive = 8192
    index_min_points: Positive = 100_000

    @field_validator("uri")
    @classmethod
    def _is_embedded(cls, value: str) -> str:
        if value.startswith("db://"):
            raise ValueError(f"{value} is a LanceDB server; only folders and object storage are written to")
        return value


class PgvectorSection(Section):
    """A PostgreSQL whose connection string, with its password, is in the environment variable `dsn_env`."""

    dsn_env: str
    schema_name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=63)] = "public"
    collection: CollectionName
    batch_points: Positive = 1024
    index_min_points: Positive = 10_000

    @field_validator("dsn_env")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        return _variable_name(value)


class QdrantSection(Section):
    """A Qdrant server at `url`, or a folder at `path` for a few thousand points and one process at a time."""

    url: str | None = None
    api_key_env: str | None = None
    path: str | None = None
    collection: CollectionName
    batch_points: Positive = 256
    timeout_seconds: Positive = 60
    finish_seconds: Annotated[float, Field(ge=0)] = 600.0

    @field_validator("api_key_env")
    @classmethod
    def _is_a_name(cls, value: str | None) -> str | None:
        return None if value is None else _variable_name(value)

    @model_validator(mode="after")
    def _server_or_folder(self) -> QdrantSection:
        if (self.url is None) == (self.path is None):
            raise ValueError("give either url (a server) or path (a folder)")
        return self


class Sinks(Section):
    """Where vectors go besides files: any number of these at once."""

    lancedb: LanceDBSection | None = None
    pgvector: PgvectorSection | None = None
    qdrant: QdrantSection | None = None

    def anchored(self) -> Sinks:
        """With local paths made absolute."""
        lancedb, qdrant = self.lancedb, self.qdrant
        if lancedb is not None:
            lancedb = lancedb.model_copy(update={"uri": _absolute(lancedb.uri)})
        if qdrant is not None and qdrant.path is not None:
            qdrant = qdrant.model_copy(update={"path": _absolute(qdrant.path)})
        return self.model_copy(update={"lancedb": lancedb, "qdrant": qdrant})


class Incremental(Section):
    """Going on from an earlier run of the same output: what is unchanged since is taken from its parts.

    `base` is a run's id, or `latest`, the last one that ended. `delete_vanished` deletes from the sinks what the base
    run had and the listing no longer has.
    """

    base: str | None = None
    delete_vanished: bool = False


class RayOptions(Section):
    """Cluster use. `workers` fields are counts of actors or concurrent tasks; None is sized from the cluster.

    `window_items` None: as many as fill batches (`Config.window_items`).
    """

    address: str | None = None
    num_cpus: Positive | None = None
    object_store_bytes: Positive | None = None
    metrics_port: Annotated[int, Field(gt=0, lt=65536)] | None = None
    decode_workers: Positive | None = None
    encode_workers: Positive | None = None
    generate_workers: Positive | None = None
    pool_workers: Positive | None = None
    wait_seconds: Annotated[float, Field(ge=0)] = 300.0
    window_items: Positive | None = None
    first_window_items: Positive = 512
    segment_windows: Positive = 64


class Logs(Section):
    """What is logged: `text` are warnings, for people; `json` a line of JSON for each step of the run."""

    format: LogFormat = "text"


class Config(Section):
    """A complete run. See `configs/` for examples; `headrace run FILE --set a.b=c` reaches every field."""

    job: Literal["caption_videos", "embed_backfill", "index_documents", "rerank", "score_texts", "score_media"]
    input: str
    output: str = "output"
    run_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    model: str
    prompt: str = "Describe this."
    limit: Positive | None = None
    sample_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    budget: BudgetSection = BudgetSection()
    max_quarantined_fraction: Fraction = 1.0
    demo_media: DemoMedia | None = None
    sources: Sources = Sources()
    sampling: Sampling = Sampling()
    decode: Decode = Decode()
    document: Document = Document()
    encode: Encode = Encode()
    generate: Generate = Generate()
    pooling: MediaPooling = MediaPooling()
    text: Text = Text()
    rank: Rank = Rank()
    score: Score = Score()
    store: Store = Store()
    sinks: Sinks = Sinks()
    incremental: Incremental = Incremental()
    ray: RayOptions = RayOptions()
    logs: Logs = Logs()

    @model_validator(mode="after")
    def _incremental_runs_have_names(self) -> Config:
        if self.incremental.base is None:
            return self
        if self.job not in ("embed_backfill", "index_documents"):
            raise ValueError(f"incremental.base is for jobs that embed, not for {self.job}")
        if self.run_id is None:
            raise ValueError(
                "incremental.base needs a run_id: a listing that looks the same may hold changed items, so each run of "
                "it has a name of its own (such as the day)"
            )
        return self

    @model_validator(mode="after")
    def _samples_delete_nothing(self) -> Config:
        if self.sample_fraction is not None and self.incremental.delete_vanished:
            raise ValueError(
                "a sample has most of the listing left out, and incremental.delete_vanished would delete that from the "
                "sinks; set incremental.delete_vanished: false"
            )
        return self

    @model_validator(mode="after")
    def _scores_are_of_what_there_is(self) -> Config:
        for name, job, parts in (("per_token", "score_texts", "texts"), ("per_frame", "score_media", "videos")):
            if getattr(self.score, name) and self.job != job:
                raise ValueError(f"score.{name} is for {parts}, of the job {job}, not for {self.job}")
        return self

    @field_validator("budget", mode="before")
    @classmethod
    def _tier_by_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"tier": value}
        return value

    @field_validator("budget")
    @classmethod
    def _budget_is_known(cls, value: BudgetSection) -> BudgetSection:
        try:
            resolve_budget(value.tier, value.limits)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return value

    @property
    def text_model(self) -> str:
        """What embeds texts."""
        return self.text.model or self.model

    def text_pooling(self) -> dict[str, Any]:
        """The contract's fields that are given for texts."""
        return (self.text.pooling if self.text.model is not None else self.pooling).contract()

    def scorer_options(self) -> dict[str, Any]:
        """What a scorer is loaded with: rerankers have an activation of their own."""
        return self.score.model_dump(include={"per_token", "activation"}) if self.job == "score_texts" else {}

    def sampled(self, share: str) -> Config:
        """The run of a part of the listing, `share` such as "1%" or "0.5%"; a named run gets a name of its own for it.

        Raises `ConfigError` for another notation, a share that is not within (0, 100], and where a sample is refused.
        """
        if not re.fullmatch(r"[0-9]+(\.[0-9]+)?%", share):
            raise ConfigError(f"--sample takes a share such as 1% or 0.5%, got {share!r}")
        percent = float(share[:-1])
        changed: dict[str, Any] = {"sample_fraction": percent / 100}
        if self.run_id is not None:
            changed["run_id"] = f"{self.run_id}-sample-{percent:g}pct"
        return parse_config({**self.model_dump(), **changed}, f"--sample {share}")

    def limits(self) -> Budget:
        """The admission budget in force."""
        return resolve_budget(self.budget.tier, self.budget.limits)

    def source_policy(self) -> SourcePolicy:
        """Where media may be read from. What is fetched by URL is bounded by the budget's `max_bytes`."""
        return SourcePolicy(**self.sources.model_dump(), max_bytes=int(self.limits().max_bytes))

    def anchored(self) -> Config:
        """With local paths of store, sinks, roots and output made absolute: workers may start in other directories."""
        local_path = self.store.local_path
        anchored_local = None if local_path is None else _absolute(local_path)
        store = self.store.model_copy(update={"path": _absolute(self.store.path), "local_path": anchored_local})
        sources = self.sources.model_copy(update={"roots": tuple(map(_absolute, self.sources.roots))})
        update = {
            "store": store,
            "output": _absolute(self.output),
            "sinks": self.sinks.anchored(),
            "sources": sources,
        }
        return self.model_copy(update=update)

    @property
    def window_items(self) -> int:
        """Items of a window once they have reached their full size."""
        return self.ray.window_items or full_window_items(self.encode.max_batch_items)

    def identity(self) -> dict[str, Any]:
        """The fields that determine the results; where they go, who computes them and how many at a time are not.

        Of `ray`, the sizes of the windows count: a part holds one window, and a resumed run must find the same ones.
        """
        elsewhere = {
            "output",
            "run_id",
            "store",
            "sinks",
            "incremental",
            "max_quarantined_fraction",
            "demo_media",
            "input",
            "logs",
        }
        cluster = RayOptions.model_fields.keys() - {"window_items", "first_window_items"}
        deadlines = {name for name in Sources.model_fields if name.endswith("_seconds")}
        exclude: dict[str, Any] = {
            **dict.fromkeys(elsewhere, True),
            "ray": cluster,
            "decode": {"io_threads", "sandbox", "item_seconds"},
            "sources": deadlines,
        }
        fields = self.model_dump(mode="json", exclude=exclude)
        if self.sample_fraction is None:
            del fields["sample_fraction"]  # a run of everything keeps the digest that it had before there were samples
        return fields

    def digest(self) -> str:
        """16 hex digits over `identity()`."""
        text = json.dumps(self.identity(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _absolute(path: str) -> str:
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _variable_name(value: str) -> str:
    """`value`, if it can name an environment variable. A refusal does not repeat it: it may be the secret itself."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("expected the name of an environment variable; what it holds is never in a configuration")
    return value


def load_config(path: str, settings: list[str] | None = None) -> Config:
    """Read a YAML file and apply `a.b=c` settings. Raises `ConfigError` with file, key and the nearest valid name."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    try:
        raw = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a configuration is a mapping of keys to values, got {type(raw).__name__}")
    return parse_config(with_settings(raw, settings or []), path)


def with_settings(raw: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """`raw` with each `a.b=c` applied, in order. Raises `ConfigError` for one that is not such."""
    for setting in settings:
        _apply(raw, setting)
    return raw


def parse_config(raw: dict[str, Any], origin: str = "config") -> Config:
    """Check a mapping. Raises `ConfigError` listing every problem, `origin` first."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        problems = "\n".join(f"  {_explain(problem)}" for problem in error.errors())
        raise ConfigError(f"{origin}: configuration refused\n{problems}") from error


def _apply(raw: dict[str, Any], setting: str) -> None:
    path, separator, text = setting.partition("=")
    if not separator or not path:
        raise ConfigError(f"--set takes key=value (for example encode.max_batch_items=8), got {setting!r}")
    *parents, last = path.strip().split(".")
    node = raw
    for name in parents:
        child = node.get(name)
        if name == "budget" and isinstance(child, str):
            child = {"tier": child}
        node[name] = child = {} if child is None else child
        if not isinstance(child, dict):
            raise ConfigError(f"--set {setting}: {name!r} holds a single value and has no keys below it")
        node = child
    node[last] = _setting_value([*parents, last], text)


def _setting_value(path: list[str], text: str) -> Any:
    """`text` itself for a field that holds text: YAML would make a mapping of the prompt "Describe: what happens", and
    a number of the run id 20260131. Every other field takes what YAML makes of it."""
    kinds = _kinds(_annotation(path))
    if str in kinds and not (type(None) in kinds and text in ("null", "~", "")):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _explain(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "(top level)"
    if problem["type"] == "extra_forbidden":
        names = _field_names(problem["loc"][:-1])
        close = difflib.get_close_matches(str(problem["loc"][-1]), names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the keys here are {', '.join(sorted(names)) or 'none yet'}"
        return f"{where}: unknown key; {hint}"
    if problem["type"] == "missing":
        return f"{where}: required"
    if problem["type"] == "value_error":
        return f"{where}: {problem['ctx']['error']}"
    return f"{where}: {problem['msg']} (got {problem['input']!r})"


def _field_names(path: tuple[int | str, ...]) -> list[str]:
    section = next(kind for kind in _kinds(_annotation(path)) if issubclass(kind, BaseModel))
    return list(section.model_fields)


def _annotation(path: Sequence[int | str]) -> Any:
    """The declared type of the field at `path`; `Config` at (), None when there is no such field."""
    annotation: Any = Config
    for part in path:
        section = next((kind for kind in _kinds(annotation) if issubclass(kind, BaseModel)), None)
        field = section.model_fields.get(str(part)) if section is not None else None
        annotation = field.annotation if field is not None else None
    return annotation


def _kinds(annotation: Any) -> list[type]:
    """The classes a value may be of, with unions and `Annotated` taken apart."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for each in get_args(annotation) for kind in _kinds(each)]
    return [annotation] if isinstance(annotation, type) else []
