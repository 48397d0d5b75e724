"""Which members a tar or zip archive has, and where they lie in it. The archive is not trusted.

tar: POSIX.1-2001 (ustar and pax) with GNU's long names; zip: APPNOTE.TXT 6.3.10, with Zip64. Pure.
"""

from __future__ import annotations

import itertools
import re
import stat
import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import BinaryIO

from pipeline.errors import ItemError

HEADER_BYTES = 512  # from a member's `start`, as many as `data_offset` wants
MAX_MEMBERS = 250_000  # 290 bytes each
_MAX_EXTRA_BYTES = 2**20  # of a pax header or a long name
_MAX_NAME_BYTES = 4096
_MAX_DIRECTORY_BYTES = 128 * 2**20
# Not tuned. Drawn JPEGs deflate by 1.3, clips by 1.1, a blank BMP by 1,000; below so many bytes it does not matter.
_MAX_RATIO = 100
_RATIO_FREE_BYTES = 2**20

_BLOCK = 512
_REGULAR, _CONTAINER = (b"0", b"\0", b"7"), b"5"
_REFUSED_TYPES = {b"1": "a link", b"2": "a link", b"3": "a device", b"4": "a device", b"6": "a pipe", b"S": "sparse"}
_WITHOUT_DATA = (b"1", b"2", b"3", b"4", b"5", b"6")
_SPARSE_MORE, _SPARSE_MORE_AFTER = 482, 504  # where GNU's sparse headers say that another block of them follows

_END, _END64, _LOCATOR64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q"), struct.Struct("<4sLQL")
_ENTRY, _LOCAL = struct.Struct("<4s6H3L5H2L"), struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 2**16 - 1
_FULL16, _FULL32 = 2**16 - 1, 2**32 - 1
_ENCRYPTED, _UTF8 = 0x1, 0x800
_STORED, _DEFLATED = 0, 8
_UNIX = 3

_ARCHIVE = re.compile(r"(?P<archive>[^#]*\.(?:tar|zip))#(?P<name>.+)", re.I | re.S)
_ARCHIVE_URL = re.compile(r"(?P<archive>https?://[^?#]*\.(?:tar|zip)(?:\?[^#]*)?)#(?P<name>.+)", re.I | re.S)
ARCHIVE_SUFFIXES = (".tar", ".zip")


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A file in an archive. `start` is where its header begins, `stop` a place behind its bytes and at most the next
    one's `start`; `crc` is the CRC-32 of its content (zip) or of its header block (tar). `refusal` says why it is not
    read, "" for one that is."""

    name: str
    start: int
    stop: int
    num_bytes: int
    crc: int
    is_zipped: bool = False
    is_deflated: bool = False
    stored_bytes: int = 0
    refusal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveIndex:
    """By name, the files of an archive; `damage` says from where on it makes no sense, "" for one that does."""

    members: dict[str, Member]
    damage: str = ""

    def find(self, name: str, archive: str) -> Member:
        """The member that can be read. Raises `ItemError` (stage `fetch`): `not_found`, `corrupt_archive`,
        `member_refused`."""
        member = self.members.get(name.removeprefix("./"))
        if member is None and self.damage:
            raise ItemError("fetch", "corrupt_archive", f"{archive}: {self.damage}")
        if member is None:
            raise ItemError("fetch", "not_found", f"{archive}: has no member {name[:200]!r}")
        if member.refusal:
            raise ItemError("fetch", "member_refused", f"{archive}#{name[:200]}: {member.refusal}")
        return member


class _DamageError(Exception):
    """Says what makes no sense, and where."""


def split_member(uri: str) -> tuple[str, str] | None:
    """(archive, member) of `….tar#member` or `….zip#member`; None for other URIs. A member is written as it is."""
    pattern = _ARCHIVE_URL if uri[:8].lower().startswith(("http://", "https://")) else _ARCHIVE
    matched = pattern.fullmatch(uri)
    return None if matched is None else (matched["archive"], matched["name"])


def index_archive(file: BinaryIO, num_bytes: int, archive: str) -> ArchiveIndex:
    """The index of an archive of so many bytes, whose name says of which kind it is."""
    is_zip = re.split(r"[?#]", archive, maxsplit=1)[0].lower().endswith(".zip")
    return _index_zip(file, num_bytes) if is_zip else _index_tar(file, num_bytes)


def member_bytes(member: Member, data: bytes) -> bytes:
    """The content of a member, from the archive's bytes from its `start` to its `stop`.

    Raises `ItemError` (stage `fetch`): `corrupt_archive`, `content_mismatch` for an archive that is not the
    one that was indexed.
    """
    at = data_offset(member, data)
    if not member.is_zipped:
        return data[at : at + member.num_bytes]
    content = data[at : at + member.stored_bytes]
    if member.is_deflated:
        content = _inflated(content, member)
    if len(content) != member.num_bytes or zlib.crc32(content) != member.crc:
        raise ItemError("fetch", "corrupt_archive", f"{member.name}: size or checksum are not what the archive says")
    return content


def data_offset(member: Member, header: bytes) -> int:
    """Where the content begins, counted from `start`, from the bytes there. Raises as `member_bytes` does."""
    if not member.is_zipped:
        if zlib.crc32(header[:_BLOCK]) != member.crc:
            raise ItemError("fetch", "content_mismatch", f"{member.name}: its archive changed since it was indexed")
        return _BLOCK
    if len(header) < _LOCAL.size or header[:4] != b"PK\3\4":
        raise ItemError("fetch", "corrupt_archive", f"{member.name}: it does not begin where the archive says")
    *_, name_bytes, extra_bytes = _LOCAL.unpack_from(header)
    offset: int = _LOCAL.size + name_bytes + extra_bytes
    if member.start + offset + member.stored_bytes > member.stop:
        raise ItemError("fetch", "corrupt_archive", f"{member.name}: it ends behind where the next one begins")
    return offset


def _inflated(data: bytes, member: Member) -> bytes:
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        return inflater.decompress(data, member.num_bytes + 1)
    except zlib.error as error:
        raise ItemError("fetch", "corrupt_archive", f"{member.name}: {error}") from error


def _index(members: Iterable[Member]) -> ArchiveIndex:
    """What `members` come to, until they are damaged, too many, or all there."""
    found: dict[str, Member] = {}
    try:
        for number, member in enumerate(members):
            if number == MAX_MEMBERS:
                raise _DamageError(f"it has more than {MAX_MEMBERS:,} members")
            other = found.get(member.name)
            found[member.name] = member if other is None else replace(member, refusal="its name occurs more than once")
    except _DamageError as error:
        return ArchiveIndex(members=found, damage=str(error))
    return ArchiveIndex(members=found)


def _name_refusal(name: str) -> str:
    """Why a name is not one below the archive's own folder, "" for one that is."""
    if name.startswith("/") or re.match(r"[A-Za-z]:", name):
        return "its name is absolute"
    if ".." in name.split("/"):
        return "its name leads out of the archive"
    if not name or "\\" in name or re.search(r"[\x00-\x1f\x7f]", name):
        return "its name is empty, or has backslashes or control characters"
    return ""


def _decoded_name(raw: bytes, encoding: str = "utf-8") -> tuple[str, str]:
    """(name, why it is refused); what is not in `encoding` is shown with escapes."""
    if len(raw) > _MAX_NAME_BYTES:
        raise _DamageError(f"a member has a name of {len(raw):,} bytes, {raw[:100]!r}…")
    try:
        name = raw.decode(encoding).removeprefix("./")
    except UnicodeDecodeError:
        return raw.decode("ascii", "backslashreplace"), "its name is not UTF-8"
    return name, _name_refusal(name)


def _index_tar(file: BinaryIO, num_bytes: int) -> ArchiveIndex:
    return _index(_tar_members(file, num_bytes))


def _tar_members(file: BinaryIO, num_bytes: int) -> Iterable[Member]:
    at = 0
    raw_name: bytes | None = None
    pax: dict[bytes, bytes] = {}
    while True:
        block = _read(file, at, _BLOCK)
        if block == bytes(_BLOCK):
            return
        kind, size = block[156:157], _header_size(block, at)
        if kind in _REGULAR and b"size" in pax:
            size = _decimal(pax[b"size"], at)
        data = at + _BLOCK
        if kind == b"S" and block[_SPARSE_MORE]:
            while _read(file, data, _BLOCK)[_SPARSE_MORE_AFTER]:
                data += _BLOCK
            data += _BLOCK
        stop = data if kind in _WITHOUT_DATA else data + -(-size // _BLOCK) * _BLOCK
        if stop > num_bytes and data + size > num_bytes:
            raise _DamageError(f"the member at byte {at} ends at {data + size}, behind the archive's {num_bytes}")
        if kind in (b"x", b"g", b"L"):
            extra = _read(file, data, _bounded(size, at))
            if kind == b"L":
                raw_name = extra.rstrip(b"\0")
            else:
                records = _pax_records(extra, at)
                if kind == b"g" and records.keys() & {b"path", b"size"}:
                    raise _DamageError(f"the header at byte {at} gives all members one name or size")
                pax = records if kind == b"x" else pax
        elif kind != b"K":
            name, refusal = _decoded_name(pax.get(b"path", raw_name or _header_name(block)))
            if kind != _CONTAINER and not (kind in _REGULAR and name.endswith("/")):
                refusal = refusal or _type_refusal(kind, pax)
                end = data + size if kind in _REGULAR else data
                crc = zlib.crc32(block)
                yield Member(name=name, start=at, stop=end, num_bytes=size, crc=crc, refusal=refusal)
            raw_name, pax = None, {}
        at = stop


def _type_refusal(kind: bytes, pax: dict[bytes, bytes]) -> str:
    if any(key.startswith(b"GNU.sparse.") for key in pax):
        return "it is sparse"
    if kind in _REGULAR:
        return ""
    return f"it is {_REFUSED_TYPES.get(kind, f'of the unknown type {kind!r}')}"


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    file.seek(at)
    data = file.read(size)
    if len(data) < size:
        raise _DamageError(f"it ends at byte {at + len(data)}, before what should be there")
    return data


def _bounded(size: int, at: int) -> int:
    if size > _MAX_EXTRA_BYTES:
        raise _DamageError(f"the header at byte {at} is followed by {size:,} bytes of names")
    return size


def _header_size(block: bytes, at: int) -> int:
    """The size that a header gives; its checksum is checked first."""
    summed = sum(block[:148]) + 8 * ord(" ") + sum(block[156:])
    try:
        is_valid = int(block[148:156].strip(b" \0") or b"-1", 8) == summed
        # Above 8 GB GNU writes the number itself, behind a first bit.
        raw = block[124:136]
        size = int.from_bytes(raw[1:], "big") if raw[0] == 0x80 else int(raw.strip(b" \0") or b"0", 8)
    except ValueError:
        is_valid, size = False, -1
    if not is_valid or size < 0:
        raise _DamageError(f"there is no valid header at byte {at}")
    return size


def _header_name(block: bytes) -> bytes:
    name, prefix = block[:100].partition(b"\0")[0], block[345:500].partition(b"\0")[0]
    return prefix + b"/" + name if prefix and block[257:263] == b"ustar\0" else name


def _pax_records(data: bytes, at: int) -> dict[bytes, bytes]:
    records: dict[bytes, bytes] = {}
    rest = data
    while rest.strip(b"\0"):
        length, space, _ = rest[:32].partition(b" ")
        end = _decimal(length, at)
        key, equals, value = rest[len(length) + 1 : end - 1].partition(b"=")
        if not space or not equals or not len(length) < end <= len(rest) or rest[end - 1 : end] != b"\n":
            raise _DamageError(f"the extended header at byte {at} makes no sense")
        records[key] = value
        rest = rest[end:]
    return records


def _decimal(text: bytes, at: int) -> int:
    if not re.fullmatch(rb"[0-9]{1,18}", text):
        raise _DamageError(f"{text[:40]!r} in the extended header at byte {at} is no number")
    return int(text)


def _index_zip(file: BinaryIO, num_bytes: int) -> ArchiveIndex:
    try:
        count, offset, directory = _directory(file, num_bytes)
    except _DamageError as error:
        return ArchiveIndex(members={}, damage=str(error))
    index = _index(_zip_members(directory, count, offset))
    ordered = sorted(index.members.values(), key=lambda member: (member.start, member.stop))
    following = [member.start for member in ordered[1:]] + [offset]
    members = {m.name: _bounded_by(m, stop) for m, stop in zip(ordered, following, strict=False)}
    # The one behind begins within this one: neither is what the directory says.
    for member, other in itertools.pairwise(ordered):
        if member.stop > other.start:
            members[other.name] = replace(other, refusal="it overlaps another member")
    return replace(index, members=members)


def _bounded_by(member: Member, following: int) -> Member:
    if member.stop > following:
        return replace(member, refusal="it overlaps another member")
    # Names and extra fields in front of the content may be longer than in the directory, and are not known before.
    return replace(member, stop=min(following, member.stop + 2 * _FULL16))


def _directory(file: BinaryIO, num_bytes: int) -> tuple[int, int, bytes]:
    """(members, where the central directory lies, its bytes)."""
    tail_at = max(0, num_bytes - _END.size - _MAX_COMMENT)
    tail = _read(file, tail_at, num_bytes - tail_at)
    at = tail.rfind(b"PK\5\6")
    while at >= 0 and not (at + _END.size <= len(tail) == at + _END.size + _END.unpack_from(tail, at)[7]):
        at = tail.rfind(b"PK\5\6", 0, at)
    if at < 0:
        raise _DamageError("it has no end of a central directory: it is cut off, or no zip archive")
    _, disk, first_disk, here, count, size, offset, _ = _END.unpack_from(tail, at)
    end = tail_at + at
    locator_at = end - _LOCATOR64.size
    mark, _, end64, _ = (
        _LOCATOR64.unpack(_read(file, locator_at, _LOCATOR64.size)) if locator_at >= 0 else (b"", 0, 0, 0)
    )
    if mark == b"PK\6\7":
        if end64 + _END64.size > locator_at:
            raise _DamageError(f"its Zip64 end is said to lie at byte {end64}")
        mark, _, _, _, disk, first_disk, here, count, size, offset = _END64.unpack(_read(file, end64, _END64.size))
        end = end64
        if mark != b"PK\6\6":
            raise _DamageError(f"there is no Zip64 end at byte {end64}")
    if disk or first_disk or here != count:
        raise _DamageError("it is one of several parts")
    if offset + size != end or count * _ENTRY.size > size:
        raise _DamageError(f"{count:,} members in {size:,} bytes at {offset:,} are no directory that ends at {end:,}")
    if count > MAX_MEMBERS or size > _MAX_DIRECTORY_BYTES:
        raise _DamageError(
            f"it has more than {MAX_MEMBERS:,} members, or {_MAX_DIRECTORY_BYTES:,} bytes of their names"
        )
    return count, offset, _read(file, offset, size)


def _zip_members(directory: bytes, count: int, directory_at: int) -> Iterable[Member]:
    at = 0
    for _ in range(count):
        if directory[at : at + 4] != b"PK\1\2" or at + _ENTRY.size > len(directory):
            raise _DamageError(f"there is no member at byte {at} of its directory")
        fields = _ENTRY.unpack_from(directory, at)
        made_by, flags, method, crc = fields[1] >> 8, fields[3], fields[4], fields[7]
        name_bytes, extra_bytes, comment_bytes, mode = fields[10], fields[11], fields[12], fields[15] >> 16
        names = at + _ENTRY.size
        at = names + name_bytes + extra_bytes + comment_bytes
        if at > len(directory):
            raise _DamageError("its directory ends within a member")
        raw = directory[names : names + name_bytes]
        extra = directory[names + name_bytes : names + name_bytes + extra_bytes]
        stored_bytes, num_bytes, start = _sizes64(extra, fields[8], fields[9], fields[16])
        name, refusal = _decoded_name(raw, "utf-8" if flags & _UTF8 else "cp437")
        if name.endswith("/"):
            continue
        stop = start + _LOCAL.size + name_bytes + stored_bytes
        if stop > directory_at:
            raise _DamageError(f"{name[:200]!r} ends at byte {stop}, behind the directory at {directory_at}")
        yield Member(
            name=name,
            start=start,
            stop=stop,
            num_bytes=num_bytes,
            crc=crc,
            is_zipped=True,
            is_deflated=method == _DEFLATED,
            stored_bytes=stored_bytes,
            refusal=refusal
            or _mode_refusal(mode if made_by == _UNIX else 0)
            or _method_refusal(flags, method, num_bytes, stored_bytes),
        )
    if at != len(directory):
        raise _DamageError(f"its directory goes on behind its {count:,} members")


def _sizes64(extra: bytes, stored_bytes: int, num_bytes: int, start: int) -> tuple[int, int, int]:
    """Stored size, size and place, those that do not fit in 32 bits from the Zip64 field."""
    at = 0
    values = b""
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            values = extra[at + 4 : at + 4 + length]
        at += 4 + length
    found = [num_bytes, stored_bytes, start]
    for number, value in enumerate(found):
        if value == _FULL32 and len(values) >= 8:
            found[number], values = int.from_bytes(values[:8], "little"), values[8:]
    return found[1], found[0], found[2]


def _mode_refusal(mode: int) -> str:
    if stat.S_ISLNK(mode):
        return "it is a link"
    return "" if stat.S_IFMT(mode) in (0, stat.S_IFREG) else "it is a device, a pipe or a socket"


def _method_refusal(flags: int, method: int, num_bytes: int, stored_bytes: int) -> str:
    if flags & _ENCRYPTED:
        return "it is encrypted"
    if method not in (_STORED, _DEFLATED):
        return f"it is compressed by method {method}, only storing (0) and deflating (8) are known"
    if method == _STORED and num_bytes != stored_bytes:
        return f"it is stored, and {num_bytes:,} bytes in {stored_bytes:,}"
    if num_bytes > max(_RATIO_FREE_BYTES, _MAX_RATIO * stored_bytes):
        return f"{num_bytes:,} bytes deflated to {stored_bytes:,} are more than {_MAX_RATIO} times as many"
    return ""
