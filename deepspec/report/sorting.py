"""The page's only script: a click (or Enter) on a column's head sorts its table. Everything else works without it."""

import base64
import hashlib

SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    const key = (row) => {
      const cell = row.cells[column];
      return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
    };
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "descending";
      for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "ascending" : "descending");
      const unknown = (row) => row.cells[column].textContent === "\\u2013";
      const order = (a, b) => typeof a === "number" && typeof b === "number" ? a - b :
        String(a).localeCompare(String(b), undefined, {numeric: true});
      [...body.rows].sort((a, b) => unknown(a) - unknown(b) || (down ? 1 : -1) * order(key(a), key(b)))
        .forEach((row) => body.append(row));
    };
    head.tabIndex = 0;
    head.addEventListener("click", sort);
    head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
  });
}
"""


def content_policy() -> str:
    """What a browser may do for the page: run this script and draw; no request leaves it."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
