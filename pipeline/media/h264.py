"""What an H.264 file says of its pictures' size and order before one is decoded. Pure.

Names and numbers of sections are those of ITU-T H.264 (08/2021), and of ISO/IEC 14496-15 for `avcC`.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.media.bits import Bits

_SEQUENCE_PARAMETER_SET = 7  # nal_unit_type
_EXTENDED_SAR = 255
# profile_idc that, with constraint_set3_flag, have intra pictures only: nothing is reordered (E.2.1)
_INTRA_PROFILES = frozenset({44, 86, 100, 110, 122, 244})
# profile_idc with chroma_format_idc and scaling matrices (7.3.2.1.1)
_HIGH_PROFILES = frozenset({44, 83, 86, 100, 110, 118, 122, 128, 134, 135, 138, 139, 244})
_MOST_ZEROS = 32  # of an exp-Golomb code


@dataclass(frozen=True, kw_only=True, slots=True)
class H264Sequence:
    """Of a sequence parameter set: the pictures' size in pixels, cropped, and how many a decoder holds back at most
    because they are shown later, None where it does not say."""

    width: int
    height: int
    num_reorder_frames: int | None


def read_sequence(avcc: bytes) -> H264Sequence | None:
    """Of an `avcC` box (5.3.3.1 of part 15) with one sequence parameter set; None for anything else."""
    if len(avcc) < 8 or avcc[0] != 1 or avcc[5] & 31 != 1:
        return None
    unit = avcc[8 : 8 + int.from_bytes(avcc[6:8], "big")]
    if not unit or unit[0] & 31 != _SEQUENCE_PARAMETER_SET:
        return None
    try:
        return _sequence(Bits(unit[1:].replace(b"\0\0\3", b"\0\0")))  # emulation prevention (7.4.1)
    except (IndexError, OverflowError):
        return None


def _sequence(bits: Bits) -> H264Sequence:
    """seq_parameter_set_data (7.3.2.1.1)."""
    profile = bits.read(8)
    has_intra_only = bits.read(8) >> 4 & 1 and profile in _INTRA_PROFILES  # constraint_set3_flag
    bits.read(8)  # level_idc
    _unsigned(bits)  # seq_parameter_set_id
    chroma_format, is_separate = 1, 0
    if profile in _HIGH_PROFILES:
        chroma_format = _unsigned(bits)
        if chroma_format == 3:
            is_separate = bits.read(1)
        _unsigned(bits)  # bit_depth_luma_minus8
        _unsigned(bits)  # bit_depth_chroma_minus8
        bits.read(1)  # qpprime_y_zero_transform_bypass_flag
        if bits.read(1):  # seq_scaling_matrix_present_flag
            for number in range(8 if chroma_format != 3 else 12):
                if bits.read(1):
                    _skip_scaling_list(bits, 16 if number < 6 else 64)
    _unsigned(bits)  # log2_max_frame_num_minus4
    order = _unsigned(bits)  # pic_order_cnt_type
    if order == 0:
        _unsigned(bits)
    elif order == 1:
        bits.read(1)
        for _ in range(2):
            _unsigned(bits)
        for _ in range(_unsigned(bits)):
            _unsigned(bits)
    _unsigned(bits)  # max_num_ref_frames
    bits.read(1)  # gaps_in_frame_num_value_allowed_flag
    width, units = 16 * (_unsigned(bits) + 1), _unsigned(bits) + 1
    is_frames_only = bits.read(1)
    height = 16 * units * (2 - is_frames_only)
    if not is_frames_only:
        bits.read(1)  # mb_adaptive_frame_field_flag
    bits.read(1)  # direct_8x8_inference_flag
    if bits.read(1):  # frame_cropping_flag
        unit_x, unit_y = _crop_units(0 if is_separate else chroma_format, is_frames_only)
        width -= unit_x * (_unsigned(bits) + _unsigned(bits))
        height -= unit_y * (_unsigned(bits) + _unsigned(bits))
    reordered = _reordered(bits) if bits.read(1) else None  # vui_parameters_present_flag
    if reordered is None and has_intra_only:
        reordered = 0
    return H264Sequence(width=width, height=height, num_reorder_frames=reordered)


def _crop_units(chroma_format: int, is_frames_only: int) -> tuple[int, int]:
    """CropUnitX, CropUnitY (7-19 to 7-22)."""
    fields = 2 - is_frames_only
    return (2 if chroma_format in (1, 2) else 1), (2 if chroma_format == 1 else 1) * fields


def _skip_scaling_list(bits: Bits, size: int) -> None:
    """scaling_list (7.3.2.1.1.1)."""
    last = following = 8
    for _ in range(size):
        if following:
            following = (last + _signed(bits)) % 256
        last = following or last


def _reordered(bits: Bits) -> int | None:
    """max_num_reorder_frames of vui_parameters (E.1.1)."""
    if bits.read(1) and bits.read(8) == _EXTENDED_SAR:  # aspect_ratio_info_present_flag
        bits.read(32)
    if bits.read(1):  # overscan_info_present_flag
        bits.read(1)
    if bits.read(1):  # video_signal_type_present_flag
        bits.read(4)
        if bits.read(1):  # colour_description_present_flag
            bits.read(24)
    if bits.read(1):  # chroma_loc_info_present_flag
        _unsigned(bits)
        _unsigned(bits)
    if bits.read(1):  # timing_info_present_flag
        bits.read(65)
    has_nal_hrd = bits.read(1)
    if has_nal_hrd:
        _skip_hrd(bits)
    has_vcl_hrd = bits.read(1)
    if has_vcl_hrd:
        _skip_hrd(bits)
    if has_nal_hrd or has_vcl_hrd:
        bits.read(1)  # low_delay_hrd_flag
    bits.read(1)  # pic_struct_present_flag
    if not bits.read(1):  # bitstream_restriction_flag
        return None
    bits.read(1)  # motion_vectors_over_pic_boundaries_flag
    for _ in range(4):  # max_bytes_per_pic_denom, max_bits_per_mb_denom, log2_max_mv_length_horizontal and _vertical
        _unsigned(bits)
    return _unsigned(bits)


def _skip_hrd(bits: Bits) -> None:
    """hrd_parameters (E.1.2)."""
    count = _unsigned(bits) + 1
    bits.read(8)
    for _ in range(count):
        _unsigned(bits)
        _unsigned(bits)
        bits.read(1)
    bits.read(20)


def _unsigned(bits: Bits) -> int:
    """ue(v) (9.1)."""
    zeros = 0
    while not bits.read(1):
        zeros += 1
        if zeros > _MOST_ZEROS:
            raise OverflowError("no exp-Golomb code")
    return (1 << zeros) - 1 + bits.read(zeros)


def _signed(bits: Bits) -> int:
    """se(v) (9.1.1)."""
    number = _unsigned(bits)
    return (number + 1) // 2 if number & 1 else -(number // 2)
