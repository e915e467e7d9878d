"""What is known so far of one part: a JSON file that is whole after every result.

A second run reads it, and goes on with what it lacks. Each result names the session that it is of,
and each session says with what and where it ran, so that results of two commits stay apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DONE, FAILED, OUT_OF_MEMORY = "done", "failed", "out of memory"
AS_WHOLE = "as a whole"  # the result of what ended a part, until the next run


class Record:
    """Results by name.

    Args:
        path: Of the file, there already or not.

    Attributes:
        sessions: What :meth:`begin` was told, in order.
        results: By name; each has a ``state``.

    Raises:
        ValueError: The file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sessions: list[dict[str, Any]] = []
        self.results: dict[str, dict[str, Any]] = {}
        if not path.exists():
            return
        try:
            document = json.loads(path.read_text())
            self.sessions, self.results = document["sessions"], document["results"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}: expected results of this command, got {type(error).__name__}: {error}. "
                "Move it away, or name another --out."
            ) from error

    def require_kind(self, session: Mapping[str, Any]) -> None:
        """Check that results of a session can stand beside those that are here.

        Raises:
            ValueError: The file is of another device or torch, so that nothing could be compared.
        """
        for earlier in self.sessions[:1]:
            before, now = _kind_of(earlier), _kind_of(session)
            if before != now:
                raise ValueError(
                    f"{self.path}: expected results of {now}, got results of {before}. Name "
                    "another --out."
                )

    def begin(self, session: Mapping[str, Any]) -> None:
        """A run begins; what comes now is of it."""
        self.sessions.append(dict(session))
        self.results.pop(AS_WHOLE, None)
        self._write()

    def put(self, name: str, **result: Any) -> None:
        """Keep a result, in place of an earlier one of that name."""
        self.results[name] = {**result, "session": len(self.sessions) - 1}
        self._write()

    def state_of(self, name: str) -> str | None:
        """``None`` where nothing is known."""
        state: str | None = self.results.get(name, {}).get("state")
        return state

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        document = {"sessions": self.sessions, "results": self.results}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1))
        partial.replace(self.path)  # whoever is stopped here leaves the old file or the new one


def _kind_of(session: Mapping[str, Any]) -> str:
    return f"{session['device']['name']} with torch {session['versions']['torch']}"
