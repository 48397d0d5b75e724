import random

import numpy as np
import pytest
import torch
from transformers import Qwen2AudioEncoder, Qwen2AudioEncoderConfig, WhisperConfig, WhisperFeatureExtractor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from pipeline.planning.sound import QWEN2_AUDIO, WHISPER, Stride

NUM_SAMPLES = [1, 159, 160, 161, 320, 321, 400, 639, 640, 641, 16_000, 16_001, 47_999, 160_000, 479_999, 480_000]


@pytest.mark.parametrize("num_samples", [*NUM_SAMPLES, 480_001, 600_000])
def test_frames_are_the_feature_extractors(num_samples):
    extract = WhisperFeatureExtractor()
    sound = np.zeros(num_samples, np.float32)
    features = extract(sound, sampling_rate=16_000, return_attention_mask=True, return_tensors="np")
    assert features["input_features"].shape == (1, 80, 3000)
    assert WHISPER.frames(num_samples) == QWEN2_AUDIO.frames(num_samples) == features["attention_mask"].sum()


def test_whisper_makes_1500_rows_of_any_sound():
    config = WhisperConfig(d_model=8, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=8)
    rows = WhisperEncoder(config)(torch.zeros(1, 80, 3000)).last_hidden_state
    assert {WHISPER.feature_length(n) for n in NUM_SAMPLES} == {rows.shape[1]} == {1500}


@pytest.mark.parametrize("num_samples", [n for n in NUM_SAMPLES if n > 320])
def test_qwen2_audio_keeps_a_row_every_40_ms(num_samples):
    config = Qwen2AudioEncoderConfig(d_model=8, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=8)
    encoder = Qwen2AudioEncoder(config)
    frames = torch.tensor([QWEN2_AUDIO.frames(num_samples)])
    _, expected = encoder._get_feat_extract_output_lengths(frames)
    assert QWEN2_AUDIO.feature_length(num_samples) == expected.item()


def test_rows_equal_qwen2_audios_on_2000_lengths():
    encoder = Qwen2AudioEncoder(
        Qwen2AudioEncoderConfig(d_model=8, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=8)
    )
    lengths = random.Random(1).sample(range(321, 600_000), 2000)
    frames = torch.tensor([QWEN2_AUDIO.frames(n) for n in lengths])
    _, expected = encoder._get_feat_extract_output_lengths(frames)
    assert [QWEN2_AUDIO.feature_length(n) for n in lengths] == expected.tolist()


@pytest.mark.slow
def test_frames_equal_the_feature_extractors_on_2000_lengths():
    extract = WhisperFeatureExtractor()
    for num_samples in random.Random(2).sample(range(1, 600_000), 2000):
        features = extract(
            np.zeros(num_samples, np.float32), sampling_rate=16_000, return_attention_mask=True, return_tensors="np"
        )
        assert WHISPER.frames(num_samples) == QWEN2_AUDIO.frames(num_samples) == features["attention_mask"].sum()
        assert WHISPER.feature_length(num_samples) == (features["input_features"].shape[-1] - 1) // 2 + 1 == 1500


def test_thirty_seconds_of_qwen2_audio_are_750_rows():
    config = Qwen2AudioEncoderConfig(d_model=8, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=8)
    rows = Qwen2AudioEncoder(config)(torch.zeros(1, 128, 3000)).last_hidden_state
    assert QWEN2_AUDIO.feature_length(480_000) == QWEN2_AUDIO.feature_length(10**7) == rows.shape[1] == 750


@pytest.mark.parametrize("length", [2, 3, 4, 7, 100, 101])
@pytest.mark.parametrize(
    "stride", [Stride(kernel=3, step=2, padding=1), Stride(kernel=2, step=2), Stride(kernel=5, step=3)]
)
def test_a_stride_is_a_convolution(length, stride):
    if length + 2 * stride.padding < stride.kernel:
        assert stride.length(length) == 0
        return
    convolution = torch.nn.Conv1d(1, 1, stride.kernel, stride.step, stride.padding)
    assert convolution(torch.zeros(1, 1, length)).shape[-1] == stride.length(length)
