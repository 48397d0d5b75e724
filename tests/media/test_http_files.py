"""Objects at URLs, against real servers on loopback: what is fetched, and every way in which that is refused."""

from __future__ import annotations

import contextlib
import hashlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ItemError, TransientError
from pipeline.media.http_files import HttpFiles, UnavailableError
from pipeline.media.source import FetchCounter, open_source, read_source, stat_source
from pipeline.media.url_policy import SourcePolicy
from pipeline.retry import retry
from pipeline.schema import MediaItem
from tests.media.web_server import Handler, Web, make_authority

CONTENT = bytes(range(256)) * 8192 + b"end"  # 2 MB: several blocks, the last one not whole
NAMES = ("localhost", "media.test")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Web]:
    context, authority = make_authority(tmp_path_factory.mktemp("authority"), *NAMES)
    with pytest.MonkeyPatch.context() as patch, Web(context) as server:
        patch.setenv("SSL_CERT_FILE", authority)
        yield server


@pytest.fixture(autouse=True)
def forget(web: Web) -> None:
    web.answers.clear()
    web.asked.clear()
    web.clients.clear()


@pytest.fixture
def policy(web: Web) -> SourcePolicy:
    return SourcePolicy(internal_domains=NAMES, allowed_ports=(web.port,), max_bytes=4 * 2**20)


@pytest.fixture
def make_files(policy: SourcePolicy) -> Iterator[Callable[..., HttpFiles]]:
    """Clients under `policy` with changes; `addresses` are what names resolve to, an answer each time."""
    made: list[HttpFiles] = []

    def make(addresses: list[list[str]] | None = None, **changes: Any) -> HttpFiles:
        answers = iter(addresses or [])

        async def lookup(host: str, port: int) -> list[str]:
            return next(answers)

        made.append(HttpFiles(replace(policy, **changes), None if addresses is None else lookup))
        return made[-1]

    yield make
    for files in made:
        files.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("random.uniform", lambda low, high: 0.0)


def refusal(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(ItemError) as caught:
        call()
    assert caught.value.stage == "fetch"
    return caught.value.code, caught.value.message


def test_whole_objects_and_ranges_through_sources(web: Web, policy: SourcePolicy) -> None:
    item = MediaItem(uri=web.hold("/clip.mp4", CONTENT, ETag='"v1"', Content_Type="video/mp4"))
    facts = stat_source(item, policy)
    assert (facts.num_bytes, facts.source_id) == (len(CONTENT), f"etag:{item.uri}:v1:{len(CONTENT)}")
    counter = FetchCounter()
    assert read_source(item, counter, policy) == CONTENT
    assert counter == FetchCounter(fetches=1, bytes_fetched=len(CONTENT))
    web.asked.clear()
    counter = FetchCounter()
    with open_source(item, counter, policy) as file:
        file.seek(-100, 2)
        assert file.read() == CONTENT[-100:]
        file.seek(10)
        assert file.read(20) == CONTENT[10:30]
    assert counter == FetchCounter(fetches=1, bytes_fetched=120)
    ranges = [headers["range"] for _, headers in web.asked]
    assert ranges == [
        "bytes=0-0",
        f"bytes={3 * 2**19}-{2**21 - 1}",
        f"bytes={2**21}-{2**21 + 2}",
        f"bytes=0-{2**19 - 1}",
    ]
    assert [headers.get("if-range") for _, headers in web.asked] == [None, *3 * ['"v1"']]
    assert {headers["accept-encoding"] for _, headers in web.asked} == {"identity"}


def test_connections_are_used_again(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    files, url = make_files(), web.hold("/a.jpg", CONTENT, ETag='"v1"')
    for _ in range(3):
        files.look(url)
        files.read(url)
    assert (len(web.asked), len(web.clients)) == (6, 1)


def test_only_so_many_connections_a_host(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def slow(handler: Handler) -> None:
        time.sleep(0.02)
        handler.reply_object(b"12345")

    web.answers["/slow.jpg"] = slow
    files = make_files()
    with ThreadPoolExecutor(24) as pool:
        assert set(pool.map(lambda _: files.read(web.url("/slow.jpg")), range(48))) == {b"12345"}
    assert len(web.clients) == 8


@pytest.mark.parametrize(
    "headers, source_id",
    [
        ({"ETag": '"v1"'}, "etag:{url}:v1:2097155"),
        ({"ETag": 'W/"v1"', "Last_Modified": "Tue, 01 Dec 2026 00:00:00 GMT"}, "object:{url}:2097155:Tue, 01 Dec 2026"),
        ({"ETag": 'W/"v1"'}, f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"),
        ({}, f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"),
    ],
)
@pytest.mark.parametrize("ranges", [True, False])
def test_what_identifies_an_object(
    web: Web, make_files: Callable[..., HttpFiles], headers: dict[str, str], source_id: str, ranges: bool
) -> None:
    url = web.hold("/a.jpg", CONTENT, ranges=ranges, **headers)
    num_bytes, found = make_files().look(url)
    assert num_bytes == len(CONTENT)
    assert found.startswith(source_id.format(url=url))


def test_a_server_without_ranges_is_read_whole_once(web: Web, policy: SourcePolicy) -> None:
    item = MediaItem(uri=web.hold("/a.mp4", CONTENT, ranges=False, ETag='"v1"'))
    with open_source(item, FetchCounter(), policy) as file:
        file.seek(100)
        assert file.read(5) == CONTENT[100:105]
        file.seek(-5, 2)
        assert file.read(5) == CONTENT[-5:]
    assert [headers.get("range") for _, headers in web.asked] == ["bytes=0-0", None]


@pytest.mark.parametrize("headers", [{"ETag": '"v2"'}, {"ETag": '"v2"', "has_if_range": "no"}, {}])
def test_an_object_that_changes_while_it_is_read(web: Web, policy: SourcePolicy, headers: dict[str, str]) -> None:
    heeds = headers.pop("has_if_range", None) is None
    item = MediaItem(uri=web.hold("/a.mp4", CONTENT, **({"ETag": '"v1"'} if headers else {})))
    with open_source(item, FetchCounter(), policy) as file:
        file.read(10)

        def other(handler: Handler) -> None:
            if not heeds:
                del handler.headers["If-Range"]
            handler.reply_object(CONTENT + b"!", **headers)

        web.answers["/a.mp4"] = other
        file.seek(-10, 2)
        assert refusal(file.read)[0] == "content_mismatch"


def test_empty_objects(web: Web, policy: SourcePolicy) -> None:
    for ranges in (True, False):
        item = MediaItem(uri=web.hold("/empty.jpg", b"", ranges=ranges, ETag='"0"'))
        assert refusal(lambda item=item: stat_source(item, policy))[0] == "empty_file"
        assert refusal(lambda item=item: read_source(item, FetchCounter(), policy))[0] == "empty_file"


@pytest.mark.parametrize(
    "status, code",
    [
        (404, "not_found"),
        (410, "not_found"),
        (401, "access_denied"),
        (403, "access_denied"),
        (451, "access_denied"),
        (400, "unexpected_answer"),
        (204, "unexpected_answer"),
        (300, "unexpected_answer"),
        (304, "unexpected_answer"),
        (302, "unexpected_answer"),  # without a Location
        (501, "unexpected_answer"),
        (206, "unexpected_answer"),  # without a Content-Range
        (416, "unexpected_answer"),
    ],
)
def test_answers_without_the_object(web: Web, policy: SourcePolicy, status: int, code: str) -> None:
    web.answers["/a.jpg"] = lambda handler: handler.reply(status)
    item = MediaItem(uri=web.url("/a.jpg"))
    for call in (
        stat_source,
        lambda i, p: read_source(i, FetchCounter(), p),
        lambda i, p: open_source(i, FetchCounter(), p),
    ):
        assert refusal(lambda call=call: call(item, policy))[0] == code
    assert len(web.asked) == 3  # and none again


@pytest.mark.parametrize(
    "said", ["bytes 5-5/10", "bytes 0-0/*", "bytes */5", "bytes 0-0/99999999999999999999", "items 0-0/5", "bytes 0-0/0"]
)
def test_ranges_that_make_no_sense(web: Web, make_files: Callable[..., HttpFiles], said: str) -> None:
    web.answers["/a.jpg"] = lambda handler: handler.reply(206, b"x", Content_Range=said)
    assert refusal(lambda: make_files().look(web.url("/a.jpg")))[0] == "unexpected_answer"


@pytest.mark.parametrize(
    "headers",
    [
        {"Content_Type": "text/html"},
        {"Content_Type": "application/json; charset=utf-8"},
        {"Content_Type": "image/jpeg", "Content_Encoding": "gzip"},
        {"Content_Encoding": "br"},
    ],
)
def test_what_is_no_media(web: Web, make_files: Callable[..., HttpFiles], headers: dict[str, str]) -> None:
    url = web.hold("/a.jpg", b"12345", **headers)
    files = make_files()
    for call in (files.look, files.read):
        assert refusal(lambda call=call: call(url))[0] == "wrong_content_type"


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_what_may_pass_is_tried_again(web: Web, policy: SourcePolicy, quick: None, status: int) -> None:
    outcomes = iter([status, status])

    def answer(handler: Handler) -> None:
        failing = next(outcomes, None)
        handler.reply_object(CONTENT) if failing is None else handler.reply(failing)

    web.answers["/a.jpg"] = answer
    assert read_source(MediaItem(uri=web.url("/a.jpg")), FetchCounter(), policy) == CONTENT
    assert len(web.asked) == 3


def test_a_server_that_stays_down_is_its_items_fault(web: Web, policy: SourcePolicy, quick: None) -> None:
    web.answers["/a.jpg"] = lambda handler: handler.reply(503)
    code, message = refusal(lambda: read_source(MediaItem(uri=web.url("/a.jpg")), FetchCounter(), policy))
    assert (code, "HTTP 503" in message, len(web.asked)) == ("unavailable", True, 5)


@pytest.mark.parametrize(
    "said, least, most", [("7", 7, 7), ("86400", 30, 30), ("soon", 0, 0), ("-5", 0, 0), ("DATE", 15, 20)]
)
def test_a_server_says_when_to_ask_again(
    web: Web, make_files: Callable[..., HttpFiles], quick: None, said: str, least: float, most: float
) -> None:
    from email.utils import formatdate

    text = formatdate(time.time() + 20, usegmt=True) if said == "DATE" else said
    web.answers["/a.jpg"] = lambda handler: handler.reply(429, Retry_After=text)
    files, pauses = make_files(), []

    def meaning(error: Exception) -> Exception:
        assert isinstance(error, UnavailableError)
        return TransientError(str(error), error.after_seconds)

    with pytest.raises(TransientError):
        retry(lambda: files.read(web.url("/a.jpg")), scheme="https", meaning=meaning, sleep=pauses.append)
    assert len(pauses) == 4
    assert all(least <= pause <= most for pause in pauses)


def cut_off(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(len(CONTENT)))
    handler.end_headers()
    handler.wfile.write(CONTENT[: len(CONTENT) // 2])
    handler.close_connection = True


def hang_up(handler: Handler) -> None:
    handler.connection.close()
    handler.close_connection = True


@pytest.mark.parametrize("fault", [cut_off, hang_up])
def test_connections_that_break(web: Web, policy: SourcePolicy, quick: None, fault: Callable[[Handler], None]) -> None:
    faults = iter([fault])
    web.answers["/a.jpg"] = lambda handler: next(faults, lambda handler: handler.reply_object(CONTENT))(handler)
    assert read_source(MediaItem(uri=web.url("/a.jpg")), FetchCounter(), policy) == CONTENT
    web.answers["/a.jpg"] = fault
    assert refusal(lambda: read_source(MediaItem(uri=web.url("/a.jpg")), FetchCounter(), policy))[0] == "unavailable"


def nonsense(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 \xff\xfe\r\n\r\n")
    handler.close_connection = True


def test_a_message_is_text_without_a_signature(web: Web, policy: SourcePolicy, quick: None) -> None:
    for fault in (nonsense, cut_off, hang_up, lambda handler: handler.reply(503)):
        web.answers["/a.jpg"] = fault
        item = MediaItem(uri=web.url("/a.jpg?signature=secret"))
        code, message = refusal(lambda item=item: read_source(item, FetchCounter(), policy))
        assert (code, "secret" in message) == ("unavailable", False)
        assert message.encode().startswith(b"https://localhost")


def endless(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    while True:
        handler.wfile.write(b"10000\r\n" + bytes(65536) + b"\r\n")


def test_an_object_that_states_too_much_is_not_read(web: Web, policy: SourcePolicy) -> None:
    def claim(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(2**40))
        handler.send_header("ETag", '"1"')
        handler.end_headers()

    web.answers["/a.jpg"] = claim
    web.answers["/b.jpg"] = lambda handler: handler.reply(206, b"x", Content_Range=f"bytes 0-0/{2**40}", ETag='"1"')
    for path in ("/a.jpg", "/b.jpg"):
        item = MediaItem(uri=web.url(path))
        code, message = refusal(lambda item=item: stat_source(item, policy))
        assert (code, f"{2**40:,}" in message) == ("too_large", True)
    assert refusal(lambda: read_source(MediaItem(uri=web.url("/a.jpg")), FetchCounter(), policy))[0] == "too_large"


def test_an_object_that_states_nothing_is_counted(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    web.answers["/a.jpg"] = endless
    files = make_files()
    for call in (files.look, files.read):
        assert refusal(lambda call=call: call(web.url("/a.jpg")))[0] == "too_large"


def test_one_byte_that_does_not_end(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    def answer(handler: Handler) -> None:
        handler.reply(206, bytes(2**20), Content_Range="bytes 0-0/2097152")

    web.answers["/a.jpg"] = answer
    assert refusal(lambda: make_files().look(web.url("/a.jpg")))[0] == "too_large"


def dripping(handler: Handler, seconds: float) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not handler.server.web.ending.wait(seconds):
        handler.wfile.write(b".")


def dripping_headers(handler: Handler, seconds: float) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while not handler.server.web.ending.wait(seconds):
        handler.wfile.write(b"X: y\r\n")


def dripping_chunks(handler: Handler, seconds: float) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;")
    while not handler.server.web.ending.wait(seconds):
        handler.wfile.write(b"x")


@pytest.mark.parametrize("drip", [dripping, dripping_headers, dripping_chunks])
def test_a_drip_meets_the_total_time(web: Web, make_files: Callable[..., HttpFiles], drip: Any) -> None:
    web.answers["/a.jpg"] = lambda handler: drip(handler, 0.05)
    files = make_files(total_seconds=0.5, read_seconds=5.0)
    began = time.monotonic()
    code, message = refusal(lambda: files.read(web.url("/a.jpg")))
    assert (code, "0.5 s" in message) == ("timed_out", True)
    assert 0.4 < time.monotonic() - began < 4


@pytest.mark.parametrize("drip", [dripping, dripping_headers])
def test_a_stall_meets_the_reading_time(web: Web, make_files: Callable[..., HttpFiles], drip: Any) -> None:
    web.answers["/a.jpg"] = lambda handler: drip(handler, 30.0)
    files = make_files(read_seconds=0.3)
    began = time.monotonic()
    with pytest.raises(UnavailableError, match="imeout"):
        files.read(web.url("/a.jpg"))
    assert time.monotonic() - began < 4


def test_a_handshake_that_never_comes_meets_the_connecting_time(make_files: Callable[..., HttpFiles]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        files = make_files(connect_seconds=0.3, allowed_ports=(port,))
        began = time.monotonic()
        with pytest.raises(UnavailableError):
            files.read(f"https://localhost:{port}/a.jpg")
        assert time.monotonic() - began < 4


def test_a_resolver_that_never_answers_meets_its_time(
    make_files: Callable[..., HttpFiles], policy: SourcePolicy
) -> None:
    import asyncio

    async def lookup(host: str, port: int) -> list[str]:
        await asyncio.sleep(60)
        return []

    files = HttpFiles(replace(policy, dns_seconds=0.2), lookup)
    try:
        with pytest.raises(UnavailableError):
            files.read(f"https://media.test:{policy.allowed_ports[0]}/a.jpg")
    finally:
        files.close()


def test_names_that_do_not_exist_or_answer(make_files: Callable[..., HttpFiles], policy: SourcePolicy) -> None:
    failures = [socket.gaierror(socket.EAI_NONAME, "no name"), socket.gaierror(socket.EAI_AGAIN, "again")]

    async def lookup(host: str, port: int) -> list[str]:
        raise failures.pop(0)

    files = HttpFiles(policy, lookup)
    try:
        assert refusal(lambda: files.read("https://nowhere.example/a.jpg"))[0] == "not_found"
        with pytest.raises(UnavailableError):
            files.read("https://nowhere.example/a.jpg")
    finally:
        files.close()


def test_nothing_listens(make_files: Callable[..., HttpFiles]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    files = make_files(allowed_ports=(port,))
    with pytest.raises(UnavailableError):
        files.read(f"https://localhost:{port}/a.jpg")


def test_a_certificate_for_another_name(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    web.hold("/a.jpg", b"12345")
    files = make_files([["127.0.0.1"]], internal_domains=("other.test",))
    code, message = refusal(lambda: files.read(web.url("/a.jpg", "other.test")))
    assert (code, "certificate" in message, web.asked) == ("url_refused", True, [])


def test_a_certificate_of_an_unknown_authority(
    web: Web, make_files: Callable[..., HttpFiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    web.hold("/a.jpg", b"12345")
    assert refusal(lambda: make_files().read(web.url("/a.jpg")))[0] == "url_refused"


def test_the_name_is_what_the_server_is_asked_for(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    """The connection goes to the address that was checked; the certificate and `Host` are those of the name."""
    web.hold("/a.jpg", b"12345")
    assert make_files([["127.0.0.1"]]).read(web.url("/a.jpg", "media.test")) == b"12345"
    assert web.asked[0][1]["host"] == f"media.test:{web.port}"


def test_an_answer_that_changes_is_asked_for_once(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    """Rebinding: the first answer is the server here, the second a place where nobody is; only the first is used."""
    web.hold("/a.jpg", b"12345")
    files = make_files([["127.0.0.1"], ["192.168.255.254"]])
    assert files.read(web.url("/a.jpg", "media.test")) == b"12345"
    assert files.read(web.url("/a.jpg", "media.test")) == b"12345"


def test_a_public_name_that_turns_private(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    """A name outside the internal domains passes its check once and then answers with loopback: not connected to."""
    web.hold("/a.jpg", b"12345")
    files = make_files([["240.0.0.1"], ["127.0.0.1"], ["8.8.8.8", "127.0.0.1"]], internal_domains=())
    for address in ("240.0.0.1, a reserved", "127.0.0.1, a loopback", "127.0.0.1, a loopback"):
        code, message = refusal(lambda: files.read(web.url("/a.jpg", "media.test")))
        assert (code, f"media.test resolves to {address}" in message) == ("url_refused", True)
    assert web.asked == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "[::ffff:127.0.0.1]", "169.254.169.254"])
def test_loopback_is_refused_without_a_configuration(web: Web, make_files: Callable[..., HttpFiles], host: str) -> None:
    web.hold("/a.jpg", b"12345")
    files = make_files(internal_domains=())
    for call in (files.look, files.read):
        assert refusal(lambda call=call: call(web.url("/a.jpg", host)))[0] == "url_refused"
    assert web.asked == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(web: Web, make_files: Callable[..., HttpFiles], status: int) -> None:
    web.hold("/b.jpg", CONTENT, ETag='"v1"')
    web.redirect("/a.jpg", "/b.jpg", status)
    files = make_files()
    url = web.url("/a.jpg")
    assert files.look(url) == (len(CONTENT), f"etag:{url}:v1:{len(CONTENT)}")
    assert files.read(url) == CONTENT
    with files.open(url, block_bytes=1024, max_blocks=4) as file:
        file.seek(5)
        assert file.read(5) == CONTENT[5:10]


def test_so_many_redirects_and_no_more(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    for number in range(6):
        web.redirect(f"/{number}", f"/{number + 1}")
    web.hold("/6", b"12345")
    files = make_files(max_redirects=5)
    assert files.read(web.url("/1")) == b"12345"
    assert refusal(lambda: files.read(web.url("/0")))[0] == "too_many_redirects"
    assert refusal(lambda: make_files(max_redirects=0).read(web.url("/5")))[0] == "too_many_redirects"


def test_redirects_in_a_circle(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    web.redirect("/a.jpg", "/b.jpg")
    web.redirect("/b.jpg", "/a.jpg")
    assert refusal(lambda: make_files().read(web.url("/a.jpg")))[0] == "too_many_redirects"
    assert len(web.asked) == 6


@pytest.mark.parametrize(
    "location, reason",
    [
        ("http://localhost/a.jpg", "may not lead to http"),
        ("file:///etc/passwd", "file:// is not fetched"),
        ("ftp://localhost/a.jpg", "ftp:// is not fetched"),
        ("gs://bucket/key", "gs:// is not fetched"),
        ("data:image/png;base64,AAAA", "no URL with a host"),
        ("https://169.254.169.254/latest/meta-data/", "169.254.169.254, a cloud metadata address"),
        ("https://[fd00:ec2::254]/latest/", "fd00:ec2::254, a cloud metadata address"),
        ("https://metadata.google.internal/", "cloud metadata service"),
        ("https://127.0.0.1/a.jpg", "127.0.0.1, a loopback address"),
        ("https://[::1]/a.jpg", "::1, a loopback address"),
        ("https://10.0.0.1/a.jpg", "10.0.0.1, a private address"),
        ("https://0.0.0.0/a.jpg", "0.0.0.0, an unspecified address"),
        ("https://2130706433/a.jpg", "plain host name"),
        ("https://0x7f.1/a.jpg", "plain host name"),
        ("https://localhost./a.jpg", "plain host name"),
        ("https://localhost:22/a.jpg", "port 22 is not allowed"),
        ("https://user@localhost/a.jpg", "user name"),
        ("//[::ffff:10.0.0.1]/a.jpg", "a private (IPv4 embedded in IPv6) address"),
    ],
)
def test_redirects_to_where_nobody_may_go(
    web: Web, make_files: Callable[..., HttpFiles], location: str, reason: str
) -> None:
    web.redirect("/a.jpg", "/b.jpg")
    web.redirect("/b.jpg", location)
    code, message = refusal(lambda: make_files(http=True).read(web.url("/a.jpg")))
    assert code == "url_refused"
    assert reason in message
    assert "(redirect 2)" in message
    assert [path for path, _ in web.asked] == ["/a.jpg", "/b.jpg"]


def test_a_redirect_to_a_name_that_is_private(web: Web, make_files: Callable[..., HttpFiles]) -> None:
    web.redirect("/a.jpg", "https://elsewhere.example/b.jpg")
    files = make_files([["127.0.0.1"], ["192.168.0.7"]])
    code, message = refusal(lambda: files.read(web.url("/a.jpg")))
    assert code == "url_refused"
    assert "https://elsewhere.example/b.jpg (redirect 1): elsewhere.example resolves to 192.168.0.7" in message


def test_http_where_it_is_configured(policy: SourcePolicy) -> None:
    with Web() as plain:
        url = plain.hold("/a.jpg", CONTENT, ETag='"v1"')
        allowed = replace(policy, http=True, allowed_ports=(plain.port,))
        assert read_source(MediaItem(uri=url), FetchCounter(), allowed) == CONTENT
        assert refusal(lambda: stat_source(MediaItem(uri=url), policy))[0] == "url_refused"


def test_no_credentials_cookies_or_referrers_are_sent(
    web: Web, make_files: Callable[..., HttpFiles], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine localhost login me password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    web.answers["/a.jpg"] = lambda handler: handler.reply(302, Location="/b.jpg", Set_Cookie="a=b")
    web.hold("/b.jpg", b"12345")
    assert make_files().read(web.url("/a.jpg")) == b"12345"
    sent = {name for _, headers in web.asked for name in headers}
    assert sent == {"host", "accept", "accept-encoding", "user-agent"}


def test_local_paths_outside_the_roots(tmp_path: Path) -> None:
    for name in ("in/a.jpg", "out/b.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"12345")
    (tmp_path / "in" / "link.jpg").symlink_to(tmp_path / "out" / "b.jpg")
    (tmp_path / "root").symlink_to(tmp_path / "in")
    policy = SourcePolicy(roots=(str(tmp_path / "root"),))
    for uri in (f"{tmp_path}/in/a.jpg", f"file://{tmp_path}/root/a.jpg", f"{tmp_path}/out/../in/a.jpg"):
        assert read_source(MediaItem(uri=uri), FetchCounter(), policy) == b"12345"
    for uri in (f"{tmp_path}/out/b.jpg", f"{tmp_path}/in/link.jpg", f"{tmp_path}/in/../out/b.jpg", "/etc/passwd"):
        item = MediaItem(uri=uri)
        assert refusal(lambda item=item: stat_source(item, policy))[0] == "path_refused"
        assert refusal(lambda item=item: read_source(item, FetchCounter(), policy))[0] == "path_refused"
        assert refusal(lambda item=item: open_source(item, FetchCounter(), policy))[0] == "path_refused"


ANSWERS = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
    b'HTTP/1.1 200 OK\r\nContent-Length: 5\r\nETag: "\xff"\r\nContent-Type: image/\xff\r\n\r\nhello',
    b"HTTP/1.1 206 OK\r\nContent-Length: 1\r\nContent-Range: bytes 0-0/5\r\n\r\nh",
    b"HTTP/1.1 302 Found\r\nLocation: /\xff\xfe\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: \xff://[\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 503 Busy\r\nRetry-After: \xff\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\nhello",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
)
INSERTED = (
    b"\r\n",
    b"9" * 21,
    b"-1",
    b"\0",
    b": ",
    b"A" * 9000,
    b"\r\nTransfer-Encoding: chunked",
    b"\r\nContent-Length: 7",
)


def test_whatever_is_answered_is_the_items_fault(make_files: Callable[..., HttpFiles]) -> None:
    drawn = random.Random(4)
    answers: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                connection.sendall(answers[-1])

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        threading.Thread(target=serve, daemon=True).start()
        files = make_files(http=True, allowed_ports=(port,), read_seconds=1.0, max_bytes=10_000)
        for number in range(300):
            answer = bytearray(ANSWERS[number % len(ANSWERS)])
            for _ in range(drawn.choice((0, 1, 2, 5)) if number >= len(ANSWERS) else 0):
                at = drawn.randrange(len(answer))
                answer[at : at + drawn.choice((0, 1, 4))] = drawn.choice((bytes([drawn.randrange(256)]), *INSERTED))
            answers.append(bytes(answer))
            for call in (files.look, files.read):
                try:
                    call(f"http://localhost:{port}/a.jpg")
                except (ItemError, UnavailableError) as error:
                    str(error).encode()
        server.shutdown(socket.SHUT_RDWR)
