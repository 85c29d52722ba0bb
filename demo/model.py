# SPDX-License-Identifier: Apache-2.0
"""The tiny GLM-5: written once for each version of its writer, then put on a box as shards."""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

from gpubox.errors import GpuboxError

from . import ROOT, commands, settings
from .engine import Podman

WRITER = Path(__file__).resolve().parent / "tiny_glm5"
SHARDS = 3
SUMS = "SHA256SUMS"


def writer_digest(writer: Path = WRITER) -> str:
    """Digest of the writer's sources: another writer, another model."""
    return settings.fingerprint(
        {path.name: path.read_bytes() for path in writer.glob("*.py")} | {"shards": b"%d" % SHARDS}
    )


def checksums(directory: Path) -> str:
    """Text for ``sha256sum --check`` over the files of a directory, by name."""
    lines = []
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name != SUMS:
            with path.open("rb") as stream:
                lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {path.name}\n")
    return "".join(lines)


def write(cache: Path) -> Path:
    """Directory on the host with the shards, config and tokenizer; its checksums are written last.

    Raises:
        GpuboxError: the writer failed.
    """
    final = cache / f"tiny-glm5-{writer_digest()}"
    if (final / SUMS).is_file():
        return final
    staged = final.with_name(final.name + ".part")
    shutil.rmtree(staged, ignore_errors=True)
    shutil.rmtree(final, ignore_errors=True)
    staged.parent.mkdir(parents=True, exist_ok=True)
    argv = [sys.executable, "-m", "demo.tiny_glm5", str(staged), "--shards", str(SHARDS)]
    outcome = commands.run(argv, cwd=ROOT)
    if outcome.code != 0:
        raise GpuboxError(
            f"`{' '.join(argv[1:])}` ended with {outcome.code}:\n{outcome.tail()}",
            "the tiny GLM-5 as GGUF shards",
            "correct what it says (free space in ~/.cache?), then repeat",
        )
    (staged / SUMS).write_text(checksums(staged), encoding="utf-8")
    staged.rename(final)
    return final


def put(podman: Podman, container: str, source: Path) -> bool:
    """Have the files on the box at ``/srv/models/shards``; whether they had to be copied.

    Raises:
        GpuboxError: they could not be copied.
    """
    target = settings.SHARDS_IN_BOX
    known = podman.inside(container, "cat", f"{target}/{SUMS}")
    if known.code == 0 and known.output == (source / SUMS).read_text(encoding="utf-8"):
        check = ("sh", "-c", f"cd {target} && sha256sum --check --quiet --strict {SUMS}")
        if podman.inside(container, *check).code == 0:
            return False
    staged = f"{target}.part"
    wanted = f"the shards in {container}:{target}"
    remedy = "check the free space, then repeat"
    script = f"rm -rf {staged} && mkdir -p {staged}"
    podman.must("exec", container, "sh", "-c", script, wanted=wanted, remedy=remedy)
    podman.must("cp", f"{source}/.", f"{container}:{staged}", wanted=wanted, remedy=remedy)
    script = (
        f"chown -R root:root {staged} && chmod -R u=rwX,go=rX {staged}"
        f" && rm -rf {target} && mv {staged} {target}"
    )
    podman.must("exec", container, "sh", "-c", script, wanted=wanted, remedy=remedy)
    return True
