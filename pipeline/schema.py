"""The values that travel between stages: frozen, validated, free of torch and Ray."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Modality = Literal["image", "video", "page", "audio"]
Status = Literal["ok", "quarantined", "skipped"]


def fields_of(value: Any) -> dict[str, Any]:
    """Of a dataclass with slots, by name; `dataclasses.asdict` copies what is in them and takes ten times as long."""
    return {name: getattr(value, name) for name in value.__slots__}


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaItem:
    """One image, video, page of a PDF document or sound (a video's too): a URI, or inline bytes.

    `modality` is None when neither the manifest nor the file name says; the probe then decides by content.
    `version` (an object version or any caller-given token) and `sha256` identify the content without a fetch.
    `page` counts from 0 and is of modality "page" only; without it, such an item is a document not yet taken apart.
    A part of a video or sound, from `start_seconds` to `stop_seconds` of it, is an item of its own; None is its start,
    its end.
    """

    uri: str | None = None
    data: bytes | None = None
    modality: Modality | None = None
    version: str | None = None
    sha256: str | None = None
    page: int | None = None
    start_seconds: float | None = None
    stop_seconds: float | None = None

    def __post_init__(self) -> None:
        if (self.uri is None) == (self.data is None):
            raise ValueError(f"a media item has either a uri or inline data, got {self.uri = }")
        if self.page is not None and (self.page < 0 or self.modality != "page"):
            raise ValueError(f"pages count from 0 and are of modality page, got {self.page = } of {self.modality = }")
        if self.is_part and not 0 <= (self.start_seconds or 0.0) < (
            math.inf if self.stop_seconds is None else self.stop_seconds
        ):
            raise ValueError(f"a part stops behind its start, got {self.start_seconds = }, {self.stop_seconds = }")

    @property
    def is_part(self) -> bool:
        """True of what names its start or its end."""
        return self.start_seconds is not None or self.stop_seconds is not None

    @property
    def fragment(self) -> str:
        """What of the file the item is, as URIs say it: "" for all of it, times in seconds, pages counted from 1."""
        if self.page is not None:
            return f"#page={self.page + 1}"
        if not self.is_part:
            return ""
        stop = "" if self.stop_seconds is None else f",{self.stop_seconds:.17g}"
        return f"#t={self.start_seconds or 0.0:.17g}{stop}"

    @property
    def name(self) -> str:
        """What to call the item in messages; pages are counted from 1, as readers and PDF viewers do."""
        file = self.uri if self.uri is not None else f"<{len(self.data or b'')} inline bytes>"
        return f"{file}{self.fragment}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One manifest row: what a caller wants to be asked about zero or more media items, embedded or ranked.

    `prompt` or `messages` (chat form; content parts of type "image"/"video" take `media` in order) override the
    job's own prompt. `text` is what is embedded where there is no media; `query` and `documents` are ranked.
    """

    item_index: int
    id: str
    media: tuple[MediaItem, ...] = ()
    prompt: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    tenant: str = ""
    text: str | None = None
    query: str | None = None
    documents: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRules:
    """What images are decoded to where their files leave a choice; the defaults add nothing to a feature key.

    `background` is the colour behind transparent pixels, `#rrggbb`. With `keep_truncated` an image whose file ends
    early is what could be decoded, and grey where nothing could; without it, it is quarantined.
    """

    background: str = "#ffffff"
    keep_truncated: bool = False

    @property
    def background_rgb(self) -> tuple[int, int, int]:
        """0 to 255."""
        red, green, blue = bytes.fromhex(self.background.removeprefix("#"))
        return red, green, blue

    def key_term(self, *, opaque: bool) -> str:
        """What the rules add to the key of an image; of one in an `opaque` format the background is no part."""
        background = "" if opaque or self.background == "#ffffff" else f",background={self.background}"
        return background + (",truncated=keep" if self.keep_truncated else "")


DEFAULT_IMAGE_RULES = ImageRules()


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """Facts from a media header, before decode. `width` and `height` are as presented (rotation applied).

    Images and pages: `num_frames` 1, `duration_seconds` and `rate_fps` 0; a page's size is in pixels at the resolution
    that it was probed for. Videos: `duration_seconds` is first presented frame to
    end of the last, `rate_fps` the average rate, `num_frames` an estimate that may be wrong (edit lists, WebM, TS).
    Sounds: no size, frames or `rate_fps`; `duration_seconds` is from the file's first picture or sample to the end of
    the sound, `sample_rate_hz` and `num_channels` are the source's. Those are 0 for all others.

    Of a video whose header has an index (MP4, MOV), all 0 elsewhere: `coded_frames` packets of `coded_bytes` in all,
    `keyframes` of them with `keyframe_bytes`. There, and where cues name the keyframes (Matroska): `keyframe_spacing`
    packets from each to the next where these are always as many, else 0; `group_frames` that number's mean, of the
    group that a packet is in. `reorder_depth`: how many pictures a decoder holds back, because they are shown later
    than others that are decoded after them.
    """

    modality: Modality
    container: str
    codec: str
    width: int
    height: int
    num_bytes: int
    duration_seconds: float = 0.0
    rate_fps: float = 0.0
    num_frames: int = 1
    sample_rate_hz: int = 0
    num_channels: int = 0
    coded_frames: int = 0
    coded_bytes: int = 0
    keyframes: int = 0
    keyframe_bytes: int = 0
    keyframe_spacing: int = 0
    group_frames: float = 0.0
    reorder_depth: int = 0

    @property
    def num_samples(self) -> int:
        """Of all channels together, as the source has them."""
        return math.ceil(self.duration_seconds * self.sample_rate_hz * self.num_channels)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceVector:
    """What one media item will cost, known before anything large is allocated."""

    num_bytes: int
    pixels_per_frame: int
    num_frames: int
    duration_seconds: float
    feature_tokens: int
    num_samples: int = 0
    decode_seconds: float = 0.0  # of a reference core, estimated

    @property
    def total_pixels(self) -> int:
        """Pixels of all sampled frames at their original size."""
        return self.pixels_per_frame * self.num_frames


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplePlan:
    """The presentation times, in seconds from the first shown frame, of the frames to take; never descending."""

    pts_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        times = self.pts_seconds
        if not times or min(times) < 0 or any(b < a for a, b in itertools.pairwise(times)):
            raise ValueError(f"a sample plan needs one or more ascending times >= 0, got {times}")

    def __len__(self) -> int:
        return len(self.pts_seconds)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frames:
    """Decoded, resized frames and the presentation times actually shown, in seconds from the first shown frame."""

    pixels: npt.NDArray[np.uint8]  # (T, H, W, 3)
    pts_seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if self.pixels.dtype != np.uint8 or len(shape) != 4 or shape[3] != 3 or shape[0] != len(self.pts_seconds):
            raise ValueError(
                f"frames are uint8 (T, H, W, 3) with T times, got {self.pixels.dtype} {shape} "
                f"and {len(self.pts_seconds)} times"
            )

    def __repr__(self) -> str:
        return f"Frames(pixels={self.pixels.dtype}{list(self.pixels.shape)}, pts_seconds={self.pts_seconds})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Where an item's features lie: `grid` is (t, h, w) in patches before merging, sizes are (height, width).

    `timestamps` are the times of the frames shown, `duration_seconds` that of the whole item: models are told of them.
    `cropped_size` is the middle of `resized_size` that a model sees, where its processor crops.
    """

    grid: tuple[int, int, int]
    merge_size: int
    feature_length: int
    original_size: tuple[int, int]
    resized_size: tuple[int, int]
    timestamps: tuple[float, ...] = ()
    duration_seconds: float = 0.0
    cropped_size: tuple[int, int] | None = None

    @property
    def num_tiles(self) -> int:
        """Tiles, frames or steps of time: what the tower looks at each by itself."""
        return self.grid[0]

    @property
    def num_patches(self) -> int:
        """What the tower computes of the item, before merging or resampling."""
        return math.prod(self.grid)

    @property
    def shown_size(self) -> tuple[int, int]:
        """(height, width) of the frames that the model is handed."""
        return self.cropped_size or self.resized_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Placeholder:
    """What stands for one media item in a prompt: the processor's own text, with each run of a media token shown once.

    `runs` are the lengths of those runs, in order. Text rather than token ids, because a tokenizer may merge what
    stands at the seam: Gemma 3's placeholder begins and ends with line breaks.
    """

    text: str
    runs: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Media tokens, which is the number of feature rows they are replaced by."""
        return sum(self.runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSize:
    """Bytes of a modality's records: of a row of features, in all tensors together, and of what a record has besides.

    The latter without key terms, for an image or a video of four frames.
    """

    row_bytes: int
    other_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorSpace:
    """Where vectors of one model and contract lie: only those of one `digest` compare. `contract` is as JSON has it."""

    model: str
    dimensions: int
    contract: dict[str, Any]
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorSpaces:
    """Those of a job: of media, and of texts; equal where one model has both. None: there are no such vectors."""

    media: VectorSpace | None
    text: VectorSpace | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreSpace:
    """What scores mean: only those of one `digest` compare. `labels` name a score's columns, in their order.

    `activation` is the dotted name of what was applied to the logits; `contract` is as JSON has it.
    """

    model: str
    labels: tuple[str, ...]
    activation: str
    contract: dict[str, Any]
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFailure:
    """The wire form of `errors.ItemError`: why an item is in quarantine."""

    stage: str
    code: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """Says that a planned batch is put away. Idempotent by (stage, window, batch, digest).

    `shards` are those that its records lie in, a tenant's apart from another's. `counts` and `seconds` are additive:
    every number of the run's summary is a sum over receipts. So are `cpu_seconds`, of processes and their children, and
    `accelerator_seconds`, by stage.
    """

    stage: Literal["plan", "encode", "prompt", "generate", "tokenize", "ready", "pool"]
    window: int
    batch: int
    digest: str
    shards: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    quarantine: dict[str, int] = field(default_factory=dict)
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    accelerator_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def identity(self) -> tuple[str, int, int, str]:
        """What makes two deliveries of one receipt the same."""
        return self.stage, self.window, self.batch, self.digest
