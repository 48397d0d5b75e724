"""Media and documents that a configuration's `demo_media` has drawn when nothing is there yet."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.demo.documents import make_demo_documents
from pipeline.demo.media import make_demo_media


def draw_demo(config: Config) -> None:
    """Draw what `config.demo_media` asks for, if it does, at `config.input`."""
    drawn = config.demo_media
    if drawn is None:
        return
    if config.job == "index_documents":
        folder = config.input.rstrip("/").rpartition("/")[0]
        make_demo_documents(folder, documents=drawn.documents, seed=drawn.seed)
    else:
        make_demo_media(config.input, **drawn.model_dump(exclude={"documents"}))
