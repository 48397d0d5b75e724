"""The keys of a planned item's features and frames; no torch or transformers, which decode does without."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeline.errors import ItemError
from pipeline.features.identity import FeatureKeyTerms, FrameKeyTerms, canonical_json
from pipeline.media.backend import (
    DECODE_BACKEND,
    DECODE_RULES,
    HEIF_BACKEND,
    IMAGE_BACKEND,
    PAGE_BACKEND,
    SOUND_BACKEND,
)
from pipeline.media.packets import RANGED_FORMATS
from pipeline.media.resize import Resample, resize_backend
from pipeline.media.source_id import Strength
from pipeline.planning.estimate import Network
from pipeline.planning.geometry import OwnSizeRule, SizeRule
from pipeline.schema import (
    DEFAULT_IMAGE_RULES,
    ImageRules,
    MediaItem,
    Modality,
    Probe,
    RecordSize,
    Request,
    ScoreSpace,
    VectorSpaces,
)
from pipeline.stages.rows import PlannedMedia

Identity = Literal["content", "version", "auto"]
# Of which ids it is taken that they stand for the bytes that were seen under them.
_TRUSTED: dict[Identity, frozenset[Strength]] = {
    "content": frozenset({"content"}),
    "auto": frozenset({"content", "strong"}),
    "version": frozenset({"content", "strong", "weak"}),
}

_SCALED = "jpeg"  # the container whose decoder scales: `pipeline.media.image`
_OPAQUE = {"jpeg"}  # containers without transparency


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderIdentity:
    """The terms of a key that are the encoder's: digests of weights, processor configuration and placeholder layout.

    `resample` is how frames are resized for it, and `dct_scaled` whether a JPEG's decoder does a part of it: parts of
    the resize back end. `at_keyframes`: of videos the keyframes before the planned times are shown. `image` is what
    images are decoded to where their files leave a choice.
    """

    weights: str
    processor: str
    placeholder: str
    precision: str
    resample: Resample = "bicubic"
    dct_scaled: bool = False
    at_keyframes: bool = False
    image: ImageRules = DEFAULT_IMAGE_RULES

    def digest(self) -> str:
        """16 hex digits over the terms."""
        resize = self._resize_backend(_SCALED)
        rules = self.image.key_term(opaque=False)
        terms = [self.weights, self.processor, self.placeholder, self.precision, resize, *([rules] if rules else [])]
        return hashlib.sha256(canonical_json(terms)).hexdigest()[:16]

    def key_terms(self, planned: PlannedMedia, content: str) -> FeatureKeyTerms:
        """Everything that the features of `planned`, whose bytes are `content`, depend on."""
        return FeatureKeyTerms(
            tenant=planned.tenant,
            content=content,
            sampling=_sampling(planned),
            decode_backend=self._decode_backend(planned.probe),
            decode_rules=DECODE_RULES,
            resize_backend=self._resize_backend(planned.probe.container),
            resized_size=planned.geometry.resized_size,
            processor=self.processor,
            weights=self.weights,
            precision=self.precision,
            placeholder=self.placeholder,
        )

    def frame_key_terms(self, planned: PlannedMedia, content: str) -> FrameKeyTerms:
        """Everything that the frames of `planned` depend on, which is nothing of the model but their size."""
        return FrameKeyTerms(
            tenant=planned.tenant,
            content=content,
            sampling=_sampling(planned),
            decode_backend=self._decode_backend(planned.probe),
            decode_rules=DECODE_RULES,
            resize_backend=self._resize_backend(planned.probe.container),
            resized_size=planned.geometry.resized_size,
            cropped_size=planned.geometry.cropped_size,
        )

    def _decode_backend(self, probe: Probe) -> str:
        """A page is drawn at some size before it is resized, which changes its pixels as another library would."""
        if probe.modality == "page":
            return f"{PAGE_BACKEND},{probe.width}x{probe.height}"
        if probe.modality == "audio":
            return SOUND_BACKEND
        if probe.modality == "video":
            return DECODE_BACKEND + (",keyframes" if self.at_keyframes else "")
        library = HEIF_BACKEND if probe.container == "heif" else IMAGE_BACKEND
        return library + self.image.key_term(opaque=probe.container in _OPAQUE)

    def _resize_backend(self, container: str) -> str:
        scaled = "dct+" if self.dct_scaled and container == _SCALED else ""
        return scaled + resize_backend(self.resample)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedModel:
    """What a run needs to know of its checkpoint, told by the worker that loaded it, so that no other need load it.

    The encoder's terms of every feature key; modality → "" or why this checkpoint cannot be used with it; what a record
    of each modality takes; and how many numbers the weights of each half are, with `networks` for what it computes.
    `rules` are of those modalities whose frames are resized for the encoder when they are decoded, `own_size_rules` of
    those whose frames reach the model's processor as they are: where there is neither, the processor is asked about
    each size. `vectors` is given for models that make vectors, `scores` for those that make scores.
    """

    kind: Literal["vision_language", "dual_encoder", "text", "scorer", "image_classifier"] = "vision_language"

    identity: EncoderIdentity
    verdicts: dict[Modality, str]
    rules: Mapping[Modality, SizeRule]
    sizes: dict[Modality, RecordSize]
    parameters: dict[str, int]
    networks: dict[str, Network] = field(default_factory=dict)
    vectors: VectorSpaces | None = None
    scores: ScoreSpace | None = None
    own_size_rules: Mapping[Modality, OwnSizeRule] = field(default_factory=dict)

    def network(self, half: str) -> Network:
        """Of "encoder", "language" or "text"; without attention where an older version checked the model."""
        return self.networks.get(half) or Network(parameters=self.parameters.get(half, 0))


def _sampling(planned: PlannedMedia) -> tuple[float, ...]:
    return planned.requested.pts_seconds if planned.probe.modality == "video" else ()


def sha256_content(data: bytes) -> str:
    """The content term of bytes."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def is_trusted(strength: Strength, identity: Identity) -> bool:
    """Whether an object is known by its source id; what is not is read and hashed each time."""
    return strength in _TRUSTED[identity]


def source_content(source_id: str) -> str:
    """The content term of an object that is read only in part: never that of bytes that somebody has seen."""
    return f"version:{source_id}"


def is_read_by_range(probe: Probe, max_whole_bytes: int) -> bool:
    """Whether of a video only the index or cues are read, and what its planned frames need."""
    return probe.modality == "video" and probe.container in RANGED_FORMATS and probe.num_bytes > max_whole_bytes


def media_content(media: MediaItem, file_content: str) -> str:
    """The content term of `media`, whose file has `file_content`: a page, or a part, is a content of its own.

    Two parts that show the same frames are not one: models are told, and some reckon with, how long each is.
    """
    return f"{file_content}{media.fragment}"


def media_source(media: MediaItem, source_id: str, dpi: float) -> str:
    """The source id of `media`, whose file has `source_id`: what was probed of one page, at one size, is no other's.

    Nor is what was probed of a part, or of the sound of a video.
    """
    size = "" if media.page is None else f"&dpi={dpi:g}"
    return f"{source_id}{'#audio' if media.modality == 'audio' else ''}{media.fragment}{size}"


def request_source(request: Request, media_sources: Sequence[str]) -> str:
    """The source id of all that a row says; `media_sources` are its media's, in order.

    Of a row that is one media item and nothing else it is that one's, of a row that is a text the text's hash.
    """
    said = [request.text, request.prompt, request.messages]
    if said == [None, None, None] and len(media_sources) == 1:
        return media_sources[0]
    if request.text is not None and said[1:] == [None, None] and not media_sources:
        return sha256_content(request.text.encode())
    return sha256_content(canonical_json([list(media_sources), *said]))


def check_content(media: MediaItem, expected: str | None, found: str) -> None:
    """Raise `ItemError` when bytes are not those expected: features of other bytes would answer for them ever after."""
    if expected not in (None, found):
        raise ItemError(
            "fetch",
            "content_mismatch",
            f"{media.name}: the content is {found}, expected {expected} (the manifest's, or the one that was planned)",
        )


def check_source(media: MediaItem, expected: str, found: str) -> None:
    """Raise `ItemError` when an object that is read in part is not the one that was planned."""
    if expected != found:
        raise ItemError(
            "fetch", "content_mismatch", f"{media.name}: it is {found} now, and was {expected} when planned"
        )
