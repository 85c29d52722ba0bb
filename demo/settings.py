# SPDX-License-Identifier: Apache-2.0
"""What the operator can set through the environment, checked before anything is done."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpubox.errors import GpuboxError

SUITES = ("bookworm", "trixie")
WHEELHOUSE_IN_BOX = "/srv/wheelhouse"
CA_BUNDLE_IN_BOX = "/srv/ca-bundle.crt"
CACHE_IN_BOX = "/var/cache/gpubox"
SHARDS_IN_BOX = "/srv/models/shards"

# Settings of package clients that mean the same inside the box as on the host.
_HANDED_ON = (
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "PIP_DEFAULT_TIMEOUT",
    "PIP_EXTRA_INDEX_URL",
    "PIP_INDEX_URL",
    "UV_DEFAULT_INDEX",
    "UV_HTTP_TIMEOUT",
    "UV_INDEX",
    "http_proxy",
    "https_proxy",
    "no_proxy",
)
# A bundle of certificate authorities may be named by any of these; the first one set is taken.
_BUNDLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@dataclass(frozen=True)
class Settings:
    """Checked settings of one run."""

    suite: str
    port: int  # on the host's loopback
    cache: Path  # state that survives runs and clones
    wheelhouse: Path | None  # directory mounted read-only into the box
    find_links: str  # what uv and pip in the box are pointed at, empty for none
    ca_bundle: Path | None
    package_environment: Mapping[str, str]  # variables of the box's processes


def _port(text: str) -> int:
    if not text.isdigit() or not 1024 <= int(text) <= 65535:
        raise GpuboxError(
            f"GPUBOX_DEMO_PORT is {text!r}",
            "a port between 1024 and 65535",
            "set GPUBOX_DEMO_PORT to a free port, or unset it for 18000",
        )
    return int(text)


def read(environment: Mapping[str, str], home: Path) -> Settings:
    """Settings from environment variables.

    Raises:
        GpuboxError: a variable has a value that cannot work.
    """
    suite = environment.get("DEMO_SUITE") or SUITES[0]
    if suite not in SUITES:
        raise GpuboxError(
            f"DEMO_SUITE is {suite!r}", f"one of {', '.join(SUITES)}", "set DEMO_SUITE to one"
        )
    source = environment.get("GPUBOX_WHEELHOUSE") or environment.get("PIP_FIND_LINKS") or ""
    wheelhouse: Path | None = None
    find_links = source
    if source and "://" not in source:
        wheelhouse = Path(source).expanduser().resolve()
        if not wheelhouse.is_dir():
            raise GpuboxError(
                f"GPUBOX_WHEELHOUSE (or PIP_FIND_LINKS) names {source}, which is no directory",
                "a directory of wheels or a URL",
                "correct the variable or unset it",
            )
        find_links = WHEELHOUSE_IN_BOX
    named = next((environment[name] for name in _BUNDLES if environment.get(name)), "")
    bundle = Path(named).resolve() if named else None
    if bundle is not None and not bundle.is_file():
        raise GpuboxError(
            f"the certificate bundle {named} does not exist",
            "a file of certificate authorities, as SSL_CERT_FILE names it",
            "correct SSL_CERT_FILE or unset it",
        )
    variables = {name: environment[name] for name in _HANDED_ON if environment.get(name)}
    if find_links:
        variables |= {"PIP_FIND_LINKS": find_links, "UV_FIND_LINKS": find_links}
    if bundle is not None:
        clients = ("PIP_CERT", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")
        variables |= dict.fromkeys(clients, CA_BUNDLE_IN_BOX)
    cache = Path(environment.get("XDG_CACHE_HOME") or home / ".cache") / "gpubox"
    return Settings(
        suite=suite,
        port=_port(environment.get("GPUBOX_DEMO_PORT") or "18000"),
        cache=cache,
        wheelhouse=wheelhouse,
        find_links=find_links,
        ca_bundle=bundle,
        package_environment=dict(sorted(variables.items())),
    )


def fingerprint(paths: Mapping[str, bytes]) -> str:
    """Digest over named contents, in a fixed order."""
    total = hashlib.sha256()
    for name in sorted(paths):
        total.update(f"{name}\0{len(paths[name])}\0".encode())
        total.update(paths[name])
    return total.hexdigest()[:16]
