"""`sampling.policy: model`: the frames that the model's own video processor takes of a video that it is given whole."""

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import (
    Glm4vVideoProcessor,
    InternVLVideoProcessor,
    LlavaOnevisionVideoProcessor,
    Qwen2VLVideoProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMVideoProcessor,
)

from pipeline.errors import ConfigError, ItemError
from pipeline.media.probe import probe_media
from pipeline.media.video import decode_video
from pipeline.models.vision_language import VisionLanguageFacts
from pipeline.schema import Probe
from tests.media.media_files import Recipe, full_decode, make_video

PROCESSORS: dict[str, Any] = {
    "qwen3-vl": Qwen3VLVideoProcessor(cap_pixels_per_frame=True),
    "qwen2-vl at 3 fps": Qwen2VLVideoProcessor(do_sample_frames=True, fps=3, cap_pixels_per_frame=True),
    "internvl": InternVLVideoProcessor(do_sample_frames=True, num_frames=8),
    "smolvlm": SmolVLMVideoProcessor(do_sample_frames=True, num_frames=16, fps=1),
    "glm-4v": Glm4vVideoProcessor(do_sample_frames=True),
    "llava-onevision": LlavaOnevisionVideoProcessor(do_sample_frames=True, num_frames=6),
}
CLIPS = {
    "mp4": Recipe(num_frames=95, options={"g": "12", "bf": "3"}),
    "mp4, 24 fps": Recipe(num_frames=131, rate=24, options={"g": "30", "bf": "2"}),
    "webm": Recipe(
        container="webm", library="libvpx-vp9", num_frames=70, options={"deadline": "realtime", "cpu-used": "8"}
    ),
    "short": Recipe(num_frames=11, rate=10),
}


def facts_of(video_processor: Any) -> VisionLanguageFacts:
    processor = SimpleNamespace(video_processor=video_processor, video_token="<video>")
    return VisionLanguageFacts(model="some/model", processor=processor, config=None)


def indices_by_the_processor(processor: Any, frames: list[np.ndarray], rate: float) -> list[int]:
    """Which of all frames it takes."""
    metadata = {"total_num_frames": len(frames), "fps": rate, "duration": len(frames) / rate, "width": 96, "height": 64}
    processed = processor(
        videos=[np.stack(frames)],
        video_metadata=[metadata],
        do_sample_frames=True,
        return_metadata=True,
        return_tensors="pt",
    )
    return sorted(int(index) for index in processed["video_metadata"][0].frames_indices)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_frames_are_those_of_the_models_processor(name: str, clip: str) -> None:
    data = make_video(CLIPS[clip])
    frames = [pixels for _, pixels in full_decode(data)]
    indices = indices_by_the_processor(PROCESSORS[name], frames, float(CLIPS[clip].rate))
    probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared="video", name="clip")
    shown = decode_video(io.BytesIO(data), facts_of(PROCESSORS[name]).sample(probe), None)
    for index, pixels in zip(indices, shown.pixels, strict=True):
        assert np.array_equal(pixels, frames[index])


def test_what_the_processor_refuses_is_quarantined() -> None:
    data = make_video(Recipe(num_frames=7, rate=10))
    frames = [pixels for _, pixels in full_decode(data)]
    with pytest.raises(ValueError, match="exceeds"):
        indices_by_the_processor(PROCESSORS["internvl"], frames, 10.0)
    probe = probe_media(io.BytesIO(data), num_bytes=len(data), declared="video", name="clip")
    with pytest.raises(ItemError) as caught:
        facts_of(PROCESSORS["internvl"]).sample(probe)
    assert (caught.value.stage, caught.value.code) == ("plan", "no_frame_sampled")


def test_a_video_without_a_rate_is_refused() -> None:
    probe = Probe(modality="video", container="mov", codec="h264", width=8, height=8, num_bytes=1, num_frames=5)
    with pytest.raises(ItemError) as caught:
        facts_of(PROCESSORS["qwen3-vl"]).sample(probe)
    assert caught.value.code == "no_frame_sampled"


def test_a_processor_that_takes_all_frames_is_refused() -> None:
    facts_of(PROCESSORS["internvl"]).check_sampling()
    with pytest.raises(ConfigError, match="does not choose frames"):
        facts_of(InternVLVideoProcessor(do_sample_frames=False)).check_sampling()
