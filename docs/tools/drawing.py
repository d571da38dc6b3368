"""A small canvas for pictures of the documentation, in a light and a dark palette."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

MONOSPACE = "ui-monospace, monospace"


@dataclass(frozen=True, slots=True)
class Palette:
    """The colours of a picture, by what they are for."""

    suffix: str  # of the file
    page: str
    box: str
    line: str
    text: str
    muted: str
    accent: str
    good: str
    bad: str
    series: tuple[str, ...]  # of versions, in turn; readable by people who see few colours
    on_series: str  # text on them


LIGHT = Palette(
    suffix="", page="#ffffff", box="#f6f8fa", line="#8c959f", text="#1f2328", muted="#59636e", accent="#0969da",
    good="#1a7f37", bad="#cf222e", series=("#9ecbe8", "#f3c49a", "#a6dcc4", "#dcb6d2", "#e8d595"), on_series="#1f2328",
)  # fmt: skip
DARK = Palette(
    suffix="-dark", page="#0d1117", box="#161b22", line="#6e7681", text="#e6edf3", muted="#9198a1", accent="#58a6ff",
    good="#3fb950", bad="#f85149", series=("#1f5f8b", "#8a4f1d", "#1f6e53", "#7a4470", "#75621a"), on_series="#e6edf3",
)  # fmt: skip


@dataclass(slots=True)
class Canvas:
    """Collects the elements of one SVG file. Units are pixels of a picture that is shown at its own size."""

    width: float
    height: float
    title: str
    palette: Palette
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, w: float, h: float, fill: str, stroke: str = "none", *, radius: float = 3.0,
        dashed: bool = False, stroke_width: float = 1.2,
    ) -> None:  # fmt: skip
        dashes = ' stroke-dasharray="4 3"' if dashed else ""
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius:g}" fill="{fill}" '
            f'stroke="{stroke}" stroke-width="{stroke_width:g}"{dashes}/>'
        )

    def text(
        self, x: float, y: float, text: str, *, size: float = 13, fill: str | None = None, anchor: str = "start",
        bold: bool = False, code: bool = False,
    ) -> None:  # fmt: skip
        weight = ' font-weight="600"' if bold else ""
        family = f' font-family="{MONOSPACE}"' if code else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill or self.palette.text}" '
            f'text-anchor="{anchor}"{weight}{family}>{escape(text)}</text>'
        )

    def line(
        self, points: list[tuple[float, float]], stroke: str, *, width: float = 1.4, dashed: bool = False,
        arrow: bool = False,
    ) -> None:  # fmt: skip
        path = "M" + " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        dashes = ' stroke-dasharray="3 3"' if dashed else ""
        head = ' marker-end="url(#arrow)"' if arrow else ""
        self.parts.append(f'<path d="{path}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{dashes}{head}/>')

    def circle(self, x: float, y: float, radius: float, fill: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}" fill="{fill}"/>')

    def svg(self) -> str:
        marker = (
            '<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0L10 5L0 10z" fill="{self.palette.line}"/></marker></defs>'
        )
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:g} {self.height:g}" '
            f'font-family="system-ui, sans-serif" role="img" aria-label="{escape(self.title)}">'
        )
        page = f'<rect width="{self.width:g}" height="{self.height:g}" fill="{self.palette.page}"/>'
        return "\n".join([head, page, marker, *self.parts, "</svg>"]) + "\n"

    def save(self, folder: Path, name: str) -> None:
        (folder / f"{name}{self.palette.suffix}.svg").write_text(self.svg(), encoding="utf-8")
