"""Plots: every value lies where its axis says, and nothing but text can be in a text."""

import base64
import re
import struct
import xml.etree.ElementTree as ET
import zlib

import pytest

from torchmuster.report.plots import (
    Area,
    PlotBar,
    PlotLabels,
    PlotLine,
    PlotPiece,
    Scale,
    bar_plot,
    columns,
    heat_plot,
    heatmap_png,
    line_plot,
    ticks,
    time_ticks,
    value_scale,
)

LABELS = PlotLabels(key="k", title="T <&> T", words="W", x="step", y="loss")


def drawn(svg):
    """Parse the picture as strict XML: what is not escaped would not parse."""
    return ET.fromstring(str(svg).replace(" data-read=1", ""))


def ways(svg, style):
    return [one.get("d") for one in drawn(svg).iter("path") if one.get("class") == style]


def test_a_line_is_drawn_by_its_scale_and_interrupted_where_nothing_is_known():
    line = PlotLine(name="a", points=[(0, 0.0), (1, 1.0), (2, None), (3, 2.0), (4, 1.0)])

    (way,) = ways(line_plot(LABELS, [line]), "line")

    numbers = [float(word) for word in re.findall(r"[\d.]+", way)]
    assert re.sub(r"[\d. ]", "", way) == "MLML"
    xs, ys = numbers[::2], numbers[1::2]
    assert xs == sorted(xs)
    assert ys[0] > ys[1] == ys[3] > ys[2]


@pytest.mark.parametrize(
    "values", [[], [None], [1.0], [0.0, 0.0], [1e308, -1e308], [5e-324, 1.0], [1e-300, 1e300]]
)
def test_every_series_can_be_drawn(values):
    line = PlotLine(name="a", points=[*enumerate(values)])

    text = str(line_plot(LABELS, [line]))

    assert "nan" not in text
    assert "inf" not in text
    drawn(text)


def test_100_000_points_are_few_in_the_picture_and_their_spike_stays():
    points = [(n, 1.0 if n != 31_415 else 1000.0) for n in range(100_000)]

    svg = line_plot(LABELS, [PlotLine(name="a", points=points)])

    (way,) = ways(svg, "line")
    assert len(way) < 30_000
    ys = [float(y) for y in re.findall(r"[\d.]+ ([\d.]+)", way)]
    assert ys.count(min(ys)) == 1
    assert max(ys) - min(ys) > 150


def test_an_area_is_closed_at_each_gap():
    area = Area(xs=(0, 1, 2, 3), least=(1, 1, None, 1), most=(2, 3, None, 2))

    (way,) = ways(line_plot(LABELS, [], areas=[area]), "band")

    assert way.count("M") == way.count("z") == 2


def test_bars_have_titles_signs_and_words_where_there_is_room():
    two, ten = (PlotPiece(begin=0, end=end, style="s", title="t") for end in (2, 10))
    row = PlotBar(name="<b>", pieces=[two], words="why & how", signs=(2.0,))
    other = PlotBar(name="x", pieces=[ten])

    picture = drawn(bar_plot(LABELS, [row, other], is_time=True))

    widths = [float(one.get("width")) for one in picture.iter("rect")]
    assert widths[1] == pytest.approx(5 * widths[0], rel=0.01)
    texts = [one.text for one in picture.iter("text")]
    assert "<b>" in texts
    assert "why & how" in texts
    assert [one.get("class") for one in picture.iter("path")].count("sign") == 1


def test_columns_of_512_ranks_are_one_path_for_each_layer():
    layers = [("a", [1.0] * 512), ("b", [float(n) for n in range(512)])]

    svg = columns(LABELS, [str(n) for n in range(512)], layers)

    assert ways(svg, "a")[0].count("z") == 512
    assert ways(svg, "b")[0].count("z") == 511  # nothing is drawn for nothing
    assert len(svg) < 60_000


def test_columns_are_labelled_by_their_names():
    svg = columns(LABELS, ["0", "1", "8", "9"], [("a", [1.0] * 4)])

    labels = re.findall(r"<text[^>]*>([^<]*)</text>", str(svg))
    assert "".join(name for name in labels if name in "012389")[:4] == "0189"


def pixels(uri):
    data = base64.b64decode(uri.partition(",")[2])
    assert data.startswith(b"\x89PNG")
    place, chunks = 8, {}
    while place < len(data):
        (size,) = struct.unpack(">I", data[place : place + 4])
        kind, body = data[place + 4 : place + 8], data[place + 8 : place + 8 + size]
        (check,) = struct.unpack(">I", data[place + 8 + size : place + 12 + size])
        assert check == zlib.crc32(kind + body)
        chunks[kind] = body
        place += 12 + size
    width, height = struct.unpack(">2I", chunks[b"IHDR"][:8])
    raw = zlib.decompress(chunks[b"IDAT"])
    return [[*raw[y * (width + 1) + 1 : (y + 1) * (width + 1)]] for y in range(height)]


def test_a_heat_map_has_a_pixel_for_each_value():
    found = pixels(heatmap_png([[0.0, 1.0], [0.5, None], [9.0]], 0.0, 1.0))
    assert found == [[1, 64], [33, 0], [64, 0]]


def test_one_spike_does_not_hide_the_rest_of_a_heat_map():
    rows = [[1.0 + 0.01 * (n % 10) for n in range(200)] for _ in range(4)]
    rows[0][0] = 1e6

    (image,) = drawn(heat_plot(LABELS, rows, span_s=1.0, unit="ms")).iter("image")

    assert len({level for row in pixels(image.get("href")) for level in row}) >= 10


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0.5, 0.51), (-3, 7e5), (0, 1e300), (1e-9, 2e-9)]
)
def test_ticks_are_few_and_on_the_scale(low, high):
    scale = Scale(low=low, high=high, begin=0, end=1)

    for found in (ticks(scale), time_ticks(scale)):
        assert 1 <= len(found) <= 11
        assert all(low <= value <= high for value, _ in found)


def test_values_far_apart_have_a_logarithmic_axis():
    scale = value_scale([0.001, 10.0], 100.0, 0.0)

    assert scale.is_log
    assert [text for _, text in ticks(scale)] == ["0.001", "0.01", "0.1", "1", "10"]
    assert not value_scale([0.0, 10.0], 100.0, 0.0).is_log
