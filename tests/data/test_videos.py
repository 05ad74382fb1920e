"""Videos are given as frames with times; whatever is not that is rejected by cause and field."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyeline.core.batch import EncodedImage, Text, Video
from eyeline.core.errors import BadSample
from eyeline.data.images.image_files import image_key
from eyeline.data.layouts.media import MAX_FRAMES
from eyeline.data.rejects import CAUSES
from eyeline.data.sources.sources import Rows, Source, open_source
from tests.data.read_back import row_of

FRAMES = ["clip/0.png", "clip/1.png", "clip/2.png"]
ASKED = [{"from": "human", "value": "<video>\nwhat happens?"}, {"from": "gpt", "value": "nothing"}]
TWO = [{"from": "human", "value": "<video> then <image> then <video>?"}, {"from": "gpt", "value": "yes"}]


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Rows]:
    def write(row: dict[str, Any]) -> Rows:
        (tmp_path / "rows.json").write_text(json.dumps([row]))
        return open_source(Source(path=str(tmp_path / "rows.json")))

    return write


def videos(rows: Rows) -> list[Video]:
    return [item for item in row_of(rows).media if isinstance(item, Video)]


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}, {"role": "assistant", "content": "ok"}]}


def test_a_column_of_frames_is_one_video(opened, tmp_path: Path) -> None:
    rows = opened({"video": FRAMES, "conversations": ASKED})
    video, text = row_of(rows).messages[0].parts
    assert isinstance(video, Video)
    assert video.frames == tuple(EncodedImage(name, tmp_path / name) for name in FRAMES)
    assert video.seconds == (0.0, 0.5, 1.0)  # two frames per second, where nothing is said
    assert text == Text("what happens?")
    assert row_of(rows).images == video.frames
    assert [image_key(p) for p in row_of(rows).images] == [str(tmp_path / name) for name in FRAMES]


@pytest.mark.parametrize(
    ("timing", "seconds"),
    [
        ({"fps": 4}, (0.0, 0.25, 0.5)),
        ({"sample_fps": 0.5, "fps": 30}, (0.0, 2.0, 4.0)),  # the rate that the frames were taken at, not the video's
        ({"timestamps": [1, 1.5, 9]}, (1.0, 1.5, 9.0)),
    ],
)
def test_times_are_taken_from_the_row_or_the_part(opened, timing: dict[str, Any], seconds: tuple[float, ...]) -> None:
    assert videos(opened({"video": FRAMES, "conversations": ASKED, **timing}))[0].seconds == seconds
    assert videos(opened(chat({"type": "video", "video": FRAMES, **timing}, {"type": "text", "text": "?"})))[0].seconds == seconds


@pytest.mark.parametrize("column", ["video", "videos"])
def test_several_videos_and_images_keep_their_order(opened, column: str) -> None:
    rows = opened({column: [FRAMES[:2], FRAMES], "fps": [1, 4], "image": "a.png", "conversations": TWO})
    first, _, image, _, second, _ = row_of(rows).messages[0].parts
    assert isinstance(first, Video)
    assert isinstance(second, Video)
    assert (first.seconds, image, second.seconds) == ((0.0, 1.0), row_of(rows).media[1], (0.0, 0.25, 0.5))


def test_bare_parts_and_strings_take_videos_from_the_column(opened) -> None:
    bare = {**chat({"type": "video"}, {"type": "text", "text": "?"}), "videos": [FRAMES]}
    string = {"messages": [{"role": "user", "content": "<video>?"}, {"role": "assistant", "content": "ok"}], "videos": [FRAMES]}
    assert videos(opened(bare)) == videos(opened(string))


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "a file": ({"video": "a.mp4", "conversations": ASKED}, "video_file", "video"),
    "a list of files": ({"videos": ["a.mp4"], "conversations": ASKED}, "video_file", "videos[0]"),
    "a file in a part": (chat({"type": "video", "video": "a.mp4"}), "video_file", "messages[0].content[0].video"),
    "a playlist by URL": (
        chat({"type": "video_url", "video_url": {"url": "a.m3u8"}}),
        "video_file",
        "messages[0].content[0].video_url",
    ),
    "frames by URL": ({"video": ["http://x/0.png"], "conversations": ASKED}, "remote_url", "video[0]"),
    "frames outside": ({"video": ["../0.png"], "conversations": ASKED}, "outside_root", "video[0]"),
    "no frames": ({"video": [], "conversations": ASKED}, "placeholder_count", "conversations"),
    "a number": ({"video": 3, "conversations": ASKED}, "video_frames", "video"),
    "numbers for frames": ({"video": [1, 2], "conversations": ASKED}, "wrong_type", "video[0]"),
    "too many frames": ({"video": ["a.png"] * (MAX_FRAMES + 1), "conversations": ASKED}, "video_frames", "video"),
    "no place": ({"video": FRAMES, "conversations": [{"from": "human", "value": "hi"}, ASKED[1]]}, "placeholder_count", "conversations"),
    "no video": ({"conversations": ASKED}, "placeholder_count", "conversations"),
    "two places": ({"video": FRAMES, "conversations": TWO, "image": "a"}, "placeholder_count", "conversations"),
    "image for video": ({"image": "a.png", "conversations": ASKED}, "placeholder_count", "conversations"),
    "in an answer": (
        {"video": FRAMES, "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "<video>"}]},
        "image_in_answer",
        "conversations[1].value",
    ),
    "in a text part": (chat({"type": "text", "text": "<video>"}), "placeholder_count", "messages[0].content[0].text"),
    "a bare part without a column": (chat({"type": "video"}), "placeholder_count", "messages"),
    **{
        f"fps {fps!r}": ({"video": FRAMES, "conversations": ASKED, "fps": fps}, "video_frames", "timestamps, sample_fps or fps")
        for fps in (0, -1, 1e9, "2", True)
    },
    **{
        f"times {times!r}": (
            {"video": FRAMES, "conversations": ASKED, "timestamps": times},
            "video_frames",
            "timestamps, sample_fps or fps",
        )
        for times in ([0, 1], [0, 2, 1], [-1, 0, 1], [0, 1, None], [0, 1, 1e12], 5)
    },
    "times of a part": (
        chat({"type": "video", "video": FRAMES, "timestamps": [2, 1, 0]}),
        "video_frames",
        "messages[0].content[0]",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_videos(opened, name: str) -> None:
    row, cause, field = BAD[name]
    with pytest.raises(BadSample) as caught:
        row_of(opened(row))
    assert (caught.value.cause, caught.value.field) == (cause, field)
    assert caught.value.cause in CAUSES


def test_a_video_file_is_refused_with_the_way_to_extract_its_frames(opened) -> None:
    with pytest.raises(BadSample, match=r"Extract them first, for example with: ffmpeg .* give the list of their paths"):
        row_of(opened({"video": "a.mp4", "conversations": ASKED}))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "b"}, {"from": "gpt", "value": "c"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "observation", "value": "b"}, {"from": "gpt", "value": "c"}]},
    ],
)
def test_turns_of_tools_are_rejected_by_name(opened, row: dict[str, Any]) -> None:
    with pytest.raises(BadSample, match="of tools are not supported") as caught:
        row_of(opened(row))
    assert caught.value.cause == "tool_turn"
