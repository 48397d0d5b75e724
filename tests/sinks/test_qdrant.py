"""What only Qdrant has: a server that answers by HTTP status, and a folder that one process at a time may open."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import qdrant_client
import qdrant_client.models
from sample_points import documents, make_collection

from pipeline.config import QdrantSection
from pipeline.errors import ConfigError, TransientError
from pipeline.sinks.qdrant import QdrantSink


class Server(http.server.ThreadingHTTPServer):
    """Answers with the statuses it is given, one a request, and with a count of 5."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.statuses: list[int] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.append(self.headers.get("api-key"))
        body = json.dumps({"result": {"count": 5}, "status": "ok", "time": 0.0}).encode()
        self.send_response(self.server.statuses.pop(0))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_is_busy_is_asked_again(server: Server) -> None:
    server.statuses = [503, 500, 200]
    sink = QdrantSink(QdrantSection(url=server.url, collection="documents"))
    assert sink.count(make_collection()) == 5
    assert server.statuses == []


def test_a_key_that_is_refused_is_not_tried_again(server: Server) -> None:
    server.statuses = [403, 200]
    sink = QdrantSink(QdrantSection(url=server.url, collection="documents"))
    with pytest.raises(ConfigError, match=r"Qdrant refuses the API key of sinks\.qdrant"):
        sink.count(make_collection())
    assert server.statuses == [200]


def test_a_request_that_is_wrong_is_the_programs_fault(server: Server) -> None:
    server.statuses = [400, 200]
    sink = QdrantSink(QdrantSection(url=server.url, collection="documents"))
    with pytest.raises(qdrant_client.http.exceptions.UnexpectedResponse):
        sink.count(make_collection())


@pytest.mark.filterwarnings("ignore:Api key is used with an insecure connection:UserWarning")
def test_the_key_is_taken_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    section = QdrantSection(url=server.url, api_key_env="HEADRACE_TEST_KEY", collection="documents")
    with pytest.raises(ConfigError, match="HEADRACE_TEST_KEY, which is not set here"):
        QdrantSink(section).count(make_collection())
    monkeypatch.setenv("HEADRACE_TEST_KEY", "hunter2")
    server.statuses = [200]
    assert QdrantSink(section).count(make_collection()) == 5
    assert server.keys == ["hunter2"]


def test_a_server_that_is_not_there_is_out_of_reach() -> None:
    sink = QdrantSink(QdrantSection(url="http://127.0.0.1:1", collection="documents"))
    with pytest.raises(TransientError, match=r"http://127\.0\.0\.1:1"):
        sink.prepare(make_collection())


# Its client forgets the lock file that it could not lock (1.20).
@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed file .*[.]lock:ResourceWarning")
def test_a_folder_that_is_open_elsewhere_is_waited_for(make_section: Callable[..., Any]) -> None:
    section = make_section("qdrant")
    sink, collection = QdrantSink(section), make_collection()
    sink.prepare(collection)
    other = qdrant_client.QdrantClient(path=section.path)
    threading.Timer(0.15, other.close).start()
    sink.write(collection, documents(1))
    assert sink.count(collection) == 2


def test_somebody_elses_collection_is_left_alone(make_section: Callable[..., Any]) -> None:
    section = make_section("qdrant")
    client = qdrant_client.QdrantClient(path=section.path)
    named = {"a": qdrant_client.models.VectorParams(size=8, distance="Cosine")}
    client.create_collection(make_collection().physical, vectors_config=named)
    client.close()
    with pytest.raises(ConfigError, match="dimensions is None, expected 8"):
        QdrantSink(section).prepare(make_collection())
    client = qdrant_client.QdrantClient(path=section.path)
    client.create_collection("documents", vectors_config=named["a"])
    client.close()
    with pytest.raises(ConfigError, match="a Qdrant collection 'documents', which is not headrace's"):
        QdrantSink(section).prepare(make_collection())


def test_without_its_client_the_sink_says_what_to_install(
    make_section: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    section = make_section("qdrant")
    monkeypatch.setitem(sys.modules, "qdrant_client", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[qdrant\]'"):
        QdrantSink(section)
