"""Modules for tasks in files of the user's own.

`evenstep.tasks.files.%2Fhome%2Fme%2Fmy_task%2Epy` is the module of /home/me/my_task.py: the path is in the
name, so any other process, such as a data loader's worker that is handed a pickled sample of a class from
that file, can import it too. Two files of one name do not clash, nor does one called random.py with Python's.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote_to_bytes

__path__: list[str] = []  # makes this a package to the import system

_loading: list[Path] = []


def module_of(path: Path) -> ModuleType:
    """The module of a file: run now, unless it was already. An error in it is the user's to see, as it is."""
    path = path.resolve()
    for module in tuple(sys.modules.values()):  # it may be the script that runs, or imported by its own name
        file = str(getattr(module, "__dict__", {}).get("__file__"))  # not an attribute: some load when asked
        if file.endswith(path.name) and Path(file).resolve() == path:
            return module
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)  # the file's neighbours can be imported, as when Python runs it
    _loading.append(path)
    try:
        return importlib.import_module(f"{__name__}.{quote(os.fsencode(path), safe='').replace('.', '%2E')}")
    finally:
        _loading.pop()


def loading() -> Path | None:
    """The file that is being loaded right now: training cannot start from inside it."""
    return _loading[-1] if _loading else None


class _Finder:
    """Reads the path out of the module's name."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        prefix = f"{__name__}."
        if not name.startswith(prefix):
            return None
        file = os.fsdecode(unquote_to_bytes(name.removeprefix(prefix)))
        return importlib.util.spec_from_file_location(name, file)


sys.meta_path.append(_Finder)
