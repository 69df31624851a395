"""Files that others write anew while we use what they said, such as certificates."""

from __future__ import annotations

from pathlib import Path


class Rewritten:
    """Tells whether any of the files is another than when it was last asked."""

    def __init__(self, *files: Path) -> None:
        self._files = files
        self._seen = self._look()

    def __call__(self) -> bool:
        before, self._seen = self._seen, self._look()
        return before != self._seen

    def _look(self) -> tuple[tuple[int, int], ...]:
        found = (file.stat() for file in self._files if file.is_file())
        return tuple((each.st_ino, each.st_mtime_ns) for each in found)
