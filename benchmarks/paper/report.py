"""What a section of docs/reproduction.md is made of: the paper's claims beside our figures, tables, plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A statement of the paper and what we find.

    Attributes
    ----------
    where : str
        Place in the paper.
    paper, ours : str
        The statement, and our figure for it.
    agrees : bool or None
        None where the paper gives no figure to agree with.
    why : str
        What the difference comes from; shown where there is one.
    """

    where: str
    paper: str
    ours: str
    agrees: bool | None
    why: str = ""

    @property
    def verdict(self) -> str:
        """`agrees`, or `differs` with the reason."""
        if self.agrees is None:
            return f"no figure to compare with. {self.why}".strip()
        if self.agrees:
            return "agrees"
        return f"**differs**: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report; `body` is Markdown that names its plots relative to the report."""

    title: str
    claims: Sequence[Claim]
    body: str

    def markdown(self) -> str:
        """The section with its claims first."""
        return f"## {self.title}\n\n{claims_table(self.claims)}\n\n{self.body.strip()}\n"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a report's plots lie: the directory, and how the report names it."""

    directory: Path
    name: str

    def link(self, file: str, text: str) -> str:
        """A Markdown image."""
        return f"![{text}]({self.name}/{file})"


def claims_table(claims: Sequence[Claim]) -> str:
    """A row per claim."""
    return table(
        ["where", "the paper", "here", "verdict"], [[c.where, c.paper, c.ours, c.verdict] for c in claims]
    )


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """A Markdown table; the columns `right` are numbers."""
    marks = ["--:" if i in right else "---" for i in range(len(header))]
    lines = [header, marks, *[[_cell(value) for value in row] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: object) -> str:
    return "-" if value is None else str(value).replace("|", "\\|")
