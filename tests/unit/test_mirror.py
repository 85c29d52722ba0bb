# SPDX-License-Identifier: Apache-2.0
"""Fetching against a real server: whole, interrupted, changed, wrong, forbidden, by other ways."""

from __future__ import annotations

import hashlib
import os
import shutil
import ssl
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from gpubox import mirror as under_test
from gpubox.errors import GpuboxError
from gpubox.mirror import (
    BLOCK,
    Mirror,
    Secret,
    Wanted,
    address,
    is_verified,
    model_plan,
    name_of,
    note,
    part_of,
    read_record,
    read_secret,
    remote_set_faults,
    source_fault,
    space_fault,
)

from tests.unit.file_server import FileServer, cut, etag, instead, status
from tests.unit.gguf_files import METADATA, GgufFile, TensorData, shard_set
from tests.unit.timing import FOREVER

CONTENT = hashlib.shake_128(b"content").digest(3 * BLOCK + 17)
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TYPES = ["F32", "Q8_0", "Q4_K", "Q6_K"]


def wanted_of(content: bytes, name: str = "x.bin") -> Wanted:
    return Wanted(name, len(content), hashlib.sha256(content).hexdigest())


WANTED = wanted_of(CONTENT)


@pytest.fixture
def server() -> Iterator[FileServer]:
    one = FileServer()
    one.files["/m/x.bin"] = CONTENT
    yield one
    one.close()


@pytest.fixture
def pauses() -> list[float]:
    return []


@pytest.fixture
def mirror(pauses: list[float]) -> Mirror:
    return Mirror(pause=pauses.append, attempts=3)


def fetch(mirror: Mirror, server: FileServer, folder: Path, wanted: Wanted = WANTED) -> None:
    mirror.fetch(f"{server.url}/m/x.bin", wanted, folder / "x.bin")


def refused(
    mirror: Mirror, server: FileServer, folder: Path, wanted: Wanted = WANTED
) -> GpuboxError:
    with pytest.raises(GpuboxError) as caught:
        fetch(mirror, server, folder, wanted)
    assert not (folder / "x.bin").exists()
    return caught.value


def only_the_file(folder: Path) -> None:
    assert [path.name for path in folder.iterdir()] == ["x.bin"]
    assert (folder / "x.bin").read_bytes() == CONTENT


def test_a_whole_file(mirror: Mirror, server: FileServer, tmp_path: Path) -> None:
    fetch(mirror, server, tmp_path)
    only_the_file(tmp_path)
    assert server.seen == [("/m/x.bin", None, None)]
    assert (tmp_path / "x.bin").stat().st_mode & 0o777 == 0o644


def test_an_empty_file(mirror: Mirror, server: FileServer, tmp_path: Path) -> None:
    server.files["/m/x.bin"] = b""
    fetch(mirror, server, tmp_path, wanted_of(b""))
    assert (tmp_path / "x.bin").read_bytes() == b""


def test_an_interrupted_transfer_goes_on_where_it_stopped(
    mirror: Mirror, server: FileServer, tmp_path: Path, pauses: list[float]
) -> None:
    server.plan = {0: cut(BLOCK + 5), 1: status(503), 2: cut(7)}
    fetch(mirror, server, tmp_path)
    only_the_file(tmp_path)
    starts = [asked for _, asked, _ in server.seen]
    assert starts[0] is None
    assert starts[1] == starts[2]
    sizes = [int(asked.removeprefix("bytes=").rstrip("-")) for asked in starts[1:] if asked]
    assert 0 < sizes[0] <= BLOCK + 5
    assert sizes[-1] == sizes[0] + 7
    assert pauses


def test_the_next_run_goes_on_too(mirror: Mirror, server: FileServer, tmp_path: Path) -> None:
    server.plan = {0: cut(2 * BLOCK), 1: status(500), 2: status(500), 3: status(500)}
    assert "500" in refused(mirror, server, tmp_path).measured
    kept = part_of(tmp_path / "x.bin").stat().st_size
    assert kept > 0
    fetch(mirror, server, tmp_path)
    only_the_file(tmp_path)
    assert server.seen[-1][1] == f"bytes={kept}-"


def test_a_killed_run_is_continued(mirror: Mirror, server: FileServer, tmp_path: Path) -> None:
    part_of(tmp_path / "x.bin").write_bytes(CONTENT[: BLOCK + 3])
    fetch(mirror, server, tmp_path)
    only_the_file(tmp_path)
    assert server.seen == [("/m/x.bin", f"bytes={BLOCK + 3}-", None)]


FETCH = """
import sys
from pathlib import Path
from gpubox.mirror import Mirror, Wanted
url, name, size, sha256, path = sys.argv[1:]
Mirror().fetch(url, Wanted(name, int(size), sha256), Path(path))
"""


def test_a_sigkill_in_a_transfer_and_a_second_run_beside_it(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    halfway, ended = threading.Event(), threading.Event()

    def stalled(request: BaseHTTPRequestHandler, content: bytes) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.send_header("ETag", etag(content))
        request.end_headers()
        request.wfile.write(content[: 2 * BLOCK])
        request.wfile.flush()
        halfway.set()
        ended.wait(FOREVER)

    server.plan = {0: stalled}
    path = tmp_path / "x.bin"
    arguments = [f"{server.url}/m/x.bin", WANTED.name, str(WANTED.size), WANTED.sha256, str(path)]
    library = str(Path(under_test.__file__).parents[1])
    child = subprocess.Popen(
        [sys.executable, "-c", FETCH, *arguments], env={**os.environ, "PYTHONPATH": library}
    )
    try:
        assert halfway.wait(FOREVER)
        # the block before the last one that was sent is on its way to the disk
        while not (part_of(path).is_file() and part_of(path).stat().st_size):
            time.sleep(0.01)
        assert "another run" in refused(mirror, server, tmp_path).measured
    finally:
        child.kill()
        child.wait()
        ended.set()
    kept = part_of(path).stat().st_size
    fetch(mirror, server, tmp_path)
    only_the_file(tmp_path)
    assert server.seen[1:] == [("/m/x.bin", f"bytes={kept}-", None)]


def test_a_complete_part_needs_no_request(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    part_of(tmp_path / "x.bin").write_bytes(CONTENT)
    fetch(mirror, server, tmp_path)
    only_the_file(tmp_path)
    assert server.seen == []


def test_a_part_that_is_too_long_starts_over(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    part_of(tmp_path / "x.bin").write_bytes(CONTENT + b"x")
    fetch(mirror, server, tmp_path)
    only_the_file(tmp_path)
    assert server.seen == [("/m/x.bin", None, None)]


def test_a_server_without_ranges_starts_over(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    server.ranges = False
    server.plan = {0: cut(BLOCK)}
    fetch(mirror, server, tmp_path)
    only_the_file(tmp_path)
    assert len(server.seen) == 2


def test_a_changed_revision_is_refused_and_the_rerun_starts_over(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    other = bytes(len(CONTENT))
    server.plan = {0: cut(BLOCK), 1: instead(other)}
    error = refused(mirror, server, tmp_path)
    assert "changed during the transfer" in error.measured
    assert list(tmp_path.iterdir()) == []
    fetch(mirror, server, tmp_path)
    only_the_file(tmp_path)


def test_a_wrong_length_is_refused_before_a_byte(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    server.files["/m/x.bin"] = CONTENT + b"more"
    error = refused(mirror, server, tmp_path)
    assert f"{len(CONTENT) + 4} bytes" in error.measured
    assert error.wanted == f"{len(CONTENT)} bytes"
    assert part_of(tmp_path / "x.bin").stat().st_size == 0


def test_a_wrong_length_of_a_range_is_refused(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    part_of(tmp_path / "x.bin").write_bytes(CONTENT[:5])
    server.files["/m/x.bin"] = CONTENT + b"more"
    assert "bytes 5-" in refused(mirror, server, tmp_path).measured


def test_a_wrong_content_is_removed(mirror: Mirror, server: FileServer, tmp_path: Path) -> None:
    server.files["/m/x.bin"] = bytes(len(CONTENT))
    error = refused(mirror, server, tmp_path)
    assert error.wanted == WANTED.sha256
    assert list(tmp_path.iterdir()) == []


def test_a_body_without_end_is_cut(mirror: Mirror, server: FileServer, tmp_path: Path) -> None:
    def endless(request: BaseHTTPRequestHandler, content: bytes) -> None:
        request.send_response(200)
        request.send_header("Connection", "close")
        request.end_headers()
        request.close_connection = True
        request.wfile.write(content + b"x")

    server.plan = {0: endless}
    assert "more than" in refused(mirror, server, tmp_path).measured


@pytest.mark.parametrize("code", [401, 403, 404, 410, 400])
def test_a_refusal_is_not_repeated(
    mirror: Mirror, server: FileServer, tmp_path: Path, code: int
) -> None:
    server.plan = {0: status(code)}
    error = refused(mirror, server, tmp_path)
    assert str(code) in error.measured
    assert len(server.seen) == 1


def test_an_unreachable_server_is_given_up(tmp_path: Path, pauses: list[float]) -> None:
    one = FileServer()
    one.close()
    with pytest.raises(GpuboxError, match="refused") as caught:
        Mirror(pause=pauses.append, attempts=3).fetch(f"{one.url}/x", WANTED, tmp_path / "x.bin")
    assert "goes on where it stopped" in caught.value.remedy
    assert pauses == [2.0, 4.0]


def test_a_silent_connection_is_given_up_and_continued(
    server: FileServer, tmp_path: Path, pauses: list[float]
) -> None:
    def silent(request: BaseHTTPRequestHandler, content: bytes) -> None:
        request.send_response(200)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content[:BLOCK])
        request.wfile.flush()
        ended.wait(FOREVER)

    ended = threading.Event()
    server.plan = {0: silent}
    fetch(Mirror(pause=pauses.append, timeout=0.5, attempts=1000), server, tmp_path)
    ended.set()
    only_the_file(tmp_path)
    assert len(pauses) >= 1


# --- secrets --------------------------------------------------------------------------------------


def test_the_token_reaches_its_host_only(tmp_path: Path, server: FileServer) -> None:
    store = FileServer()
    store.files["/signed"] = CONTENT
    server.token = "hunter2"  # noqa: S105 - of this test
    server.plan = {
        0: status(302, Location="/moved"),
        1: status(302, Location=f"{store.url}/signed?sig=1"),
    }
    fetch(Mirror(Secret("hunter2")), server, tmp_path)
    store.close()
    only_the_file(tmp_path)
    assert [token for *_, token in server.seen] == ["Bearer hunter2"] * 2
    assert store.seen == [("/signed?sig=1", None, None)]


def test_a_query_is_put_behind_every_address_and_into_no_message(
    server: FileServer, tmp_path: Path
) -> None:
    fetch(Mirror(Secret("?sig=hunter2")), server, tmp_path)
    assert server.seen == [("/m/x.bin?sig=hunter2", None, None)]
    (tmp_path / "x.bin").unlink()
    server.plan = {1: status(403)}
    assert "hunter2" not in str(refused(Mirror(Secret("?sig=hunter2")), server, tmp_path))
    assert "hunter2" not in repr(Mirror(Secret("?sig=hunter2")))


def test_no_token_crosses_the_network_in_the_clear(tmp_path: Path) -> None:
    with pytest.raises(GpuboxError, match="not encrypted"):
        Mirror(Secret("hunter2")).fetch("http://mirror.invalid/x", WANTED, tmp_path / "x.bin")


def test_a_secret_is_read_from_a_file_of_roots_own(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("hunter2\n")
    path.chmod(0o600)
    assert read_secret(str(path)).header == "Bearer hunter2"
    assert read_secret("") == Secret()
    path.chmod(0o640)
    with pytest.raises(GpuboxError, match="mode 0640") as caught:
        read_secret(str(path))
    assert "hunter2" not in str(caught.value)
    path.chmod(0o600)
    for content in (b"", b"hunter2 two", b"hunter2\xff"):
        path.write_bytes(content)
        with pytest.raises(GpuboxError) as caught:
            read_secret(str(path))
        assert "hunter2" not in str(caught.value)
    with pytest.raises(GpuboxError, match="No such file"):
        read_secret(str(tmp_path / "none"))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_certificates_are_checked(tmp_path: Path, pauses: list[float]) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    one = FileServer(context)
    one.files["/m/x.bin"] = CONTENT
    (tmp_path / "out").mkdir()
    error = refused(Mirror(pause=pauses.append), one, tmp_path / "out")
    assert "certificate" in error.measured.lower()
    assert pauses == []
    plain = FileServer()
    one.plan = {0: status(302, Location=f"{plain.url}/m/x.bin")}
    trusting = Mirror(ca_bundle=str(certificate), pause=pauses.append)
    assert "redirects to http" in refused(trusting, one, tmp_path / "out").measured
    assert plain.seen == []
    fetch(trusting, one, tmp_path / "out")
    only_the_file(tmp_path / "out")
    one.close()
    plain.close()


# --- memory, what was verified, space -------------------------------------------------------------


def test_memory_is_bounded(mirror: Mirror, server: FileServer, tmp_path: Path) -> None:
    content = bytes(64 * BLOCK)
    server.files["/m/x.bin"] = content
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    fetch(mirror, server, tmp_path, wanted_of(content))
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert peak < 16 * BLOCK


def test_what_was_verified_is_known_until_it_changes(tmp_path: Path) -> None:
    path, record = tmp_path / "x.bin", tmp_path / "record.json"
    path.write_bytes(CONTENT)
    assert not is_verified(WANTED, path, read_record(record))
    note(WANTED, path, record)
    assert is_verified(WANTED, path, read_record(record))
    assert not is_verified(wanted_of(b"other"), path, read_record(record))
    os.utime(path, ns=(1, 1))
    assert not is_verified(WANTED, path, read_record(record))
    record.write_text("[")
    assert read_record(record) == {}


def test_space_counts_what_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "RESERVE_BYTES", 0)
    free = shutil.disk_usage(tmp_path).free
    huge = Wanted("x.bin", 2 * free, "0" * 64)
    fault = space_fault(tmp_path / "new", [huge])
    assert fault is not None
    assert f"{2 * free} bytes" in fault.wanted
    with part_of(tmp_path / "x.bin").open("wb") as part:
        part.truncate(2 * free)
    assert space_fault(tmp_path, [huge]) is None
    assert space_fault(tmp_path, []) is None


# --- headers before the bytes ---------------------------------------------------------------------


def header_check(
    mirror: Mirror, server: FileServer, folder: Path, contents: dict[str, bytes], types: list[str]
) -> list[GpuboxError]:
    server.files = {f"/m/{name}": content for name, content in contents.items()}
    urls = {name: f"{server.url}/m/{name}" for name in contents}
    wanted = {name: wanted_of(content, name) for name, content in contents.items()}
    paths = [folder / "none" / name for name in sorted(contents)]
    return remote_set_faults(mirror, urls, paths, wanted, types)


@pytest.mark.parametrize("ranges", [True, False])
def test_headers_tell_types_before_the_bytes_come(
    mirror: Mirror,
    server: FileServer,
    tmp_path: Path,
    ranges: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_test, "HEADER_STEPS", (64, 512, 4096))
    server.ranges = ranges
    good_set = shard_set(tmp_path / "shards")
    contents = {path.name: path.read_bytes() for path in good_set.paths}
    assert header_check(mirror, server, tmp_path, contents, TYPES) == []
    assert ("bytes=0-511") in [asked for _, asked, _ in server.seen]
    assert all(asked for _, asked, _ in server.seen)
    (fault, *_) = header_check(mirror, server, tmp_path, contents, ["F32", "Q8_0", "Q6_K"])
    assert "quantization type Q4_K" in fault.measured


def test_experts_without_quantization_are_told_before_the_bytes_come(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    name = "blk.0.ffn_up_exps.weight"
    content = GgufFile(METADATA, (TensorData(name, (256, 2)),)).to_bytes()
    (fault,) = header_check(mirror, server, tmp_path, {"x.gguf": content}, TYPES)
    assert f"quantization type F32, the first is {name}" in fault.measured


def test_a_bundle_that_is_none_is_named(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none.pem", "No such file"), (tmp_path / "empty.pem", "")):
        if not said:
            path.write_text("no certificate")
        with pytest.raises(GpuboxError, match="python_env_ca_bundle") as caught:
            Mirror(ca_bundle=str(path))
        assert str(path) in caught.value.measured
        assert said in caught.value.measured


@pytest.mark.parametrize("location", ["http://[::1", "//[/x"])
def test_a_redirect_to_no_address_is_told(
    mirror: Mirror, server: FileServer, tmp_path: Path, location: str
) -> None:
    server.plan = {0: status(302, Location=location)}
    error = refused(mirror, server, tmp_path)
    assert f"{server.url}/m/x.bin" in error.measured


def test_a_set_of_two_models_is_refused_by_its_headers(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    good_set = shard_set(tmp_path / "shards")
    contents = {path.name: path.read_bytes() for path in good_set.paths}
    names = sorted(contents)
    contents[names[1]], contents[names[2]] = contents[names[2]], contents[names[1]]
    faults = header_check(mirror, server, tmp_path, contents, TYPES)
    assert any("split.no" in fault.measured for fault in faults)


def test_a_page_instead_of_a_header_is_named(
    mirror: Mirror, server: FileServer, tmp_path: Path
) -> None:
    (fault,) = header_check(mirror, server, tmp_path, {"x.gguf": b"<html>login</html>"}, TYPES)
    assert "HTML page" in fault.measured
    assert len(server.seen) == 1


# --- addresses and the plan -----------------------------------------------------------------------

HUB = f"hf://zai-org/GLM-5-GGUF@{COMMIT}/UD-Q4_K_XL/GLM-5-00001-of-00002.gguf"


def test_addresses() -> None:
    hub = "https://hub.example/"
    base = f"https://hub.example/zai-org/GLM-5-GGUF/resolve/{COMMIT}"
    assert address(HUB, "a b.gguf", hub) == f"{base}/UD-Q4_K_XL/a%20b.gguf"
    top = f"hf://zai-org/GLM-5@{COMMIT}/config.json"
    assert address(top, "config.json", hub).endswith(f"/resolve/{COMMIT}/config.json")
    assert address("https://m.example/a/x.gguf", "y.gguf", hub) == "https://m.example/a/y.gguf"
    assert name_of("https://m.example/a/x%20y.gguf") == "x y.gguf"
    assert name_of("/a/x%20y.gguf") == "x%20y.gguf"


@pytest.mark.parametrize("source", [HUB, "https://m.example:8443/a/x.gguf", "http://10.0.0.1/x"])
def test_addresses_that_can_be_used(source: str) -> None:
    assert source_fault(source) is None


@pytest.mark.parametrize(
    "source",
    [
        "hf://zai-org/GLM-5@main/x.gguf",
        f"hf://zai-org/GLM-5@{COMMIT}/../x.gguf",
        f"hf://zai-org/GLM-5@{COMMIT}",
        "https://user:hunter2@m.example/x.gguf",
        "https://m.example/x.gguf?sig=hunter2",
        "https:///x.gguf",
        "https://m.example/a b",
        "https://[",
    ],
)
def test_addresses_that_cannot(source: str) -> None:
    wanted = source_fault(source)
    assert wanted
    assert "hunter2" not in wanted


def test_the_plan_of_a_fetched_model() -> None:
    names = [f"GLM-5-0000{number}-of-00002.gguf" for number in (1, 2)]
    files = {name: {"size": 7, "sha256": "a" * 64} for name in [*names, "config.json"]}
    plan = model_plan(HUB, files, ["config.json"], "/srv/m", "GLM-5.gguf", "merged")
    folder = Path(plan["shard"]).parent
    assert plan["fetch"]
    assert plan["bytes"] == 21
    assert folder.parent == Path("/srv/m/sets")
    assert plan["record"] == f"{folder}.verified.json"
    assert plan["model"] == "/srv/m/GLM-5.gguf"
    files["config.json"] = {"size": 8, "sha256": "a" * 64}
    other = model_plan(HUB, files, ["config.json"], "/srv/m", "GLM-5.gguf", "shards")
    assert Path(other["model"]).parent != folder
    assert Path(other["model"]).name == names[0]
    del files[names[1]]
    with pytest.raises(GpuboxError, match=f"lacks {names[1]}, tokenizer.json"):
        model_plan(HUB, files, ["tokenizer.json"], "/srv/m", "GLM-5.gguf", "merged")


def test_the_plan_of_a_set_of_the_box() -> None:
    shard = "/data/GLM-5-00002-of-00002.gguf"
    plan = model_plan(shard, {}, [], "/srv/m", "GLM-5.gguf", "merged")
    assert (plan["fetch"], plan["shard"], plan["model"]) == (False, shard, "/srv/m/GLM-5.gguf")
    served = model_plan(shard, {}, [], "/srv/m", "GLM-5.gguf", "shards")["model"]
    assert served == "/data/GLM-5-00001-of-00002.gguf"
    assert model_plan("", {}, [], "/srv/m", "GLM-5.gguf", "merged")["shard"] == ""
    with pytest.raises(GpuboxError, match="gguf_model_source is empty"):
        model_plan("", {}, [], "/srv/m", "GLM-5.gguf", "shards")
