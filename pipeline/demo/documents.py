"""Generated PDF documents whose every sentence and scanned picture is known, and some that cannot be read."""

import io
import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from PIL import Image
from reportlab.lib.pagesizes import A4
from reportlab.lib.pdfencrypt import StandardEncryption
from reportlab.lib.utils import ImageReader, simpleSplit
from reportlab.pdfgen.canvas import Canvas

from pipeline.demo import media, scenes
from pipeline.demo.scenes import Scene
from pipeline.storage import Folder

PageKind = Literal["text", "columns", "scan", "rotated", "empty"]

# Every third document has the empty page as well.
PAGE_KINDS: tuple[PageKind, ...] = ("text", "columns", "scan", "rotated", "empty")
IMAGES = 4
FAILURES = {"broken/empty.pdf": "empty_file", "broken/locked.pdf": "encrypted_document", "broken/cut.pdf": "truncated"}

_KINDS = (
    *("observatory", "lighthouse", "copper mine", "bakery", "library", "railway station", "glass works", "orchard"),
    *("salt market", "ferry", "paper mill", "swimming pool", "town theatre", "bell foundry", "cheese cellar"),
    *("weather station", "botanical garden", "fishing harbour", "clock museum", "brick kiln"),
)
_TOWNS = (
    *("Aldbury", "Brenthaven", "Corvale", "Dunmere", "Eskdale", "Farrowgate", "Glenholm", "Hartsea", "Inverloch"),
    *("Kelstow", "Larkfield", "Marwick", "Northby", "Ostermoor", "Penvale", "Quarrington", "Ravensby", "Stillwater"),
    *("Thornbeck", "Ulverton", "Vennford", "Wexcombe", "Yarrow", "Zellwood", "Ambershaw"),
)
_PEOPLE = ("Ada Moreau", "Bjarne Holt", "Chiara Lombardi", "Dev Anand", "Elif Yilmaz", "Farid Haddad", "Greta Lind")
_COLOURS = ("red", "green", "blue", "yellow", "white", "black", "grey")
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_TREES = ("oaks", "birches", "lime trees", "willows", "cedars", "walnut trees")

# Each says one thing of a topic, so that topic and fact together are said once in all documents.
_FACTS: tuple[Callable[[str, random.Random], str], ...] = (
    lambda topic, rng: f"{topic} was founded in {rng.randint(1650, 1990)} by {rng.choice(_PEOPLE)}.",
    lambda topic, rng: f"The front door of {_inner(topic)} is painted {rng.choice(_COLOURS)}.",
    lambda topic, rng: f"{topic} is closed to visitors every {rng.choice(_WEEKDAYS)}.",
    lambda topic, rng: f"A ticket to {_inner(topic)} costs {rng.randint(2, 40)} crowns.",
    lambda topic, rng: f"{rng.randint(3, 90)} people work at {_inner(topic)} in winter.",
    lambda topic, rng: f"The roof of {_inner(topic)} was last repaired in {rng.randint(1991, 2024)}.",
    lambda topic, rng: f"Behind {_inner(topic)} stand {rng.randint(3, 60)} {rng.choice(_TREES)}.",
    lambda topic, rng: f"{topic} is heated with {rng.choice(('wood', 'gas', 'coal', 'warm springs', 'sunlight'))}.",
    lambda topic, rng: f"A flood reached {rng.randint(20, 190)} centimetres inside {_inner(topic)} long ago.",
    lambda topic, rng: f"School classes may visit {_inner(topic)} free of charge in {rng.choice(('May', 'June'))}.",
    lambda topic, rng: f"The oldest tool kept at {_inner(topic)} weighs {rng.randint(2, 80)} kilograms.",
    lambda topic, rng: f"{rng.choice(_PEOPLE)} has been the director of {_inner(topic)} since the last election.",
)
_SENTENCES_A_PAGE = 4

_PASSWORD = "headrace"
_MARGIN = 64.0  # points, as everything of a page
_LEADING = 16.0
_FONT, _FONT_SIZE = "Helvetica", 11.0
_POINTS_PER_PIXEL = 2.0  # of a scanned scene: 36 dots an inch

Truth = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Page:
    """One page to write: its sentences, or the scene that was scanned."""

    kind: PageKind
    title: str = ""
    sentences: tuple[str, ...] = ()
    scene: Scene | None = None


def make_demo_documents(folder_url: str, *, documents: int, seed: int) -> None:
    """Writes PDFs and images to `documents/` under `folder_url` (any fsspec URL), and lastly `truth.jsonl` beside it.

    Each document is about one topic, in four pages or five: text under a title, two columns, a scanned scene without a
    text layer, text on a page that is turned by 90 degrees, and sometimes an empty page. Beside them `IMAGES` drawn
    scenes as JPEG and PNG, and `FAILURES`, which no reader opens. `truth.jsonl` has an object a line: `id` as a
    listing of `documents/` by page has it, and `sentence`, `caption` or `code`; a sentence is in one page only.

    Equal arguments give equal bytes. Nothing is written when `truth.jsonl` exists, so a first start that was killed
    half-way is made again. Raises ValueError for more documents than there are topics (500).
    """
    topics = [f"The {kind} of {town}" for kind, town in itertools.product(_KINDS, _TOWNS)]
    if not 0 <= documents <= len(topics):
        raise ValueError(f"there are topics for {len(topics)} documents; got {documents}")
    folder = Folder(folder_url)
    if folder.exists("truth.jsonl"):
        return
    random.Random(f"{seed}/topics").shuffle(topics)
    truth: list[Truth] = []
    for number, topic in enumerate(topics[:documents]):
        rng = random.Random(f"{seed}/{topic}")
        pages = list(_plan(topic, number, rng))
        name = f"report-{number:04d}.pdf"
        folder.write_bytes(f"documents/{name}", _pdf(pages, rng))
        truth += _truth(name, pages)
    truth += _write_images(folder, seed)
    truth += _write_failures(folder)
    lines = "".join(json.dumps(row) + "\n" for row in truth)
    folder.write_bytes("truth.jsonl", lines.encode())


def _inner(topic: str) -> str:
    """The topic within a sentence."""
    return topic[0].lower() + topic[1:]


def _plan(topic: str, number: int, rng: random.Random) -> Iterator[_Page]:
    facts = [fact(topic, rng) for fact in _FACTS]
    rng.shuffle(facts)
    left = iter(facts)
    for kind in PAGE_KINDS:
        if kind == "scan":
            yield _Page(kind=kind, scene=rng.choice(scenes.all_scenes("image")))
        elif kind != "empty":
            sentences = tuple(itertools.islice(left, _SENTENCES_A_PAGE))
            yield _Page(kind=kind, title=topic if kind == "text" else "", sentences=sentences)
        elif number % 3 == 0:
            yield _Page(kind=kind)


def _truth(name: str, pages: Sequence[_Page]) -> Iterator[Truth]:
    for number, page in enumerate(pages, start=1):
        id_ = f"{name}#page={number}"
        yield from ({"id": id_, "sentence": sentence} for sentence in page.sentences)
        if page.scene is not None:
            yield {"id": id_, "caption": scenes.caption(page.scene)}


def _write_images(folder: Folder, seed: int) -> Iterator[Truth]:
    rng = random.Random(f"{seed}/images")
    for number, scene in enumerate(rng.sample(scenes.all_scenes("image"), IMAGES)):
        format: media.ImageFormat = "jpeg" if number % 2 == 0 else "png"
        name = f"scene-{number:04d}{media.IMAGE_SUFFIXES[format]}"
        folder.write_bytes(f"documents/{name}", media.encode_image(scenes.draw_image(scene, rng), format, rng))
        yield {"id": name, "caption": scenes.caption(scene)}


def _write_failures(folder: Folder) -> Iterator[Truth]:
    rng = random.Random(0)
    page = _Page(kind="text", title="Not to be read", sentences=("No reader gets as far as this.",))
    whole, locked = _pdf([page], rng), _pdf([page], rng, password=_PASSWORD)
    files = {"broken/empty.pdf": b"", "broken/locked.pdf": locked, "broken/cut.pdf": whole[: len(whole) // 2]}
    for name, data in files.items():
        folder.write_bytes(f"documents/{name}", data)
        yield {"id": name, "code": FAILURES[name]}


def _pdf(pages: Sequence[_Page], rng: random.Random, *, password: str | None = None) -> bytes:
    file = io.BytesIO()
    encryption = None if password is None else StandardEncryption(password, strength=128)
    canvas = Canvas(file, pagesize=A4, invariant=1, encrypt=encryption)  # invariant: no dates, ids from the content
    for page in pages:
        _draw(canvas, page, rng)
        canvas.showPage()
    canvas.save()
    return file.getvalue()


def _draw(canvas: Canvas, page: _Page, rng: random.Random) -> None:
    if page.scene is not None:
        canvas.setPageRotation(0)
        _draw_scan(canvas, page.scene, rng)
        return
    width, height = A4
    if page.kind == "rotated":  # written from the bottom to the top of A4, so that it is upright once A4 is turned
        canvas.translate(width, 0)
        canvas.rotate(90)
        width, height = height, width
    canvas.setPageSize((width, height))  # as it is shown
    canvas.setPageRotation(90 if page.kind == "rotated" else 0)
    top = height - _MARGIN
    if page.title:
        canvas.setFont("Helvetica-Bold", 20)
        canvas.drawString(_MARGIN, top, page.title)
        top -= 3 * _LEADING
    columns = 2 if page.kind == "columns" else 1
    column = (width - _MARGIN * (columns + 1)) / columns
    share = -(-len(page.sentences) // columns)
    for number in range(columns):
        left = _MARGIN + number * (column + _MARGIN)
        _draw_column(canvas, page.sentences[number * share : (number + 1) * share], left, top, column)


def _draw_column(canvas: Canvas, sentences: Sequence[str], left: float, top: float, width: float) -> None:
    text = canvas.beginText(left, top)
    text.setFont(_FONT, _FONT_SIZE, _LEADING)
    for sentence in sentences:
        text.textLines(simpleSplit(sentence, _FONT, _FONT_SIZE, width))
        text.textLine("")
    canvas.drawText(text)


def _draw_scan(canvas: Canvas, scene: Scene, rng: random.Random) -> None:
    pixels = scenes.draw_image(scene, rng)
    height, width = (side * _POINTS_PER_PIXEL for side in pixels.shape[:2])
    canvas.setPageSize((width, height))
    canvas.drawImage(ImageReader(Image.fromarray(pixels)), 0, 0, width, height)
