"""The folder a report goes to: whether one may be written there, and made if so."""

from pathlib import Path

from videogen.errors import EnvironmentFault, bad, say


def check_free(folder: Path, report: str, *, overwrite: bool, option: str = "--output-dir") -> None:
    """Raise RequestError when the folder is none, or holds a report of this file name that must stay."""
    if folder.exists() and not folder.is_dir():
        raise bad(option, str(folder), "a folder", "choose another path")
    if (folder / report).exists() and not overwrite:
        raise bad(option, str(folder), f"a folder without {report}", "choose another, or pass --overwrite")


def make_folder(folder: Path) -> None:
    """The folder and its parents. Raises EnvironmentFault when the disk refuses."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        told = say("output folder", str(folder), "a folder that can be written", error.strerror or str(error))
        raise EnvironmentFault(told) from error
