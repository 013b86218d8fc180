"""One site of a run on Modal, for those who don't use `composer-prime launch`. It calls the command line, no more.

    modal secret create composer-prime-bucket AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... AWS_DEFAULT_REGION=...
        # and HF_TOKEN=... for a gated model
    GPU=A10G:2 modal run --detach infra/modal/app.py --recipe recipes/multi_site/reverse_text_2.toml --site a \\
        --settings '--outer.store s3://my-bucket/runs'

From the root of this repository, in a shell. Each call is an app of its own, and goes on until its site has ended. To
end sites and their bill: `modal app list`, then `modal app stop ap-...` for each that is called composer-prime. Built,
deployed to a loopback and called without Modal's servers; not run on them by us.
"""

import os
import shlex
import subprocess

import modal

DAY_S = 24 * 3600
"""Modal's longest; its default is five minutes. A longer run goes on in the next attempt, from the bucket."""

BAD_INPUT_EXIT = 2
"""Of `composer-prime site`: something only a person can mend, which its log says; trying again would only cost."""

app = modal.App("composer-prime")
# Absolute, as Modal makes the context's folder: else it doesn't find Dockerfile.dockerignore.
image = modal.Image.from_dockerfile(os.path.abspath("infra/docker/Dockerfile"), context_dir=".")
outputs = modal.Volume.from_name("composer-prime-outputs", create_if_missing=True)
bucket = modal.Secret.from_name("composer-prime-bucket", required_keys=["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])


@app.function(
    image=image,
    gpu=os.environ.get("GPU") or None,
    timeout=DAY_S,
    retries=modal.Retries(max_retries=7, initial_delay=1.0),
    volumes={"/data": outputs},
    secrets=[bucket],
)
def run_site(recipe: str, site: str, settings: list[str]) -> None:
    """Train one site. Raises CalledProcessError when it fails, so that Modal tries again where that may help."""
    where = f"/opt/composer-prime/{recipe}"
    command = ["composer-prime", "site", where, "--site", site, "--resume", "--output_dir", "/data", *settings]
    done = subprocess.run(command)
    if done.returncode != BAD_INPUT_EXIT:
        done.check_returncode()


@app.local_entrypoint()
def main(recipe: str, site: str, settings: str = "") -> None:
    """`settings` override the recipe's, as on the command line."""
    run_site.remote(recipe, site, shlex.split(settings))
