"""headrace: offline batch multimodal processing on Ray Data. `pipeline.flow` is the line; start reading there.

The names below are those of `pipeline.api`, imported when they are used: workers that only decode import this package
too, and do without Ray.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.api import FeatureReader, caption, embed, encode, rerank, score, summary
else:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from pipeline import api

        return getattr(api, name)


__all__ = ["FeatureReader", "caption", "embed", "encode", "rerank", "score", "summary"]
