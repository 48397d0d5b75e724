"""Clips that are odd in one way each: other codecs, containers, headers and structures than the common ones."""

from media_files import Recipe

ODD_CLIPS = {
    "h264 10 bit": Recipe(pix_fmt="yuv420p10le", options={"g": "15", "bf": "2"}),
    "hevc 10 bit": Recipe(
        library="libx265",
        pix_fmt="yuv420p10le",
        options={"x265-params": "log-level=none:pools=none:frame-threads=1:keyint=15"},
    ),
    "h264 interlaced": Recipe(options={"g": "15", "bf": "2", "x264-params": "tff=1"}),
    "h264 interlaced ts": Recipe(container="mpegts", options={"g": "15", "bf": "2", "x264-params": "tff=1"}),
    "mpeg-2 ts": Recipe(container="mpegts", library="mpeg2video", options={"g": "15", "bf": "2", "b": "2M"}),
    "mpeg-2 mov": Recipe(container="mov", library="mpeg2video", options={"g": "15", "bf": "2", "b": "2M"}),
    "mpeg-4 mp4 B": Recipe(library="mpeg4", options={"g": "15", "bf": "2"}),
    "prores": Recipe(container="mov", library="prores_ks", pix_fmt="yuv422p10le"),
    "ffv1 mkv": Recipe(container="matroska", library="ffv1"),
    "png mov": Recipe(container="mov", library="png", pix_fmt="rgb24"),
    "vp9 alpha": Recipe(
        container="webm",
        library="libvpx-vp9",
        pix_fmt="yuva420p",
        options={"deadline": "realtime", "cpu-used": "8", "auto-alt-ref": "0"},
    ),
    "vp9 mp4": Recipe(library="libvpx-vp9", options={"deadline": "realtime", "cpu-used": "8", "g": "20"}),
    "av1 mp4": Recipe(library="libsvtav1", num_frames=60, options={"g": "30", "preset": "12"}),
    "av1 webm": Recipe(container="webm", library="libsvtav1", num_frames=60, options={"g": "30", "preset": "10"}),
    "h264 slices": Recipe(options={"g": "15", "bf": "2", "x264-params": "slices=4"}),
    "h264 periodic no IDR": Recipe(options={"x264-params": "keyint=90:min-keyint=10:open-gop=1:bframes=5:b-adapt=2"}),
    "h264 weighted": Recipe(options={"g": "30", "bf": "3", "x264-params": "weightp=2:weightb=1"}),
    "h264 1 frame": Recipe(num_frames=1),
    "h264 2 frames": Recipe(num_frames=2),
    "h264 60 fps": Recipe(rate=60, options={"g": "30", "bf": "3"}),
    "h264 ntsc-like slow": Recipe(rate=5, num_frames=20, options={"g": "6", "bf": "2"}),
    "h264 mov": Recipe(container="mov", options={"g": "15", "bf": "2"}),
    "h264 3gp": Recipe(container="3gp", options={"g": "15", "bf": "2"}),
    "h264 fragmented per frame": Recipe(
        options={"g": "15", "bf": "2"}, container_options={"movflags": "frag_every_frame+empty_moov+default_base_moof"}
    ),
    "h264 faststart": Recipe(options={"g": "15", "bf": "2"}, container_options={"movflags": "faststart"}),
    "h264 negative cts": Recipe(options={"g": "15", "bf": "2"}, container_options={"movflags": "negative_cts_offsets"}),
    "h264 no edit list": Recipe(options={"g": "15", "bf": "2"}, container_options={"use_editlist": "0"}),
    "mkv live": Recipe(container="matroska", options={"g": "15", "bf": "2"}, container_options={"live": "1"}),
    "mkv no cues": Recipe(
        container="matroska",
        options={"g": "15", "bf": "2"},
        container_options={"cues_to_front": "0", "reserve_index_space": "0"},
    ),
    "webm live vp8": Recipe(
        container="webm",
        library="libvpx",
        options={"deadline": "realtime", "cpu-used": "8", "g": "20"},
        container_options={"live": "1"},
    ),
    "flv1": Recipe(container="flv", library="flv", options={"g": "12"}),
    "wmv": Recipe(container="asf", library="wmv2", options={"g": "12"}),
    "msmpeg4 avi": Recipe(container="avi", library="msmpeg4", options={"g": "12"}),
    "huffyuv avi": Recipe(container="avi", library="huffyuv", pix_fmt="yuv422p"),
    "mjpeg avi": Recipe(container="avi", library="mjpeg", pix_fmt="yuvj420p"),
    "h264 m2ts": Recipe(
        container="mpegts", options={"g": "15", "bf": "2"}, container_options={"mpegts_m2ts_mode": "1"}
    ),
    "hevc idr hierarchical": Recipe(
        library="libx265",
        options={"x265-params": "log-level=none:pools=none:frame-threads=1:keyint=60:bframes=7:b-pyramid=1"},
    ),
    "hevc temporal layers": Recipe(
        library="libx265",
        options={"x265-params": "log-level=none:pools=none:frame-threads=1:keyint=30:bframes=7:temporal-layers=3"},
    ),
    "hevc intra": Recipe(
        library="libx265", options={"x265-params": "log-level=none:pools=none:frame-threads=1:keyint=1"}
    ),
    "h264 lossless": Recipe(pix_fmt="yuv444p", options={"g": "15", "qp": "0"}),
    "h264 gray": Recipe(pix_fmt="gray", options={"g": "15"}),
    "h264 baseline": Recipe(options={"g": "15", "profile": "baseline"}),
    "h264 full range": Recipe(pix_fmt="yuvj420p", options={"g": "15", "bf": "2"}),
}
