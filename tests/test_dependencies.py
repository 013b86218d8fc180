"""What we import is declared, and an extra brings something that we import."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

from tests.architecture import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
BROUGHT_BY_THE_USER = {
    "prime_rl",
    "vllm",
    "torchtitan",
    "gradientmail",
    "pip",
    "composer_prime",
    "composer_prime_pairs",
    "tiny_policy",
}
"""PRIME-RL and what comes with it; our own."""
PART_OF = {
    "pydantic_core": "pydantic", "httpx2": "huggingface-hub", "grpclib": "modal", "anyio": "starlette",
    "h11": "uvicorn", "jinja2": "transformers",
    "tokenizers": "transformers", "mcp": "verifiers", "jsonschema": "verifiers",
    "fsspec": "s3fs", "botocore": "boto3",
}  # fmt: skip
"""What the interface of a declared package is made of."""


def distribution(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", requirement)[0]).lower()


def imported() -> dict[str, str]:
    """Top-level modules that the package imports, anywhere, with a file that does."""
    found = {}
    for path in sorted((REPOSITORY / "composer_prime").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            else:
                continue
            found.update({name.split(".")[0]: str(path.relative_to(REPOSITORY)) for name in names})
        found.update(dict.fromkeys(re.findall(r"find_spec\(\"(\w+)", path.read_text()), path.name))
    return {name: path for name, path in found.items() if name not in sys.stdlib_module_names}


def test_every_import_is_declared() -> None:
    declared = {distribution(each) for each in PROJECT["dependencies"]}
    declared |= {distribution(each) for extra in PROJECT["optional-dependencies"].values() for each in extra}
    owners = {
        module: {re.sub(r"[-_.]+", "-", name).lower() for name in names}
        for module, names in packages_distributions().items()
    }
    missing = {
        name: path
        for name, path in imported().items()
        if name not in BROUGHT_BY_THE_USER and not {*owners.get(name, ()), PART_OF.get(name, "")} & declared
    }
    assert missing == {}


def test_every_extra_brings_something_that_we_import() -> None:
    modules = {}
    for module, names in packages_distributions().items():
        for name in names:
            modules.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(module)
    idle = {
        extra
        for extra, requirements in PROJECT["optional-dependencies"].items()
        if extra != "dev"
        and not any(modules.get(distribution(each), {distribution(each)}) & imported().keys() for each in requirements)
    }
    assert idle == set()
