"""``SHA256SUMS``: what the files of an exported directory were when they were written.

The format is that of the ``sha256sum`` command, so that ``sha256sum -c SHA256SUMS`` in the directory says the same as
:func:`check_files`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from lightning_autotp.building.checkpoint_reading import DamagedFileError, MissingFileError, inside

CHECKSUMS = "SHA256SUMS"
"""The file's name."""

_PIECE = 2**20
_LINE = re.compile(r"([0-9a-f]{64})  (.+)")


def sha256_of(path: Path) -> str:
    """A file's SHA-256, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def checksums_text(digests: Mapping[str, str]) -> str:
    """What is in the file, given each other file's SHA-256 by its path in the directory."""
    return "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))


def check_files(directory: Path) -> int:
    """Compare all files that ``SHA256SUMS`` names with what they were.

    Others are not looked at, but there must be no weights among them.

    Returns:
        How many they are.

    Raises:
        MissingFileError: if there is no ``SHA256SUMS``.
        DamagedFileError: if it cannot be read, or naming every file that is missing or changed.
    """
    sums = directory / CHECKSUMS
    if not sums.is_file():
        raise MissingFileError(
            f"{directory} has no {CHECKSUMS}: this package did not export it, or it was not copied whole"
        )
    *lines, end = sums.read_bytes().decode(errors="replace").split("\n")
    found = [match.groups() for line in lines if (match := _LINE.fullmatch(line))]
    if end or not found or len(found) < len(lines):
        raise DamagedFileError(f"{sums} is damaged, one of its lines is not the checksum of a file: copy it again")
    digests = {name: digest for digest, name in found}
    problems = [f"not named: {file.name}" for file in directory.glob("*.safetensors") if file.name not in digests]
    for name, digest in digests.items():
        path = Path(inside(directory, name))
        if not path.is_file():
            problems.append(f"missing: {name}")
        elif sha256_of(path) != digest:
            problems.append(f"changed: {name}")
    if problems:
        raise DamagedFileError(
            f"{directory} does not match {CHECKSUMS}:\n  "
            + "\n  ".join(problems)
            + "\nCopy these files again, or export again"
        )
    return len(digests)
