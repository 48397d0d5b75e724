"""Which URLs, addresses and local paths media may be read from. Pure: what resolves and connects is elsewhere."""

from __future__ import annotations

import ipaddress
import posixpath
import re
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import ItemError

URL_SCHEMES = ("http", "https")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_DEFAULT_PORTS = {"http": 80, "https": 443}
# RFC 3986, appendix B, with a scheme and an authority.
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<path>[^?#]*)(?:\?(?P<query>[^#]*))?(?:#.*)?", re.S
)
_AUTHORITY = re.compile(r"(?P<host>\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>[0-9]{1,5}))?")
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_DOTTED_QUAD = re.compile(r"(?:0|[1-9][0-9]{0,2})(?:\.(?:0|[1-9][0-9]{0,2})){3}")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")  # what inet_aton, and so most resolvers, takes for a part of an address
_MAX_HOST_CHARS = 253
_SHOWN_CHARS = 200

_METADATA_HOSTS = {
    "metadata",
    "metadata.goog",
    "metadata.google.internal",
    "instance-data",
    "instance-data.ec2.internal",
}
# What clouds answer with credentials on: AWS, Google, Azure and others; ECS; Alibaba; Azure's agent; Oracle.
_METADATA_ADDRESSES = {
    ipaddress.ip_address(text)
    for text in (
        "169.254.169.254",
        "169.254.170.2",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "fd00:ec2::254",
        "fd20:ce::254",
    )
}
# IANA's registries of special-purpose addresses, in order: the first that holds an address names it. Written out,
# because what the standard library calls private has changed between its releases.
_RANGES: list[tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, str]] = [
    (ipaddress.ip_network(network), kind)
    for network, kind in (
        ("0.0.0.0/8", "unspecified"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "carrier-grade NAT"),
        ("127.0.0.0/8", "loopback"),
        ("169.254.0.0/16", "link-local"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "reserved"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "reserved"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "unspecified"),
        ("::1/128", "loopback"),
        ("64:ff9b::/96", ""),  # NAT64, judged by what it embeds
        ("fc00::/7", "private"),
        ("fe80::/10", "link-local"),
        ("fec0::/10", "site-local"),
        ("ff00::/8", "multicast"),
        ("2001::/23", "reserved"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", ""),  # 6to4, judged by what it embeds
        ("3fff::/20", "documentation"),
        ("2000::/3", ""),
        ("::/0", "reserved"),
    )
]
# Prefix → how far right of the address an IPv4 address stands in it, and what its bits are inverted with.
_EMBEDDING = [
    (ipaddress.IPv6Network(network), shift, mask)
    for network, shift, mask in (
        ("::ffff:0:0/96", 0, 0),  # mapped
        ("::/96", 0, 0),  # compatible
        ("64:ff9b::/96", 0, 0),  # NAT64
        ("64:ff9b:1::/48", 0, 0),  # NAT64 of one's own, as most commonly laid out
        ("2002::/16", 80, 0),  # 6to4
        ("2001::/32", 64, 0),  # Teredo: its server,
        ("2001::/32", 0, 0xFFFFFFFF),  # and its client
    )
]
_OF_INTERNAL_DOMAINS = {"loopback", "private", "carrier-grade NAT"}

# Besides image/*, video/* and audio/*: what servers call media, documents and archives, and what they say of bytes that
# they know nothing of.
_MEDIA_TYPES = {
    "",
    "application/mp4",
    "application/octet-stream",
    "application/ogg",
    "application/pdf",
    "application/tar",
    "application/x-matroska",
    "application/x-pdf",
    "application/x-tar",
    "application/x-zip-compressed",
    "application/zip",
    "binary/octet-stream",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePolicy:
    """Where media may come from. `internal_domains`, each with its subdomains, may resolve to loopback, private and
    carrier-grade NAT addresses; `allowed_ports` are those besides the default one of the scheme; `max_bytes` bounds one
    object that is fetched by URL; `roots` are the folders that local paths lie in, none: anywhere.

    `total_seconds` bounds one answer with all redirects before it, `read_seconds` the wait for its next bytes.
    """

    http: bool = False
    internal_domains: tuple[str, ...] = ()
    allowed_ports: tuple[int, ...] = ()
    max_redirects: int = 5
    max_bytes: int = 512 * 2**20
    dns_seconds: float = 5.0
    connect_seconds: float = 10.0
    read_seconds: float = 15.0
    total_seconds: float = 300.0
    roots: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A URL that may be asked for, if its host's addresses may be. `host` is lower-case; an IPv6 address has no
    brackets. `rest` is the path and the query, percent-encoded."""

    scheme: str
    host: str
    port: int
    rest: str

    @property
    def is_address(self) -> bool:
        """True for a host that is not resolved."""
        return ":" in self.host or _is_dotted_quad(self.host)

    @property
    def url(self) -> str:
        """The whole of it, without a fragment."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.rest}"


class RefusedAddressError(Exception):
    """An address that a host name resolved to, or was written as, and that may not be connected to."""

    def __init__(self, host: str, address: str, kind: str) -> None:
        what = f"{address}, {'an' if kind.startswith('u') else 'a'} {kind} address"
        hint = "; an internal domain is listed in sources.internal_domains" if kind in _OF_INTERNAL_DOMAINS else ""
        super().__init__(what if host == address else f"{host} resolves to {what}{hint}")


def show_url(url: str) -> str:
    """`url` for messages: without its query, which may be a signature, and cut to a line."""
    return show_text(re.split(r"[?#]", url, maxsplit=1)[0])


def show_text(text: str) -> str:
    """What a server said, for messages: cut, and with escapes for bytes that are no text."""
    return text[:_SHOWN_CHARS].encode("utf-8", "backslashreplace").decode()


def check_url(url: str, policy: SourcePolicy, *, hop: int = 0) -> Target:
    """What `url` names, by its text alone. `hop` counts redirects before it. Raises `ItemError` (`url_refused`)."""
    if re.search(r"[\x00-\x1f\x7f\\\ud800-\udfff]", url):
        raise refuse_url(url, hop, "it has control characters, backslashes, or bytes that are no text")
    matched = _URL.fullmatch(url)
    if matched is None:
        raise refuse_url(url, hop, "it is no URL with a host")
    scheme, authority, path, query = matched["scheme"].lower(), matched["authority"], matched["path"], matched["query"]
    if scheme not in URL_SCHEMES:
        raise refuse_url(url, hop, f"{scheme}:// is not fetched by URL")
    if scheme == "http" and not policy.http:
        raise refuse_url(url, hop, "http:// is not encrypted; use https://, or set sources.http: true")
    if "@" in authority:
        raise refuse_url(url, hop, "it has a user name or password; credentials are never in a URL")
    host, port = _host_and_port(url, hop, scheme, authority, policy)
    rest = urllib.parse.quote(path, safe="/%:@!$&'()*+,;=~") or "/"
    if query is not None:
        rest += "?" + urllib.parse.quote(query, safe="/%:@!$&'()*+,;=~?[]")
    return Target(scheme=scheme, host=host, port=port, rest=rest)


def check_redirect(location: str, origin: Target, policy: SourcePolicy, *, hop: int) -> Target:
    """What a `Location` of an answer of `origin` names. Raises as `check_url`, and where https leads to http."""
    try:
        url = urllib.parse.urljoin(origin.url, location)
    except ValueError as error:
        raise refuse_url(location, hop, f"it is no URL ({error})") from error
    target = check_url(url, policy, hop=hop)
    if origin.scheme == "https" and target.scheme == "http":
        raise refuse_url(url, hop, "https:// may not lead to http://")
    return target


def check_addresses(host: str, addresses: Sequence[str], policy: SourcePolicy) -> None:
    """Raise `RefusedAddressError` unless every one of the addresses of `host` may be connected to."""
    allowed = _OF_INTERNAL_DOMAINS if is_internal(host, policy) else set()
    for address in addresses:
        kind = special_kind(ipaddress.ip_address(address.partition("%")[0]))
        if kind is not None and kind not in allowed:
            raise RefusedAddressError(host, address, kind)


def special_kind(address: Address) -> str | None:
    """What keeps `address` from being a public one, itself or an IPv4 address that it embeds; None for a public one."""
    if address in _METADATA_ADDRESSES:
        return "cloud metadata"
    if isinstance(address, ipaddress.IPv6Address):
        for network, shift, mask in _EMBEDDING:
            if address in network and int(address) > 1:
                embedded = special_kind(ipaddress.IPv4Address(((int(address) >> shift) & 0xFFFFFFFF) ^ mask))
                if embedded is not None:
                    return f"{embedded} (IPv4 embedded in IPv6)"
        if address.ipv4_mapped is not None:
            return None
    return next((kind or None for network, kind in _RANGES if address in network), None)


def is_internal(host: str, policy: SourcePolicy) -> bool:
    """True for a domain that the policy lists, and for those below it."""
    return any(host == domain or host.endswith(f".{domain}") for domain in policy.internal_domains)


def is_media_type(content_type: str) -> bool:
    """True unless a `Content-Type` says that the answer is something else than media, a document or an archive."""
    kind = content_type.partition(";")[0].strip().lower()
    return kind in _MEDIA_TYPES or kind.partition("/")[0] in ("image", "video", "audio")


def is_within(real_path: str, real_roots: Sequence[str]) -> bool:
    """True when a path lies in one of the folders, or there are none; links of both are resolved already."""
    return not real_roots or any(posixpath.commonpath([real_path, root]) == root for root in real_roots)


def refuse_url(url: str, hop: int, reason: str) -> ItemError:
    """The error that names the URL, how many redirects led there, and why it is not fetched."""
    where = f" (redirect {hop})" if hop else ""
    return ItemError("fetch", "url_refused", f"{show_url(url)}{where}: {reason}")


def _host_and_port(url: str, hop: int, scheme: str, authority: str, policy: SourcePolicy) -> tuple[str, int]:
    matched = _AUTHORITY.fullmatch(authority)
    if matched is None:
        raise refuse_url(url, hop, f"{authority[:_SHOWN_CHARS]!r} is not a host with an optional port")
    port = int(matched["port"] or _DEFAULT_PORTS[scheme])
    host = _literal_host(matched["host"]) if matched["host"].startswith("[") else _named_host(matched["host"])
    if host is None:
        raise refuse_url(
            url,
            hop,
            f"{matched['host'][:_SHOWN_CHARS]!r} is neither a plain host name (ASCII, no trailing dot; others as "
            "xn--…) nor an address in its usual notation",
        )
    if host in _METADATA_HOSTS:
        raise refuse_url(url, hop, f"{host} is a cloud metadata service")
    if port != _DEFAULT_PORTS[scheme] and port not in policy.allowed_ports:
        raise refuse_url(url, hop, f"port {port} is not allowed; list it in sources.allowed_ports")
    return host, port


def _literal_host(text: str) -> str | None:
    """An IPv6 address in brackets, as it is commonly written; None for anything else, zones included."""
    try:
        return None if "%" in text else str(ipaddress.IPv6Address(text[1:-1]))
    except ValueError:
        return None


def _named_host(text: str) -> str | None:
    """A host name or IPv4 address; None where programs could disagree on what it names."""
    host = text.lower()
    if not host.isascii() or len(host) > _MAX_HOST_CHARS:
        return None
    if _NUMBER.fullmatch(host.rpartition(".")[2]):
        return host if _is_dotted_quad(host) else None
    return host if all(_LABEL.fullmatch(label) for label in host.split(".")) else None


def _is_dotted_quad(host: str) -> bool:
    return bool(_DOTTED_QUAD.fullmatch(host)) and all(int(part) < 256 for part in host.split("."))
