# SPDX-License-Identifier: Apache-2.0
"""Fetches the files of a model, each held to the size and sha256 that were wanted.

A file grows as ``.NAME.part`` beside its final name and gets that name by a rename once every byte
is right, so whatever ends a run, the next one goes on and nothing wrong ever has the final name.
Standard library only; memory is one block.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import re
import shutil
import ssl
import stat
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, unquote, urlsplit

from .errors import GpuboxError
from .gguf import MAGIC, MAX_HEADER, read_header
from .gguf_merge import known_result, read_set, shard_paths, takes_from_shards
from .preflight import RESERVE_BYTES, type_faults
from .release import digest, write_atomically

BLOCK = 1 << 20  # bytes of one read
HEADER_STEPS = (1 << 20, 8 << 20, 64 << 20, MAX_HEADER)  # bytes asked for until a header is whole
HUB_SOURCE = re.compile(
    r"hf://(?P<repo>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{40})/(?P<path>[^?#]+)", re.ASCII
)
REFUSED = {
    401: "put a valid token into the file that gguf_model_token_file names",
    403: "put a token that may read it into the file that gguf_model_token_file names",
    404: "correct gguf_model_source and the names in gguf_model_files",
    410: "correct gguf_model_source and the names in gguf_model_files",
}
PASSING = (408, 425, 429, 500, 502, 503, 504)  # a later try may do better


@dataclass(frozen=True)
class Wanted:
    """One file of a model: ``size`` in bytes, ``sha256`` in lower-case hexadecimal digits."""

    name: str
    size: int
    sha256: str
    source: str = ""  # its own address, where it is not beside the shards


def is_remote(source: str) -> bool:
    """An address, not a path on the box."""
    return source.startswith(("http://", "https://", "hf://"))


def source_fault(source: str) -> str | None:
    """What an address of a file should be when ``source`` is none that can be used, else None."""
    if source.startswith("hf://"):
        named = HUB_SOURCE.fullmatch(source) is not None and ".." not in source.split("/")
        return None if named else "hf://OWNER/REPOSITORY@COMMIT/FILE with a commit of 40 digits"
    wanted = "http(s)://HOST/…/FILE without user, query and fragment"
    try:
        parts = urlsplit(source)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return wanted
    if "@" in parts.netloc or "?" in source or "#" in source:
        return f"{wanted} (a secret belongs into the file that gguf_model_token_file names)"
    return None if good and not re.search(r"[\s\x00-\x1f\x7f]", source) else wanted


def address(source: str, name: str, hub: str) -> str:
    """URL of the file ``name`` beside ``source``; ``hub`` is the model hub's own URL."""
    match = HUB_SOURCE.fullmatch(source)
    if match:
        folder = match["path"].rpartition("/")[0]
        base = f"{hub.rstrip('/')}/{match['repo']}/resolve/{match['commit']}/{quote(folder)}"
        return f"{base.rstrip('/')}/{quote(name)}"
    return f"{source.rpartition('/')[0]}/{quote(name)}"


def name_of(source: str) -> str:
    """File name that a path or an address ends in."""
    name = source.rpartition("/")[2]
    return unquote(name) if source.startswith(("http://", "https://")) else name


def url_of(wanted: Wanted, source: str, hub: str) -> str:
    """URL of a file: beside the shard at ``source``, or where its own entry says."""
    if wanted.source:
        return address(wanted.source, name_of(wanted.source), hub)
    return address(source, wanted.name, hub)


def manifest(files: Mapping[str, Mapping[str, Any]]) -> list[Wanted]:
    """The variable ``gguf_model_files``, sorted by name."""
    return [
        Wanted(name, int(one["size"]), str(one["sha256"]), str(one.get("source", "")))
        for name, one in sorted(files.items())
    ]


def model_plan(
    source: str,
    files: Mapping[str, Mapping[str, Any]],
    companions: Iterable[str],
    directory: str,
    file: str,
    layout: str,
) -> dict[str, Any]:
    """Where everything of the model lies on the box, from the role's variables alone.

    What is fetched has a folder named by the digest of the manifest: another model is another
    folder, and the one that is served stays whole while the next one comes.

    Returns:
        ``fetch`` (bool), ``bytes`` to fetch, ``origin`` (what tells the fetched set from others,
        else empty), ``shard`` (path of the shard that was named, empty when nothing was),
        ``record`` (path of the notes on what was verified) and ``model`` (path of the file that is
        served).

    Raises:
        GpuboxError: an address without a complete manifest, or the layout ``shards`` without
            shards.
    """
    fetch = is_remote(source)
    wanted = manifest(files)
    key = digest([[one.name, one.size, one.sha256] for one in wanted])
    shard = Path(directory, "sets", key, name_of(source)) if fetch else Path(source)
    if fetch:
        names = [*(path.name for path in shard_paths(shard)), *companions]
        missing = sorted(set(names) - {one.name for one in wanted})
        if missing:
            raise GpuboxError(
                f"gguf_model_files lacks {', '.join(missing)}",
                "size and sha256 of every shard and companion that is fetched",
                "add them to gguf_model_files, or correct gguf_model_source",
            )
    if layout == "shards" and not source:
        raise GpuboxError(
            "gguf_model_layout is shards and gguf_model_source is empty",
            "the set to serve",
            "set gguf_model_source to any shard of it",
        )
    served = shard_paths(shard)[0] if layout == "shards" else Path(directory, file)
    return {
        "fetch": fetch,
        "bytes": sum(one.size for one in wanted) if fetch else 0,
        "origin": key if fetch else "",
        "shard": str(shard) if source else "",
        "record": str(Path(directory, "sets", f"{key}.verified.json")),
        "model": str(served),
    }


# ---------------------------------------------------------------------------------- what is there


def _identity(path: Path) -> list[int]:
    """State of a file; without its device, whose number another boot may change."""
    found = path.stat()
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def read_record(path: Path) -> dict[str, Any]:
    """Notes on what was verified; empty when there are none that can be read."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def is_verified(wanted: Wanted, path: Path, record: Mapping[str, Any]) -> bool:
    """The file is in the state in which its sha256 was found right."""
    return path.is_file() and record.get(wanted.name) == [wanted.sha256, *_identity(path)]


def note(wanted: Wanted, path: Path, record_path: Path) -> None:
    """Remember that the sha256 of ``path`` is right."""
    record_path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    record = read_record(record_path) | {wanted.name: [wanted.sha256, *_identity(path)]}
    write_atomically(record_path, json.dumps(record, indent=1, sort_keys=True) + "\n")


def part_of(path: Path) -> Path:
    """Where ``path`` grows."""
    return path.with_name(f".{path.name}.part")


def _entity_of(path: Path) -> Path:
    """Where the ETag of what grows is kept."""
    return path.with_name(f".{path.name}.part.etag")


def _hashed(stream: IO[bytes], length: int) -> Any:
    """sha256 object over the next ``length`` bytes (fewer where the file ends)."""
    sha256 = hashlib.sha256()
    while length and (block := stream.read(min(BLOCK, length))):
        sha256.update(block)
        length -= len(block)
    return sha256


def content_fault(wanted: Wanted, path: Path) -> GpuboxError | None:
    """What is wrong with the content of a file of the box, by reading all of it."""
    if not path.is_file():
        return GpuboxError(f"{path} is missing", "a file of the model", "Put it there.")
    size = path.stat().st_size
    remedy = "Fetch this file again, or correct gguf_model_files."
    if size != wanted.size:
        return GpuboxError(f"{path}: {size} bytes", f"{wanted.size} bytes", remedy)
    with path.open("rb") as stream:
        found = _hashed(stream, size).hexdigest()
    if found != wanted.sha256:
        return GpuboxError(f"{path}: sha256 {found}", wanted.sha256, remedy)
    return None


def set_faults(paths: Sequence[Path], supported: Collection[str]) -> list[GpuboxError]:
    """Everything that the headers of a set say against serving it; all shards must be there."""
    headers, faults = read_set(paths)
    types = {one.name: one.quantization_type.name for head in headers for one in head.tensors}
    return [*faults, *(GpuboxError(*parts) for parts in type_faults(types, supported))]


# ---------------------------------------------------------------------------------- the transfer


@dataclass(frozen=True)
class Secret:
    """A bearer token, or a query (``?…``) that is put behind every address."""

    text: str = field(default="", repr=False)

    @property
    def query(self) -> str:
        """What is put behind an address."""
        return self.text if self.text.startswith("?") else ""

    @property
    def header(self) -> str:
        """Value of the header Authorization, empty for none."""
        return f"Bearer {self.text}" if self.text and not self.query else ""


def read_secret(path: str) -> Secret:
    """The secret in a file of the box; no secret for an empty path.

    Raises:
        GpuboxError: others than its owner can read the file, or it holds no single line. The text
            never shows the content.
    """
    if not path:
        return Secret()
    try:
        with open(path, encoding="ascii") as stream:  # noqa: PTH123 - one open, one fstat
            status = os.fstat(stream.fileno())
            text = stream.read(1 << 16).strip()
    except (OSError, ValueError) as error:
        found = error.strerror if isinstance(error, OSError) else "no ASCII text"
        raise GpuboxError(
            f"{path} cannot be read ({found})",
            "the file that gguf_model_token_file names",
            f"write the token into {path} on the box, owner root, mode 0600",
        ) from None
    if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (0, os.geteuid()):
        raise GpuboxError(
            f"{path} has mode {stat.S_IMODE(status.st_mode):04o} and owner {status.st_uid}",
            "a file that root alone can read",
            f"chown root {path} && chmod 0600 {path}",
        )
    if not re.fullmatch(r"[\x21-\x7e]+", text):
        raise GpuboxError(
            f"{path} holds {len(text.split())} words", "one token or ?query", "write it again"
        )
    return Secret(text)


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token goes to the host that it was meant for and to no other."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """The next request."""
        following = super().redirect_request(req, fp, code, msg, headers, newurl)
        old, new = urlsplit(req.full_url), urlsplit(newurl)
        if old.scheme == "https" and new.scheme != "https":
            raise urllib.error.HTTPError(
                req.full_url.partition("?")[0], code, "redirects to http", headers, fp
            )
        token = req.unredirected_hdrs.get("Authorization")
        if following and token and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            following.add_unredirected_header("Authorization", token)
        return following


@dataclass
class Mirror:
    """Transfers over HTTP(S) with one secret.

    Args:
        secret: see `Secret`. Refused where it would cross the network in the clear.
        ca_bundle: certificates to trust instead of the system's.
        timeout: seconds without a byte after which a connection is given up.
        attempts: tries in a row without a new byte before giving up.
        pause: called with the seconds to wait before the next try.
    """

    secret: Secret = field(default_factory=Secret)
    ca_bundle: str = ""
    timeout: float = 60.0
    attempts: int = 6
    pause: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        try:
            context = ssl.create_default_context(cafile=self.ca_bundle or None)
        except OSError as error:  # an SSLError is one
            raise GpuboxError(
                f"python_env_ca_bundle {self.ca_bundle}: {error.strerror or error}",
                "a file of the box with certificates (PEM)",
                "correct python_env_ca_bundle, or leave it empty",
            ) from None
        self._opener = urllib.request.build_opener(
            _Redirects(), urllib.request.HTTPSHandler(context=context)
        )

    def _open(self, url: str, headers: Mapping[str, str]) -> Any:
        parts = urlsplit(url)
        local = parts.hostname in ("localhost", "127.0.0.1", "::1")
        if self.secret.text and parts.scheme != "https" and not local:
            raise GpuboxError(
                f"{url} is not encrypted and there is a token for it",
                "an https address",
                "correct gguf_model_source, or leave gguf_model_token_file empty",
            )
        # identity: a length and a range then mean bytes of the file
        sent = {"User-Agent": "gpubox", "Accept-Encoding": "identity", **headers}
        request = urllib.request.Request(url + self.secret.query, headers=sent)  # noqa: S310
        if self.secret.header:
            request.add_unredirected_header("Authorization", self.secret.header)
        try:
            return self._opener.open(request, timeout=self.timeout)
        except OSError:
            raise
        except ValueError as error:  # of urllib, for a Location that is no address
            raise GpuboxError(
                f"{url} redirects to an address that is none ({error})",
                "the file",
                "look at the server, then run again",
            ) from None

    def _refusal(self, url: str, error: Exception) -> GpuboxError:
        """A lasting failure for a person; the query, a secret, is in none of the texts."""
        if isinstance(error, urllib.error.HTTPError):
            found = f"{error.code} {error.msg}"
            remedy = REFUSED.get(error.code, "look at the server, then run again")
        else:
            reason = getattr(error, "reason", error)
            found = str(reason) or type(reason).__name__
            remedy = "repair the connection, then run again: it goes on where it stopped"
        return GpuboxError(f"{url}: {found}", "the file", remedy)

    def _retrying(self, url: str, step: Callable[[], bool], progress: Callable[[], int]) -> None:
        """Call ``step`` until it says that it is done; give up when no byte comes any more."""
        idle, before = 0, progress()
        while True:
            try:
                if step():
                    return
                error: Exception = ConnectionError("the connection ended early")
            except urllib.error.HTTPError as refused:
                refused.close()
                if refused.code not in PASSING:
                    raise self._refusal(url, refused) from None
                error = refused
            except (OSError, http.client.HTTPException) as failed:
                if isinstance(getattr(failed, "reason", failed), ssl.SSLCertVerificationError):
                    raise self._refusal(url, failed) from None
                error = failed
            after = progress()
            idle, before = (0 if after > before else idle + 1), after
            if idle >= self.attempts:
                raise self._refusal(url, error) from None
            self.pause(float(2 ** min(idle, 5)))

    def start_of(self, url: str, wanted: Wanted, length: int) -> bytes:
        """The first ``length`` bytes, by a range where the server has them."""
        length = min(length, wanted.size)
        data = b""

        def step() -> bool:
            nonlocal data
            with self._open(url, {"Range": f"bytes=0-{length - 1}"}) as response:
                _require_size(url, wanted, 0, response)
                data = _read_exactly(response, length)
            return len(data) == length

        self._retrying(url, step, lambda: len(data))
        return data

    def fetch(self, url: str, wanted: Wanted, path: Path) -> None:
        """Bring the file to ``path``, going on with what an earlier run left.

        Raises:
            GpuboxError: refused by the server, unreachable, another length, another content, or
                changed since the transfer began. ``path`` is as it was. What is known to be wrong
                is removed, what may still be right is kept for the next run.
        """
        part, entity = part_of(path), _entity_of(path)
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "r+b") as stream:
            _lock(descriptor, part)
            transfer = _Transfer(self, url, wanted, stream, entity)
            try:
                self._retrying(url, transfer.step, lambda: transfer.done)
                transfer.require_content()
            except _Wrong as wrong:
                part.unlink()
                entity.unlink(missing_ok=True)
                raise wrong.error from None
            stream.flush()
            os.fchmod(stream.fileno(), 0o644)
            os.fsync(stream.fileno())
        part.rename(path)
        entity.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _lock(descriptor: int, part: Path) -> None:
    """Two runs that write one file would spoil it; the lock ends with the process."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise GpuboxError(
            f"{part} grows in another run", "one run at a time", "wait for it, or end it"
        ) from None


class _Wrong(Exception):  # noqa: N818 - a signal between two functions of this file
    """What was fetched so far is of no use."""

    def __init__(self, url: str, found: str, wanted: str) -> None:
        super().__init__(found)
        self.error = GpuboxError(
            f"{url}: {found}",
            wanted,
            "Run again to fetch it from the start; if it stays, the source has another file than "
            "gguf_model_files describes.",
        )


def _read_exactly(response: IO[bytes], length: int) -> bytes:
    pieces = []
    while length and (block := response.read(min(BLOCK, length))):
        pieces.append(block)
        length -= len(block)
    return b"".join(pieces)


def _require_size(url: str, wanted: Wanted, start: int, response: Any) -> None:
    """The answer must be about a file of the wanted size, and a range begin where it should."""
    if response.status == 206:
        match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", response.headers.get("Content-Range", ""))
        found = (int(match[1]), int(match[2])) if match else None
        if found != (start, wanted.size):
            told = response.headers.get("Content-Range", "no Content-Range")
            raise _wrong_length(url, told, f"from byte {start} of {wanted.size}")
        return
    length = response.headers.get("Content-Length")
    if length is not None and length.strip() != str(wanted.size):
        raise _wrong_length(url, f"{length} bytes", f"{wanted.size} bytes")


def _wrong_length(url: str, found: str, wanted: str) -> GpuboxError:
    return GpuboxError(
        f"{url}: the server offers {found}",
        wanted,
        "correct gguf_model_files or gguf_model_source: that is another file",
    )


@dataclass
class _Transfer:
    """One file on its way: what is on the disk, hashed, and the ETag that it belongs to."""

    mirror: Mirror
    url: str
    wanted: Wanted
    stream: IO[bytes]
    entity: Path

    def __post_init__(self) -> None:
        size = os.fstat(self.stream.fileno()).st_size
        self.done = size if size <= self.wanted.size else 0
        self.stream.seek(0)
        self.sha256 = _hashed(self.stream, self.done)
        try:
            self.etag = self.entity.read_text(encoding="utf-8")
        except (OSError, ValueError):
            self.etag = ""
        self._cut()

    def _cut(self) -> None:
        self.stream.truncate(self.done)
        self.stream.seek(self.done)

    def _restart(self) -> None:
        self.done, self.sha256 = 0, hashlib.sha256()
        self._cut()

    def step(self) -> bool:
        """One request; whether the file is complete afterwards."""
        if self.done == self.wanted.size:
            return True
        headers = {}
        if self.done:
            headers["Range"] = f"bytes={self.done}-"
            if self.etag and not self.etag.startswith("W/"):
                headers["If-Range"] = self.etag
        try:
            response = self.mirror._open(self.url, headers)
        except urllib.error.HTTPError as error:
            if error.code == 416 and self.done:
                error.close()
                self._restart()
                return False
            raise
        with response:
            self._require_same(response.headers.get("ETag", ""))
            _require_size(self.url, self.wanted, self.done, response)
            if response.status != 206 and self.done:
                self._restart()  # a server without ranges
            self._receive(response)
        return self.done == self.wanted.size

    def _require_same(self, etag: str) -> None:
        if self.done and self.etag and etag != self.etag:
            raise _Wrong(
                self.url, f"changed during the transfer (ETag {etag or 'gone'})", self.etag
            )
        if etag != self.etag:
            self.etag = etag
            write_atomically(self.entity, etag)

    def _receive(self, response: IO[bytes]) -> None:
        while block := response.read(BLOCK):
            if self.done + len(block) > self.wanted.size:
                raise _Wrong(self.url, f"more than {self.wanted.size} bytes", "no more")
            self.stream.write(block)
            self.sha256.update(block)
            self.done += len(block)

    def require_content(self) -> None:
        """Raise `_Wrong` unless the bytes are the wanted ones."""
        found = self.sha256.hexdigest()
        if found != self.wanted.sha256:
            raise _Wrong(self.url, f"sha256 {found}", self.wanted.sha256)


# ---------------------------------------------------------------------------------- a model


def remote_set_faults(
    mirror: Mirror,
    urls: Mapping[str, str],
    shards: Sequence[Path],
    wanted: Mapping[str, Wanted],
    supported: Collection[str],
) -> list[GpuboxError]:
    """Everything that the headers of a set say against fetching it.

    Of a shard that is not on the box, only its first MiB (more where its header is longer) is
    fetched, into a sparse file of its size in a temporary folder.
    """
    with tempfile.TemporaryDirectory(prefix="gpubox-") as name:
        paths = []
        for shard in shards:
            path = Path(name, shard.name)
            paths.append(path)
            if shard.is_file():
                path.symlink_to(shard)
            else:
                _put_header(mirror, urls[shard.name], wanted[shard.name], path)
        return set_faults(paths, supported)


def _put_header(mirror: Mirror, url: str, wanted: Wanted, path: Path) -> None:
    for length in HEADER_STEPS:
        data = mirror.start_of(url, wanted, length)
        with path.open("wb") as stream:
            stream.write(data)
            stream.truncate(wanted.size)
        if not data.startswith(MAGIC) or len(data) == wanted.size:
            return  # the checks of the set say what it is
        try:
            if read_header(path).end <= len(data):
                return
        except GpuboxError:
            continue


def space_fault(folder: Path, missing: Iterable[Wanted]) -> GpuboxError | None:
    """Too little space for what is still to come; counts what has come already."""
    needed = 0
    for one in missing:
        part = part_of(folder / one.name)
        needed += one.size - min(one.size, part.stat().st_size if part.is_file() else 0)
    above = folder
    while not above.is_dir():
        above = above.parent
    free = shutil.disk_usage(above).free
    if not needed or free >= needed + RESERVE_BYTES:
        return None
    return GpuboxError(
        f"{free} bytes free for {folder}",
        f"{needed} bytes for the shards and {RESERVE_BYTES} in reserve",
        "free space there, or set gguf_model_dir to a larger file system",
    )


def settled(shards: Sequence[Path], merged: Path, origin: str, remote: bool) -> bool:
    """The shards are not looked at any more: their merger has their bytes, or will have them."""
    # a merge in place is gone on with; its shards have holes
    return takes_from_shards(merged) or (
        remote and known_result(shards, merged, origin=origin) is not None
    )


def surplus(sets: Path, shard: Path, keep: str, merged: Path | None) -> list[Path]:
    """What the policy ``keep`` removes, sorted; the folder ``sets`` holds nothing of others.

    What the shards in use, the files beside them or their merger lead to through links stays.

    Args:
        sets: folder of the fetched sets, one folder each.
        shard: a shard of the set in use; one outside of ``sets`` is never removed.
        keep: ``all``; ``current``, the set in use alone; ``none``, nor its shards once merged.
        merged: the merger of the set in use; once it is there its shards are served no more.
    """
    if keep == "all" or not sets.is_dir():
        return []
    shards = shard_paths(shard)
    made = merged is not None and merged.is_file()
    served = set() if merged is None else _way(merged)
    beside = list(shard.parent.iterdir()) if shard.parent.is_dir() else []
    used = served.union(*map(_way, [*shards, *beside]))
    kept = {one for path in used for one in (path, *path.parents)}
    found = []
    for path in sets.iterdir():
        match = re.fullmatch(r"([0-9a-f]{16})(\.verified\.json)?", path.name)
        if match and match[1] != shard.parent.name and not _way(sets / match[1]) & kept:
            found.append(path)
    if keep == "none" and made and shard.parent.parent == sets:
        found += [path for path in shards if path.is_file() and not _way(path) & served]
    return sorted(found)


def _way(path: Path) -> set[Path]:
    """A path and all that it leads to, link by link, each without links in its folders."""
    found: set[Path] = set()
    while True:
        path = Path(os.path.realpath(path.parent), path.name)
        if path in found or not path.is_symlink():
            return found | {path}
        found.add(path)
        path = path.parent / path.readlink()
