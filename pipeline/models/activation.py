"""What makes scores of a head's logits, by the dotted names under which sentence-transformers saves it."""

from __future__ import annotations

from typing import Any

SIGMOID = "torch.nn.modules.activation.Sigmoid"
IDENTITY = "torch.nn.modules.linear.Identity"
SOFTMAX = "torch.nn.modules.activation.Softmax"
NAMED = {"none": IDENTITY, "sigmoid": SIGMOID, "softmax": SOFTMAX}


def pipeline_activation(config: Any) -> str:
    """What transformers applies to a classifier's logits: `postprocess` of its pipelines for texts and for images."""
    if config.problem_type == "regression":
        return IDENTITY
    return SIGMOID if config.problem_type == "multi_label_classification" or config.num_labels == 1 else SOFTMAX
