"""Draws one transfer of a merged trace as SVG, as docs/trace.svg shows one.

    etha trace DIR... -o trace.json && python bench/trace_picture.py trace.json 5 docs/trace.svg

5 is the transfer's seq. Drawn are the spans of that transfer, on the tracks that Perfetto has, and the arrows from each
send to its receive.
"""

from __future__ import annotations

import json
import sys
from html import escape
from pathlib import Path
from typing import Any

Event = dict[str, Any]

COLOURS = {
    "transfer": "#d0d7de",
    "copy_in": "#b39ddb",
    "wait": "#eef1f4",
    "book": "#f2cc60",
    "compile": "#e8a05c",
    "move": "#6cb6ff",
    "verify": "#c297ff",
    "commit": "#f0a3b0",
    "copy_out": "#8ddb8c",
    "send": "#4c9a6a",
    "receive": "#a5d6b7",
    "copy": "#6cb6ff",
    "checksum": "#c297ff",
}
LEFT, WIDTH, RIGHT, ROW, HEAD = 190, 880, 20, 20, 58
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Arial, sans-serif"


class Picture:
    """One transfer's spans. Times are in microseconds."""

    def __init__(self, events: list[Event], seq: int) -> None:
        self.names = {
            (event["name"], event["pid"], event["tid"]): event["args"]["name"]
            for event in events
            if event["ph"] == "M" and "name" in event["args"]
        }
        spans = [event for event in events if event["ph"] == "X"]
        whole = [event for event in spans if event["args"].get("seq") == seq]
        calls = [event for event in whole if event["name"] == "transfer"]
        # From the last call on: before it the others have waited.
        self.begun = max(event["ts"] for event in calls if "verb" in event["args"]) - 60
        self.ended = max(event["ts"] + event["dur"] for event in whole)
        parts = [
            event
            for event in spans
            if not event["args"]
            and any(
                (event["pid"], event["tid"]) == (call["pid"], call["tid"])
                and call["ts"] <= event["ts"]
                and event["ts"] + event["dur"] <= call["ts"] + call["dur"] + 0.01
                for call in calls
            )
        ]
        self.spans = whole + parts
        keys = {(event["pid"], event["tid"]) for event in self.spans}
        self.tracks = sorted(keys, key=lambda key: (key[0], self._order(key)))
        ids = {(event["ph"], event["id"]): event for event in events if event["ph"] in "sf" and self._seen(event)}
        self.arrows = [
            (ids["s", number], ids["f", number])
            for kind, number in ids
            if kind == "s" and ("f", number) in ids and "send" in self._track(ids["s", number])
        ]

    def _order(self, key: tuple[int, int]) -> tuple[int, str]:
        name = self.names["thread_name", *key]
        return {"lane": 1, "send": 2, "receive": 3}.get(name.split(" ")[0], 0), name

    def _track(self, event: Event) -> str:
        return str(self.names["thread_name", event["pid"], event["tid"]])

    def _seen(self, event: Event) -> bool:
        return self.begun <= event["ts"] <= self.ended and (event["pid"], event["tid"]) in self.tracks

    def _around(self, end: Event) -> Event:
        """The span at which an arrow ends."""
        return next(
            event
            for event in self.spans
            if (event["pid"], event["tid"]) == (end["pid"], end["tid"])
            and event["ts"] <= end["ts"] <= event["ts"] + event["dur"]
        )

    def _x(self, at: float) -> float:
        at = min(max(at, self.begun), self.ended)
        return LEFT + (at - self.begun) / (self.ended - self.begun) * (WIDTH - LEFT - RIGHT)

    def svg(self) -> str:
        """The picture."""
        rows: list[str] = []
        place: dict[tuple[int, int], float] = {}
        y, process = HEAD, 0
        for key in self.tracks:
            if key[0] != process:
                process = key[0]
                y += 24
                names = {pid: name for (kind, pid, _), name in self.names.items() if kind == "process_name"}
                rows.append(text(12, y - 6, names[process].split(" (pid")[0], weight=600, size=13))
            place[key] = y
            rows.append(text(24, y + 14, self.names["thread_name", *key], colour="#57606a"))
            rows.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - RIGHT}" height="{ROW - 3}" fill="#f6f8fa"/>')
            y += ROW
        for event in sorted(self.spans, key=lambda event: (event["ts"], -event["dur"])):
            rows += self._span(event, place[event["pid"], event["tid"]])
        for one, other in self.arrows:
            a, b = self._x(one["ts"]), self._x(self._around(other)["ts"])
            top, bottom = (place[event["pid"], event["tid"]] + ROW / 2 for event in (one, other))
            rows.append(
                f'<path d="M{a:.1f},{top:.1f} C{a:.1f},{(top + bottom) / 2:.1f} {b - 40:.1f},{bottom:.1f} '
                f'{b:.1f},{bottom:.1f}" fill="none" stroke="#1f6f43" stroke-width="1.2" marker-end="url(#head)"/>'
            )
        height = y + 12
        milliseconds = (self.ended - self.begun) / 1000
        shown = [name for name in COLOURS if any(event["name"] == name for event in self.spans)]
        legend, x = [], 12.0
        for name in shown:
            legend.append(f'<rect x="{x}" y="34" width="11" height="11" fill="{COLOURS[name]}" stroke="#8c959f"/>')
            label = "way between worker and agent" if name == "transfer" else name
            legend.append(text(x + 16, 44, label))
            x += 32 + 6.4 * len(label)
        about = (
            "Spans of calls, phases and streams of one transfer between two hosts, with an arrow from each send to its "
            "receive."
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
                f'aria-labelledby="title desc" font-family="{FONT}">',
                '  <title id="title">One transfer between two hosts, as ETHA_TRACE records it</title>',
                f'  <desc id="desc">{about}</desc>',
                '  <defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" '
                'orient="auto"><path d="M0,0 L10,5 L0,10 z" fill="#1f6f43"/></marker></defs>',
                f'  <rect width="{WIDTH}" height="{height}" rx="10" fill="#ffffff"/>',
                "  "
                + text(12, 22, f"One transfer between two hosts: {milliseconds:.1f} ms from left to right", 600, 14),
                *(f"  {row}" for row in legend + rows),
                "</svg>",
                "",
            ]
        )

    def _span(self, event: Event, y: float) -> list[str]:
        a, b = self._x(event["ts"]), self._x(event["ts"] + event["dur"])
        if event["ts"] + event["dur"] < self.begun:
            return []
        width, name = max(b - a, 0.8), event["name"]
        found = [
            f'<rect x="{a:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 3}" fill="{COLOURS.get(name, "#d0d7de")}" '
            f'stroke="#8c959f" stroke-width="0.5"><title>{escape(name)}: {event["dur"]:.0f} us</title></rect>'
        ]
        if width > 7 * len(name) + 6 and name != "transfer":
            found.append(text(a + width / 2, y + 13, name, anchor="middle", size=11, colour="#1f2328"))
        return found


def text(
    x: float, y: float, words: str, weight: int = 400, size: int = 12, colour: str = "#1f2328", anchor: str = "start"
) -> str:
    """A line of text."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(words)}</text>'
    )


if __name__ == "__main__":
    merged, number, picture = sys.argv[1:]
    events = json.loads(Path(merged).read_text(encoding="utf-8"))["traceEvents"]
    Path(picture).write_text(Picture(events, int(number)).svg(), encoding="utf-8")
