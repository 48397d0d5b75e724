"""Which URLs and addresses are refused, by their text alone."""

from __future__ import annotations

import ipaddress

import pytest

from pipeline.errors import ItemError
from pipeline.media.url_policy import (
    RefusedAddressError,
    SourcePolicy,
    check_addresses,
    check_redirect,
    check_url,
    is_media_type,
    is_within,
    special_kind,
)

PUBLIC = SourcePolicy()


def refusal(url: str, policy: SourcePolicy = PUBLIC) -> str:
    with pytest.raises(ItemError) as caught:
        check_url(url, policy)
    assert (caught.value.stage, caught.value.code) == ("fetch", "url_refused")
    return caught.value.message


@pytest.mark.parametrize(
    "url, asked",
    [
        ("https://example.com/a.jpg", "https://example.com/a.jpg"),
        ("HTTPS://EXAMPLE.com/A.jpg", "https://example.com/A.jpg"),
        ("https://example.com", "https://example.com/"),
        ("https://example.com:443/a", "https://example.com/a"),
        ("https://example.com/a b/ü.jpg", "https://example.com/a%20b/%C3%BC.jpg"),
        ("https://example.com/a%20b.jpg?sig=a%2Fb&x=[1]#part", "https://example.com/a%20b.jpg?sig=a%2Fb&x=[1]"),
        ("https://xn--bcher-kva.example/a", "https://xn--bcher-kva.example/a"),
        ("https://8.8.8.8/a", "https://8.8.8.8/a"),
        ("https://[2606:4700:0::1111]/a", "https://[2606:4700::1111]/a"),
    ],
)
def test_what_is_asked_for(url: str, asked: str) -> None:
    assert check_url(url, PUBLIC).url == asked


@pytest.mark.parametrize(
    "url, reason",
    [
        ("https:///a.jpg", "neither a plain host name"),
        ("https:/example.com/a.jpg", "no URL with a host"),
        ("//example.com/a.jpg", "no URL with a host"),
        ("http://example.com/a.jpg", "not encrypted"),
        ("ftp://example.com/a.jpg", "ftp:// is not fetched"),
        ("file:///etc/passwd", "file:// is not fetched"),
        ("gopher://example.com/1", "gopher:// is not fetched"),
        ("https://user@example.com/", "user name"),
        ("https://user:word@example.com/", "user name"),
        ("https://example.com@127.0.0.1/", "user name"),
        ("https://127.0.0.1#@example.com/", None),
        ("https://example.com\\@127.0.0.1/", "backslashes"),
        ("https://example.com/\r\nHost: x", "control characters"),
        ("https://exa\tmple.com/", "control characters"),
        ("https://exa mple.com/", "plain host name"),
        ("https://example.com/\udcff.jpg", "no text"),
        ("https://example.com./", "plain host name"),
        ("https://127.0.0.1./", "plain host name"),
        ("https://example..com/", "plain host name"),
        ("https://-example.com/", "plain host name"),
        (f"https://{'a' * 64}.com/", "plain host name"),
        (f"https://{'a.' * 127}com/", "plain host name"),
        ("https://ex%61mple.com/", "plain host name"),
        ("https://127.0.0.1%2f.example.com/", "plain host name"),
        ("https://①②⑦.⓪.⓪.①/", "plain host name"),
        ("https://127。0。0。1/", "plain host name"),
        ("https://bücher.example/", "plain host name"),
        ("https://loc\u00adalhost/", "plain host name"),
        ("https://2130706433/", "plain host name"),
        ("https://0x7f000001/", "plain host name"),
        ("https://0x7f.0.0.1/", "plain host name"),
        ("https://0177.0.0.1/", "plain host name"),
        ("https://017700000001/", "plain host name"),
        ("https://127.1/", "plain host name"),
        ("https://127.0.1/", "plain host name"),
        ("https://0/", "plain host name"),
        ("https://127.0.0.0x1/", "plain host name"),
        ("https://127.0.0.1.1/", "plain host name"),
        ("https://8.8.8.256/", "plain host name"),
        ("https://[fe80::1%25eth0]/", "plain host name"),
        ("https://[fe80::1%eth0]/", "plain host name"),
        ("https://[v1.a]/", "plain host name"),
        ("https://[127.0.0.1]/", "plain host name"),
        ("https://[::1/", "not a host with an optional port"),
        ("https://::1/", "not a host with an optional port"),
        ("https://example.com:/", "not a host with an optional port"),
        ("https://example.com:8443/", "port 8443 is not allowed"),
        ("https://example.com:80/", "port 80 is not allowed"),
        ("https://example.com:0/", "port 0 is not allowed"),
        ("https://example.com:99999/", "port 99999 is not allowed"),
        ("https://example.com:４４３/", "not a host with an optional port"),
        ("https://metadata.google.internal/computeMetadata/v1/", "cloud metadata service"),
        ("https://METADATA/", "cloud metadata service"),
    ],
)
def test_refused_urls(url: str, reason: str | None) -> None:
    if reason is None:  # what follows the # is no part of the host
        assert check_url(url, PUBLIC).host == "127.0.0.1"
    else:
        assert reason in refusal(url)


def test_a_message_has_no_signature() -> None:
    assert "secret" not in refusal("http://example.com/a.jpg?signature=secret")


def test_what_a_policy_adds() -> None:
    policy = SourcePolicy(http=True, allowed_ports=(8443,))
    assert check_url("http://example.com/a", policy).url == "http://example.com/a"
    assert check_url("https://example.com:8443/a", policy).url == "https://example.com:8443/a"
    assert "port 443 is not" in refusal("http://example.com:443/a", policy)


@pytest.mark.parametrize(
    "address, kind",
    [
        ("0.0.0.0", "unspecified"),
        ("0.1.2.3", "unspecified"),
        ("10.0.0.1", "private"),
        ("172.16.0.1", "private"),
        ("172.31.255.255", "private"),
        ("192.168.1.1", "private"),
        ("100.64.0.1", "carrier-grade NAT"),
        ("100.127.255.255", "carrier-grade NAT"),
        ("127.0.0.1", "loopback"),
        ("127.255.255.254", "loopback"),
        ("169.254.1.1", "link-local"),
        ("169.254.169.254", "cloud metadata"),
        ("169.254.170.2", "cloud metadata"),
        ("100.100.100.200", "cloud metadata"),
        ("168.63.129.16", "cloud metadata"),
        ("192.0.0.192", "cloud metadata"),
        ("192.0.0.1", "reserved"),
        ("192.0.2.1", "documentation"),
        ("198.51.100.1", "documentation"),
        ("203.0.113.1", "documentation"),
        ("198.18.0.1", "benchmarking"),
        ("192.88.99.1", "reserved"),
        ("224.0.0.1", "multicast"),
        ("239.255.255.255", "multicast"),
        ("240.0.0.1", "reserved"),
        ("255.255.255.255", "reserved"),
        ("::", "unspecified"),
        ("::1", "loopback"),
        ("fc00::1", "private"),
        ("fd12:3456::1", "private"),
        ("fd00:ec2::254", "cloud metadata"),
        ("fe80::1", "link-local"),
        ("fec0::1", "site-local"),
        ("ff02::1", "multicast"),
        ("2001:db8::1", "documentation"),
        ("3fff::1", "documentation"),
        ("100::1", "reserved"),
        ("4000::1", "reserved"),
        ("::ffff:127.0.0.1", "loopback (IPv4 embedded in IPv6)"),
        ("::ffff:169.254.169.254", "cloud metadata (IPv4 embedded in IPv6)"),
        ("::127.0.0.1", "loopback (IPv4 embedded in IPv6)"),
        ("::8.8.8.8", "reserved"),
        ("64:ff9b::10.0.0.1", "private (IPv4 embedded in IPv6)"),
        ("64:ff9b:1::10.0.0.1", "private (IPv4 embedded in IPv6)"),
        ("64:ff9b:1::8.8.8.8", "reserved"),
        ("2002:7f00:1::", "loopback (IPv4 embedded in IPv6)"),
        ("2002:a9fe:a9fe::1", "cloud metadata (IPv4 embedded in IPv6)"),
        ("2001:0:a00:1::f7f7:f7f7", "private (IPv4 embedded in IPv6)"),  # Teredo: server 10.0.0.1, client 8.8.8.8
        ("2001:0:808:808::80ff:fffe", "loopback (IPv4 embedded in IPv6)"),  # server 8.8.8.8, client 127.0.0.1
        ("2001:0:808:808::f7f7:f7f7", "reserved"),
        ("8.8.8.8", None),
        ("100.63.255.255", None),
        ("100.128.0.1", None),
        ("172.32.0.1", None),
        ("223.255.255.255", None),
        ("2606:4700::1111", None),
        ("::ffff:8.8.8.8", None),
        ("64:ff9b::8.8.8.8", None),
        ("2002:808:808::1", None),
    ],
)
def test_kinds_of_addresses(address: str, kind: str | None) -> None:
    assert special_kind(ipaddress.ip_address(address)) == kind


def test_what_the_standard_library_calls_not_global_is_special() -> None:
    """Both tables come from the same registries; the transitional forms are judged more closely here."""
    for block in range(256):
        for second in (0, 1, 18, 51, 64, 88, 100, 113, 168, 254, 255):
            address = ipaddress.IPv4Address(f"{block}.{second}.0.1")
            if not address.is_global:
                assert special_kind(address) is not None, address


def test_every_address_of_an_answer_is_checked() -> None:
    check_addresses("example.com", ["8.8.8.8", "2606:4700::1111"], PUBLIC)
    with pytest.raises(RefusedAddressError, match=r"example\.com resolves to 10\.0\.0\.1, a private address"):
        check_addresses("example.com", ["8.8.8.8", "10.0.0.1"], PUBLIC)
    with pytest.raises(RefusedAddressError, match=r"^127\.0\.0\.1, a loopback address"):
        check_addresses("127.0.0.1", ["127.0.0.1"], PUBLIC)
    with pytest.raises(RefusedAddressError, match="link-local"):
        check_addresses("example.com", ["fe80::1%eth0"], PUBLIC)


@pytest.mark.parametrize("host", ["corp.example", "media.corp.example"])
@pytest.mark.parametrize("address", ["10.1.2.3", "127.0.0.1", "100.64.1.1", "fd12::1", "::1"])
def test_internal_domains_have_private_addresses(host: str, address: str) -> None:
    check_addresses(host, [address], SourcePolicy(internal_domains=("corp.example",)))


@pytest.mark.parametrize(
    "host, address",
    [
        ("notcorp.example", "10.1.2.3"),
        ("corp.example.org", "10.1.2.3"),
        ("corp.example", "169.254.169.254"),
        ("corp.example", "fd00:ec2::254"),
        ("corp.example", "169.254.1.1"),
        ("corp.example", "224.0.0.1"),
        ("corp.example", "0.0.0.0"),
        ("corp.example", "::ffff:169.254.169.254"),
        ("10.1.2.3", "10.1.2.3"),
    ],
)
def test_and_nothing_else_has(host: str, address: str) -> None:
    with pytest.raises(RefusedAddressError):
        check_addresses(host, [address], SourcePolicy(internal_domains=("corp.example",)))


@pytest.mark.parametrize(
    "location, found",
    [
        ("/b.jpg", "https://example.com/b.jpg"),
        ("b.jpg?x=1", "https://example.com/a/b.jpg?x=1"),
        ("//cdn.example.com/b.jpg", "https://cdn.example.com/b.jpg"),
        ("https://cdn.example.com/b.jpg", "https://cdn.example.com/b.jpg"),
    ],
)
def test_redirects(location: str, found: str) -> None:
    origin = check_url("https://example.com/a/a.jpg", PUBLIC)
    assert check_redirect(location, origin, PUBLIC, hop=1).url == found


@pytest.mark.parametrize(
    "location, reason",
    [
        ("http://example.com/a.jpg", "may not lead to http"),
        ("file:///etc/passwd", "file:// is not fetched"),
        ("s3://bucket/key", "s3:// is not fetched"),
        ("data:image/png;base64,AAAA", "no URL with a host"),
        ("https://[::1", "no URL"),
        ("https://user@example.com/", "user name"),
        ("//example.com:22/", "port 22"),
    ],
)
def test_refused_redirects(location: str, reason: str) -> None:
    policy = SourcePolicy(http=True)
    origin = check_url("https://example.com/a/a.jpg", policy)
    with pytest.raises(ItemError, match=reason) as caught:
        check_redirect(location, origin, policy, hop=3)
    assert (caught.value.code, "(redirect 3)" in caught.value.message) == ("url_refused", True)


@pytest.mark.parametrize(
    "kind, is_media",
    [
        ("image/jpeg", True),
        ("Video/MP4; codecs=x", True),
        ("", True),
        ("application/octet-stream", True),
        ("application/pdf", True),
        ("text/html; charset=utf-8", False),
        ("application/json", False),
        ("imagejpeg", False),
    ],
)
def test_media_types(kind: str, is_media: bool) -> None:
    assert is_media_type(kind) is is_media


@pytest.mark.parametrize(
    "path, roots, is_inside",
    [
        ("/data/a.jpg", ["/data"], True),
        ("/data", ["/data"], True),
        ("/database/a.jpg", ["/data"], False),
        ("/etc/passwd", ["/data", "/media"], False),
        ("/media/a.jpg", ["/data", "/media"], True),
        ("/etc/passwd", [], True),
        ("/etc/passwd", ["/"], True),
    ],
)
def test_roots(path: str, roots: list[str], is_inside: bool) -> None:
    assert is_within(path, roots) is is_inside
