# SPDX-License-Identifier: Apache-2.0
"""Makes what the scenario stands in: ``python molecule/reprovision/stand_ins.py DIRECTORY``.

``DIRECTORY/site`` is the repository's site with one more stack, whose engine is a stand-in;
``DIRECTORY/stand-ins.tar`` goes onto the box: the engine's wheel, a model of small sizes that
divides by eight, and the recorded boxes.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import sys
import tarfile
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from demo.tiny_glm5.model import Dimensions  # noqa: E402 - the path is set above
from demo.tiny_glm5.writer import write  # noqa: E402

ENGINE = "gpubox_stand_in_engine"
VERSION = "1.0"
STACK = "stand-in-engine"
# rows and heads that eight ranks can share; what the kernels insist on is as in GLM-5
MODEL = Dimensions(
    heads=64, value=64, nope=64, feed_forward=2048, expert_feed_forward=2048, experts=2
)


def wheel(directory: Path) -> str:
    """Write the engine's wheel, the same bytes each time; its sha256."""
    directory.mkdir(parents=True)
    info = f"{ENGINE}-{VERSION}.dist-info"
    name = ENGINE.replace("_", "-")
    files = {
        f"{ENGINE}.py": (Path(__file__).parent / f"{ENGINE}.py").read_text(encoding="utf-8"),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\nvllm = {ENGINE}:main\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text.encode())}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    target = directory / f"{ENGINE}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, text in files.items():
            archive.writestr(zipfile.ZipInfo(path), text)
    return hashlib.sha256(target.read_bytes()).hexdigest()


def site(directory: Path, sha256: str) -> None:
    """The site as it is, and beside it the stack with the stand-in."""
    for name in ("roles", "playbooks", "plugins", "templates"):
        shutil.copytree(ROOT / name, directory / name)
    shutil.copy(ROOT / "site.yml", directory)
    real = yaml.safe_load((ROOT / "stacks/glm5-cu130.yml").read_text(encoding="utf-8"))
    name = ENGINE.replace("_", "-")
    stack = real | {
        "name": STACK,
        "python": "3.11",
        "requirements": f"{STACK}.requirements.txt",
        "foundation": [name],
        "patch_series": [],
        "system_packages": [],
    }
    folder = directory / "stacks"
    folder.mkdir()
    (folder / f"{STACK}.yml").write_text(yaml.safe_dump(stack), encoding="utf-8")
    pin = f"{name}=={VERSION} \\\n    --hash=sha256:{sha256}\n"
    (folder / f"{STACK}.requirements.txt").write_text(pin, encoding="utf-8")


def main(directory: Path) -> None:
    """Make everything anew."""
    shutil.rmtree(directory, ignore_errors=True)
    box = directory / "box"
    site(directory / "site", wheel(box / "wheels"))
    write(box / "shards", 2, dim=MODEL)
    shutil.copytree(ROOT / "tests/boxes", box / "boxes", ignore=shutil.ignore_patterns("__py*"))
    with tarfile.open(directory / "stand-ins.tar", "w") as archive:
        archive.add(box, ".")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
