"""Media at https:// URLs through every stage: fetched, probed by range, decoded, and each refusal in quarantine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.config import Config
from tests.media.media_files import Recipe, make_image, make_video
from tests.media.web_server import Web, make_authority
from tests.stages.line import Line

REFUSED = {
    "loopback": ("https://127.0.0.1:{port}/a.png", "url_refused"),
    "plain": ("http://localhost:{port}/a.png", "url_refused"),
    "metadata": ("https://localhost:{port}/metadata.png", "url_refused"),
    "circle": ("https://localhost:{port}/circle.png", "too_many_redirects"),
    "page": ("https://localhost:{port}/page.png", "wrong_content_type"),
    "absent": ("https://localhost:{port}/absent.png", "not_found"),
    "large": ("https://localhost:{port}/large.mp4", "too_large"),
}


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    context, authority = make_authority(tmp_path_factory.mktemp("authority"), "localhost")
    with pytest.MonkeyPatch.context() as patch, Web(context) as server:
        patch.setenv("SSL_CERT_FILE", authority)
        server.hold("/a.png", make_image("PNG"), ETag='"a"', Content_Type="image/png")
        server.hold("/b.mp4", make_video(Recipe(num_frames=45)), ETag='"b"', Content_Type="video/mp4")
        server.hold("/no-ranges.png", make_image("PNG"), ranges=False)
        server.hold("/large.mp4", bytes(3 * 2**20), ETag='"c"')
        server.hold("/page.png", b"<html></html>", Content_Type="text/html")
        server.redirect("/moved.png", "/a.png")
        server.redirect("/metadata.png", "https://169.254.169.254/latest/meta-data/")
        server.redirect("/circle.png", "/circle.png")
        yield server


def configured(make_config: Callable[..., Config], manifest: Path, web: Web) -> Config:
    return make_config(
        manifest,
        sources={"internal_domains": ["localhost"], "allowed_ports": [web.port]},
        budget={"limits": {"max_bytes": 2 * 2**20}},
        decode={"max_inline_bytes": 1024},  # so that the clip is probed by range
        store={"reuse": True},
    )


def test_urls_go_through_every_stage(
    web: Web, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    good = {name: web.url(f"/{name}") for name in ("a.png", "b.mp4", "moved.png", "no-ranges.png")}
    refused = {name: uri.format(port=web.port) for name, (uri, _) in REFUSED.items()}
    rows = [{"id": name, "uri": uri} for name, uri in {**good, **refused}.items()]
    line = Line(configured(make_config, write_manifest(rows), web))
    found = {row["id"]: row["code"] for row in line.rows}
    assert found == {**dict.fromkeys(good), **{name: code for name, (_, code) in REFUSED.items()}}
    assert all(row["text"] for row in line.rows if row["status"] == "ok")
    # The three pictures are the same bytes, and the clip's header was read before the whole of it.
    assert (line.count("encodes"), "bytes=0-0" in {headers.get("range") for _, headers in web.asked}) == (2, True)


def test_a_known_url_is_not_fetched_again(
    web: Web, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    manifest = write_manifest([{"id": "b", "video": web.url("/b.mp4")}])
    config = configured(make_config, manifest, web)
    assert Line(config).count("fetches") == 2  # its header, and the whole
    again = Line(config.model_copy(update={"prompt": "What colour is it?"}))
    assert (again.count("fetches"), again.count("encodes")) == (0, 0)


def test_local_media_outside_the_roots_are_quarantined(
    tmp_path: Path, make_config: Callable[..., Config], write_manifest: Callable[..., Path]
) -> None:
    for folder in ("in", "out"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.png").write_bytes(make_image("PNG"))
    rows = [{"id": folder, "uri": f"{folder}/a.png"} for folder in ("in", "out")]
    line = Line(make_config(write_manifest(rows), sources={"roots": [str(tmp_path / "in")]}))
    assert {row["id"]: row["code"] for row in line.rows} == {"in": None, "out": "path_refused"}


def test_the_policy_is_printed(tmp_path: Path, make_config: Callable[..., Config]) -> None:
    config = tmp_path / "run.json"
    config.write_text(json.dumps(make_config("x").model_dump(mode="json", exclude_none=True)))
    command = [sys.executable, "-m", "jobs.cli", "limits", str(config), "--set", "sources.internal_domains=[a.example]"]
    program = f"import sys; sys.argv = {command[2:]!r}; from jobs.cli import main; main()"
    printed = json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert printed["sources"]["internal_domains"] == ["a.example"]
    assert (printed["sources"]["http"], printed["sources"]["roots"], printed["max_frames"]) == (False, [], 256)
    assert printed["sources"]["max_bytes"] == printed["max_bytes"] == 512 * 2**20
