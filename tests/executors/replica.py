"""A machine of a job's image on this one: its folders are folders here, its GitHub holds tiny repositories."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from composer_prime.executors.packages import CONSTRAINTS, CUDA_IMAGE, PRIME_RL_COMMITS, PRIME_RL_UV, Packages

COMMIT = "559b447"
PROJECT = """\
[project]
name = "prime-rl"
version = "0.8.0"
requires-python = ">=3.11"
dependencies = ["verifiers", "packaging==24.2"]

[project.scripts]
rl = "prime_rl:main"

[project.optional-dependencies]
flash-attn = ["pluggy==1.5.0"]
flash-attn-3 = []
disagg = []
quack = ["mccabe"]

[dependency-groups]
dev = ["toolz"]

[tool.uv]
required-version = ">=0.11.1"
exclude-newer = "7 days"

[tool.uv.exclude-newer-package]
verifiers = false

[tool.uv.workspace]
members = ["deps/prime-envs/environments/*/*"]

[tool.uv.sources]
verifiers = { path = "deps/verifiers", editable = true }

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build]
dev-mode-dirs = {folders}

[tool.hatch.build.targets.wheel]
packages = ["src/prime_rl"]
"""
VERIFIERS = """\
[project]
name = "verifiers"
dynamic = ["version"]
requires-python = ">=3.11"

[build-system]
requires = ["hatchling", "hatch-vcs"]
build-backend = "hatchling.build"

[tool.hatch.version]
source = "vcs"
fallback-version = "0.0.0"

[tool.hatch.version.raw-options]
local_scheme = "no-local-version"
"""
ENVIRONMENT = """\
[project]
name = "gsm8k"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["verifiers"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
include = ["gsm8k.py"]
"""
MAIN = """\
import os, sys
from pathlib import Path

def main():
    print("rl's parent:", *Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\\0"), flush=True)
    print("rl of", sys.prefix, os.environ.get("CUDA_HOME"), *sys.argv[1:])
"""
STAND_INS = {
    "the image": "this machine, with folders for /app and /opt; PRIME-RL's own has a tiny one",
    "apt-get": "notes what it is asked for, and installs nothing",
    "github.com": "tiny repositories in a folder, laid out as PRIME-RL's, with its rules for uv",
    "rl": "prints its arguments and ends: no GPU is there",
    "torch, and what else PRIME-RL's lock has": "this machine's packages",
}
"""In a replica, by what they stand for. All else is real: sh, git, uv, the index, our wheel and its commands."""


class Replica:
    """What `STAND_INS` says. It has all that a CUDA image has, until it becomes another machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.github, self._kept = folder, folder / "github", folder / "kept"
        programs = folder / "programs"
        programs.mkdir(parents=True)
        self._kept.mkdir()
        (programs / "apt-get").write_text(f'#!/bin/sh\necho "$@" >> {folder}/apt\n')
        (programs / "apt-get").chmod(0o755)
        (programs / "python3").symlink_to(sys.executable)
        pip = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        index = os.environ.get("PIP_INDEX_URL") or subprocess.run(pip, capture_output=True, text=True).stdout.strip()
        self.env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
            **({"UV_DEFAULT_INDEX": index} if index else {}),  # uv is to ask where pip asks
            **({"SSL_CERT_FILE": os.environ["PIP_CERT"]} if "PIP_CERT" in os.environ else {}),
            "PIP_CACHE_DIR": str(Path.home() / ".cache/pip"),
            "PATH": f"{programs}:{os.defpath}", "HOME": str(folder), "UV_LINK_MODE": "copy",
            "GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "protocol.file.allow", "GIT_CONFIG_VALUE_0": "always",
        }  # fmt: skip
        self.commit = ""
        self.commit = self._publish()

    def _git(self, repository: str, *arguments: str) -> str:
        git = ["git", "-C", str(self.github / "PrimeIntellect-ai" / repository), "-c", "user.name=me"]
        command = [*git, "-c", "user.email=me@example.org", "-c", "init.defaultBranch=main", *arguments]
        return subprocess.run(command, env=self.env, check=True, capture_output=True, text=True).stdout.strip()

    def _repository(self, name: str, files: dict[str, str]) -> None:
        folder = self.github / "PrimeIntellect-ai" / name
        for file, text in {"README": name, **files}.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        self._git(name, "init", "--quiet")
        self._git(name, "add", ".")
        self._git(name, "commit", "--quiet", "-m", "first")

    def _publish(self) -> str:
        """Make the repositories; the commit that stands for PRIME-RL's."""
        self._repository("verifiers.git", {"pyproject.toml": VERIFIERS, "verifiers/__init__.py": ""})
        self._git("verifiers.git", "tag", "v0.3.0")
        self._git("verifiers.git", "commit", "--quiet", "--allow-empty", "-m", "second")
        environment = "environments/math/gsm8k"
        self._repository(
            "prime-envs.git", {f"{environment}/pyproject.toml": ENVIRONMENT, f"{environment}/gsm8k.py": ""}
        )
        for name in ("renderers.git", "pydantic-config"):
            self._repository(name, {})
        lent = ["src", *(path for path in sys.path if Path(path).name == "site-packages")]
        project = PROJECT.replace("{folders}", json.dumps(lent))
        files = {"src/prime_rl/__init__.py": MAIN, "src/prime_rl/monitors/__init__.py": "", "pyproject.toml": project}
        self._repository("prime-rl.git", files)
        for name in ("verifiers", "renderers", "prime-envs", "pydantic-config"):
            place = f"{self.github}/PrimeIntellect-ai/{name if name == 'pydantic-config' else f'{name}.git'}"
            self._git("prime-rl.git", "submodule", "--quiet", "add", f"file://{place}", f"deps/{name}")
        folder = self.github / "PrimeIntellect-ai/prime-rl.git"
        modules = folder / ".gitmodules"
        # All but one by ssh, as PRIME-RL names them.
        text = re.sub(rf"file://{self.github}/(.*\.git)", r"git@github.com:\1", modules.read_text())
        modules.write_text(text)
        (uv,) = (each for each in Packages((), prime_rl=COMMIT).preparation if PRIME_RL_UV in each)
        locked = self.run(f"{uv} && /opt/uv/bin/uv lock --quiet --project {folder}")
        assert locked.returncode == 0, locked.stderr
        self._git("prime-rl.git", "add", ".")
        self._git("prime-rl.git", "commit", "--quiet", "-m", "locked")
        return self._git("prime-rl.git", "rev-parse", "HEAD")

    def there(self, text: str) -> str:
        """A text with this machine's own places."""
        places = {
            "https://github.com/": f"file://{self.github}/",
            PRIME_RL_COMMITS[COMMIT]: self.commit,
            CONSTRAINTS: str(self.folder / "constraints"),
            "/opt/": f"{self.folder}/opt/",
            "/app": f"{self.folder}/app",
        }
        return re.sub("|".join(map(re.escape, places)), lambda found: places[found[0]], text)

    def run(self, script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a script in this machine's own places."""
        env, words = self.env | variables, ["sh", "-c", self.there(script), *arguments]
        return subprocess.run(words, cwd=self.folder, env=env, capture_output=True, text=True)

    def prepare(self) -> None:
        """Install PRIME-RL at its commit, by the uv that is there already."""
        for command in Packages((), prime_rl=COMMIT).preparation:
            if PRIME_RL_UV in command:
                continue
            assert (done := self.run(command)).returncode == 0, f"{command}: {done.stderr}"

    def keep_image(self) -> None:
        """Make an image of v0.8.0 of this prepared machine."""
        source = self.folder / "app/src/prime_rl"
        (source / "utils").mkdir()
        (source / "monitors").rename(source / "utils/monitor")
        (source / "utils/monitor/file.py").touch()
        for name in ("app", "opt"):
            (self.folder / name).rename(self._kept / name)

    def renew(self, image: str) -> None:
        """Become a new machine of an image: the CUDA one, or PRIME-RL's v0.8.0."""
        for entry in self.folder.iterdir():
            if entry.name in ("apt", "constraints", "ran"):
                entry.unlink()
            elif entry.name in ("app", "opt", "outputs"):
                shutil.rmtree(entry)
        if image != CUDA_IMAGE:
            shutil.copytree(self._kept, self.folder, symlinks=True, dirs_exist_ok=True)

    def installed(self) -> dict[str, str]:
        done = self.run("/opt/uv/bin/uv pip list --no-config --quiet --python /app/.venv --format freeze")
        return dict(line.split("==") for line in done.stdout.split())
