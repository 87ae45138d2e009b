"""The files of the page. Nothing else of the disk is ever sent.

The page's scripts import one another by the names of an import map: the server maps them to addresses, a report to the
scripts themselves, and no script differs between the two.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from octavo.errors import UnsupportedError

STYLE = "style.css"
ICON = "icon.svg"
PLOTLY = "plotly.min.js"
_STATIC = resources.files("octavo.dashboard") / "static"


@cache
def scripts() -> dict[str, str]:
    """Return the page's own scripts, by name."""
    return {each.name: each.read_text("utf-8") for each in sorted(_STATIC.iterdir(), key=lambda each: each.name)
            if each.name.endswith(".js")}  # fmt: skip


@cache
def text_of(name: str) -> str:
    """Return another file of the page: the style or the icon."""
    return (_STATIC / name).read_text("utf-8")


def plotly() -> Path:
    """Return the script that the installed package plotly brings along.

    Raises:
        UnsupportedError: plotly is not installed.
    """
    require("plotly")
    package = importlib.util.find_spec("plotly")  # found, not imported: that takes a second
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    for folder in folders:
        script = Path(folder) / "package_data" / PLOTLY
        if script.is_file():
            return script
    raise UnsupportedError(
        "the installed plotly brings no plotly.min.js along. Install it anew: pip install --force-reinstall plotly"
    )


def require(*packages: str) -> None:
    """See to it that packages are installed.

    Raises:
        UnsupportedError: naming those that are not, and what to install.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UnsupportedError(
            f"the dashboard needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed:"
            " pip install octavo[dashboard]"
        )


def page(head: str, modules: Mapping[str, str], start: str) -> str:
    """Return the page.

    Args:
        head: elements that bring the style and Plotly.
        modules: where each script is found.
        start: what comes at the end of the body.
    """
    mapped = f'<script type="importmap">{import_map(modules)}</script>'  # before anything that names a script
    return text_of("index.html").replace("<!-- head -->", f"{mapped}\n{head}").replace("<!-- start -->", start)


def import_map(modules: Mapping[str, str]) -> str:
    """Return the import map: the name of a script is `octavo/NAME`."""
    return json.dumps({"imports": {f"octavo/{name}": address for name, address in modules.items()}})


def hashed(script: str) -> str:
    """Return how a content security policy names a script within a page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def as_data(text: str, media_type: str = "text/javascript") -> str:
    """Return a text as an address that holds it."""
    return f"data:{media_type};base64,{base64.b64encode(text.encode()).decode()}"


def safe_in_script(content: str) -> str:
    """Return text such that a script element can hold it: nothing in it ends the element or begins a comment."""
    return content.replace("</", "<\\/").replace("<!--", "<\\!--")


def joined(lines: Iterable[str]) -> str:
    """Return elements, a line each."""
    return "\n".join(lines)
