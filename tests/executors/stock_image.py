"""What stands for a stock image with Python and uv: a fresh environment that has the packages of an index, and none of
ours.

The index's are links to those of this environment, so that pip finds them installed and asks no index. `uv` is pip.
"""

import sys
import sysconfig
import venv
from pathlib import Path

OURS = ("composer_prime", "reverse_letters", "sort_letters", "tool_letters", "_editable", "__editable__")

UV = """\
#!{python}
import subprocess, sys
words = iter(sys.argv[1:])
assert [next(words), next(words)] == ["pip", "install"]
kept = []
for word in words:
    if word == "--torch-backend":
        assert next(words) in ("cpu", "auto")
    elif word != "--system":
        kept.append(word)
pip = [{python!r}, "-m", "pip", "--python", {inside!r}, "install", "--no-index", "--no-cache-dir"]
sys.exit(subprocess.run([*pip, "--disable-pip-version-check", *kept]).returncode)
"""


def make_stock_image(folder: Path) -> Path:
    """A new one; the folder of its programs."""
    venv.create(folder, with_pip=False, symlinks=True)
    inside = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OURS) and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    uv = folder / "bin" / "uv"
    uv.write_text(UV.format(python=sys.executable, inside=str(inside)))
    uv.chmod(0o755)
    return folder / "bin"
