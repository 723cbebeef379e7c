"""The HTML page around the sections: one file, no network, readable on a phone, light and dark."""

import math
from dataclasses import dataclass
from html import escape
from typing import Any, Optional, Sequence

from deepspec.report.sorting import SCRIPT, content_policy
from deepspec.report.svg import number

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --line: #d0d7de; --paper: #ffffff; --card: #f6f8fa;
  --s0: #0969b8; --s1: #c4500a; --s2: #11795a; --s3: #9a3f8f; --s4: #8a6d00; --s5: #50626f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9aa7b4; --line: #3a434d; --paper: #0e1318;
  --card: #171d24; --s0: #63b3f5; --s1: #f59a5a; --s2: #4fd1a5; --s3: #e08fd6; --s4: #e0c04a; --s5: #a9bac7; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); overflow-wrap: break-word; }
h1 { font-size: 1.6rem; margin: 0.5rem 0; } h2 { font-size: 1.25rem; margin: 2.5rem 0 0.5rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 0.2rem; }
p.lead, figcaption, .soft { color: var(--soft); } a { color: var(--s0); }
nav ul { display: flex; flex-wrap: wrap; gap: 0.3rem 1rem; list-style: none; padding: 0; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(13rem, 1fr)); gap: 0.8rem; margin: 1rem 0; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 0.7rem 0.9rem; }
.facts dt { color: var(--soft); font-size: 0.9rem; } .facts dd { margin: 0; font-size: 1.4rem; font-weight: 600; }
.facts dd small { display: block; font-size: 0.85rem; font-weight: 400; color: var(--soft); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
figure { margin: 0.8rem 0; max-width: 34rem; } figure svg[role=img] { width: 100%; height: auto; display: block; }
svg text { font: 14px system-ui, sans-serif; fill: var(--ink); } svg .grid { stroke: var(--line); stroke-width: 1; }
svg .axis { stroke: var(--soft); } svg .ideal { stroke: var(--soft); stroke-dasharray: 4 4; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; list-style: none; padding: 0; margin: 0.3rem 0;
  font-size: 0.9rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: 0.92rem; margin: 0.6rem 0; }
th, td { padding: 0.25rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th:first-child, td:first-child, td.text, caption { text-align: left; } caption { color: var(--soft); }
thead th { cursor: pointer; } thead th[aria-sort]::after { content: " \\25BE"; }
thead th[aria-sort=ascending]::after { content: " \\25B4"; }
.missing { border-left: 4px solid var(--s4); background: var(--card); padding: 0.6rem 0.9rem; }
code, pre { font: 0.9em ui-monospace, monospace; } pre { overflow-x: auto; background: var(--card); padding: 0.8rem; }
"""


@dataclass(frozen=True)
class Section:
    """One part of the report. ``lead`` says in one or two sentences what is shown and what good looks like."""

    anchor: str
    title: str
    lead: str
    body: str  # HTML; everything in it that is not ours has been escaped


def missing(what: str, command: str) -> str:
    """A box that says what is not there and how to get it."""
    return f'<p class="missing">{escape(what)} Make it with: <code>{escape(command)}</code></p>'


def figure(chart: str, caption: str) -> str:
    """A chart with the sentence that says what to see in it; "" without a chart."""
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>" if chart else ""


def figures(*parts: str) -> str:
    """Figures side by side where there is room."""
    return f'<div class="figures">{"".join(parts)}</div>'


def _cell(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        text = "\N{EN DASH}" if value is None else str(value)
        kind = ' class="text"' if isinstance(value, str) and not value[:1].isdigit() else ""
        return f"<td{kind}>{escape(text)}</td>"
    exact = f' data-value="{value!r}"' if math.isfinite(value) else ""
    return f"<td{exact}>{f'{value:,}' if isinstance(value, int) else number(value)}</td>"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "") -> str:
    """A table that scrolls on a narrow screen and sorts by any column: numbers rounded, None a dash, text escaped."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    body = "".join(f"<tr>{''.join(_cell(value) for value in row)}</tr>" for row in rows)
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f'<div class="scroll"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def facts(items: Sequence[tuple[str, str, str]]) -> str:
    """Headline numbers: (label, value, remark)."""
    cards = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
                    for label, value, remark in items)
    return f'<dl class="facts">{cards}</dl>'


def page(title: str, subtitle: str, headline: str, sections: Sequence[Section], footer: Optional[str] = None) -> str:
    """The whole document."""
    links = "".join(f'<li><a href="#{one.anchor}">{escape(one.title)}</a></li>' for one in sections)
    body = "".join(f'<section id="{one.anchor}"><h2>{escape(one.title)}</h2><p class="lead">{escape(one.lead)}</p>'
                   f"{one.body}</section>" for one in sections)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body><header><h1>{escape(title)}</h1>"
        f'<p class="soft">{escape(subtitle)}</p></header><main>{headline}<nav aria-label="Sections"><ul>{links}</ul>'
        f'</nav>{body}</main><footer><p class="soft">{escape(footer or "")}</p></footer>'
        f"<script>{SCRIPT}</script></body></html>\n"
    )
