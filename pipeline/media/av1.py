"""Which pictures of an AV1 stream no other refers to, by their headers. Pure.

The decoder has no way to be asked (libdav1d loses frames when `skip_frame` changes while it runs), but a picture that
refreshes no reference slot leaves nothing behind: it need not be fed at all. Names and numbers of sections are those of
the AV1 Bitstream & Decoding Process Specification (version 1.0.0 with errata 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.media.bits import Bits

_SEQUENCE_HEADER, _FRAME_HEADER, _FRAME = 1, 3, 6  # obu_type
_KEY_FRAME, _INTRA_ONLY_FRAME, _SWITCH_FRAME = 0, 2, 3  # frame_type
_ALL_SLOTS = 255
_SELECT = 2  # SELECT_SCREEN_CONTENT_TOOLS, SELECT_INTEGER_MV


@dataclass(frozen=True, kw_only=True, slots=True)
class Av1Sequence:
    """What of a sequence header (5.5) is needed to read frame headers."""

    frame_id_bits: int  # 0: none are sent
    force_screen_content_tools: int
    force_integer_mv: int
    order_hint_bits: int


def read_sequence(data: bytes | memoryview) -> Av1Sequence | None:
    """Of the first sequence header among the OBUs of `data`; None without one, or of a kind whose frame headers are not
    read here (still pictures, decoder models)."""
    for kind, payload in _units(data):
        if kind == _SEQUENCE_HEADER:
            try:
                return _sequence(Bits(payload))
            except IndexError:
                return None
    return None


def is_unreferenced(data: bytes | memoryview, sequence: Av1Sequence) -> bool:
    """True when nothing that comes after a temporal unit can depend on it: it has no sequence header, and its frames
    refresh no reference slot. False for what cannot be told."""
    has_frame = False
    for kind, payload in _units(data):
        if kind == _SEQUENCE_HEADER:
            return False
        if kind in (_FRAME_HEADER, _FRAME):
            try:
                if _refresh_frame_flags(Bits(payload), sequence) != 0:
                    return False
            except IndexError:
                return False
            has_frame = True
    return has_frame


def _units(data: bytes | memoryview) -> Iterator[tuple[int, bytes | memoryview]]:
    """(obu_type, payload) of each OBU (5.3); the last may lack its size."""
    at = 0
    while at < len(data):
        head = data[at]
        at += 2 if head & 4 else 1  # obu_extension_flag
        size = len(data) - at
        if head & 2:  # obu_has_size_field
            size, at = _leb128(data, at)
        yield head >> 3 & 15, data[at : at + size]
        at += size


def _leb128(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """(value, place behind it) (4.10.5)."""
    value = 0
    for shift in range(0, 56, 7):
        if at >= len(data):
            break
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if not byte & 128:
            break
    return value, at


def _sequence(bits: Bits) -> Av1Sequence | None:
    """sequence_header_obu (5.5.1)."""
    bits.read(3)  # seq_profile
    bits.read(1)  # still_picture
    if bits.read(1):  # reduced_still_picture_header
        return None
    if bits.read(1):  # timing_info_present_flag
        return None
    has_initial_delay = bits.read(1)
    for _ in range(bits.read(5) + 1):
        bits.read(12)  # operating_point_idc
        if bits.read(5) > 7:  # seq_level_idx
            bits.read(1)  # seq_tier
        if has_initial_delay and bits.read(1):
            bits.read(4)
    width_bits, height_bits = bits.read(4) + 1, bits.read(4) + 1
    bits.read(width_bits)
    bits.read(height_bits)
    frame_id_bits = 0
    if bits.read(1):  # frame_id_numbers_present_flag
        delta_bits = bits.read(4) + 2
        frame_id_bits = bits.read(3) + 1 + delta_bits
    bits.read(3)  # use_128x128_superblock, enable_filter_intra, enable_intra_edge_filter
    bits.read(4)  # enable_interintra_compound, enable_masked_compound, enable_warped_motion, enable_dual_filter
    has_order_hint = bits.read(1)
    if has_order_hint:
        bits.read(2)  # enable_jnt_comp, enable_ref_frame_mvs
    screen = _SELECT if bits.read(1) else bits.read(1)
    integer_mv = _SELECT
    if screen > 0 and not bits.read(1):
        integer_mv = bits.read(1)
    return Av1Sequence(
        frame_id_bits=frame_id_bits,
        force_screen_content_tools=screen,
        force_integer_mv=integer_mv,
        order_hint_bits=bits.read(3) + 1 if has_order_hint else 0,
    )


def _refresh_frame_flags(bits: Bits, sequence: Av1Sequence) -> int:
    """uncompressed_header (5.9.2) up to refresh_frame_flags."""
    if bits.read(1):  # show_existing_frame: of a key frame it refreshes all slots
        return _ALL_SLOTS
    frame_type, is_shown = bits.read(2), bits.read(1)
    if frame_type == _SWITCH_FRAME or (frame_type == _KEY_FRAME and is_shown):
        return _ALL_SLOTS
    if not is_shown:
        bits.read(1)  # showable_frame
    is_resilient = bits.read(1)
    bits.read(1)  # disable_cdf_update
    has_screen_content = sequence.force_screen_content_tools
    if has_screen_content == _SELECT:
        has_screen_content = bits.read(1)
    if has_screen_content and sequence.force_integer_mv == _SELECT:
        bits.read(1)
    bits.read(sequence.frame_id_bits)
    bits.read(1)  # frame_size_override_flag
    bits.read(sequence.order_hint_bits)
    if frame_type not in (_KEY_FRAME, _INTRA_ONLY_FRAME) and not is_resilient:
        bits.read(3)  # primary_ref_frame
    return bits.read(8)
