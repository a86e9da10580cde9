"""Why versions of models are not served: those that a start left out, and those of a watched repository."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

log = logging.getLogger(__name__)


class VersionProblems:
    """Problems by model and version. Thread-safe.

    ``left_out``: by model, the versions that the start left out, with the reasons."""

    def __init__(self, left_out: Mapping[str, Mapping[int, str]]) -> None:
        self._left_out = left_out
        self._watched: Mapping[str, Mapping[int, str]] = {}
        self._models: Mapping[str, str] = {}
        self._lock = threading.Lock()  # of changes

    def texts(self) -> dict[str, str]:
        """All problems of each model that has some, in a line."""
        found: dict[str, list[str]] = {}
        for name, versions in self._left_out.items():
            found.setdefault(name, []).extend(
                f"version {version}, chosen at run time, is not served: {why}"
                for version, why in versions.items()
            )
        for name in {**self._watched, **self._models}:
            found.setdefault(name, []).extend(self._watched_texts(name))
        return {name: "; ".join(texts) for name, texts in found.items()}

    def of(self, name: str, version: int) -> str:
        """Why a version is not served, or ""."""
        for problems in (self._watched, self._left_out):
            if text := problems.get(name, {}).get(version):
                return text
        return ""

    def set_watched(self, name: str, versions: Mapping[int, str], problem: str = "") -> None:
        """Replace the problems of a watched model: of its ``versions``, and of the model itself.

        Logs them once."""
        with self._lock:
            before = self._watched_texts(name)
            self._watched = _with(self._watched, name, versions)
            others = {each: text for each, text in self._models.items() if each != name}
            self._models = others | ({name: problem} if problem else {})
            after = self._watched_texts(name)
        if after and after != before:
            log.warning("model %s: %s", name, "; ".join(after))

    def clear(self, name: str, version: int) -> None:
        """Remove the problem of a version, which is served now."""
        with self._lock:
            self._left_out = _without(self._left_out, name, version)
            self._watched = _without(self._watched, name, version)

    def clear_left_out(self, name: str) -> None:
        """Remove the problems of the start for a model, which is not to be served any more."""
        with self._lock:
            self._left_out = _with(self._left_out, name, {})

    def _watched_texts(self, name: str) -> list[str]:
        versions = self._watched.get(name, {}).items()
        found = [f"version {v} of the repository is not served: {why}" for v, why in versions]
        return [*found, *filter(None, [self._models.get(name)])]


def _without(
    problems: Mapping[str, Mapping[int, str]], name: str, version: int
) -> Mapping[str, Mapping[int, str]]:
    of_model = {v: why for v, why in problems.get(name, {}).items() if v != version}
    return _with(problems, name, of_model)


def _with(
    problems: Mapping[str, Mapping[int, str]], name: str, versions: Mapping[int, str]
) -> Mapping[str, Mapping[int, str]]:
    others = {each: found for each, found in problems.items() if each != name}
    return others | ({name: dict(versions)} if versions else {})
