"""Report files of `videogen bench` and `eval`, and what they say of a recipe; invents nothing."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_KINDS = ("eval", "bench")
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/|`]+/)+")  # of the machine: a page is for others too
_SHOWN_METRICS = ("psnr", "ssim", "vmaf")


@dataclass(slots=True)
class Reports:
    """The reports in a folder and in the folders right below it; an empty one without a folder."""

    folder: Path | None
    _found: dict[str, Path] = field(default_factory=dict)

    def names(self) -> list[str]:
        """The reports there are, by the name of their folder and their kind."""
        self._found = {}
        if self.folder is not None and self.folder.is_dir():
            for place in (self.folder, *sorted(path for path in self.folder.iterdir() if path.is_dir())):
                for kind in _KINDS:
                    if (place / f"{kind}.md").is_file():
                        self._found[f"{place.name} ({kind})"] = place / f"{kind}.md"
        return list(self._found)

    def text(self, name: str) -> str:
        """A report as Markdown, the folders of its files left out; a name that is not listed gives none."""
        path = self._found.get(name)
        return _FOLDERS.sub("", path.read_text(encoding="utf-8")) if path is not None else ""

    def measured(self, recipe: str) -> list[tuple[str, str]]:
        """A (name, line) per quality report whose new arm is this recipe."""
        lines = []
        for name in self.names():
            path = self._found[name].with_suffix(".json")
            if path.stem == "eval" and path.is_file():
                try:
                    line = _line(json.loads(path.read_text(encoding="utf-8")), recipe)
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue
                lines += [(name, line)] if line else []
        return lines


def _line(report: dict[str, Any], recipe: str) -> str:
    if report["recipes"]["new"]["name"] != recipe:
        return ""
    told = [f"{report['speed_up']['value']:.2f} times as fast as {report['recipes']['reference']['name']}"] if report["speed_up"] else []
    for name in _SHOWN_METRICS:
        found = report["summary"].get(name, {}).get("new", {})
        if found.get("mean"):
            told.append(f"{name} {found['mean']['value']:.3g}")
        elif found.get("identical") and found["identical"] == found["clips"]:
            told.append(f"{name} identical")
    return f"{', '.join(told)} (n={len(report['clips'])})"
