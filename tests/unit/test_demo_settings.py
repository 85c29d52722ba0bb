# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from gpubox.errors import GpuboxError

from demo import settings


def test_defaults_need_no_variable(tmp_path: Path) -> None:
    found = settings.read({}, tmp_path)
    assert (found.suite, found.port, found.cache) == ("bookworm", 18000, tmp_path / ".cache/gpubox")
    assert (found.wheelhouse, found.find_links, found.ca_bundle) == (None, "", None)
    assert found.package_environment == {}


def test_a_wheelhouse_directory_is_seen_at_its_place_in_the_box(tmp_path: Path) -> None:
    found = settings.read({"PIP_FIND_LINKS": str(tmp_path)}, tmp_path)
    assert found.wheelhouse == tmp_path
    assert found.find_links == "/srv/wheelhouse"
    assert found.package_environment["UV_FIND_LINKS"] == "/srv/wheelhouse"


def test_a_wheelhouse_url_is_handed_on_and_own_variable_wins(tmp_path: Path) -> None:
    url = "https://wheels.example/cpu"
    found = settings.read({"GPUBOX_WHEELHOUSE": url, "PIP_FIND_LINKS": "/nowhere"}, tmp_path)
    assert (found.wheelhouse, found.find_links) == (None, url)


def test_index_and_certificates_reach_the_box(tmp_path: Path) -> None:
    bundle = tmp_path / "ca.crt"
    bundle.write_text("-----BEGIN CERTIFICATE-----\n")
    environment = {
        "SSL_CERT_FILE": str(bundle),
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "EDITOR": "vi",
    }
    found = settings.read(environment, tmp_path)
    assert found.ca_bundle == bundle
    assert found.package_environment == {
        "PIP_CERT": "/srv/ca-bundle.crt",
        "REQUESTS_CA_BUNDLE": "/srv/ca-bundle.crt",
        "SSL_CERT_FILE": "/srv/ca-bundle.crt",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
    }


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"GPUBOX_DEMO_PORT": "80"}, "GPUBOX_DEMO_PORT is '80'"),
        ({"GPUBOX_DEMO_PORT": "http"}, "GPUBOX_DEMO_PORT is 'http'"),
        ({"DEMO_SUITE": "buster"}, "DEMO_SUITE is 'buster'"),
        ({"GPUBOX_WHEELHOUSE": "/does/not/exist"}, "/does/not/exist, which is no directory"),
        ({"SSL_CERT_FILE": "/does/not/exist.pem"}, "/does/not/exist.pem does not exist"),
    ],
)
def test_values_that_cannot_work_are_refused(
    tmp_path: Path, environment: dict[str, str], named: str
) -> None:
    with pytest.raises(GpuboxError) as caught:
        settings.read(environment, tmp_path)
    assert named in caught.value.measured
    assert caught.value.remedy


def test_fingerprint_tells_contents_and_names_apart() -> None:
    one = settings.fingerprint({"a": b"x", "b": b"y"})
    assert one == settings.fingerprint({"b": b"y", "a": b"x"})
    assert one != settings.fingerprint({"a": b"xb", "b": b"y"})
    assert one != settings.fingerprint({"a": b"y", "b": b"x"})
