"""Generated documents: every sentence is in its page and no other, every file says what the truth says of it."""

import io
import json
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pypdf
import pytest
from PIL import Image

from pipeline.demo import documents, scenes
from pipeline.errors import ItemError
from pipeline.media.document import page_text, probe_page, render_page
from pipeline.media.probe import probe_media
from pipeline.media.source import stat_source
from pipeline.runs.manifest import freeze_manifest, read_range
from pipeline.storage import Folder


def files_under(folder: str) -> dict[str, bytes]:
    fs, path = fsspec.core.url_to_fs(folder)
    return {name.removeprefix(path).lstrip("/"): fs.cat_file(name) for name in fs.find(path)}


def truth_of(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files["truth.jsonl"].splitlines()]


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    folder = str(tmp_path_factory.mktemp("corpus"))
    documents.make_demo_documents(folder, documents=7, seed=3)
    return folder, files_under(folder)


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "demo") if request.param == "local" else f"memory://documents-{uuid.uuid4().hex}"


def test_a_listing_by_page_and_the_truth_name_the_same_items(
    corpus: tuple[str, dict[str, bytes]], tmp_path: Path
) -> None:
    folder, files = corpus
    run = Folder(str(tmp_path))
    listing = freeze_manifest(f"{folder}/documents", run, limit=None, expand_pages=True)
    requests = read_range(run, 0, listing.num_items)
    known = {row["id"] for row in truth_of(files)}
    assert known <= {request.id for request in requests}
    assert listing.num_items == 7 * 4 + 3 + documents.IMAGES + len(documents.FAILURES)  # 0, 3 and 6 have an empty page
    # An empty page is what the truth says nothing of.
    silent = [request for request in requests if request.id not in known]
    assert {request.id for request in silent} == {f"report-000{n}.pdf#page=5" for n in (0, 3, 6)}


def test_each_sentence_is_in_its_page_and_nowhere_else(corpus: tuple[str, dict[str, bytes]]) -> None:
    _, files = corpus
    texts: dict[str, str] = {}
    for name, data in files.items():
        if name.startswith("documents/report"):
            for page in range(len(pypdf.PdfReader(io.BytesIO(data)).pages)):
                texts[f"{name.removeprefix('documents/')}#page={page + 1}"] = words(page_text(data, page))
    sentences = [row for row in truth_of(files) if "sentence" in row]
    assert len(sentences) == 7 * 12
    for row in sentences:
        assert [id_ for id_, text in texts.items() if row["sentence"] in text] == [row["id"]]
        assert texts[row["id"]].count(row["sentence"]) == 1
    without_text = {id_ for id_, text in texts.items() if not text}
    captioned = {row["id"] for row in truth_of(files) if "caption" in row}
    assert without_text == {id_ for id_ in texts if id_ in captioned or id_.endswith("#page=5")}


def test_another_reader_finds_the_same_text(corpus: tuple[str, dict[str, bytes]]) -> None:
    _, files = corpus
    data = files["documents/report-0000.pdf"]
    for number, page in enumerate(pypdf.PdfReader(io.BytesIO(data)).pages):
        assert Counter(page.extract_text().split()) == Counter(page_text(data, number).split())


def test_pages_are_of_every_kind(corpus: tuple[str, dict[str, bytes]]) -> None:
    _, files = corpus
    data = files["documents/report-0000.pdf"]
    pages = pypdf.PdfReader(io.BytesIO(data)).pages
    assert [page.rotation for page in pages] == [0, 0, 0, 90, 0]
    sizes = [probe_page(data, n, num_bytes=1, dpi=72.0, name="a.pdf") for n in range(5)]
    assert [(size.width, size.height) for size in sizes if size is not sizes[2]] == [
        *[(595, 842)] * 2,
        (842, 595),
        (595, 842),
    ]
    assert len(pages[2].images) == 1
    columns = page_text(data, 1).split("\n")
    assert max(map(len, columns)) < 50 < max(map(len, page_text(data, 0).split("\n")))


def test_a_turned_page_is_upright_where_it_is_shown(corpus: tuple[str, dict[str, bytes]]) -> None:
    """Lines of text are wide: ink is spread over columns, and lies in few rows."""
    _, files = corpus
    ink = (render_page(files["documents/report-0001.pdf"], 3, (595, 842)) < 128).any(axis=2)
    assert ink.any(axis=1).mean() < 0.15 < 0.35 < ink.any(axis=0).mean()


def test_scanned_pages_and_images_show_what_the_truth_says(corpus: tuple[str, dict[str, bytes]]) -> None:
    _, files = corpus
    captions = [row for row in truth_of(files) if "caption" in row]
    assert len(captions) == 7 + documents.IMAGES
    for row in captions:
        name, _, number = row["id"].partition("#page=")
        pixels = _picture(files[f"documents/{name}"], int(number) - 1 if number else None)
        [scene] = [s for s in scenes.all_scenes("image") if scenes.caption(s) == row["caption"]]
        height, width, _ = pixels.shape
        corner = pixels[2:6, 2:6].reshape(-1, 3).mean(axis=0)
        assert np.abs(corner - scenes.BACKGROUNDS[scene.background]).max() < 25
        x, y = scenes.POSITIONS[scene.place]
        radius = min(scenes.SIZES[scene.size]) * min(width, height)
        inside = [min(max(f * side, radius), side - radius) for f, side in ((x, width), (y, height))]
        centre = pixels[int(inside[1]) - 1 : int(inside[1]) + 2, int(inside[0]) - 1 : int(inside[0]) + 2]
        assert np.abs(centre.reshape(-1, 3).mean(axis=0) - scenes.COLOURS[scene.colour]).max() < 40


def _picture(data: bytes, page: int | None) -> np.ndarray:
    if page is None:
        return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    facts = probe_page(data, page, num_bytes=1, dpi=36.0, name="scan")
    return render_page(data, page, (facts.height, facts.width))


def test_files_that_cannot_be_read_fail_as_the_truth_says(corpus: tuple[str, dict[str, bytes]], tmp_path: Path) -> None:
    folder, files = corpus
    run = Folder(str(tmp_path))
    listing = freeze_manifest(f"{folder}/documents/broken", run, limit=None, expand_pages=True)
    found = {}
    for request in read_range(run, 0, listing.num_items):
        [item] = request.media
        with pytest.raises(ItemError) as caught:
            stat_source(item)
            data = files[f"documents/broken/{request.id}"]
            probe_media(io.BytesIO(data), num_bytes=len(data), declared=item.modality, name=item.name, page=item.page)
        found[f"broken/{request.id}"] = caught.value.code
    assert found == documents.FAILURES == {row["id"]: row["code"] for row in truth_of(files) if "code" in row}


def test_a_seed_fixes_the_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 4), ("b", 4), ("c", 5)):
        documents.make_demo_documents(str(tmp_path / name), documents=2, seed=seed)
    first, again, other = (files_under(str(tmp_path / name)) for name in "abc")
    assert first == again
    assert first != other


def test_a_corpus_that_exists_is_left_alone_and_half_of_one_is_made_again(folder: str) -> None:
    documents.make_demo_documents(folder, documents=2, seed=4)
    whole = files_under(folder)
    fs, path = fsspec.core.url_to_fs(folder)
    fs.rm_file(f"{path}/truth.jsonl")
    fs.pipe_file(f"{path}/documents/report-0001.pdf", b"half")
    documents.make_demo_documents(folder, documents=2, seed=4)
    assert files_under(folder) == whole
    fs.pipe_file(f"{path}/documents/report-0001.pdf", b"mine")
    documents.make_demo_documents(folder, documents=2, seed=5)
    assert files_under(folder) == {**whole, "documents/report-0001.pdf": b"mine"}


@pytest.mark.parametrize("count", [-1, 501])
def test_there_are_only_so_many_topics(tmp_path: Path, count: int) -> None:
    with pytest.raises(ValueError, match="topics for 500 documents"):
        documents.make_demo_documents(str(tmp_path), documents=count, seed=1)
