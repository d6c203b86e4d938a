"""What a section of docs/reproduction.md is made of: the paper's claims beside our figures, tables, plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
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


def page(sections: Sequence[Section], *, command: str, machine: str, wall_s: float) -> str:
    """The report: how it was made, all claims, then the sections."""
    claims = [claim for section in sections for claim in section.claims]
    compared = [claim for claim in claims if claim.agrees is not None]
    agreeing = sum(bool(claim.agrees) for claim in compared)
    head = f"""# What the paper states and what we find

ExeGPT (ASPLOS '24, arXiv 2404.07947) measured its own runtime on A40 and A100 clusters. Here the same models,
clusters, length distributions and bounds are planned from an analytic profile of those GPUs and, where it is
said, replayed request by request. So ratios between policies can be compared, absolute times only roughly: no
profile of the paper is public.

    {command}

Made on {date.today()} on {machine}, in {wall_s:.0f} s.

Of {len(compared)} statements {agreeing} agree: our figure is at least the paper's where more is better, at
most where less is, the same where it is a choice, and within 10 % where a value is printed. For the others
the reason stands beside."""
    parts = [head, "## All statements", claims_table(claims), *[section.markdown() for section in sections]]
    return "\n\n".join(part.strip() for part in parts) + "\n"
