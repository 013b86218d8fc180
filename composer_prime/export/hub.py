"""Puts a snapshot's folder into a model repository on the Hugging Face hub."""

from pathlib import Path

from composer_prime.errors import INSTALL, BadInput, ConfigError, StoreError

SCHEME = "hf://"


def parse_repository(uri: str) -> str:
    """namespace/name out of hf://namespace/name. Raises BadInput for anything else."""
    name = uri.removeprefix(SCHEME).strip("/")
    if not uri.startswith(SCHEME) or name.count("/") != 1 or name.startswith("buckets/"):
        raise BadInput(f"--to ({uri}) must be hf://namespace/name for a model repository, or a folder: correct it")
    return name


def check_installed() -> None:
    """Raise ConfigError when huggingface_hub is missing, before anything is made that could not be uploaded."""
    try:
        import huggingface_hub  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--to hf:// needs a package that isn't installed ({error.name}): {INSTALL.format('hf')}"
        ) from error


def upload(folder: Path, repository: str, message: str, *, private: bool) -> str:
    """Upload the folder as one commit on the repository's main branch, and return where it can be looked at.

    repository   made when it isn't there; `private` counts only then

    Endpoint and token are the hub's own (HF_ENDPOINT, HF_TOKEN or `hf auth login`). Raises StoreError when it fails.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True, private=private)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message).commit_url)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        cause = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise StoreError(
            f"hf://{repository} didn't take the upload ({cause.rstrip('.')}): check its name, HF_TOKEN and its rights"
        ) from error
