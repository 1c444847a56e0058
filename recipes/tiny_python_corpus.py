"""Text for the default model: permissively licensed Python source, never the standard library.

Source files are taken from the distributions installed in site-packages folders. Four sieves:

1. licence: every licence that a distribution's metadata name must be permissive; one that names
   none, or any other, is left out, and so is a file whose head names another licence;
2. standard library: a file of which more than a fiftieth of the five-line shingles (runs of five
   code lines) also occur in the running interpreter's standard library is a copy or a descendant
   of it; folders of vendored code and distributions that are backports are left out by name;
3. tables: files that are mostly digits, or have very long lines, are data and not code;
4. repetition: a file of which half the shingles were already taken is left out.

A hundredth of the files that pass, chosen by the hash of their path, is held out of training.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
import zlib
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import Distribution, distributions
from pathlib import Path

from formats.errors import RecipeError

SHINGLE = 5  # code lines
STDLIB_SHARE = 0.02  # of a file's shingles
REPEATED_SHARE = 0.50
HELD_OUT = 100  # one file of so many
GROUP = 256  # files between two looks at the limit

# Words of a licence's name: it must have one of the first kind, and none of neither kind.
PERMISSIVE = re.compile("mit|bsd|iscl?|psf|python|apache|bsl|zlib|unlicense|cc")  # cc as in CC0
FILLER = re.compile(
    "the|new|modified|simplified|revised|clause|software|foundation|licen[sc]e|version|v|and|or"
    "|with|llvm|exception|cmu|[0-4]"
)
OTHER_LICENCE = re.compile(
    r"GNU\s+(Lesser|Library|Affero)?\s*General\s+Public|\b[AL]?GPL|Mozilla\s+Public|proprietary"
    r"|Python\s+Software\s+Foundation|\bPSF\b|Creative\s+Commons",
    re.IGNORECASE,
)
BACKPORTS = re.compile(
    r"setuptools|pip|typing.extensions|importlib.(metadata|resources)|zipp|exceptiongroup|tomli"
    r"|backports?\b.*|async.timeout|futures|mock|multiprocess|contextlib2|pathlib2|dataclasses|lib2to3"
    r"|black|cloudpickle|dill|graphlib.*|pyasyncore|standard-.*|distlib|virtualenv"
)
VENDORED = re.compile(  # folders
    "_*(vendor|vendored|externals?|extern|third_?party|distutils|backports?|b?lib2to3|pgen2|pyrepl)"
)


@dataclass(frozen=True)
class Source:
    """One Python file of a distribution."""

    distribution: str
    name: str  # path below site-packages
    path: str


@dataclass
class Share:
    """What one distribution gave to the corpus."""

    name: str
    version: str
    licence: str
    files: int = 0
    bytes: int = 0


@dataclass
class Corpus:
    """Texts of the files, and their distributions."""

    train: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    shares: dict[str, Share] = field(default_factory=dict)
    stdlib_copies: int = 0  # files left out for what they share with the standard library

    def add(self, source: Source, text: str) -> None:
        """Put one file on its side of the split, by the hash of its name."""
        digest = hashlib.sha256(source.name.encode()).digest()
        side = self.train if int.from_bytes(digest[:4]) % HELD_OUT else self.held_out
        side.append(text)
        share = self.shares[source.distribution]
        share.files += 1
        share.bytes += len(text.encode())

    @property
    def characters(self) -> int:
        """Characters of the training texts."""
        return sum(map(len, self.train))

    def sources(self) -> list[dict[str, object]]:
        """Distributions that gave anything, by name: name, version, licence, files, bytes."""
        used = (share for share in self.shares.values() if share.files)
        return [asdict(share) for share in sorted(used, key=lambda share: share.name.lower())]


def permissive_licence(dist: Distribution) -> str | None:
    """The licences that a distribution's metadata name, or None unless all are permissive.

    Read are License-Expression, or else the licence classifiers, or else a one-line License field.
    """
    meta = dist.metadata
    classifiers = [
        line.split(" :: ")[-1]
        for line in meta.get_all("Classifier") or []
        if line.startswith("License :: ") and line != "License :: OSI Approved"
    ]
    stated = meta.get_all("License-Expression") or classifiers or meta.get_all("License") or [""]
    for text in stated:
        words = re.findall(r"[a-z]+|[0-9]", text.lower())
        if not any(map(PERMISSIVE.fullmatch, words)):
            return None
        if not all(PERMISSIVE.fullmatch(word) or FILLER.fullmatch(word) for word in words):
            return None
    return " AND ".join(sorted(set(stated)))


def find_sources(folders: Sequence[Path]) -> tuple[list[Source], dict[str, Share]]:
    """Python files of all permissively licensed distributions, in an order fixed by their names."""
    sources: dict[str, Source] = {}
    shares: dict[str, Share] = {}
    for dist in distributions(path=[str(folder) for folder in folders]):
        name, licence = dist.metadata["Name"], permissive_licence(dist)
        if licence is None or name in shares or BACKPORTS.fullmatch(name.lower()):
            continue
        shares[name] = Share(name, dist.version, licence)
        for file in dist.files or ():
            if file.suffix == ".py" and not any(map(VENDORED.fullmatch, file.parts[:-1])):
                sources[str(file)] = Source(name, str(file), str(dist.locate_file(file)))
    order = sorted(sources, key=lambda name: hashlib.sha256(name.encode()).digest())
    return [sources[name] for name in order], shares


def shingles(text: str) -> frozenset[int]:
    """Hashes of every run of five code lines, blank and comment lines and indentation left out."""
    lines = [line.strip() for line in text.splitlines()]
    codes = [zlib.crc32(line.encode()) for line in lines if line and not line.startswith("#")]
    runs = (tuple(codes[i : i + SHINGLE]) for i in range(max(1, len(codes) - SHINGLE + 1)))
    return frozenset(map(hash, runs))  # hashes of tuples of integers are the same in any process


def read_text(path: str | Path) -> str:
    """A source file's text with plain newlines; empty if it is missing or not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def is_code(text: str) -> bool:
    """Whether a text is code of some length, rather than a table, a stub or minified."""
    lines = text.splitlines()
    if not 200 <= len(text) <= 400_000 or max(map(len, lines)) > 500:
        return False
    return sum(c.isdigit() for c in text) < 0.2 * len(text)


def without_notice(text: str) -> str:
    """The text without the comment block at its head where that is a copyright notice."""
    head = re.match(r"(?:[ \t]*(?:#[^\n]*)?\n)+", text)
    if head and re.search(r"copyright|licen[sc]e", head[0], re.IGNORECASE):
        return text[head.end() :]
    return text


@dataclass(frozen=True)
class Sieved:
    """What the first three sieves say of a file: no text if it was left out."""

    text: str = ""
    shingles: frozenset[int] = frozenset()
    stdlib_copy: bool = False


def sieve(source: Source, stdlib: frozenset[int]) -> Sieved:
    """Read one file; leave it out if it is no code, licensed apart or a copy of the library."""
    text = read_text(source.path)
    if not is_code(text) or OTHER_LICENCE.search(text[:3000]):
        return Sieved()
    found = shingles(text)
    if len(found & stdlib) > STDLIB_SHARE * len(found):
        return Sieved(stdlib_copy=True)
    return Sieved(without_notice(text), found)


_stdlib: frozenset[int] = frozenset()  # of a worker process: sent once, not with every file


def _start_worker(stdlib: frozenset[int]) -> None:
    global _stdlib
    _stdlib = stdlib


def _sieve(source: Source) -> Sieved:
    return sieve(source, _stdlib)


def _stdlib_file(path: str) -> frozenset[int]:
    return shingles(read_text(path))


def stdlib_shingles(pool: ProcessPoolExecutor) -> frozenset[int]:
    """Shingles of the running interpreter's whole standard library, its tests included.

    Raises:
        RecipeError: The interpreter carries no sources of it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    outside = {"site-packages", "dist-packages", "__pycache__"}
    paths = [str(p) for p in root.rglob("*.py") if not outside & set(p.parts[len(root.parts) :])]
    if not paths:
        raise RecipeError(
            f"no Python sources under {root}: without the standard library's text its copies cannot"
            " be left out; run an interpreter that carries its sources"
        )
    return frozenset().union(*pool.map(_stdlib_file, paths, chunksize=32))


def build_corpus(folders: Sequence[Path], limit_bytes: int, workers: int) -> Corpus:
    """Read, sieve and split the Python files of site-packages folders.

    Args:
        folders: site-packages folders.
        limit_bytes: Stop at about so much text.
        workers: Processes that read and sieve.

    Raises:
        RecipeError: Nothing passed the sieves, or the standard library cannot be read.
    """
    sources, shares = find_sources(folders)
    corpus = Corpus(shares=shares)
    with ProcessPoolExecutor(workers) as pool:
        stdlib = stdlib_shingles(pool)
    seen: set[int] = set()
    with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(stdlib,)) as pool:
        for start in range(0, len(sources), GROUP):
            group = sources[start : start + GROUP]
            for source, passed in zip(group, pool.map(_sieve, group, chunksize=16), strict=True):
                corpus.stdlib_copies += passed.stdlib_copy
                repeated = len(passed.shingles & seen) > REPEATED_SHARE * len(passed.shingles)
                if passed.text and not repeated:
                    seen |= passed.shingles
                    corpus.add(source, passed.text)
            if sum(share.bytes for share in shares.values()) >= limit_bytes:
                break
    if not corpus.train:
        raise RecipeError(f"no permissively licensed Python source under {[*map(str, folders)]}")
    return corpus
