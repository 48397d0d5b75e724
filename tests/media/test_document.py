"""Pages of PDFs: what is counted, measured, drawn and read, held against pypdf, arithmetic and drawn colours."""

from __future__ import annotations

import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pypdf
import pytest
from media_files import make_image
from pdf_files import LETTER, Page, make_pdf, rectangle, stream, text_line
from pypdf.generic import DictionaryObject, FloatObject, NameObject

from pipeline.config import Config
from pipeline.errors import ItemError, TransientError
from pipeline.media.backend import PAGE_BACKEND
from pipeline.media.budget import TIERS, admit
from pipeline.media.decode import decode_media
from pipeline.media.document import DEFAULT_DPI, page_text, probe_page, read_page_count, render_page
from pipeline.media.probe import probe_media
from pipeline.media.resize import resize_frames
from pipeline.media.sampling import sample_plan
from pipeline.schema import Probe, ResourceVector

RED, GREEN, BLUE, WHITE = (220, 30, 30), (30, 160, 50), (40, 70, 225), (255, 255, 255)


def probe(data: bytes, page: int = 0, dpi: float = DEFAULT_DPI) -> Probe:
    return probe_page(data, page, num_bytes=len(data), dpi=dpi, name="report.pdf")


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(ItemError) as caught:
        call()
    return caught.value.stage, caught.value.code


def encrypted(data: bytes, user_password: str) -> bytes:
    writer = pypdf.PdfWriter(clone_from=io.BytesIO(data))
    writer.encrypt(user_password, owner_password="owner", algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


THREE = make_pdf([Page(content=text_line(f"This is page {n}.", 72, 700)) for n in (1, 2, 3)])


# ---- counts and sizes


@pytest.mark.parametrize("num_pages", [1, 3, 40])
def test_pages_are_counted(num_pages: int) -> None:
    data = make_pdf([Page() for _ in range(num_pages)])
    assert read_page_count(data, "a.pdf") == num_pages == len(pypdf.PdfReader(io.BytesIO(data)).pages)


@pytest.mark.parametrize(
    ("page", "dpi", "width", "height"),
    [
        (Page(), 72.0, 612, 792),
        (Page(), 144.0, 1224, 1584),
        (Page(media_box=(0, 0, 595.276, 841.89)), 144.0, 1191, 1684),  # A4: 1190.552 x 1683.78
        (Page(media_box=(0, 0, 595.276, 841.89), rotate=90), 144.0, 1684, 1191),
        (Page(rotate=180), 72.0, 612, 792),
        (Page(rotate=-90), 72.0, 792, 612),
        (Page(media_box=(100, 200, 400, 300)), 72.0, 300, 100),
        (Page(crop_box=(0, 0, 306, 792)), 72.0, 306, 792),
        (Page(crop_box=(100, 100, 200, 400), rotate=270), 36.0, 150, 50),
        (Page(crop_box=(-500, -500, 306, 5000)), 72.0, 306, 792),  # what lies outside MediaBox does not count
        (Page(media_box=(0, 0, 1, 1)), 10.0, 1, 1),  # 0.14 pixels
    ],
)
def test_sizes_are_those_of_the_picture(page: Page, dpi: float, width: int, height: int) -> None:
    data = make_pdf([Page(media_box=(0, 0, 5, 5)), page])
    assert probe(data, 1, dpi) == Probe(
        modality="page", container="pdf", codec="pdf", width=width, height=height, num_bytes=len(data)
    )


@pytest.mark.parametrize("rotate", [0, 90])
def test_sizes_agree_with_another_reader(rotate: int) -> None:
    data = make_pdf([Page(media_box=(10, 20, 333.3, 444.4), rotate=rotate)])
    [page] = pypdf.PdfReader(io.BytesIO(data)).pages
    sides = (float(page.mediabox.width), float(page.mediabox.height))
    width, height = sides if page.rotation == 0 else sides[::-1]
    facts = probe(data, dpi=300.0)
    assert (facts.width, facts.height) == (round(width * 300 / 72), round(height * 300 / 72))


def test_a_page_that_names_no_size_is_a_letter() -> None:
    facts = probe(make_pdf([Page(media_box=None)]), dpi=72.0)
    assert (facts.width, facts.height) == (LETTER[2], LETTER[3])


def test_a_poster_is_refused_by_the_budget_before_it_is_drawn() -> None:
    facts = probe(make_pdf([Page(media_box=(0, 0, 200 * 72, 200 * 72))]))
    assert (facts.width, facts.height) == (28_800, 28_800)  # 200 inches x 144
    vector = ResourceVector(
        num_bytes=facts.num_bytes,
        pixels_per_frame=facts.width * facts.height,
        num_frames=1,
        duration_seconds=0.0,
        feature_tokens=1,
    )
    with pytest.raises(ItemError, match="over_budget_pixels: 829,440,000"):
        admit(vector, TIERS["default"])


def test_the_configured_resolution_is_the_stated_one() -> None:
    raw = {"job": "caption_videos", "input": "m.jsonl", "model": "demo:captioner"}
    assert Config.model_validate(raw).document.dpi == DEFAULT_DPI


# ---- verdicts


def test_a_document_behind_a_password() -> None:
    data = encrypted(THREE, "secret")
    assert refused(lambda: read_page_count(data, "a.pdf")) == ("probe", "encrypted_document")
    assert refused(lambda: probe(data)) == ("probe", "encrypted_document")
    assert refused(lambda: render_page(data, 0, (8, 8))) == ("decode", "encrypted_document")


def test_a_document_that_only_its_owner_may_change_is_read() -> None:
    data = encrypted(THREE, "")
    assert read_page_count(data, "a.pdf") == 3
    assert page_text(data, 1) == "This is page 2."


def test_a_document_without_pages() -> None:
    data = make_pdf([])
    assert refused(lambda: read_page_count(data, "a.pdf")) == ("probe", "empty_document")
    assert refused(lambda: probe(data)) == ("probe", "empty_document")


@pytest.mark.parametrize("fraction", [0.02, 0.1, 0.3, 0.5])
def test_a_document_cut_off(fraction: float) -> None:
    data = make_pdf([Page(content=text_line("x" * 80, 72, 700 - 20 * n)) for n in range(20)])
    cut = data[: int(len(data) * fraction)]
    assert refused(lambda: read_page_count(cut, "a.pdf")) == ("probe", "truncated")
    assert refused(lambda: probe(cut)) == ("probe", "truncated")


def test_a_wrong_table_of_objects_is_mended() -> None:
    start = THREE.rindex(b"startxref")
    for broken in (
        THREE[:start] + b"startxref\n99999999\n%%EOF\n",
        THREE.replace(b"xref\n0 ", b"xxxx\n0 "),
        b"\r\nsome rubbish\r\n" + THREE,
    ):
        assert read_page_count(broken, "a.pdf") == 3
        assert page_text(broken, 2) == "This is page 3."


@pytest.mark.parametrize(
    ("found", "replaced", "code"),
    [
        (b"/Root 1 0 R", b"/Toor 1 0 R", "unreadable_document"),
        (b"/Catalog /Pages 2 0 R", b"/Catalog /Sages 2 0 R", "empty_document"),
    ],
)
def test_a_document_whose_root_is_gone(found: bytes, replaced: bytes, code: str) -> None:
    data = THREE.replace(found, replaced)
    assert refused(lambda: read_page_count(data, "a.pdf")) == ("probe", code)


@pytest.mark.parametrize("count", [4, 1_000_000])
def test_a_document_that_promises_more_pages_than_it_has(count: int) -> None:
    data = make_pdf([Page(), Page(), Page()], count=count)
    assert refused(lambda: read_page_count(data, "a.pdf")) == ("probe", "unreadable_document")
    assert refused(lambda: probe(data, count - 1)) == ("probe", "unreadable_document")
    assert refused(lambda: render_page(data, count - 1, (8, 8))) == ("decode", "unreadable_document")


def test_a_page_behind_the_last() -> None:
    assert refused(lambda: probe(THREE, 3)) == ("probe", "no_such_page")
    assert refused(lambda: render_page(THREE, 3, (8, 8))) == ("decode", "no_such_page")
    assert refused(lambda: page_text(THREE, 3)) == ("decode", "no_such_page")


@pytest.mark.parametrize("data", [b"", b"%PDF-1.7", b"%PDF-1.7\n%%EOF\n", bytes(4096), make_image("PNG")])
def test_what_is_no_document(data: bytes) -> None:
    stage, code = refused(lambda: read_page_count(data, "a.pdf"))
    assert (stage, code) == ("probe", "unreadable_document" if b"%%EOF" in data else "truncated")


def test_a_message_names_the_document() -> None:
    with pytest.raises(ItemError, match=r"^probe: empty_document: s3://b/a\.pdf: "):
        read_page_count(make_pdf([]), "s3://b/a.pdf")


@pytest.mark.parametrize("fraction", [k / 25 for k in range(25)])
def test_no_damage_raises_anything_but_an_item_error(fraction: float) -> None:
    place = int(len(THREE) * fraction)
    damaged = THREE[:place] + bytes(40) + THREE[place + 40 :]
    for call in (lambda: probe(damaged, 2), lambda: render_page(damaged, 2, (20, 20)), lambda: page_text(damaged, 2)):
        try:
            call()
        except ItemError as error:
            assert error.stage in ("probe", "decode")


# ---- pictures


def colour(pixels: np.ndarray, x: float, y: float) -> tuple[int, ...]:
    """At (x, y) as shares of width and height, from the top left."""
    height, width, _ = pixels.shape
    return tuple(int(level) for level in pixels[int(y * height), int(x * width)])


CORNERS = rectangle(0, 692, 100, 100, RED) + rectangle(512, 692, 100, 100, GREEN) + rectangle(0, 0, 100, 100, BLUE)


@pytest.mark.parametrize("size", [(792, 612), (1584, 1224), (99, 76), (64, 256), (200, 40)])
def test_colours_are_where_they_were_drawn(size: tuple[int, int]) -> None:
    pixels = render_page(make_pdf([Page(content=CORNERS)]), 0, size)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (*size, 3))
    assert [colour(pixels, 0.05, 0.05), colour(pixels, 0.95, 0.05)] == [RED, GREEN]
    assert [colour(pixels, 0.05, 0.95), colour(pixels, 0.95, 0.95)] == [BLUE, WHITE]
    assert colour(pixels, 0.5, 0.5) == WHITE


@pytest.mark.parametrize("rotate, turns", [(90, 1), (180, 2), (270, 3)])
def test_a_turned_page_is_the_picture_turned_clockwise(rotate: int, turns: int) -> None:
    upright = render_page(make_pdf([Page(content=CORNERS)]), 0, (792, 612))
    size = (612, 792) if turns % 2 else (792, 612)
    turned = render_page(make_pdf([Page(content=CORNERS, rotate=rotate)]), 0, size)
    assert np.array_equal(turned, np.rot90(upright, -turns))


def test_what_is_cropped_is_not_shown() -> None:
    whole = render_page(make_pdf([Page(content=CORNERS)]), 0, (792, 612))
    cropped = render_page(make_pdf([Page(content=CORNERS, crop_box=(50, 642, 350, 742))]), 0, (100, 300))
    assert np.array_equal(cropped, whole[50:150, 50:350])


def test_an_empty_page_is_white() -> None:
    assert (render_page(make_pdf([Page()]), 0, (30, 20)) == 255).all()


def test_annotations_are_drawn() -> None:
    stamp = stream(rectangle(0, 0, 100, 100, RED), "/Type /XObject /Subtype /Form /BBox [0 0 100 100]")
    annotation = "<< /Type /Annot /Subtype /Stamp /F 4 /Rect [0 0 306 396] /AP << /N 4 0 R >> >>"
    data = make_pdf([Page(entries=f"/Annots [{annotation}]")], objects=[stamp])
    pixels = render_page(data, 0, (792, 612))
    assert (colour(pixels, 0.25, 0.75), colour(pixels, 0.75, 0.75)) == (RED, WHITE)


def test_what_was_filled_into_a_form_is_drawn() -> None:
    shown = stream(rectangle(0, 0, 100, 100, BLUE), "/Type /XObject /Subtype /Form /BBox [0 0 100 100]")
    field = (
        "<< /Type /Annot /Subtype /Widget /FT /Tx /T (name) /V (x) /F 4 /Rect [306 396 612 792] /AP << /N 4 0 R >> >>"
    )
    data = make_pdf(
        [Page(entries="/Annots [5 0 R]")], objects=[shown, field], catalog="/AcroForm << /Fields [5 0 R] >>"
    )
    pixels = render_page(data, 0, (792, 612))
    assert (colour(pixels, 0.75, 0.25), colour(pixels, 0.25, 0.25)) == (BLUE, WHITE)


def test_a_page_is_drawn_the_same_again_and_beside_others() -> None:
    data = make_pdf([Page(content=CORNERS + text_line(f"Page {n}", 72, 400, size=60)) for n in range(6)])
    once = [render_page(data, page, (396, 306)) for page in range(6)]
    with ThreadPoolExecutor(6) as pool:
        again = list(pool.map(lambda page: render_page(data, page % 6, (396, 306)), range(24)))
    assert all(np.array_equal(once[i % 6], pixels) for i, pixels in enumerate(again))
    assert not np.array_equal(once[0], once[1])


def test_the_back_end_names_what_draws() -> None:
    assert PAGE_BACKEND.startswith("pdfium-") and PAGE_BACKEND.removeprefix("pdfium-").isdigit()


# ---- text


def test_text_comes_in_the_order_of_its_writing() -> None:
    left = "".join(text_line(f"left {n}", 72, 700 - 20 * n) for n in range(3))
    right = "".join(text_line(f"right {n}", 350, 700 - 20 * n) for n in range(3))
    data = make_pdf([Page(content=left + right)])
    assert page_text(data, 0) == "left 0\nleft 1\nleft 2\nright 0\nright 1\nright 2"
    other = pypdf.PdfReader(io.BytesIO(data)).pages[0].extract_text()
    assert page_text(data, 0).split() == other.split()


@pytest.mark.parametrize("rotate", [0, 90, 180, 270])
@pytest.mark.parametrize("turned", ["1 0 0 1 0 0", "0 1 -1 0 612 0", "-1 0 0 -1 612 792", "0 -1 1 0 0 792"])
def test_text_that_stands_on_its_side_keeps_its_order(turned: str, rotate: int) -> None:
    lines = text_line("One line,", 72, 500) + text_line("and another (last) one.", 72, 480)
    data = make_pdf([Page(content=f"{turned} cm\n{lines}", rotate=rotate)])
    assert page_text(data, 0) == "One line,\nand another (last) one."


def test_a_page_without_a_text_layer_has_none() -> None:
    assert page_text(make_pdf([Page(content=CORNERS)]), 0) == ""
    assert page_text(make_pdf([Page()]), 0) == ""


def test_parted_words_are_joined() -> None:
    content = text_line("an ex-", 72, 700) + text_line("ample of it - and no-", 72, 685)
    assert page_text(make_pdf([Page(content=content)]), 0) == "an example of it - and no-"


def test_what_is_not_seen_is_left_out_and_every_letter_is_kept() -> None:
    """Codes A to E stand for an emoji, a soft hyphen, NUL, a byte order mark, and a letter outside of Latin."""
    meant = "<41> <D83DDE00> <42> <00AD> <43> <0000> <44> <FEFF> <45> <0416>"
    table = f"1 begincodespacerange <00> <FF> endcodespacerange 5 beginbfchar {meant} endbfchar"
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 4 0 R >>"
    objects = [stream(f"begincmap {table} endcmap"), font]
    page = Page(content=text_line("CxAxBxCxDxExC", 72, 700).replace("/F1", "/F2"))
    data = make_pdf([page], objects=objects).replace(b"/F1 3 0 R", b"/F2 5 0 R")
    assert page_text(data, 0) == "x\N{GRINNING FACE}xxxx\N{CYRILLIC CAPITAL LETTER ZHE}x"


def test_letters_beyond_ascii() -> None:
    content = text_line("Zwölf Öfen, naïve café", 72, 700)
    assert page_text(make_pdf([Page(content=content)]), 0) == "Zwölf Öfen, naïve café"


# ---- files


class Remote(io.RawIOBase):
    """A file in storage: counts what is read, and fails from the `fails_at`-th read on."""

    def __init__(self, data: bytes, fails_at: int | None = None) -> None:
        super().__init__()
        self.num_bytes = self.num_reads = 0
        self._file, self._fails_at = io.BytesIO(data), fails_at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def read(self, size: int = -1) -> bytes:
        self.num_reads += 1
        if self._fails_at is not None and self.num_reads >= self._fails_at:
            raise TransientError("throttled")
        data = self._file.read(size)
        self.num_bytes += len(data)
        return data


def test_a_large_document_is_not_read_whole_for_its_count() -> None:
    image = stream("x" * 2_000_000)
    data = make_pdf([Page(content=text_line("a", 72, 72)), Page()], objects=[image])
    file = Remote(data)
    assert read_page_count(file, "a.pdf") == 2
    assert file.num_bytes < 100_000
    assert probe_page(file, 0, num_bytes=len(data), dpi=72.0, name="a.pdf").width == 612
    assert np.array_equal(render_page(file, 0, (80, 60)), render_page(data, 0, (80, 60)))
    assert page_text(file, 0) == "a"
    assert not file.closed


@pytest.mark.parametrize("fails_at", [1, 2, 4, 7])
def test_storage_that_fails_is_not_taken_for_a_damaged_document(fails_at: int) -> None:
    with pytest.raises(TransientError, match="throttled"):
        read_page_count(Remote(THREE, fails_at), "a.pdf")


# ---- as media


def media(data: bytes, **options: object) -> Probe:
    return probe_media(io.BytesIO(data), num_bytes=len(data), name="item", **{"declared": None, **options})  # type: ignore[arg-type]


def test_a_page_from_probe_to_frames() -> None:
    data = make_pdf([Page(), Page(content=CORNERS, media_box=(0, 0, 612, 792))])
    facts = media(data, declared="page", page=1, dpi=36.0)
    assert (facts.modality, facts.width, facts.height) == ("page", 306, 396)
    plan = sample_plan(facts, Config.model_validate({"job": "caption_videos", "input": "m", "model": "m"}).sampling)
    assert plan.pts_seconds == (0.0,)
    shown = decode_media(io.BytesIO(data), facts, plan, None, page=1)
    assert (shown.pixels.shape, shown.pts_seconds) == ((1, 396, 306, 3), (0.0,))
    fitted = decode_media(io.BytesIO(data), facts, plan, (112, 84), page=1)
    assert np.array_equal(fitted.pixels, resize_frames(render_page(data, 1, (396, 306))[None], (112, 84)))
    assert colour(fitted.pixels[0], 0.05, 0.05) == RED


def test_a_document_is_no_medium_where_a_page_or_another_is_expected() -> None:
    assert refused(lambda: media(THREE, declared="image")) == ("probe", "modality_mismatch")
    assert refused(lambda: media(THREE, declared="video")) == ("probe", "modality_mismatch")
    assert refused(lambda: media(make_image("PNG"), declared="page", page=0)) == ("probe", "modality_mismatch")
    for declared in (None, "page"):
        assert refused(lambda declared=declared: media(THREE, declared=declared)) == ("probe", "unknown_format")


def test_a_document_may_begin_with_rubbish() -> None:
    assert media(b"\xef\xbb\xbf\r\n" + THREE, declared="page", page=2).modality == "page"


def test_inherited_boxes_count() -> None:
    writer = pypdf.PdfWriter()
    writer.add_blank_page(300, 200)
    page = writer.pages[0]
    tree = writer.root_object["/Pages"].get_object()
    assert isinstance(tree, DictionaryObject)
    tree[NameObject("/MediaBox")] = page.pop(NameObject("/MediaBox"))
    tree[NameObject("/Rotate")] = FloatObject(90)
    file = io.BytesIO()
    writer.write(file)
    facts = probe(file.getvalue(), dpi=72.0)
    assert (facts.width, facts.height) == (200, 300)
