"""PDF files written by hand, so that every box, number and byte of them is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LETTER = (0.0, 0.0, 612.0, 792.0)


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page: boxes in points (left, bottom, right, top), drawing operators, and further entries of its dictionary."""

    content: str = ""
    media_box: tuple[float, float, float, float] | None = LETTER
    crop_box: tuple[float, float, float, float] | None = None
    rotate: int = 0
    entries: str = ""


def make_pdf(
    pages: Sequence[Page], *, count: int | None = None, objects: Sequence[str] = (), catalog: str = "", ending: str = ""
) -> bytes:
    """The file's bytes. `count` is what the page tree claims; `objects` are numbered from 4, pages come behind them."""
    first = 4 + len(objects)
    kids = " ".join(f"{first + 2 * i} 0 R" for i in range(len(pages)))
    bodies = [
        f"<< /Type /Catalog /Pages 2 0 R {catalog} >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {len(pages) if count is None else count} >>",
        "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>",
        *objects,
    ]
    for i, page in enumerate(pages):
        bodies.append(_page(page, contents=first + 2 * i + 1))
        bodies.append(stream(page.content))
    return _file(bodies) + ending.encode()


def stream(content: str, entries: str = "") -> str:
    """A stream object's body."""
    return f"<< /Length {len(content.encode('latin-1'))} {entries} >>\nstream\n{content}\nendstream"


def text_line(text: str, x: float, y: float, size: float = 12.0) -> str:
    """Operators that write one line in Helvetica."""
    escaped = text.replace("\\", r"\\").replace("(", r"\(").replace(")", r"\)")
    return f"BT /F1 {size} Tf {x} {y} Td ({escaped}) Tj ET\n"


def rectangle(x: float, y: float, width: float, height: float, colour: tuple[int, int, int]) -> str:
    """Operators that fill a rectangle; (x, y) is its lower left corner."""
    red, green, blue = (level / 255 for level in colour)
    return f"{red:.6f} {green:.6f} {blue:.6f} rg {x} {y} {width} {height} re f\n"


def _page(page: Page, contents: int) -> str:
    boxes = (("MediaBox", page.media_box), ("CropBox", page.crop_box))
    written = " ".join(f"/{name} [{' '.join(map(str, box))}]" for name, box in boxes if box is not None)
    return (
        f"<< /Type /Page /Parent 2 0 R {written} /Rotate {page.rotate} /Contents {contents} 0 R "
        f"/Resources << /Font << /F1 3 0 R >> >> {page.entries} >>"
    )


def _file(bodies: Sequence[str]) -> bytes:
    data = b"%PDF-1.7\n"
    places = []
    for number, body in enumerate(bodies, start=1):
        places.append(len(data))
        data += f"{number} 0 obj\n{body}\nendobj\n".encode("latin-1")
    table = "".join(f"{place:010d} 00000 n \n" for place in places)
    size = len(bodies) + 1
    trailer = f"trailer\n<< /Size {size} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + f"xref\n0 {size}\n0000000000 65535 f \n{table}{trailer}".encode()
