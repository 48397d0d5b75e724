"""Decoding in a child: the same pixels, and whatever the bytes do to it costs one item. Real processes throughout."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import ConfigError, ItemError, TransientError
from pipeline.media import sandbox_process
from pipeline.media.decode import decode_media
from pipeline.media.probe import probe_media
from pipeline.media.sandbox import Sandbox, open_sandbox
from pipeline.media.undecoded import Undecoded
from pipeline.schema import Probe, SamplePlan
from tests.media.media_files import Recipe, long_video, make_image, make_video
from tests.media.pdf_files import Page, make_pdf, text_line
from tests.media.sandboxed import SIZE, child_pid, decode, frames, is_alive, open_fds, open_hostile, order

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the child is kept in by Linux")
FIRST = SamplePlan(pts_seconds=(0.0,))
ROOT = Path(__file__).parents[2]


@pytest.fixture
def hostile() -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes of the test's own."""
    opened: list[Sandbox] = []

    def make(**options: object) -> Sandbox:
        opened.append(open_hostile(**options))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def failure(sandbox: Sandbox, data: bytes) -> ItemError:
    with pytest.raises(ItemError) as caught:
        decode(sandbox, data)
    assert caught.value.stage == "decode"
    return caught.value


def assert_decodes(sandbox: Sandbox) -> None:
    data = make_image("PNG")
    expected = decode_media(io.BytesIO(data), probe_of(data), FIRST, SIZE)
    assert np.array_equal(decode(sandbox, data).pixels, expected.pixels)


def probe_of(data: bytes) -> Probe:
    return probe_media(io.BytesIO(data), num_bytes=len(data), declared=None, name="item", page=0)


FILES: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: make_image("JPEG"),
    "grey-jpeg": lambda: make_image("JPEG", "L"),
    "png": lambda: make_image("PNG"),
    "png-16": lambda: make_image("PNG", "I;16"),
    "webp": lambda: make_image("WEBP"),
    "avif": lambda: make_image("AVIF"),
    "tiff": lambda: make_image("TIFF", compression="tiff_lzw"),
    "gif": lambda: make_image("GIF"),
    "jpeg2000": lambda: make_image("JPEG2000"),
    "h264": lambda: make_video(Recipe()),
    "h264-threads": lambda: make_video(Recipe(size=(720, 1280), num_frames=40, options={"preset": "ultrafast"})),
    "hevc": lambda: make_video(Recipe(library="libx265", options={"x265-params": "log-level=none"})),
    "vp9": lambda: make_video(Recipe(container="webm", library="libvpx-vp9", options={"cpu-used": "8"})),
    "av1": lambda: make_video(Recipe(library="libsvtav1", num_frames=40, options={"preset": "13"})),
    "mpegts": lambda: make_video(Recipe(container="mpegts")),
    "pdf": lambda: make_pdf([Page(content=text_line("The quick brown fox.", 20, 100))]),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [SIZE, None])
def test_pixels_are_those_of_this_process(shared: Sandbox, name: str, size: tuple[int, int] | None) -> None:
    data = FILES[name]()
    probe = probe_of(data)
    plan = SamplePlan(pts_seconds=(0.0, 0.5, 1.0) if probe.modality == "video" else (0.0,))
    expected = decode_media(io.BytesIO(data), probe, plan, size, "bilinear", page=0)
    found = frames(shared, Undecoded(data=data, probe=probe, plan=plan, size=size, resample="bilinear", page=0))
    assert np.array_equal(found.pixels, expected.pixels)
    assert found.pts_seconds == expected.pts_seconds


def test_a_video_is_read_by_range_and_at_keyframes(shared: Sandbox) -> None:
    data = long_video(num_groups=40)
    probe, plan = probe_of(data), SamplePlan(pts_seconds=(0.0, 13.5, 38.2))
    for at_keyframes in (False, True):
        expected = decode_media(io.BytesIO(data), probe, plan, SIZE, by_range=True, at_keyframes=at_keyframes)
        file = CountedFile(data)
        item = Undecoded(file=file, probe=probe, plan=plan, size=SIZE, at_keyframes=at_keyframes)
        found = frames(shared, item)
        assert np.array_equal(found.pixels, expected.pixels)
        assert found.pts_seconds == expected.pts_seconds
        assert file.num_read < len(data) / 5


class CountedFile(io.BytesIO):
    """Counts the bytes that are read, and fails after some."""

    def __init__(self, data: bytes, most: int = 2**40) -> None:
        super().__init__(data)
        self.num_read, self.most = 0, most

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self.num_read += len(data)
        if self.num_read > self.most:
            raise TransientError("reset")
        return data


def test_a_file_that_fails_is_not_the_decoders_fault(hostile: Callable[..., Sandbox]) -> None:
    sandbox, data = hostile(), long_video(num_groups=20)
    probe, plan = probe_of(data), SamplePlan(pts_seconds=(0.0, 13.5))
    for most in (0, 20_000, 60_000):
        file = CountedFile(data, most)
        with pytest.raises(TransientError):
            sandbox.decode([Undecoded(file=file, probe=probe, plan=plan, size=SIZE)])
        assert_decodes(sandbox)


def test_scaling_by_the_decoder_is_passed_on(shared: Sandbox) -> None:
    data = make_image("JPEG")
    probe, plan = probe_of(data), FIRST
    item = Undecoded(data=data, probe=probe, plan=plan, size=(16, 24))
    expected = decode_media(io.BytesIO(data), probe, plan, (16, 24), dct_scaled=True)
    assert np.array_equal(frames(shared, replace(item, dct_scaled=True)).pixels, expected.pixels)
    assert not np.array_equal(frames(shared, item).pixels, expected.pixels)


def test_large_files_and_frames_are_handed_over_too(shared: Sandbox) -> None:
    data = make_image("PNG") + bytes(20 * 2**20)  # more than is read at once
    size = (5000, 5000)  # 75 MB, more than is kept
    probe, plan = probe_of(data), FIRST
    expected = decode_media(io.BytesIO(data), probe, plan, size)
    assert np.array_equal(
        frames(shared, Undecoded(data=data, probe=probe, plan=plan, size=size)).pixels, expected.pixels
    )
    assert_decodes(shared)


def test_a_bad_file_fails_as_it_does_here(shared: Sandbox) -> None:
    before = child_pid(shared) if shared.level else 0
    jpeg, png = make_image("JPEG"), make_image("PNG")
    for data in (jpeg[: len(jpeg) * 4 // 5], png[: len(png) // 2], make_video(Recipe())[:-3000]):
        with pytest.raises(ItemError) as expected:
            decode_media(io.BytesIO(data), probe_of(jpeg), FIRST, SIZE)
        with pytest.raises(ItemError) as found:
            frames(shared, Undecoded(data=data, probe=probe_of(jpeg), plan=FIRST, size=SIZE))
        assert (found.value.code, found.value.message) == (expected.value.code, expected.value.message)
    assert before in (0, child_pid(shared))


def test_frames_of_another_size_than_the_header_s(shared: Sandbox) -> None:
    data = make_image("PNG")
    probe = Probe(modality="image", container="png", codec="png", width=50, height=40, num_bytes=len(data))
    with pytest.raises(ItemError) as caught:
        frames(shared, Undecoded(data=data, probe=probe, plan=FIRST, size=None))
    assert (caught.value.code, caught.value.message) == (
        "wrong_size",
        "96x64 pixels where 50x40 were admitted",
    )


@pytest.mark.parametrize("how", ["hang", "hang_in_c"])
def test_a_decoder_that_hangs_costs_its_item_and_under_a_second(hostile: Callable[..., Sandbox], how: str) -> None:
    sandbox = hostile(item_seconds=1.0)
    assert_decodes(sandbox)
    started = time.monotonic()
    assert failure(sandbox, order(how)).code == "timeout"
    assert 1.0 <= time.monotonic() - started < 2.0
    assert_decodes(sandbox)


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("segfault", "crashed", "the decoder's process ended (SIGSEGV)"),
        ("abort", "crashed", "the decoder's process ended (SIGABRT)"),
        ("raise", "crashed", "the decoder failed: TypeError('of its own')"),
        ("eat 4294967296", "out_of_memory", "decoding takes more than the 512 MB that an item of its size has"),
    ],
)
def test_a_decoder_that_breaks_costs_its_item(hostile: Callable[..., Sandbox], how: str, code: str, said: str) -> None:
    sandbox = hostile()
    assert_decodes(sandbox)
    error = failure(sandbox, order(how))
    assert (error.code, error.message) == (code, said)
    assert_decodes(sandbox)


def test_memory_within_the_item_s_is_had(shared: Sandbox) -> None:
    assert failure(shared, order(f"eat {200 * 2**20}")).code == "ate"


def test_what_an_item_has_grows_with_its_pixels(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile()
    data = order(f"eat {1500 * 2**20}")
    for side, code in ((5000, "ate"), (500, "out_of_memory")):
        probe = Probe(modality="image", container="jpeg", codec="jpeg", width=side, height=side, num_bytes=len(data))
        with pytest.raises(ItemError) as caught:
            frames(sandbox, Undecoded(data=data, probe=probe, plan=FIRST, size=SIZE))
        assert caught.value.code == code


def test_what_one_item_leaves_broken_is_no_verdict_on_the_next(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile()
    assert_decodes(sandbox)
    first = child_pid(sandbox)
    assert decode(sandbox, order("die_unless_new")).pixels.shape == (1, *SIZE, 3)
    assert child_pid(sandbox) != first


def test_items_that_are_handed_over_together(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile(item_seconds=1.0)
    files = [make_image("PNG"), order("segfault"), make_image("JPEG"), order("hang"), order("raise"), FILES["h264"]()]
    plans = [SamplePlan(pts_seconds=(0.0, 1.0, 2.0)) if data is files[-1] else FIRST for data in files]
    sizes = [SIZE, SIZE, (11, 13), SIZE, SIZE, (30, 20)]
    items = [
        Undecoded(data=data, probe=probe_of(data), plan=plan, size=size)
        for data, plan, size in zip(files, plans, sizes, strict=True)
    ]
    found = [outcome.result for outcome in sandbox.decode(items)]
    codes = [result.code if isinstance(result, ItemError) else None for result in found]
    assert codes == [None, "crashed", None, "timeout", "crashed", None]
    for item, result in zip(items, found, strict=True):
        if not isinstance(result, ItemError):
            expected = decode_media(io.BytesIO(item.data), item.probe, item.plan, item.size)
            assert np.array_equal(result.pixels, expected.pixels)
            assert result.pts_seconds == expected.pts_seconds


def test_each_of_those_has_its_own_time(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile(item_seconds=1.0)
    assert_decodes(sandbox)
    files = [*[order("sleep 0.5")] * 4, order("hang")]
    items = [Undecoded(data=data, probe=probe_of(data), plan=FIRST, size=SIZE) for data in files]
    started = time.monotonic()
    *first, last = sandbox.decode(items)
    seconds = time.monotonic() - started
    assert [isinstance(outcome.result, ItemError) for outcome in first] == [False] * 4
    assert all(0.5 <= outcome.seconds < 1.0 for outcome in first)
    assert isinstance(last.result, ItemError) and last.result.code == "timeout"
    # Were its time counted from when the fourth was looked at, it would be two seconds more.
    assert 4 * 0.5 + 1.0 <= seconds < 4 * 0.5 + 1.0 + 1.0


def test_what_a_child_says_of_its_time_is_within_what_passed(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile(item_seconds=3.0)
    lies = ["1e9", "-5.0", "float('nan')", "'x'", "None", "True"]
    items = [
        Undecoded(data=data, probe=probe_of(data), plan=FIRST, size=SIZE)
        for data in (order(f"say {{'shown': [0.0], 'seconds': {lie}}}") for lie in lies)
    ]
    started = time.monotonic()
    outcomes = sandbox.decode(items)
    assert [isinstance(outcome.result, ItemError) for outcome in outcomes] == [False] * len(lies)
    assert all(outcome.seconds >= 0 for outcome in outcomes)
    assert sum(outcome.seconds for outcome in outcomes) <= time.monotonic() - started


def test_a_child_that_is_killed_between_items_costs_none(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile()
    assert_decodes(sandbox)
    os.kill(child_pid(sandbox), signal.SIGKILL)
    assert_decodes(sandbox)


def test_a_child_that_is_killed_over_an_item_costs_none_at_first(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile(item_seconds=3.0)
    assert_decodes(sandbox)
    first = child_pid(sandbox)
    killer = threading.Timer(0.5, os.kill, (first, signal.SIGKILL))
    killer.start()
    error = failure(sandbox, order("hang"))  # tried again, in a new one, and too long there
    killer.join()
    assert error.code == "timeout"
    assert_decodes(sandbox)


def test_a_new_child_that_is_killed_says_so(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile()

    def kill() -> None:
        while sandbox._child is None:
            time.sleep(0.01)
        time.sleep(0.3)
        os.kill(child_pid(sandbox), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    error = failure(sandbox, order("hang"))
    killer.join()
    assert error.code == "crashed"
    assert error.message == "the decoder's process ended (SIGKILL, perhaps as the machine ran out of memory)"


LIES = {
    "more times than planned": "say {'shown': [0.0, 1.0]}",
    "no times": "say {'shown': []}",
    "no number": "say {'shown': ['0']}",
    "true": "say {'shown': [True]}",
    "not finite": "say {'shown': [float('nan')]}",
    "another stage": "say {'failed': ['fetch', 'x', '']}",
    "a strange code": "say {'failed': ['decode', '<b>', '']}",
    "no code": "say {'failed': 'decode'}",
    "something else": "say {'ready': []}",
    "nothing": "say {}",
    "no object": "say [1]",
    "no message": "write b'\\xff' * 100",
    "no JSON": "write b'\\x04\\0\\0\\0nope'",
    "deep JSON": "write (50000).to_bytes(4, 'little') + b'[' * 50000",
    "a large number": "write (10000).to_bytes(4, 'little') + b'1' * 10000",
    "more than it may": "write (2**31).to_bytes(4, 'little')",
}


@pytest.mark.parametrize("name", LIES)
def test_a_child_that_lies_is_not_believed(hostile: Callable[..., Sandbox], name: str) -> None:
    sandbox = hostile()
    error = failure(sandbox, order(LIES[name]))
    assert error.code == "crashed"
    assert error.message.startswith("the decoder's answer makes no sense: ")
    assert sandbox._child is None


def test_what_a_child_says_is_printable_and_short(shared: Sandbox) -> None:
    error = failure(shared, order("say {'failed': ['decode', 'corrupt', '\\x1b[31m' + 'x' * 10000]}"))
    assert error.message == "?[31m" + "x" * 495


def test_half_a_message_is_waited_for_no_longer_than_the_item_has(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile(item_seconds=1.0)
    assert_decodes(sandbox)
    started = time.monotonic()
    assert failure(sandbox, order("drip")).code == "timeout"
    assert time.monotonic() - started < 2.0


def attempt(sandbox: Sandbox, what: str) -> tuple[str, int]:
    error = failure(sandbox, order(f"attempt {what}"))
    return error.code, int(error.message) if error.code == "refused" else 0


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that anybody on this machine can reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
        yield server.getsockname()[1]


def test_without_a_filter_the_namespace_has_no_network(hostile: Callable[..., Sandbox], port: int) -> None:
    sandbox = hostile(filtered=False)
    assert_decodes(sandbox)
    if sandbox.level != "network_namespace":
        pytest.skip(f"this machine allows none: {sandbox.level}")
    code, number = attempt(sandbox, f"connect {port}")
    assert (code, number) in {("refused", errno.ENETUNREACH), ("refused", errno.EADDRNOTAVAIL)}


def test_system_calls_that_decoding_does_not_need_are_refused(shared: Sandbox, port: int) -> None:
    assert_decodes(shared)
    if "seccomp" not in (shared.level or ""):
        pytest.skip(f"this machine allows no filter: {shared.level}")
    pid = os.getpid()
    for what in (f"connect {port}", f"kill {pid}", "fork", "execute", "create", f"own_signal_at {pid}"):
        assert attempt(shared, what) == ("refused", errno.ENOSYS), what
    assert_decodes(shared)


def test_the_child_has_no_descriptors_of_its_parent(hostile: Callable[..., Sandbox]) -> None:
    with open(__file__) as file:
        os.set_inheritable(file.fileno(), True)
        sandbox = hostile()
        assert_decodes(sandbox)
        folder = Path(f"/proc/{child_pid(sandbox)}/fd")
        held = sorted(re.sub(r"\W.*", "", os.readlink(link).removeprefix("/")) for link in folder.iterdir())
    assert [name for name in held if name != "anon_inode"] == [
        "dev",
        "dev",
        "dev",
        "memfd",
        "memfd",
        "socket",
        "socket",
    ]


def test_limits_of_the_child(shared: Sandbox) -> None:
    assert_decodes(shared)
    status = Path(f"/proc/{child_pid(shared)}/status").read_text()
    limits = Path(f"/proc/{child_pid(shared)}/limits").read_text()
    assert "NoNewPrivs:\t1" in status
    assert "CapEff:\t0000000000000000" in status
    bounds = {line[:25].strip(): line[25:].split()[0] for line in limits.splitlines()}
    assert bounds["Max core file size"] == bounds["Max file size"] == "0"
    assert int(bounds["Max data size"]) < 2**30
    assert int(bounds["Max address space"]) < 3 * 2**30
    assert int(bounds["Max cpu time"]) < 300


def test_nothing_leaks_over_200_items(shared: Sandbox) -> None:
    assert_decodes(shared)
    data = make_image("JPEG")
    pid = child_pid(shared)
    before = open_fds(), open_fds(pid)
    for number in range(200):
        decode(shared, data)
        if number % 10 == 0:
            assert failure(shared, data[: len(data) * 4 // 5]).code == "truncated"
    assert (open_fds(), open_fds(pid)) == before
    assert child_pid(shared) == pid


def test_nothing_leaks_when_children_die(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile()
    assert_decodes(sandbox)
    before = open_fds()
    for _ in range(4):
        assert failure(sandbox, order("segfault")).code == "crashed"
    assert_decodes(sandbox)
    assert open_fds() == before


def test_a_child_is_replaced_after_many_items(monkeypatch: pytest.MonkeyPatch, hostile: Callable[..., Sandbox]) -> None:
    monkeypatch.setattr(sandbox_process, "_MOST_ITEMS", 3)
    sandbox = hostile()
    pids = []
    for _ in range(7):
        assert_decodes(sandbox)
        pids.append(child_pid(sandbox))
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]
    assert [pid for pid in pids if is_alive(pid)] == pids[-1:]


def test_a_child_outlives_the_thread_that_wanted_it(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile()
    first = threading.Thread(target=assert_decodes, args=(sandbox,))
    first.start()
    first.join()
    pid = child_pid(sandbox)
    time.sleep(0.2)
    assert is_alive(pid)
    assert_decodes(sandbox)
    assert child_pid(sandbox) == pid


def test_a_child_that_would_shrink_what_is_mapped_cannot(hostile: Callable[..., Sandbox]) -> None:
    assert_decodes(hostile(filtered=False))  # it tries that with each file that it gets


def test_a_closed_sandbox_leaves_no_child(hostile: Callable[..., Sandbox]) -> None:
    sandbox = hostile()
    assert_decodes(sandbox)
    pid = child_pid(sandbox)
    assert is_alive(pid)
    sandbox.close()
    assert not is_alive(pid)
    assert_decodes(sandbox)


def test_a_sandbox_that_nobody_has_any_more_leaves_no_child() -> None:
    sandbox = open_hostile()
    assert_decodes(sandbox)
    pid = child_pid(sandbox)
    del sandbox
    assert not is_alive(pid)


@pytest.mark.parametrize("mode", ["exit", "hang"])
def test_the_child_ends_with_its_parent(mode: str) -> None:
    command = [sys.executable, "-m", "tests.media.holding_parent", mode]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if mode != "exit":
            time.sleep(0.2)
            assert is_alive(pid)
            parent.kill()
        parent.wait()
    deadline = time.monotonic() + 2
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_alive(pid)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [
            sys.executable,
            "-m",
            sandbox_process.CHILD,
            str(theirs.fileno()),
            str(theirs.fileno()),
            str(os.getpid() + 1),
            "1",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, pass_fds=(theirs.fileno(),), timeout=30)
    assert done.returncode == -signal.SIGKILL


def test_a_child_that_cannot_start_stops_the_run() -> None:
    sandbox = Sandbox(item_seconds=20, module="tests.media.no_such_module")
    with pytest.raises(RuntimeError, match="the process that decodes did not start"):
        assert_decodes(sandbox)


def test_where_a_namespace_hides_the_libraries_it_does_without() -> None:
    sandbox = Sandbox(item_seconds=20, module="tests.media.unmapped_child")
    assert_decodes(sandbox)
    assert sandbox.level in ("seccomp", "none")
    sandbox.close()


def test_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_sandbox("off", 1.0) is None
    assert isinstance(open_sandbox("auto", 1.0), Sandbox)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert open_sandbox("auto", 1.0) is None
    with pytest.raises(ConfigError, match=r"decode\.sandbox: on needs Linux, this is darwin"):
        open_sandbox("on", 1.0)


def test_on_refuses_a_child_with_a_network() -> None:
    sandbox = Sandbox(item_seconds=20, must_isolate=True, module="tests.media.open_child")
    with pytest.raises(ConfigError, match="neither a network namespace nor seccomp"):
        assert_decodes(sandbox)
    assert sandbox._child is None
