# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpubox.errors import GpuboxError

from demo import image
from demo.console import Console
from demo.engine import Podman
from tests.unit.demo_stand_ins import on_path

ABSENT = (125, "", "no such image")
INSPECT = "image inspect --format {{json .Config.Labels}}"
IDENTITY = "image inspect --format {{.Id}}"
SYSTEM = f"{INSPECT} localhost/gpubox-system:bookworm"


def call(cache: Path) -> str:
    return image.ensure(Podman({}), "bookworm", cache, Console())


def labelled(recipe: str) -> tuple[int, str, str]:
    return 0, json.dumps({"gpubox.recipe": recipe}), ""


def test_the_image_of_this_recipe_is_used_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    podman = on_path(monkeypatch, tmp_path, "podman")["podman"]
    podman.answer({SYSTEM: labelled(image.recipe()), IDENTITY: (0, "sha256:7\n", "")})
    assert call(tmp_path) == "sha256:7"
    assert not [one for one in podman.calls() if one[0] in ("pull", "build")]


def test_the_public_image_is_pulled_where_a_registry_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    podman = on_path(monkeypatch, tmp_path, "podman")["podman"]
    podman.answer(
        {
            INSPECT: ABSENT,
            SYSTEM: labelled("of an older recipe"),
            "pull": (0, "id", ""),
            "build": (0, "id", ""),
            IDENTITY: (0, "sha256:8\n", ""),
        }
    )
    assert call(tmp_path) == "sha256:8"
    assert (tmp_path / "pulled-bookworm").exists()
    build = next(one for one in podman.calls() if one[0] == "build")
    assert "BASE=docker.io/library/debian:bookworm-slim" in build
    assert f"gpubox.recipe={image.recipe()}" in build


def test_without_registry_debian_is_made_of_its_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GPUBOX_DEBIAN_MIRROR", "http://mirror.example/debian")
    stand_ins = on_path(monkeypatch, tmp_path, "podman", "mmdebstrap")
    stand_ins["podman"].answer(
        {
            INSPECT: ABSENT,
            "pull": (125, "", "no such host"),
            "import": (0, "id", ""),
            "build": (0, "id", ""),
            IDENTITY: (0, "sha256:9\n", ""),
        }
    )
    stand_ins["mmdebstrap"].answer({"": (0, "an archive", "")})
    assert call(tmp_path) == "sha256:9"
    assert stand_ins["mmdebstrap"].calls()[0][-3:] == [
        "bookworm",
        "-",
        "http://mirror.example/debian",
    ]
    build = next(one for one in stand_ins["podman"].calls() if one[0] == "build")
    assert "BASE=localhost/gpubox-base:bookworm" in build


def test_without_any_network_the_error_names_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_ins = on_path(monkeypatch, tmp_path, "podman", "mmdebstrap")
    stand_ins["podman"].answer(
        {
            INSPECT: ABSENT,
            "pull": (125, "", "no such host"),
            "import": (0, "", ""),
            "rmi": (0, "", ""),
        }
    )
    stand_ins["mmdebstrap"].answer({"": (1, "", "E: Temporary failure resolving the mirror")})
    with pytest.raises(GpuboxError) as caught:
        call(tmp_path)
    assert "Temporary failure resolving" in caught.value.measured
    assert "network" in caught.value.remedy
    # what podman imported of half an archive must not be found by the next run
    assert ["rmi", "localhost/gpubox-base:bookworm"] in stand_ins["podman"].calls()


def test_without_registry_and_mmdebstrap_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    podman = on_path(monkeypatch, tmp_path, "podman", only=True)["podman"]
    podman.answer({INSPECT: ABSENT, "pull": (125, "", "no such host")})
    with pytest.raises(GpuboxError) as caught:
        call(tmp_path)
    assert "no such host" in caught.value.measured
    assert "apt-get install -y mmdebstrap" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "sources.list.d/debian.sources",
            "Types: deb\nURIs: http://one.example/debian\nSuites: bookworm\n",
        ),
        (
            "sources.list",
            "# local\ndeb [arch=amd64 signed-by=/k] http://one.example/debian bookworm main\n",
        ),
        ("sources.list.d/a.list", "deb http://one.example/debian/ bookworm main\n"),
    ],
)
def test_the_mirror_of_the_host_s_apt_is_found(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list.d/zz.sources").write_text(
        "URIs: http://two.example/debian-security\n"
    )
    (tmp_path / name).write_text(text)
    assert image.debian_mirror(tmp_path).rstrip("/") == "http://one.example/debian"


def test_another_distribution_has_no_debian_mirror(tmp_path: Path) -> None:
    (tmp_path / "sources.list.d").mkdir()
    (tmp_path / "sources.list").write_text("deb http://one.example/ubuntu noble main\n")
    assert image.debian_mirror(tmp_path) == ""


def test_only_what_was_made_or_pulled_here_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    podman = on_path(monkeypatch, tmp_path, "podman")["podman"]
    ours = (0, json.dumps({"gpubox.demo": "true"}), "")
    public = f"{INSPECT} docker.io/library/debian:bookworm-slim"
    podman.answer(
        {
            INSPECT: ABSENT,
            SYSTEM: ours,
            f"{INSPECT} localhost/gpubox-base:bookworm": ours,
            public: (0, "null", ""),
            "rmi": (0, "", ""),
            "rmi localhost/gpubox-system": (2, "", "image is in use by a container"),
        }
    )
    system, base = "localhost/gpubox-system:bookworm", "localhost/gpubox-base:bookworm"
    assert image.remove(Podman({}), ("bookworm", "trixie"), tmp_path) == ([base], [system])
    (tmp_path / "pulled-bookworm").touch()
    removed, _ = image.remove(Podman({}), ("bookworm",), tmp_path)
    assert removed == [base, "docker.io/library/debian:bookworm-slim"]


def test_older_images_without_a_name_go_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    podman = on_path(monkeypatch, tmp_path, "podman")["podman"]
    podman.answer(
        {
            INSPECT: ABSENT,
            "images --quiet": (0, "0123\n4567\n0123\n", ""),
            "rmi": (0, "", ""),
            "rmi 4567": (2, "", "image is in use by a container"),
        }
    )
    assert image.remove(Podman({}), (), tmp_path) == (["0123"], ["4567"])
    (asked,) = [call for call in podman.calls() if call[0] == "images"]
    assert "label=gpubox.demo=true" in asked
    assert "dangling=true" in asked
