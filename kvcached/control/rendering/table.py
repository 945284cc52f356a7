"""A plain text table that fits a terminal. It needs no library, so that it also works beside an engine."""

from __future__ import annotations

from kvcached.control.rendering.text import BAD, styled
from kvcached.light_dataclasses import dataclass
from kvcached.printable_text import printable

TYPE_CHECKING = False  # spelled out, because importing typing costs the command line milliseconds
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GAP = "  "
LEAST_FIRST_COLUMN = 8
ELLIPSIS = "~"


@dataclass(frozen=True)
class Cell:
    """A text in one style; ``painted`` is the text already in styles, of the same visible length."""

    text: str
    style: str = ""
    painted: str = ""

    def safe(self) -> Cell:
        """Return the cell without anything that steers a terminal; what is painted is the caller's own."""
        return self if self.text.isprintable() else Cell(printable(self.text), self.style)

    def render(self, width: int, *, left: bool, colour: bool) -> str:
        """Return the cell, padded to ``width``."""
        padding = " " * (width - len(self.text))
        text = self.painted if self.painted and colour else styled(self.text, self.style, colour=colour)
        return text + padding if left else padding + text


@dataclass(frozen=True)
class Remark:
    """A line of its own below a row, wrapped where it must be."""

    text: str
    style: str = BAD


class Table:
    """Rows of cells and remarks between them; the first column is the one that yields when space is short."""

    def __init__(self, left_columns: frozenset[int]) -> None:
        """Align these columns to the left and all others to the right."""
        self._left_columns = left_columns
        self._rows: list[Sequence[Cell] | Remark] = []

    def add(self, *cells: Cell) -> None:
        """Add a row."""
        self._rows.append([cell.safe() for cell in cells])

    def remark(self, text: str, style: str) -> None:
        """Add a remark."""
        self._rows.append(Remark(printable(text), style))

    def lines(self, width: int | None, *, colour: bool) -> Iterator[str]:
        """Return the lines; ``width`` None cuts and wraps nothing."""
        widths = self._widths(width)
        for row in self._rows:
            if isinstance(row, Remark):
                yield from _indented(row, width, colour=colour)
                continue
            cells = [_cut(row[0], widths[0]), *row[1:]]
            parts = [
                cell.render(widths[column], left=column in self._left_columns, colour=colour)
                for column, cell in enumerate(cells)
            ]
            yield GAP.join(parts).rstrip()

    def _widths(self, width: int | None) -> list[int]:
        rows = [row for row in self._rows if not isinstance(row, Remark)]
        widths = [max(len(cell.text) for cell in column) for column in zip(*rows, strict=True)]
        if width is not None and widths:
            rest = sum(widths[1:]) + len(GAP) * (len(widths) - 1)
            widths[0] = min(widths[0], max(LEAST_FIRST_COLUMN, width - rest))
        return widths


def _cut(cell: Cell, width: int) -> Cell:
    """Shorten a text in its middle: names that differ, differ at the end as often as at the start."""
    if len(cell.text) <= width:
        return cell
    end = (width - 1) // 2
    return Cell(cell.text[: width - 1 - end] + ELLIPSIS + cell.text[len(cell.text) - end :], cell.style)


def _indented(remark: Remark, width: int | None, *, colour: bool) -> Iterator[str]:
    if width is None or len(remark.text) + 4 <= width:
        yield styled(f"    {remark.text}", remark.style, colour=colour)
        return
    import textwrap  # noqa: PLC0415 - for long remarks on a terminal only

    for line in textwrap.wrap(remark.text, max(20, width), initial_indent="    ", subsequent_indent="      "):
        yield styled(line, remark.style, colour=colour)


def wrapped(text: str, style: str, width: int, *, colour: bool) -> Iterator[str]:
    """Yield a sentence of whatever origin as lines of at most ``width`` columns."""
    import textwrap  # noqa: PLC0415 - for sentences on a terminal only

    for line in textwrap.wrap(printable(text), max(20, width), break_on_hyphens=False):
        yield styled(line, style, colour=colour)
