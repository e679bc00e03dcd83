"""Pieces of a page. What comes from a run is escaped here, or by the caller where it says `html`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from rlctl.report.style import STYLE

_MOST_CHARACTERS = 300  # of a recipe value in a table


def document(title: str, *parts: str) -> str:
    """A whole page that refers to nothing outside it."""
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{escape(title)}</title>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<style>{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and its content (html); nothing without content."""
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def figures(shown: Iterable[tuple[str, str, str]]) -> str:
    """Charts side by side.

    Args:
        shown: (title, note, html of the drawing); one without a drawing is left out.
    """
    made = [
        f"<figure><figcaption>{escape(title)}<small>{escape(note)}</small></figcaption>{drawing}</figure>"
        for title, note, drawing in shown
        if drawing
    ]
    return f"<div class='figures'>{''.join(made)}</div>" if made else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells (html), which scroll by themselves on a narrow screen; nothing without rows."""
    if not rows:
        return ""
    top = "".join(f"<th>{h}</th>" for h in head) if any(head) else ""
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return (
        f"<div class='wide'><table>{f'<thead><tr>{top}</tr></thead>' if top else ''}<tbody>{body}</tbody></table></div>"
    )


def value(of: Any) -> str:
    """A recipe's value as it is written."""
    if of is None:
        return "<i class='none'>not set</i>"
    text = str(of).lower() if isinstance(of, bool) else str(of)
    return escape(text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]} …")


def mark(*, ok: bool) -> str:
    """Of a check."""
    return f"<b class='{'good' if ok else 'bad'}'>{'ok' if ok else 'look'}</b>"
