"""Logits of planned images are those of transformers' own pipeline for original ones; what cannot be is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from pipeline.errors import ConfigError
from pipeline.models.image_classifier import ImageClassifier, ImageClassifierFacts
from pipeline.planning.image_size import ExactSize, ImageGeometry, ShortestEdge
from tests.models.classifier_folders import CLASSIFIERS, SQUARE, VIT, labelled, save_classifier, vit, vit_sized

# (height, width): wide, upright, square, tiny, odd, extreme.
SIZES = [(48, 80), (90, 33), (32, 32), (5, 7), (61, 47), (20, 300), (200, 201)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(2)
    return [rng.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]


def pipeline_logits(folder: Path, images: list[np.ndarray]) -> np.ndarray:
    """What transformers' pipeline says of each image, in the order of the labels."""
    classify = hf.pipeline("image-classification", model=str(folder), device="cpu", function_to_apply="none")
    labels = classify.model.config.id2label
    found = [{each["label"]: each["score"] for each in classify(image, top_k=len(labels))} for image in images]
    return np.array([[one[labels[column]] for column in range(len(labels))] for one in found], np.float32)


@torch.inference_mode()
def whole_batch(folder: Path, images: list[np.ndarray]) -> np.ndarray:
    """Logits of the model as transformers loads it, all images in one batch."""
    model = hf.AutoModelForImageClassification.from_pretrained(folder)
    return np.asarray(model(**hf.AutoImageProcessor.from_pretrained(folder)(images=images, return_tensors="pt")).logits)


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_logits_are_those_of_transformers_pipeline(family: str, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, *CLASSIFIERS[family]())
    facts = ImageClassifierFacts.load(str(folder))
    classifier = ImageClassifier(facts, dtype="float32", device="cpu")
    classifier.check()
    images, expected = pictures(), pipeline_logits(folder, pictures())
    assert expected.std(axis=0).max() > 0.05  # not all the same, which would prove little
    sized = [facts.sizing.apply(image) for image in images]
    for image, planned in zip(images, sized, strict=True):
        assert planned.shape[:2] == facts.image_rule.geometry(*image.shape[:2]).cropped_size
    alone = np.concatenate([classifier.logits([image]) for image in sized])
    np.testing.assert_allclose(alone, expected, atol=2e-6)
    order = list(range(len(sized)))
    random.Random(1).shuffle(order)
    together = classifier.logits([sized[i] for i in order])
    np.testing.assert_allclose(together, whole_batch(folder, [images[i] for i in order]), atol=2e-6)
    # What a batch moves is the last bits, of which MobileNet's 52 layers with random weights make more.
    np.testing.assert_allclose(together, expected[order], atol=2e-4 if family == "mobilenet" else 2e-5)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("vit", ExactSize(height=32, width=32)),
        ("convnext", ShortestEdge(edge=36)),  # 32 / 0.875
        ("resnet", ExactSize(height=384, width=384)),  # from 384 on all of the image is shown
        ("levit", ShortestEdge(edge=73)),  # 64 * 256 / 224
        ("poolformer", ShortestEdge(edge=35)),  # 32 / 0.9
    ],
)
def test_sizes_are_those_of_the_family(family: str, size: Any, tmp_path: Path) -> None:
    facts = ImageClassifierFacts.load(str(save_classifier(tmp_path, *CLASSIFIERS[family]())))
    assert facts.sizing.resize == size
    if family == "convnext":
        planned = ImageGeometry(resized_size=(36, 54), cropped_size=(32, 32), grid=(2, 2))
        assert facts.image_rule.geometry(200, 300) == planned


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (hf.ViTImageProcessor(size=SQUARE, resample=0), "resamples by .*not bicubic or bilinear"),
        (hf.ViTImageProcessor(size=SQUARE, do_resize=False), "resizes by .* which is not supported"),
        (hf.ViTImageProcessor(size={"shortest_edge": 32}), "leaves images of any length"),
        (hf.PerceiverImageProcessor(size=SQUARE, crop_size=SQUARE), "something else of an image of 80 x 48 pixels"),
        (hf.ViTImageProcessor(size={"height": 40, "width": 40}), "does not take what its own image processor makes"),
    ],
)
def test_processors_that_are_not_reproduced_are_refused(processor: Any, message: str, tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, *vit_sized(processor))
    with pytest.raises(ConfigError, match=message):
        ImageClassifier(ImageClassifierFacts.load(str(folder)), dtype="float32", device="cpu").check()


def test_what_is_no_image_classifier_is_refused(tmp_path: Path) -> None:
    hf.BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(ConfigError, match="'bert' is no architecture of an image classifier"):
        ImageClassifierFacts.load(str(tmp_path / "bert"))
    hf.ShieldGemma2Config().save_pretrained(tmp_path / "asks")
    with pytest.raises(ConfigError, match="ShieldGemma2ForImageClassification does not classify by an image's pixels"):
        ImageClassifierFacts.load(str(tmp_path / "asks"))
    with pytest.raises(ConfigError, match="/nowhere/at/all"):
        ImageClassifierFacts.load("/nowhere/at/all")


def test_a_checkpoint_without_its_head_is_refused(tmp_path: Path) -> None:
    folder = save_classifier(tmp_path, hf.ViTModel(hf.ViTConfig(**VIT, **labelled())), vit()[1])
    facts = ImageClassifierFacts.load(str(folder))
    with pytest.raises(ConfigError, match=r"needs weights that it lacks: .*classifier"):
        ImageClassifier(facts, dtype="float32", device="cpu")


def test_a_network_that_looks_at_its_batch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_classifier(tmp_path, *vit())
    classifier = ImageClassifier(ImageClassifierFacts.load(str(folder)), dtype="float32", device="cpu")
    plain = classifier.model.classifier.forward
    monkeypatch.setattr(classifier.model.classifier, "forward", lambda states: plain(states - states.mean(0)))
    with pytest.raises(ConfigError, match="other logits of an image in a batch than alone"):
        classifier.check()


def test_logits_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    network, processor = vit()
    with torch.no_grad():
        network.classifier.bias[1] = torch.nan
    facts = ImageClassifierFacts.load(str(save_classifier(tmp_path, network, processor)))
    with pytest.raises(ConfigError, match=r"not finite, in torch\.float32"):
        ImageClassifier(facts, dtype="float32", device="cpu").check()


def test_half_precision_comes_out_in_float32(tmp_path: Path) -> None:
    facts = ImageClassifierFacts.load(str(save_classifier(tmp_path, *vit())))
    classifier = ImageClassifier(facts, dtype="bfloat16", device="cpu")
    classifier.check()
    logits = classifier.logits([facts.sizing.apply(image) for image in pictures()])
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, pipeline_logits(tmp_path, pictures()), atol=0.05)


def test_another_processor_has_another_digest(tmp_path: Path) -> None:
    digests = []
    for number, options in enumerate([{}, {"image_mean": [0.1, 0.2, 0.3]}, {"resample": 3}, {}]):
        folder = save_classifier(tmp_path / str(number), *vit_sized(hf.ViTImageProcessor(size=SQUARE, **options)))
        digests.append(ImageClassifierFacts.load(str(folder)).processor_digest)
    assert len(set(digests)) == 3 and digests[0] == digests[3]


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({}, "Softmax"),
        ({"problem_type": "multi_label_classification"}, "Sigmoid"),
        ({"num_labels": 1}, "Sigmoid"),
        ({"num_labels": 1, "problem_type": "regression"}, "Identity"),
    ],
)
def test_activations(options: dict[str, Any], activation: str, tmp_path: Path) -> None:
    facts = ImageClassifierFacts.load(str(save_classifier(tmp_path, *vit(**options))))
    assert facts.activation("auto").endswith(f".{activation}")
    assert facts.activation("none").endswith(".Identity")
