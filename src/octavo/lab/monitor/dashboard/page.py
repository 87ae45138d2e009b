"""The files of the page. No other file is ever sent.

The scripts import each other by names of an import map, which the server maps to URLs and a report to the embedded
scripts, so that the scripts are the same in both.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from octavo.errors import UnsupportedError

STYLE = "style.css"
ICON = "icon.svg"
PLOTLY = "plotly.min.js"
_STATIC = resources.files("octavo.lab.monitor.dashboard") / "static"


@cache
def scripts() -> dict[str, str]:
    """Return the page's own scripts, by name."""
    return {each.name: each.read_text("utf-8") for each in sorted(_STATIC.iterdir(), key=lambda each: each.name)
            if each.name.endswith(".js")}  # fmt: skip


@cache
def text_of(name: str) -> str:
    """Return the text of another file of the page: the style sheet or the icon."""
    return (_STATIC / name).read_text("utf-8")


def plotly() -> Path:
    """Return the path of the script in the installed package plotly.

    Raises:
        UnsupportedError: plotly is not installed.
    """
    require("plotly")
    package = importlib.util.find_spec("plotly")  # importing it would take a second
    folders = list(package.submodule_search_locations or ()) if package is not None else []
    for folder in folders:
        script = Path(folder) / "package_data" / PLOTLY
        if script.is_file():
            return script
    raise UnsupportedError(
        "the installed plotly contains no plotly.min.js. Reinstall it: pip install --force-reinstall plotly"
    )


def require(*packages: str) -> None:
    """Check that packages are installed.

    Raises:
        UnsupportedError: some are missing; names them and what to install.
    """
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise UnsupportedError(
            f"the dashboard needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed:"
            ' pip install "octavo[dashboard]"'
        )


def page(head: str, modules: Mapping[str, str], start: str) -> str:
    """Return the page's HTML.

    Args:
        head: elements that load the style sheet and Plotly.
        modules: URL of each script.
        start: elements at the end of the body.
    """
    mapped = f'<script type="importmap">{import_map(modules)}</script>'  # must precede every use of a script
    return text_of("index.html").replace("<!-- head -->", f"{mapped}\n{head}").replace("<!-- start -->", start)


def import_map(modules: Mapping[str, str]) -> str:
    """Return the import map; scripts are named `octavo/NAME`."""
    return json.dumps({"imports": {f"octavo/{name}": address for name, address in modules.items()}})


def hashed(script: str) -> str:
    """Return the source expression of an inline script for a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def as_data(text: str, media_type: str = "text/javascript") -> str:
    """Return a text as a data URL."""
    return f"data:{media_type};base64,{base64.b64encode(text.encode()).decode()}"


def safe_in_script(content: str) -> str:
    """Escape text for a script element: nothing in it may end the element or begin a comment."""
    return content.replace("</", "<\\/").replace("<!--", "<\\!--")
