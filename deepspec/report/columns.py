"""Plain tables for the terminal."""

from typing import Sequence


def columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Rows of equal length as aligned lines, the first ``left`` columns to the left, the others to the right."""
    widths = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
    return "\n".join("  " + "  ".join(cell.ljust(width) if place < left else cell.rjust(width) for place, (cell, width)
                                      in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)
