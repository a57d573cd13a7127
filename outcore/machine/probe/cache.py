"""Where a report is kept: one file a machine, under the user's cache folder.

A file that is torn, foreign or of another version is no error: it is measured again.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

from .report import ProbeReport


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says to ignore what is not absolute.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "outcore"


def cache_file(fingerprint: str, folder: Path | None = None) -> Path:
    return (folder or cache_folder()) / f"machine-{fingerprint}.json"


def load_report(fingerprint: str, folder: Path | None = None) -> ProbeReport | None:
    """Return the report of this machine, or None if there is none that can be trusted."""
    try:
        text = cache_file(fingerprint, folder).read_text(encoding="utf-8")
        report = ProbeReport.from_dict(json.loads(text))
    except (OSError, ValueError, RecursionError):
        return None
    return report if report.fingerprint == fingerprint else None


def save_report(report: ProbeReport, folder: Path | None = None) -> bool:
    """Keep the report, all of it or nothing; False where the folder cannot be written."""
    target = cache_file(report.fingerprint, folder)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".machine-", suffix=".tmp")
    except OSError:
        return False
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(report.to_dict(), file, indent=2)
        os.replace(name, target)
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):  # gone, if all went well
            os.unlink(name)
    return True
