"""Numbers as people read them: bytes in powers of ten, seconds, counted things. Pure."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """1610612736 -> "1.61 GB" (powers of ten)."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"


def counted(number: int, what: str) -> str:
    """1, "class" -> "1 class"; 2, "class" -> "2 classes"; 67456, "link" -> "67,456 links"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}{'es' if what.endswith('s') else 's'}"


def seconds(value: float) -> str:
    """0.0042 -> "4.2 ms"."""
    if value >= 0.9995:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if value >= 0.9995e-3 else f"{value * 1e6:.3g} us"
